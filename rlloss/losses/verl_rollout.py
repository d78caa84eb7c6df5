"""verl's options and number formats of rollout correction, translated into rules."""

import math
from collections.abc import Sequence
from typing import Any

from rlloss.errors import ConfigError, nearest
from rlloss.functional.rollout import RolloutRule

_LEVELS: dict[str, Any] = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}

REJECTION_OPTIONS = tuple(
    f"{level}_{kind}" for level in _LEVELS for kind in ("k1", "k2", "k3") if (level, kind) != ("seq_max", "k1")
)
"""The eleven names of `rollout_rs`."""


def weight_rules(level: str | None, threshold: float | str) -> tuple[RolloutRule, ...]:
    """Translates `rollout_is` and `rollout_is_threshold`: one bound truncates, "low_high" is IcePop."""
    if level is None:
        return ()
    if level not in ("token", "sequence"):
        raise ConfigError(f"rollout_is={level!r}: expected None, 'token' or 'sequence'.")
    low, high = _numbers("rollout_is_threshold", threshold)
    if low is None:
        return (RolloutRule(level, "ratio", "clamp", None, high),)  # type: ignore[arg-type]
    inside = RolloutRule(level, "ratio", "mask", low, high, "all")  # type: ignore[arg-type]
    return RolloutRule(level, "ratio", "clamp"), inside  # type: ignore[arg-type]


def rejection_rules(options: str | Sequence[str] | None, thresholds: float | str | None) -> tuple[RolloutRule, ...]:
    """Translates `rollout_rs` and `rollout_rs_threshold`; a rejected token leaves the counts."""
    if options is None:
        return ()
    if not isinstance(options, (str, Sequence)):
        raise ConfigError(f"rollout_rs={options!r}: expected a comma list or a list of options.")
    names = list(
        dict.fromkeys(str(name).strip() for name in (options.split(",") if isinstance(options, str) else options))
    )
    if thresholds is None:
        raise ConfigError("rollout_rs needs a rollout_rs_threshold.")
    given = [part.strip() for part in str(thresholds).split(",")]
    if len(given) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs has {len(names)} options and rollout_rs_threshold {len(given)} numbers; expected one for "
            f"each, or one for all."
        )
    return tuple(_rejection(name, given[index if len(given) > 1 else 0]) for index, name in enumerate(names))


def _rejection(name: str, threshold: str) -> RolloutRule:
    if name not in REJECTION_OPTIONS:
        raise ConfigError(
            f"unknown rollout_rs option {name!r}.{nearest(name, REJECTION_OPTIONS)} "
            f"Known: {', '.join(REJECTION_OPTIONS)}."
        )
    level, _, kind = name.rpartition("_")
    low, high = _numbers("rollout_rs_threshold", threshold)
    if kind != "k1":
        if low is not None:
            raise ConfigError(f"rollout_rs_threshold={threshold!r} of {name!r}: expected one upper bound in nats.")
        return RolloutRule(_LEVELS[level], kind, "mask", None, high)  # type: ignore[arg-type]
    low = 1.0 / high if low is None else low
    below, above = sorted((math.log(low), math.log(high)))
    return RolloutRule(_LEVELS[level], "k1", "mask", below, above)


def _numbers(field: str, threshold: float | str) -> tuple[float | None, float]:
    """Reads "low_high" or one number, all above 0."""
    if isinstance(threshold, bool):
        raise ConfigError(f"{field}={threshold!r}: expected a number, or 'low_high'.")
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError as error:
        raise ConfigError(f"{field}={threshold!r}: expected a number, or 'low_high'.") from error
    if len(numbers) > 2 or not all(number > 0 for number in numbers):
        raise ConfigError(f"{field}={threshold!r}: expected one number or two, all above 0.")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise ConfigError(f"{field}={threshold!r}: the lower bound lies above the upper one.")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
