"""The parts of a mixed loss: found by the name of their class, and set on the one head."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from rlloss.errors import BatchError, ConfigError, nearest
from rlloss.heads import TokenStats
from rlloss.layout import Segments
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs, PerToken
from rlloss.losses.totals import Totals
from rlloss.metrics import Metric


class MixedLossKwargs(BaseLossKwargs):
    """Labels of all parts; the tensors of a part are in its own context, `ctx.parts[name].loss_kwargs`.

    Attributes:
        part_ids: `[B, T]` int64, the part of each token, -1 for none; a batch may give one for each sequence.
    """

    part_ids: Annotated[Tensor, PerToken(-1.0, kind="id", spread=True)]


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


def world_of(totals: Mapping[str, Totals] | None, parts: Mapping[str, Any]) -> int | None:
    """Returns the ranks whose gradients are combined, where totals give them: the same for all parts.

    Raises:
        BatchError: The totals name no part, or differ in `world`.
    """
    if totals is not None and not (
        isinstance(totals, Mapping) and all(isinstance(part, Totals) for part in totals.values())
    ):
        raise BatchError("totals of a mixed loss belong to its parts: give {part name: Totals(...)}.")
    unknown = set(totals or ()) - set(parts)
    if unknown:
        raise BatchError(f"totals names {sorted(unknown)}, but the parts are {list(parts)}.")
    given = {name: part.world for name, part in (totals or {}).items() if part.world is not None}
    if len(set(given.values())) > 1:
        raise BatchError(f"totals of the parts differ in world: {given}. One backward combines the gradients of all.")
    return next(iter(given.values()), None)


def check_places(ids: Tensor, parts: Mapping[str, Any]) -> None:
    """Refuses ids of tokens that count which name no part; read by the host.

    Raises:
        BatchError: There is one.
    """
    given = sorted(set(ids.tolist()))
    if given and not -1 <= given[0] <= given[-1] < len(parts):
        raise BatchError(f"part_ids must lie between -1 and {len(parts) - 1} for the parts {list(parts)}; got {given}.")


class PartReader:
    """Evaluates a part on its rows of a slice of all tokens."""

    def __init__(self, context: BaseLossContext, rows: Tensor) -> None:
        self.context, self.rows = context, rows
        self.flat = context.loss_kwargs.take(context.layout)
        self.names = [name for name in self.flat.tensors() if context.loss_kwargs.is_per_token(name)]
        self.bounds = rows.cpu()

    def __call__(self, stats: TokenStats, part: slice) -> tuple[Tensor, dict[str, Metric]]:
        """Returns the loss of the part's rows in a slice of all rows, and its metrics."""
        start, stop = torch.searchsorted(self.bounds, torch.tensor([part.start, part.stop])).tolist()
        own = self.rows[start:stop] - part.start
        seen = picked(stats, own, self.context.layout.segments.rows(start, stop))
        return self.context.token_loss(seen, self.flat.rows(slice(start, stop), self.names))
