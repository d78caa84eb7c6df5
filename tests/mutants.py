"""Breaks the formulas one by one: every break that changes a number must be found by a test.

Mutants are generated from the syntax tree of each formula file: operators, comparisons, constants, min and max, signs,
detach, denominators, the branches of `where`. Each is put into the functions of the running interpreter, and then
golden cases and oracle tests run until one fails. `python -m tests.mutants [FILE...]` ends with status 1 when a mutant
survives that `EQUIVALENT` has no reason for.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parent.parent
FILES = (
    "rlloss/functional/bounds.py",
    "rlloss/functional/kl.py",
    "rlloss/functional/opd.py",
    "rlloss/functional/policy.py",
    "rlloss/functional/policy_quadratic.py",
    "rlloss/functional/policy_score.py",
    "rlloss/losses/calibration.py",
    "rlloss/losses/policy_covariance.py",
)
# Of a module that does more than formulas, the functions with the formulas.
FORMULAS = {
    "rlloss/losses/calibration.py": (
        "_counts_of",
        "_prompt_tokens",
        "_with_totals",
        "_inverse_denominator",
        "_inverse",
    ),
}
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
    function: str
    change: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.change}"


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


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a file's functions; docstrings, annotations and error messages are left alone."""
    tree = ast.parse((ROOT / file).read_text())
    names = FORMULAS.get(file)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in functions if names is None else [node for node in functions if node.name in names]:
        for node in list(walk(function)):
            for changed in changes(node):
                before, after = ast.unparse(node), ast.unparse(changed)
                whole = copy.deepcopy(Replace(node, changed).visit(copy_with(tree, node)))
                yield Mutant(file, node.lineno, function.name, f"{before} -> {after}", ast.fix_missing_locations(whole))


def copy_with(tree: ast.Module, kept: ast.AST) -> ast.Module:
    """A copy of the tree that still contains the very node `kept`."""
    return copy.deepcopy(tree, {id(kept): kept})


def walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The expressions of a function body and its defaults."""
    stack: list[ast.AST] = [*function.body, *function.args.defaults]
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
    original: types.FunctionType = vars(module)[mutant.function]
    changed: types.FunctionType = scope[mutant.function]
    saved = (original.__code__, original.__defaults__)
    original.__code__, original.__defaults__ = changed.__code__, changed.__defaults__
    try:
        yield
    finally:
        original.__code__, original.__defaults__ = saved


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


Check = Callable[[], None]


def checks() -> list[Check]:
    """The tests that look at numbers, as calls without arguments, the quickest first."""
    import golden_cases
    import golden_trl
    import golden_verl
    import test_policy_losses
    import test_policy_properties
    import test_selection
    from golden_exclusions import EXCLUSIONS

    found: list[Check] = []
    for name in test_policy_losses.CASES:
        found.append(lambda name=name: test_policy_losses.test_value_and_gradient(name, "log_probs"))
    for ratio in ("token", "sequence_mean", "sequence_product"):
        found.append(lambda ratio=ratio: test_policy_losses.test_kl_with_a_ratio(ratio))
    found.append(test_policy_losses.test_factors_have_no_gradient)
    found.append(test_policy_losses.test_the_off_policy_limit_itself_is_near)
    found.append(test_policy_properties.test_a_total_below_one)
    found.append(test_selection.test_small_steps)
    found.append(test_policy_losses.test_trust_region_ends)
    found.append(test_policy_losses.test_clip_fractions_count_where_the_clip_binds)
    found.append(test_policy_losses.test_iw_opd_defaults_and_gradients)
    for kind in ("token", "sequence_mean"):
        found.append(lambda kind=kind: test_policy_losses.test_the_old_policy_gets_no_gradient(kind))
    found.append(test_policy_losses.test_kl_limits_and_who_gets_a_gradient)
    found.append(test_policy_losses.test_a_bound_itself_lies_inside)
    found.append(test_policy_losses.test_iw_opd_weights_look_at_counted_tokens_only)
    found.append(test_policy_properties.test_prompts_weigh_alike)
    for groups, prompts, words in ((None, 3, "group_ids"), ([0, 3, 1], 3, "from 0"), ([0, -1, 1], 3, "from -1")):
        found.append(
            lambda g=groups, p=prompts, w=words: test_policy_properties.test_prompts_that_do_not_fit_are_named(g, p, w)
        )
    for seed in range(3):
        found.append(lambda seed=seed: test_selection.test_kl_cov_takes_the_largest_covariances(seed))
        take = test_selection.test_clip_cov_takes_candidates_only_and_as_many_as_it_should
        found.append(lambda seed=seed, take=take: take(seed))
    modules = (golden_verl.__name__, golden_trl.__name__)
    for case in golden_cases.all_cases():
        family = golden_cases.family_of(case)
        excluded = any(row.covers(case) for row in EXCLUSIONS)
        if family is None or excluded or family.adapter.__module__ not in modules:
            continue
        found.append(lambda family=family, case=case: family.adapter(case, family.variants[0]))
    for loss in ("vanilla", "gmpo", "kl_cov"):
        for test in ("test_no_split_and_no_way_changes_anything", "test_extreme_ratios_stay_finite"):
            found.append(lambda loss=loss, test=test: getattr(test_policy_properties, test)(loss))
    return found


def first_failure(suite: list[Check]) -> int | None:
    """The number of the first check that fails, or None."""
    for number, check in enumerate(suite):
        try:
            check()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return number
    return None


def main(files: list[str]) -> int:
    """Runs every mutant of the files and reports survivors."""
    from mutants_equivalent import EQUIVALENT

    warnings.simplefilter("ignore")
    suite = checks()
    if first_failure(suite) is not None:
        sys.stdout.write("the tests fail without any mutant\n")
        return 1
    total, equivalent, survivors, used = 0, 0, [], set()
    for file in files or FILES:
        for mutant in mutants(file):
            total += 1
            with installed(mutant):
                number = first_failure(suite)
            if number is not None:
                suite.insert(0, suite.pop(number))  # what kills one mutant often kills the next
                continue
            key = (mutant.function, mutant.change)
            used.add(key)
            if key in EQUIVALENT:
                equivalent += 1
            else:
                survivors.append(mutant)
                sys.stdout.write(f"survived: {mutant}\n")
                sys.stdout.flush()
    stale = [] if files else [key for key in EQUIVALENT if key not in used]
    for key in stale:
        sys.stdout.write(f"listed as equivalent, but killed or gone: {key}\n")
    sys.stdout.write(f"{total} mutants: {total - equivalent - len(survivors)} killed, {equivalent} equivalent, ")
    sys.stdout.write(f"{len(survivors)} survived\n")
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    assert inspect.getmodule(main) is not None
    sys.exit(main(sys.argv[1:]))
