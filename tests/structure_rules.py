"""The rules of the code's structure, each a function from one module's source to the sentences that it breaks.

They read the syntax tree and import nothing of what they check, so that a rule can be tried on a source string.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7

# The facade `rlloss/__init__.py` stands between losses and training: it re-exports floors 0 to 2, and what is above may
# use the names as a user would.
FACADE_FLOOR = 2.5
FLOORS: dict[str, float] = {
    "errors": 0,
    "registry": 0,
    "metrics": 0,
    "distributed": 0,
    "layout": 0,
    "functional": 1,
    "heads": 1,
    "losses": 2,
    "training": 3,
    "config_file": 4,
    "compat": 4,
    "bench": 4,
    "report": 4,
    "doctor": 4,
    "__main__": 4,
}
# Modules of one floor are siblings that may not see each other, but the single files of floor 0 and of floor 4 share
# the folder `rlloss/` and may.
SHARED_FOLDER_FLOORS = {0, 4}

# package -> prefixes of the modules that may import it
GATED_PACKAGES: dict[str, tuple[str, ...]] = {
    "pydantic": ("rlloss.losses", "rlloss.training", "rlloss.cli", "rlloss.config_file", "rlloss.compat"),
    "liger_kernel": ("rlloss.heads.liger", "rlloss.bench"),
    "triton": ("rlloss.heads.liger",),
    "transformers": ("rlloss.training", "rlloss.compat.hf"),
    "reasoning_gym": ("rlloss.training",),
    "tensorboard": ("rlloss.training",),
    "matplotlib": ("rlloss.training", "rlloss.bench"),
    "rich": ("rlloss.training", "rlloss.cli", "rlloss.bench"),
}
COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
    }
)
COLLECTIVE_MODULES = ("torch.distributed.nn", "torch.distributed._functional_collectives")
COLLECTIVE_HOME = "rlloss.distributed"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One module: its dotted name, its source, and whether it is a package's `__init__`."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def load_modules(root: Path) -> list[Module]:
    """Every module under the package folder `root`."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        modules.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return modules


def imports(module: Module) -> Iterator[tuple[str, str | None, str]]:
    """Every import as (module, name or None, local alias); relative ones made absolute."""
    for node in module.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, alias.asname or alias.name.partition(".")[0]
            continue
        assert isinstance(node, ast.ImportFrom)
        base = node.module or ""
        if node.level:
            parents = module.package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            yield base, alias.name, alias.asname or alias.name


def unit_of(name: str) -> str:
    """The folder or single file right under `rlloss` that a dotted name lies in; '' for the facade."""
    return name.split(".")[1] if "." in name else ""


def floor_of(unit: str) -> float | None:
    """The floor of a unit, None when nobody has given it one."""
    if unit == "":
        return FACADE_FLOOR
    return 4 if unit.startswith("cli") else FLOORS.get(unit)


def imported_units(module: Module) -> Iterator[tuple[str, str]]:
    """The units of rlloss that a module imports, each with the dotted name it was reached by."""
    for base, name, _ in imports(module):
        if base == "rlloss" and name is not None:
            # `from rlloss import heads` names a unit, `from rlloss import GRPOLossConfig` the facade
            is_unit = floor_of(name) is not None
            yield (name if is_unit else ""), f"rlloss.{name}"
        elif base == "rlloss" or base.startswith("rlloss."):
            yield unit_of(base), base


def imports_go_down(module: Module) -> Iterator[str]:
    """A module imports its own folder and lower floors only."""
    unit = unit_of(module.name)
    floor = floor_of(unit)
    if floor is None:
        yield f"{module.name}: no floor is declared for rlloss/{unit}"
        return
    for other, dotted in imported_units(module):
        other_floor = floor_of(other)
        if other_floor is None:
            yield f"{module.name} imports {dotted}, which has no floor"
        elif other_floor > floor or (other_floor == floor and other != unit and floor not in SHARED_FOLDER_FLOORS):
            yield f"{module.name} (floor {floor}) imports {dotted} (floor {other_floor})"


def gated_packages(module: Module) -> Iterator[str]:
    """Heavy or optional packages are imported in their own places only."""
    for base, _, _ in imports(module):
        allowed = GATED_PACKAGES.get(base.partition(".")[0])
        if allowed is not None and not module.name.startswith(allowed):
            yield f"{module.name} imports {base}, which belongs to {', '.join(allowed)}"


def dotted_name(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, '' for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def collectives_in_one_place(module: Module) -> Iterator[str]:
    """torch's collectives are called in `rlloss/distributed.py` only."""
    if module.name == COLLECTIVE_HOME:
        return
    aliases = {}
    for base, name, alias in imports(module):
        if base.startswith(COLLECTIVE_MODULES) or f"{base}.{name}" in COLLECTIVE_MODULES:
            yield f"{module.name} imports {base}"
        if base.startswith("torch.distributed") and name in COLLECTIVES:
            yield f"{module.name} imports the collective {base}.{name}"
        if name is None:
            aliases[alias] = base if alias != base.partition(".")[0] else alias
        else:
            aliases[alias] = f"{base}.{name}"
    for node in module.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        head, _, rest = dotted_name(node.value).partition(".")
        owner = ".".join(part for part in (aliases.get(head, head), rest) if part)
        if node.attr in COLLECTIVES and owner.startswith("torch.distributed"):
            yield f"{module.name}:{node.lineno} uses the collective {owner}.{node.attr}"


def small_files(module: Module) -> Iterator[str]:
    """Files stay short."""
    lines = len(module.source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{module.name} has {lines} lines, at most {MAX_FILE_LINES} are allowed"


def small_functions(module: Module) -> Iterator[str]:
    """Functions stay short, docstring included."""
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, FunctionNode)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{module.name}.{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES} are allowed"


def few_parameters(module: Module) -> Iterator[str]:
    """Functions take few parameters: more are a record that wants a name. `self`, `cls`, autograd's `ctx` are free."""
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, FunctionNode)
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if names[:1] in (["self"], ["cls"]) or (names[:1] == ["ctx"] and node.name in ("forward", "backward")):
            names = names[1:]
        names += [a.arg for a in (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if a is not None]
        if len(names) > MAX_PARAMETERS:
            yield f"{module.name}.{node.name} has {len(names)} parameters, at most {MAX_PARAMETERS} are allowed"


def no_print(module: Module) -> Iterator[str]:
    """The library never prints."""
    for node in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.name}:{node.lineno} prints"


def has_docstrings(module: Module) -> Iterator[str]:
    """Modules, public classes, public functions and public methods have a docstring."""
    if not ast.get_docstring(module.tree) and module.source.strip():
        yield f"{module.name} has no docstring"
    yield from _undocumented(module.tree.body, module.name)


def _undocumented(body: list[ast.stmt], owner: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = {dotted_name(d).rpartition(".")[2] for d in node.decorator_list}
        if not ast.get_docstring(node) and not decorators & {"overload", "override", "setter"}:
            yield f"{owner}.{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node.body, f"{owner}.{node.name}")


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    imports_go_down,
    gated_packages,
    collectives_in_one_place,
    small_files,
    small_functions,
    few_parameters,
    no_print,
    has_docstrings,
)
