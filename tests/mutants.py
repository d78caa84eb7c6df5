"""Breaks the formulas one by one: every break that changes a number must be found by a test.

Mutants are generated from the syntax tree of each formula file: operators, comparisons, constants, min and max, signs,
detach, denominators, the branches of `where`. Each is put into the functions of the running interpreter, and then the
tests that `mutants_files.py` names for its file run until one fails. What was killed is kept in `.mutants/` as
long as the file stays as it is: an interrupted run goes on where it was, and two runs may share the files.

    python -m tests.mutants [--limit SECONDS] [FILE...]

ends with status 1 when a mutant survives that `EQUIVALENT` has no reason for, and 2 when the time was up before.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import importlib
import io
import json
import signal
import sys
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parent.parent
KEPT = ROOT / ".mutants"
TEST_SECONDS = 20
"""A test that takes longer hangs, and has found its mutant."""

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
CALLS = {"minimum": "maximum", "maximum": "minimum", "sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax"}
DROPPED_CALLS = ("detach", "abs", "sqrt", "square", "exp", "log")


@dataclass(frozen=True)
class Mutant:
    """One change: where, what, and the changed module."""

    file: str
    line: int
    column: int
    function: str
    change: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.function}: {self.change}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every changed form of one node."""
    match node:
        case ast.BinOp() if type(node.op) in BINARY:
            yield ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
        case ast.UnaryOp(op=ast.USub() | ast.Invert()):
            yield node.operand
        case ast.Compare(ops=[op]) if type(op) in COMPARE:
            for other in COMPARE[type(op)]:
                yield ast.Compare(node.left, [other()], node.comparators)
        case ast.Constant(value=bool() | str() | None):
            return
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            if node.value:
                yield ast.Constant(type(node.value)(0))
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS:
            yield ast.Call(ast.Attribute(node.func.value, CALLS[name], ast.Load()), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(attr=name, value=value), args=[]) if name in DROPPED_CALLS:
            yield value
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield ast.Call(node.func, [condition, no, yes], [])
        case ast.Call(func=ast.Attribute(attr="clamp", value=value)):
            yield value
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)


class Replace(ast.NodeTransformer):
    """Puts a node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().generic_visit(node)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method of a module, by its qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, ast.FunctionDef)
            )


def mutants(file: str, names: tuple[str, ...]) -> Iterator[Mutant]:
    """Every mutant of a file's functions; docstrings, annotations and error messages are left alone."""
    tree = ast.parse((ROOT / file).read_text())
    for name, function in functions(tree):
        if names and name not in names:
            continue
        for node in list(walk(function)):
            for changed in changes(node):
                before, after = ast.unparse(node), ast.unparse(changed)
                whole = copy.deepcopy(Replace(node, changed).visit(copy_with(tree, node)))
                change = f"{before} -> {after}"
                yield Mutant(file, node.lineno, node.col_offset, name, change, ast.fix_missing_locations(whole))


def copy_with(tree: ast.Module, kept: ast.AST) -> ast.Module:
    """A copy of the tree that still contains the very node `kept`."""
    return copy.deepcopy(tree, {id(kept): kept})


def walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The expressions of a function body and its defaults."""
    stack: list[ast.AST] = [*function.body, *function.args.defaults, *filter(None, function.args.kw_defaults)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        yield node
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        stack += [child for child in ast.iter_child_nodes(node) if child not in notes]


@contextlib.contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """The functions of the running module have the mutant's code inside."""
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    scope = dict(vars(module))
    with stopped_registration():
        exec(compile(mutant.tree, mutant.file, "exec"), scope)
    original, changed = (_function(space, mutant.function) for space in (vars(module), scope))
    saved = (original.__code__, original.__defaults__, original.__kwdefaults__)
    original.__code__, original.__defaults__ = changed.__code__, changed.__defaults__
    original.__kwdefaults__ = changed.__kwdefaults__
    try:
        yield
    finally:
        original.__code__, original.__defaults__, original.__kwdefaults__ = saved


def _function(space: dict[str, Any], name: str) -> types.FunctionType:
    """The plain function behind a qualified name, whatever it is wrapped in."""
    owner, _, own = name.rpartition(".")
    found: Any = vars(space[owner])[own] if owner else space[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or getattr(found, "wrapped", found)
    function: types.FunctionType = found
    return function


@contextlib.contextmanager
def stopped_registration() -> Iterator[None]:
    """A module can be executed again without registering its losses twice."""
    from rlloss.registry import Registry

    add = Registry.add
    Registry.add = lambda self, name, entry, aliases=(): None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Registry.add = add  # type: ignore[method-assign]


class Hunt:
    """A pytest plugin that runs the collected tests over and over, against one mutant after the other."""

    def __init__(self, file: str, kept: dict[str, str], stop: float) -> None:
        self.file, self.kept, self.stop = file, kept, stop
        self.survivors: list[Mutant] = []
        self.total, self.complete = 0, True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the tests that belong to the file, the quickest kind first."""
        from mutants_files import FILES

        parts = FILES[self.file].tests
        items[:] = [item for part in parts for item in items if fits(item.nodeid, part)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Takes the place of the one run through all tests."""
        from mutants_files import FILES

        suite = list(dict.fromkeys(session.items))
        assert suite, f"no test for {self.file}"
        broken = self.killer(suite)
        assert broken is None, f"fails without any mutant: {broken.nodeid}"
        for mutant in mutants(self.file, FILES[self.file].functions):
            self.total += 1
            if str(mutant) in self.kept:
                continue
            if time.monotonic() > self.stop:
                self.complete = False
                break
            with installed(mutant):
                killer = self.killer(suite)
            if killer is None:
                self.survivors.append(mutant)
                continue
            self.kept[str(mutant)] = killer.nodeid
            suite.remove(killer)
            suite.insert(0, killer)  # what kills one mutant often kills the next
        return True

    def killer(self, suite: list[pytest.Item]) -> pytest.Item | None:
        """The first test that fails, or None."""
        from _pytest.runner import runtestprotocol

        for item in suite:
            signal.alarm(TEST_SECONDS)
            try:
                reports = runtestprotocol(item, log=False, nextitem=None)
            except TimeoutError:
                return item
            finally:
                signal.alarm(0)
            if any(report.failed for report in reports):
                return item
        return None


def fits(nodeid: str, part: str) -> bool:
    """Whether a test is meant by a part: a file, or `file::text&text in the rest of its name`."""
    path, _, text = part.partition("::")
    own = nodeid.partition("::")[2]
    return nodeid.startswith(f"tests/{path}::") and all(word in own for word in text.split("&"))


def hunt(file: str, stop: float) -> Hunt:
    """Runs the mutants of one file, and keeps what was killed."""
    from mutants_files import FILES

    source = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
    place = KEPT / f"{file.replace('/', '.')}.json"
    kept = json.loads(place.read_text()) if place.exists() else {}
    if kept.get("source") != source:
        kept = {"source": source, "killed": {}}
    found = Hunt(file, kept["killed"], stop)
    paths = dict.fromkeys(f"tests/{part.partition('::')[0]}" for part in FILES[file].tests)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *paths], plugins=[found])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.stdout.write(f"{said.getvalue()[-2000:]}\n{file}: the tests could not run ({status!r})\n")
        found.complete = False
    KEPT.mkdir(exist_ok=True)
    place.write_text(json.dumps(kept, indent=1))
    return found


def main(arguments: list[str]) -> int:
    """Runs every mutant of the files and reports survivors."""
    import hypothesis

    from mutants_equivalent import EQUIVALENT
    from mutants_files import FILES

    limit = float(arguments.pop(1)) if arguments[:1] == ["--limit"] else float("inf")
    files = [argument for argument in arguments if argument != "--limit"] or list(FILES)
    stop = time.monotonic() + limit
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_slow)
    # A mutant needs one failing example, not the smallest.
    quick = {"phases": [hypothesis.Phase.explicit, hypothesis.Phase.generate], "database": None, "derandomize": True}
    hypothesis.settings.register_profile("mutants", **quick)  # type: ignore[arg-type]
    hypothesis.settings.load_profile("mutants")
    total, survivors, used, complete = 0, 0, set(), True
    for file in files:
        found = hunt(file, stop)
        total, complete = total + found.total, complete and found.complete
        for mutant in found.survivors:
            key = (mutant.function, mutant.change)
            used.add(key)
            if key not in EQUIVALENT:
                survivors += 1
                sys.stdout.write(f"survived: {mutant}\n")
        sys.stdout.write(f"{file}: {found.total} mutants, {len(found.survivors)} not killed\n")
        sys.stdout.flush()
    stale = [key for key in EQUIVALENT if key not in used] if complete and files == list(FILES) else []
    for key in stale:
        sys.stdout.write(f"listed as equivalent, but killed or gone: {key}\n")
    sys.stdout.write(f"{total} mutants: {total - len(used) - survivors} killed, {len(used)} equivalent or the same, ")
    sys.stdout.write(f"{survivors} survived{'' if complete else '; not all were tried'}\n")
    return 1 if survivors or stale else 0 if complete else 2


def _too_slow(number: int, frame: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
