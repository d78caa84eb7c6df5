"""Golden cases: numbers that other projects' own code produced, read from `tests/golden/` and from RLLOSS_GOLDEN.

A file is a JSON object; each of its top-level lists of objects that have a `name` is a section of cases. The key of a
case says which code made it: its `function`, or else its section with its `loss` or `estimator`. A family is an adapter
that types the cases of one key through the public API (`golden_*.py`); what has none must stand in the table of
exclusions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OWN_FOLDER = Path(__file__).parent / "golden"
FOLDER_VARIABLE = "RLLOSS_GOLDEN"


@dataclass(frozen=True)
class Case:
    """One recorded call of other code."""

    file: str
    section: str
    data: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def key(self) -> str:
        if "function" in self.data:
            return str(self.data["function"])
        return ":".join([self.section, str(self.data.get("loss", self.data.get("estimator", "")))]).rstrip(":")

    def __str__(self) -> str:
        return f"{self.file}-{self.section}-{self.name}"


Adapter = Callable[[Case, Any], None]


@dataclass(frozen=True)
class Family:
    """An adapter, the keys it is for (a pattern on the whole key), and the variants it runs each case in."""

    pattern: str
    variants: tuple[Any, ...]
    adapter: Adapter


@dataclass(frozen=True)
class Exclusion:
    """Cases that are not run, by patterns on key and name, and why."""

    key: str
    reason: str
    name: str = ".*"

    def covers(self, case: Case) -> bool:
        return bool(re.fullmatch(self.key, case.key) and re.fullmatch(self.name, case.name))


FAMILIES: list[Family] = []


def family(pattern: str, variants: tuple[Any, ...] = (None,)) -> Callable[[Adapter], Adapter]:
    """Registers an adapter for all cases whose key matches `pattern`; it is called once for each variant."""

    def register(adapter: Adapter) -> Adapter:
        FAMILIES.append(Family(pattern, variants, adapter))
        return adapter

    return register


def family_of(case: Case) -> Family | None:
    """The family of a case; two that match are a mistake of ours."""
    found = [entry for entry in FAMILIES if re.fullmatch(entry.pattern, case.key)]
    assert len(found) <= 1, f"{case} matches {[entry.pattern for entry in found]}"
    return found[0] if found else None


def read_folder(folder: Path) -> Iterator[Case]:
    """Every case of every JSON file of a folder."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for section, entries in content.items():
            if isinstance(entries, list) and entries and all(isinstance(e, dict) and "name" in e for e in entries):
                yield from (Case(path.stem, section, entry) for entry in entries)


@cache
def all_cases() -> tuple[Case, ...]:
    """The project's own cases, and those of the folder that RLLOSS_GOLDEN names."""
    cases = list(read_folder(OWN_FOLDER))
    extra = os.environ.get(FOLDER_VARIABLE)
    if extra:
        found = list(read_folder(Path(extra)))
        assert found, f"{FOLDER_VARIABLE}={extra} holds no case"
        cases += found
    return tuple(cases)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of a nested list; non-finite numbers are strings there ('nan', 'Infinity', ...)."""

    def decode(item: Any) -> Any:
        return [decode(part) for part in item] if isinstance(item, list) else float(item)

    return torch.tensor(decode(values), dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Any, tolerance: float, what: str) -> None:
    """`max|a - b| <= tolerance * max(1, max|b|)`, NaN and infinities in the same places."""
    wanted = tensor(expected) if not isinstance(expected, Tensor) else expected.double()
    got = actual.detach().double()
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    finite = wanted.isfinite()
    torch.testing.assert_close(got[~finite], wanted[~finite], equal_nan=True, msg=lambda text: f"{what}: {text}")
    if finite.any():
        limit = tolerance * max(1.0, float(wanted[finite].abs().max()))
        error = float((got[finite] - wanted[finite]).abs().max())
        assert error <= limit, f"{what}: off by {error:.3g}, allowed {limit:.3g}"
