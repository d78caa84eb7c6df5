"""Config files: importable Python that defines `config`, and overrides from the command line."""

import ast
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlloss.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)


def load_config(path: str | Path, kind: type[M], overrides: Sequence[str] = ()) -> M:
    """Runs a config file and returns its `config`.

    Args:
        path: A Python file that defines `config`.
        kind: What `config` has to be.
        overrides: Assignments `a.b=c`, applied in order and validated like the rest.

    Raises:
        ConfigError: The file is missing or broken, or has no such `config`, or an override does not fit.
    """
    config = _module_variables(Path(path)).get("config")
    if config is None:
        raise ConfigError(f"{path} defines no `config`. Add a line: config = {kind.__name__}(...)")
    if not isinstance(config, kind):
        raise ConfigError(f"{path}: `config` is a {type(config).__name__}, expected a {kind.__name__}.")
    for assignment in overrides:
        config = override(config, assignment)
    return config


def override(config: M, assignment: str) -> M:
    """Returns a config with one field set.

    Args:
        config: It is not changed.
        assignment: `a.b=c`. The value is a Python literal, or `true`, `false`, `null`, or else a string.

    Raises:
        ConfigError: There is no such field, or the value does not fit it.
    """
    path, sign, text = assignment.partition("=")
    names = path.strip().split(".")
    if not sign or not all(names):
        raise ConfigError(f"--set {assignment}: expected a.b=c, for instance --set seed=1")
    value = _literal(text.strip())
    try:
        replaced: M = _replaced(config, names, value)
    except ConfigError as error:
        if isinstance(value, str):
            raise ConfigError(f"--set {assignment}: {error}") from error
        try:
            replaced = _replaced(config, names, text.strip())  # a field that wants a string such as "1e3"
        except ConfigError:
            raise ConfigError(f"--set {assignment}: {error}") from error
    return replaced


def _module_variables(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.py")])
        raise ConfigError(f"There is no config file {path}.{near}")
    name = f"rlloss_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file. A config file ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes which the file defines can be pickled
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return vars(module)


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _replaced(holder: Any, names: Sequence[str], value: Any) -> Any:
    """Returns a copy of a model or dict with the field at a path set; every model on the way is validated anew."""
    name, rest = names[0], names[1:]
    if isinstance(holder, BaseModel):
        kind = type(holder)
        if name not in kind.model_fields:
            known = list(kind.model_fields)
            hint = nearest(name, known) or f" It has: {', '.join(known)}."
            raise ConfigError(f"{kind.__name__} has no field {name!r}.{hint}")
        inner = _replaced(getattr(holder, name), rest, value) if rest else value
        return kind(**{**{field: getattr(holder, field) for field in kind.model_fields}, name: inner})
    if isinstance(holder, Mapping):
        return {**holder, name: _replaced(holder.get(name, {}), rest, value) if rest else value}
    raise ConfigError(f"{name!r} is set on {holder!r}, which has no fields.")
