"""Every public fault is claimed by a test that runs and holds its numbers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from public_cases import PUBLIC_CASES

TESTS = Path(__file__).parent
IN_NAME = re.compile(r"(?<=_)([a-m]\d\d)(?=_)")
IN_DOCSTRING = re.compile(r"\bCase ([A-M]\d\d)\b")


def claims(function: ast.FunctionDef) -> set[str]:
    """Ids in the name or the docstring of a test that asserts something."""
    ids = {found.upper() for found in IN_NAME.findall(function.name)}
    return ids | set(IN_DOCSTRING.findall(ast.get_docstring(function) or ""))


def looks(function: ast.FunctionDef) -> bool:
    """Whether a test can fail: it has an assertion, a `raises`, or calls something that compares."""
    text = ast.unparse(function)
    return any(word in text for word in ("assert", "pytest.raises", "pytest.warns", "same(", "compare("))


def numbers(function: ast.FunctionDef, module: ast.Module) -> set[float]:
    """Numbers of a test, with its decorators, and those of the names of the module that it reads; prose holds none."""
    shared: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            shared |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            shared[node.name] = node
    waiting: list[ast.AST] = [function]
    seen: set[str] = set()
    found: set[float] = set()
    while waiting:
        place = waiting.pop()
        prose = place.body[0] if isinstance(place, ast.FunctionDef) and ast.get_docstring(place) is not None else None
        for node in ast.walk(place):
            if node is getattr(prose, "value", None):
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                found.add(abs(float(node.value)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {float(number) for number in re.findall(r"\d+\.\d+", node.value)}
            elif isinstance(node, ast.Name) and node.id in shared and node.id not in seen:
                seen.add(node.id)
                waiting.append(shared[node.id])
    return found


def every_test() -> Iterator[tuple[ast.FunctionDef, ast.Module]]:
    """All test functions but those of the peers' defects, which have ids of their own."""
    for path in sorted(set(TESTS.rglob("test_*.py")) - {TESTS / "test_peer_defects.py"}):
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node, module


@pytest.fixture(scope="module")
def claimed() -> dict[str, set[float]]:
    """Ids, and the numbers of the tests that claim them."""
    found: dict[str, set[float]] = defaultdict(set)
    for function, module in every_test():
        ids = claims(function)
        assert not ids or looks(function), f"{function.name} asserts nothing"
        for case in ids:
            found[case] |= numbers(function, module)
    return found


@pytest.mark.parametrize("case", PUBLIC_CASES)
def test_a_case_has_a_test_with_its_numbers(case: str, claimed: dict[str, set[float]]) -> None:
    about, expected = PUBLIC_CASES[case]
    assert case in claimed, f"no test claims {case} ({about}): name one test_{case.lower()}_..."
    missing = [number for number in expected if abs(float(number)) not in claimed[case]]
    assert not missing, f"the tests of {case} ({about}) lack {missing}"


def test_no_test_claims_a_case_that_does_not_exist(claimed: dict[str, set[float]]) -> None:
    """Such as a typo, which would leave its case without a test."""
    assert claimed.keys() == PUBLIC_CASES.keys()


def test_the_list_is_complete() -> None:
    """How many cases of each kind there are: one that is taken out of the list is missed here."""
    kinds: dict[str, int] = defaultdict(int)
    for case in PUBLIC_CASES:
        kinds[case[0]] += 1
    assert kinds == {"A": 13, "B": 7, "C": 2, "D": 3, "E": 19, "F": 4, "G": 8, "H": 7, "I": 5, "J": 2, "K": 3} | {
        "L": 2,
        "M": 8,
    }
