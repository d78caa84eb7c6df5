"""Every error that rlloss raises on purpose.

To add one: derive from `RLLossError` and from the built-in class it refines, so that code which catches
the built-in keeps working. A message says what was given, what was expected, and the way out.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


class RLLossError(Exception):
    """Base of all errors raised by rlloss."""


class ConfigError(RLLossError, ValueError):
    """A config field, or a combination of fields, cannot work."""


class BatchError(RLLossError, ValueError):
    """A batch, or a tensor set on a context later, does not fit the loss."""


class UnknownNameError(RLLossError, ValueError):
    """A name is not registered; the message offers the nearest one."""


class NotCalibratedError(RLLossError, RuntimeError):
    """`forward` was called before `build_batches` computed the token weights."""


class BackendUnavailableError(RLLossError, ImportError):
    """An optional package, or a device it needs, is missing."""


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuses a name that is none of the known ones.

    Args:
        kind: What the name is of, for the message ("rule action").
        name: What was given.
        known: What there is.

    Raises:
        UnknownNameError: The name is not among them; the message offers the nearest one.
    """
    known = list(known)
    if name not in known:
        raise UnknownNameError(f"unknown {kind} {name!r}.{nearest(str(name), known)} Known: {', '.join(known)}.")


def named_arguments(cls: type[T]) -> type[T]:
    """Makes a dataclass answer arguments that do not fit its fields with `ConfigError`, not Python's own `TypeError`.

    Args:
        cls: The dataclass; changed, and returned.
    """
    made: Any = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    signature = inspect.signature(made)

    @functools.wraps(made)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        try:
            signature.bind(self, *values, **named)
        except TypeError as error:
            hint = "".join(nearest(name, known) for name in named if name not in known)
            raise ConfigError(f"{cls.__name__}: {error}.{hint} Its fields: {', '.join(known)}.") from None
        made(self, *values, **named)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


def as_number(value: Any) -> float:
    """Returns a number, or a tensor that holds one, as a float; NaN for whatever is none."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""
