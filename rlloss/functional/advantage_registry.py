"""Advantage estimators by name: a function whose signature says what it needs.

    @register_advantage("mine")
    def mine(rewards, group_ids): ...

An estimator gives `[N]`, one number for each sequence, or `[B, T]`, one for each token.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor

from rlloss.errors import BatchError, nearest
from rlloss.registry import Registry

F = TypeVar("F", bound=Callable[..., Tensor])
T = TypeVar("T")

_REGISTRY: Registry[Callable[..., Tensor]] = Registry("advantage estimator")


def register_advantage(name: str, aliases: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Registers an advantage estimator under a name.

    Args:
        name: The name for `compute_advantages`.
        aliases: Other names.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ConfigError: The name is taken.
    """

    def decorate(fn: F) -> F:
        _REGISTRY.add(name, fn, aliases)
        return fn

    return decorate


def unregister_advantage(name: str) -> None:
    """Removes an estimator, so that its name can be used again."""
    _REGISTRY.remove(name)


def advantage_names() -> list[str]:
    """Returns the names of all estimators."""
    return list(_REGISTRY)


def get_advantage(name: str) -> Callable[..., Tensor]:
    """Finds an estimator by name or alias; an unknown one is an error that names the nearest."""
    return _REGISTRY.get(name)


def compute_advantages(name: str, **given: Any) -> Tensor:
    """Calls an estimator with what it asks for.

    Args:
        name: Name or alias of the estimator.
        given: Its arguments by name: rewards, group_ids, lengths, mask, ... and its options.

    Raises:
        UnknownNameError: There is no such estimator.
        BatchError: An argument is missing, or the estimator has none of that name.
    """
    fn = get_advantage(name)
    check_arguments(name, given)
    return fn(**given)


def taken_by(name: str, offered: Mapping[str, T]) -> dict[str, T]:
    """Returns those of the offered arguments that an estimator asks for."""
    parameters = inspect.signature(get_advantage(name)).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {argument: value for argument, value in offered.items() if argument in parameters or open_ended}


def check_arguments(name: str, given: Collection[str]) -> None:
    """Refuses arguments that an estimator does not have, and too few of those that it needs.

    Raises:
        UnknownNameError: There is no such estimator.
        BatchError: An argument is missing, or the estimator has none of that name.
    """
    parameters = inspect.signature(get_advantage(name)).parameters
    known = taken_by(name, dict.fromkeys(given))
    unknown = [argument for argument in given if argument not in known]
    if unknown:
        raise BatchError(
            f"advantage estimator {name!r} has no argument {unknown[0]!r}.{nearest(unknown[0], parameters)} "
            f"It takes: {', '.join(parameters)}."
        )
    missing = [
        argument
        for argument, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and argument not in given
    ]
    if missing:
        raise BatchError(
            f"advantage estimator {name!r} needs {', '.join(missing)}; given: {', '.join(given) or 'nothing'}."
        )
