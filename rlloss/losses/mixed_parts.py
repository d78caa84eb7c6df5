"""The parts of a mixed loss: found by the name of their class, and set on the one head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlloss.errors import ConfigError, nearest
from rlloss.heads import TokenStats
from rlloss.layout import Segments
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext


def config_from_fields(fields: Mapping[str, Any]) -> BaseLossConfig:
    """Makes a config out of its fields and the name of its class under "loss"."""
    known: dict[str, type[BaseLossConfig]] = {}
    found: list[type[BaseLossConfig]] = [BaseLossConfig]
    for cls in found:
        found += cls.__subclasses__()
        known[class_name(cls)] = cls
    name = str(fields.get("loss"))
    if name not in known:
        raise ConfigError(f"a part names its class under 'loss'; got {name!r}.{nearest(name, known)}")
    return known[name](**{field: value for field, value in fields.items() if field != "loss"})


def class_name(cls: type[BaseLossConfig]) -> str:
    """Returns the name of a config class: bare for rlloss's own, dotted for others, which may share a bare name."""
    own = cls.__module__.startswith("rlloss.losses.")
    return cls.__name__ if own else f"{cls.__module__}.{cls.__qualname__}"


def with_shared(name: str, part: BaseLossConfig, shared: Mapping[str, Any]) -> BaseLossConfig:
    """Returns a part with the fields of the one head set in it.

    Raises:
        ConfigError: The part has another value of its own, or does not read log-probs of tokens alone.
    """
    context = part.loss_ctx_cls
    whole = ("forward", "loss_fn", "_objective", "build_batches")
    if any(getattr(context, method) is not getattr(BaseLossContext, method) for method in whole):
        raise ConfigError(
            f"parts[{name!r}] is a {type(part).__name__}, which does not read log-probs of tokens alone. Add its "
            f"loss to the mixed loss outside."
        )
    fields = type(part).model_fields
    for field, value in shared.items():
        own = getattr(part, field)
        if own not in (fields[field].default, value):
            raise ConfigError(
                f"parts[{name!r}] sets {field}={own!r}, but there is one head for all parts: set it on MixedLossConfig."
            )
    given = {field: getattr(part, field) for field in fields}
    return type(part)(**(given | dict(shared)))


def picked(stats: TokenStats, rows: Tensor, segments: Segments) -> TokenStats:
    """Returns the numbers of some rows `[n]`, which belong to the given segments."""
    entropy, extra = stats.entropy, stats.extra_log_prob
    return TokenStats(
        stats.log_prob.index_select(0, rows),
        None if entropy is None else entropy.index_select(0, rows),
        segments,
        stats.labels.index_select(0, rows),
        None if extra is None else extra.index_select(0, rows),
    )
