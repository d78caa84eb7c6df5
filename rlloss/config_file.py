"""Config files: importable Python that defines `config`, and overrides from the command line."""

import ast
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rlloss.errors import ConfigError, nearest
from rlloss.losses.config import StrictModel

M = TypeVar("M", bound=BaseModel)


def load_config(path: str | Path, kind: type[M], overrides: Sequence[str] = ()) -> M:
    """Runs a config file and returns its `config`.

    Args:
        path: A Python file that defines `config`.
        kind: What `config` has to be.
        overrides: Assignments `a.b=c`, validated like the rest.

    Raises:
        ConfigError: The file is missing or broken, or has no such `config`, or an override does not fit.
    """
    variables = _module_variables(Path(path))
    config = variables.get("config")
    if config is None:
        alike = next((name for name, value in variables.items() if isinstance(value, kind)), None)
        example = "GRPOLossConfig" if kind is StrictModel else kind.__name__
        way_out = f"Add a line: config = {example}(...)" if alike is None else f"Call {alike!r} config."
        raise ConfigError(f"{path} defines no `config`. {way_out}")
    if not isinstance(config, kind):
        raise ConfigError(f"{path}: `config` is a {type(config).__name__}, expected a {kind.__name__}.")
    return override(config, overrides)


def override(config: M, assignments: Sequence[str]) -> M:
    """Returns a config with some fields set, all at once: only the result has to be valid.

    Args:
        config: It is not changed.
        assignments: Each `a.b=c`. A value is a Python literal, or `true`, `false`, `null`, or else a string; the last
            of several to one field counts.

    Raises:
        ConfigError: There is no such field, or a value does not fit it.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, sign, text = assignment.partition("=")
        *parents, last = path.strip().split(".")
        if not sign or not all([*parents, last]):
            raise ConfigError(f"--set {assignment}: expected a.b=c, for instance --set seed=1")
        branch = tree
        for name in parents:
            inner = branch.get(name)
            branch[name] = branch = inner if isinstance(inner, dict) else {}
        branch[last] = _Text(text.strip())
    try:
        replaced: M = _replaced(config, tree) if tree else config
    except ConfigError as error:
        raise ConfigError(f"{' '.join(f'--set {assignment}' for assignment in assignments)}: {error}") from error
    return replaced


class _Text(str):
    """A value as it was typed."""


def _module_variables(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.py")])
        raise ConfigError(f"There is no config file {path}.{near}")
    name = f"rlloss_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file. A config file ends in .py.")
    for folder in (str(path.resolve().parent), str(Path.cwd())):
        # As for a script and for `python -m`; last, so that no module of a package is hidden.
        if folder not in sys.path:
            sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes which the file defines can be pickled
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a file that exits would end the command without a word
        raise ConfigError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return vars(module)


def _replaced(holder: Any, tree: Mapping[str, Any]) -> Any:
    """Returns a copy of a model or dict with the fields of a tree set; every model on the way is validated anew."""
    if isinstance(holder, BaseModel):
        kind = type(holder)
        # Only what was given: another loss has defaults of its own.
        known, fields = kind.model_fields, _given(holder)
        for name, inner in tree.items():
            if name not in known:
                hint = nearest(name, known) or f" It has: {', '.join(known)}."
                raise ConfigError(f"{kind.__name__} has no field {name!r}.{hint}")
            leaf = isinstance(inner, _Text)
            annotation = known[name].annotation
            before = fields.get(name, getattr(holder, name))
            fields[name] = _value(inner, annotation) if leaf else _replaced(before, inner)
        return kind(**fields)
    if isinstance(holder, Mapping):
        inside = {
            name: _value(inner, Any) if isinstance(inner, _Text) else _replaced(holder.get(name, {}), inner)
            for name, inner in tree.items()
        }
        return {**holder, **inside}
    raise ConfigError(f"{next(iter(tree))!r} is set on {holder!r}, which has no fields.")


def _given(holder: BaseModel) -> dict[str, Any]:
    if isinstance(holder, StrictModel):
        return holder.given_fields()
    return {name: getattr(holder, name) for name in type(holder).model_fields if name in holder.model_fields_set}


def _value(text: _Text, annotation: Any) -> Any:
    """Reads a value; one that is no literal, or that as a literal does not fit its field, is a string."""
    words = {"true": True, "false": False, "null": None, "none": None}
    plain = str(text)
    if plain.lower() in words:
        return words[plain.lower()]
    try:
        value = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return plain
    return plain if _fits(plain, annotation) and not _fits(value, annotation) else value


def _fits(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except (ValidationError, PydanticUserError):
        return False
    return True
