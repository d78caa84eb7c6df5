"""From a user's batch mapping to kwargs: every check of a batch, and the one host read of `build`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.layout import Shard, from_jagged, jagged_offsets, spread_over_tokens
from rlloss.losses.kwargs import BaseLossKwargs, Offsets, PerSequence, PerToken

K = TypeVar("K", bound=BaseLossKwargs)


def kwargs_of(cls: type[K], data: Mapping[str, Any], shard: Shard | None = None) -> K:
    """Reads the fields of a kwargs class out of a batch.

    Args:
        cls: The kwargs class; its annotations say what each field must look like.
        data: The batch; it is only read.
        shard: Which part of the rows is kept later, under sequence parallelism; tensors may be this part already.

    Raises:
        BatchError: A required key is missing, or a tensor does not fit.
    """
    present = packed_mapping(data)
    _require(cls, present)
    labels = _labels(present["shifted_labels"])
    offsets = _offsets(present, labels)
    fields: dict[str, Any] = {"shifted_labels": labels, "cu_seq_lens": offsets}
    for name in cls.model_fields:
        key = batch_key(cls, name)
        if name not in (*fields, "shard") and key in present:
            fields[name] = _field(cls, name, present[key], _Shape(labels, offsets, shard))
    return cls(**fields)


def packed_mapping(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a batch that are not None; jagged tensors become one packed row with offsets.

    Raises:
        BatchError: A jagged tensor has rows of other lengths than the labels, or the labels are not jagged.
    """
    present = {key: value for key, value in data.items() if value is not None}
    jagged = {key: value for key, value in present.items() if isinstance(value, Tensor) and value.is_nested}
    if not jagged:
        return present
    labels = jagged.get("shifted_labels")
    if labels is None:
        raise BatchError(f"{', '.join(jagged)} is jagged, but shifted_labels is not. Give all tensors in one layout.")
    offsets = jagged_offsets(labels)
    for key, value in jagged.items():
        if not torch.equal(jagged_offsets(value), offsets):
            raise BatchError(
                f"{key} has rows of lengths {jagged_offsets(value).diff().tolist()}, but those of shifted_labels are "
                f"{offsets.diff().tolist()}."
            )
    return present | {"cu_seq_lens": offsets} | {key: from_jagged(value) for key, value in jagged.items()}


def batch_key(cls: type[BaseLossKwargs], name: str) -> str:
    """Returns the key under which a batch holds a field."""
    role = cls.role(name)
    return role.key if isinstance(role, PerToken) and role.key else name


def check_field(loss_kwargs: BaseLossKwargs, name: str) -> None:
    """Checks a per-token tensor that was set after `build`.

    Raises:
        BatchError: Its shape is not that of the labels.
    """
    value, shard = getattr(loss_kwargs, name), loss_kwargs.shard
    if isinstance(value, Tensor) and value.is_nested:
        value = from_jagged(value).detach()
        setattr(loss_kwargs, name, value)
    if isinstance(value, Tensor) and value.shape[:2] != loss_kwargs.shifted_labels.shape:
        whole = "" if shard is None else f" (this rank's part) or T={shard.length} (whole rows)"
        raise BatchError(
            f"{name} has shape {tuple(value.shape)}, expected {tuple(loss_kwargs.shifted_labels.shape)}, the shape of "
            f"shifted_labels{whole}."
        )


def refuse_nan(loss_kwargs: BaseLossKwargs, names: Sequence[str], ignore_idx: int) -> None:
    """Refuses NaN at tokens that count; one host synchronisation for each tensor.

    Raises:
        BatchError: There is one.
    """
    counted = loss_kwargs.shifted_labels != ignore_idx
    for name in names:
        bad = int((torch.isnan(getattr(loss_kwargs, name)) & counted).sum())
        if bad:
            raise BatchError(f"{name} is NaN at {bad} tokens that count. Mask them, or find out where they come from.")


def offsets_of(num_tokens: Tensor) -> Tensor:
    """Returns the offsets `[S+1]` int32 of packed sequences with these lengths `[S]`."""
    counts = num_tokens.reshape(-1)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


@dataclass(frozen=True)
class LabelFacts:
    """What the host knows of a tensor of labels.

    Attributes:
        lowest: Smallest label that is not ignored.
        highest: Largest one.
        count: Number of labels that are not ignored.
    """

    lowest: int
    highest: int
    count: int


def read_labels(labels: Tensor, ignore_idx: int, cu_seq_lens: Tensor | None, shard: Shard | None = None) -> LabelFacts:
    """Reads range and count of the labels, and checks the offsets, in one host synchronisation.

    Args:
        labels: `[B, T]`, under sequence parallelism this rank's part.
        ignore_idx: Label of tokens that do not count.
        cu_seq_lens: Offsets of the whole row, or None.
        shard: Which part of the rows the labels are.

    Raises:
        BatchError: A label is negative and not ignored, or the offsets do not describe the row.
    """
    counted = labels != ignore_idx
    big = torch.iinfo(torch.int64).max
    wide = labels.long()
    facts = [
        torch.where(counted, wide, big).amin() if labels.numel() else wide.new_tensor(big),
        torch.where(counted, wide, -big).amax() if labels.numel() else wide.new_tensor(-big),
        counted.sum(),
    ]
    if cu_seq_lens is not None:
        steps = cu_seq_lens[1:] - cu_seq_lens[:-1]
        first = 0 if shard is None else shard.start
        beyond = torch.arange(first, first + labels.shape[1], device=labels.device) >= cu_seq_lens[-1]
        facts += [cu_seq_lens[0], steps.amin(), cu_seq_lens[-1], (counted[0] & beyond).sum()]
    lowest, highest, count, *offsets = (int(fact) for fact in torch.stack([fact.long() for fact in facts]).tolist())
    if offsets:
        _check_offsets(offsets, labels.shape[1] if shard is None else shard.length)
    if count and lowest < 0:
        raise BatchError(
            f"shifted_labels contains the negative label {lowest}, but ignore_idx is {ignore_idx}. Set ignore_idx to "
            "the value that marks ignored tokens, or replace the label."
        )
    return LabelFacts(lowest, highest, count)


def _check_offsets(offsets: list[int], length: int) -> None:
    first, shortest, last, beyond = offsets
    if first != 0 or shortest < 0 or last > length:
        raise BatchError(
            f"cu_seq_lens starts at {first}, ends at {last} and has a smallest step of {shortest}; expected offsets "
            f"that start at 0, never fall, and end at most at T={length}."
        )
    if beyond:
        raise BatchError(
            f"{beyond} tokens that count lie beyond the end of the last packed sequence ({last} of T={length}). Extend "
            f"cu_seq_lens, or ignore these labels."
        )


def _require(cls: type[BaseLossKwargs], present: Mapping[str, Any]) -> None:
    required = [batch_key(cls, name) for name, field in cls.model_fields.items() if field.is_required()]
    missing = [key for key in required if key not in present]
    if missing:
        raise BatchError(
            f"the batch lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present)) or 'nothing'}. "
            f"{cls.__name__} requires {', '.join(map(repr, required))}."
        )


def _labels(labels: Any) -> Tensor:
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise BatchError(f"shifted_labels is {given}, expected an integer tensor [B, T] (packed: [1, T]).")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise BatchError(f"shifted_labels has dtype {labels.dtype}, expected an integer type.")
    return labels


def _offsets(present: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    offsets = present.get("cu_seq_lens")
    if offsets is None and "num_tokens" in present:
        offsets = offsets_of(torch.as_tensor(present["num_tokens"], device=labels.device))
    if offsets is None:
        return None
    offsets = torch.as_tensor(offsets, device=labels.device).reshape(-1).to(torch.int32)
    if offsets.shape[0] < 2:
        raise BatchError(f"cu_seq_lens has {offsets.shape[0]} entries, expected at least 2: the start 0 and an end.")
    if labels.shape[0] != 1:
        raise BatchError(
            f"cu_seq_lens or num_tokens goes with one packed row [1, T], but shifted_labels has shape "
            f"{tuple(labels.shape)}. Drop it for padded rows, or pack the rows."
        )
    return offsets


@dataclass(frozen=True)
class _Shape:
    """What the tensors of a batch must fit: its whole labels, offsets, and the part of the rows that is kept."""

    labels: Tensor
    offsets: Tensor | None
    shard: Shard | None

    @property
    def rows(self) -> tuple[int, int]:
        return int(self.labels.shape[0]), int(self.labels.shape[1])

    def fits(self, value: Tensor, length: int, wide: bool) -> bool:
        """Whether a tensor is `[B, length]`, or `[B, length, K]` where wide."""
        return tuple(value.shape[:2]) == (self.rows[0], length) and value.ndim == (3 if wide else 2)

    @property
    def sequences(self) -> int:
        return self.rows[0] if self.offsets is None else int(self.offsets.shape[0]) - 1


def _field(cls: type[BaseLossKwargs], name: str, value: Any, shape: _Shape) -> Any:
    role = cls.role(name)
    if not isinstance(value, Tensor):
        if isinstance(role, (PerToken, PerSequence)):
            raise BatchError(f"{batch_key(cls, name)} is a {type(value).__name__}, expected a tensor.")
        return value
    if isinstance(role, Offsets):
        return value
    if value.device != shape.labels.device:
        raise BatchError(
            f"{batch_key(cls, name)} is on {value.device}, but shifted_labels is on {shape.labels.device}. "
            f"Move the batch to one device."
        )
    value = value.detach()
    if isinstance(role, PerSequence):
        if tuple(value.shape) != (shape.sequences,):
            raise BatchError(
                f"{batch_key(cls, name)} has shape {tuple(value.shape)}, expected ({shape.sequences},), one "
                f"for each sequence."
            )
        return value
    return _per_token(batch_key(cls, name), role, value, shape) if isinstance(role, PerToken) else value


def _per_token(key: str, role: PerToken, value: Tensor, shape: _Shape) -> Tensor:
    if role.kind == "mask":
        value = value != 0
    elif role.kind == "id":
        if value.is_floating_point() or value.dtype == torch.bool:
            raise BatchError(f"{key} has dtype {value.dtype}, expected an integer type.")
        value = value.long()
    elif not value.is_floating_point():
        value = value.float()
    if shape.fits(value, shape.rows[1], role.wide):
        return value
    if role.spread and tuple(value.shape) in ((shape.sequences,), (shape.sequences, 1)):
        return spread_over_tokens(value.reshape(-1), shape.rows, shape.offsets)
    options = f"{(*shape.rows, 'K') if role.wide else shape.rows}"
    options += f" or ({shape.sequences},), one for each sequence" if role.spread else ""
    if shape.shard is not None:
        if shape.fits(value, shape.shard.local_length, role.wide):
            return value
        options += f" or T={shape.shard.local_length}, this rank's part of the rows"
    raise BatchError(f"{key} has shape {tuple(value.shape)}, expected {options}; shifted_labels is {shape.rows}.")
