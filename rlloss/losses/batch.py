"""From a user's batch mapping to kwargs: every check of a batch, and the one host read of `build`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.layout import Shard, from_jagged, jagged_offsets
from rlloss.losses.batch_keys import batch_key, check_keys
from rlloss.losses.fields import RowShape, as_field, as_integers, as_labels, as_offsets
from rlloss.losses.kwargs import BaseLossKwargs, PerSequence, PerToken

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
    check_keys(cls, present)
    labels = as_labels(present["shifted_labels"])
    offsets = _offsets(present, labels)
    fields: dict[str, Any] = {"shifted_labels": labels, "cu_seq_lens": offsets}
    for name in cls.model_fields:
        key = batch_key(cls, name, present)
        if name not in (*fields, "shard") and key in present:
            fields[name] = as_field(cls, name, key, present[key], RowShape(labels, offsets, shard))
    return cls(**fields)


def packed_mapping(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a batch that are not None; jagged tensors become one packed row with offsets.

    Raises:
        BatchError: It is no mapping, a jagged tensor has rows of other lengths than the labels, or the labels are not
            jagged.
    """
    if not hasattr(data, "items"):
        raise BatchError(f"the batch is a {type(data).__name__}, expected a mapping from names to tensors.")
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


def check_rows(loss_kwargs: BaseLossKwargs) -> None:
    """Reads labels and offsets that may have been set after `build` as `build` reads them.

    Raises:
        BatchError: They do not fit.
    """
    labels, offsets = as_labels(loss_kwargs.shifted_labels), loss_kwargs.cu_seq_lens
    _replace(loss_kwargs, "shifted_labels", labels)
    _replace(loss_kwargs, "cu_seq_lens", None if offsets is None else as_offsets(offsets, labels))


def check_fields(loss_kwargs: BaseLossKwargs, computed: Collection[str]) -> None:
    """Reads every tensor that may have been set after `build` as `build` reads it.

    Args:
        loss_kwargs: The kwargs; a tensor that has another form than `build` gives it is replaced, never written into.
        computed: Fields that are about to be computed anew, whatever they hold.

    Raises:
        BatchError: A field is no tensor, or has the wrong shape, type or device.
    """
    check_rows(loss_kwargs)
    cls = type(loss_kwargs)
    for name in cls.model_fields:
        if name not in ("shifted_labels", *computed) and isinstance(cls.role(name), (PerToken, PerSequence)):
            _read_late(loss_kwargs, name)


def check_field(loss_kwargs: BaseLossKwargs, name: str) -> None:
    """Checks one per-token tensor, which must have the shape of the labels by now.

    Raises:
        BatchError: It does not fit.
    """
    _read_late(loss_kwargs, name)
    value, labels = getattr(loss_kwargs, name), loss_kwargs.shifted_labels
    if value is not None and value.shape[:2] != labels.shape:
        raise BatchError(
            f"{name} has shape {tuple(value.shape)}, expected {tuple(labels.shape)}, the shape of shifted_labels. Call "
            f"build_batches first: it splits whole rows over the ranks."
        )


def _read_late(loss_kwargs: BaseLossKwargs, name: str) -> None:
    value, cls = getattr(loss_kwargs, name), type(loss_kwargs)
    if value is None:
        if cls.model_fields[name].is_required():
            raise BatchError(f"{name} is None, but {cls.__name__} requires it.")
        return
    shape = RowShape(loss_kwargs.shifted_labels, loss_kwargs.cu_seq_lens, loss_kwargs.shard)
    if isinstance(value, Tensor) and value.is_nested:
        rows = jagged_offsets(value).tolist()
        if rows != shape.bounds:
            raise BatchError(f"{name} is jagged with the offsets {rows}, but those of the labels are {shape.bounds}.")
        value = from_jagged(value)
    _replace(loss_kwargs, name, as_field(cls, name, name, value, shape))


def _replace(loss_kwargs: BaseLossKwargs, name: str, value: Any) -> None:
    """Assigns a field where it is another; whoever remembers a tensor knows it by its identity."""
    if value is not getattr(loss_kwargs, name):
        setattr(loss_kwargs, name, value)


def refuse_nan(loss_kwargs: BaseLossKwargs, names: Sequence[str], ignore_idx: int) -> None:
    """Refuses NaN at tokens that count; one host synchronisation for each tensor.

    Raises:
        BatchError: There is one.
    """
    counted = loss_kwargs.shifted_labels != ignore_idx
    for name in names:
        found = torch.isnan(getattr(loss_kwargs, name))
        found = found if found.ndim == counted.ndim else found.any(dim=-1)
        bad = int((found & counted).sum())
        if bad:
            raise BatchError(f"{name} is NaN at {bad} tokens that count. Mask them, or find out where they come from.")


def offsets_of(num_tokens: Any, device: torch.device | None = None) -> Tensor:
    """Returns the offsets `[S+1]` int32 of packed sequences with these lengths `[S]`.

    Raises:
        BatchError: They are not integers.
    """
    counts = as_integers("num_tokens", num_tokens, "[S]", device)
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


def read_labels(loss_kwargs: BaseLossKwargs, ignore_idx: int) -> LabelFacts:
    """Reads range and count of the labels, and checks offsets and temperature, in one host synchronisation.

    Args:
        loss_kwargs: Labels, offsets and temperature; under sequence parallelism this rank's part of the rows.
        ignore_idx: Label of tokens that do not count.

    Raises:
        BatchError: A label is negative and not ignored, the offsets do not describe the row, or a temperature is not
            above 0 at a token that counts.
    """
    labels, cu_seq_lens, shard = loss_kwargs.shifted_labels, loss_kwargs.cu_seq_lens, loss_kwargs.shard
    counted, temperature = labels != ignore_idx, loss_kwargs.temperature
    big = torch.iinfo(torch.int64).max
    wide = labels.long()
    facts = [
        torch.where(counted, wide, big).amin() if labels.numel() else wide.new_tensor(big),
        torch.where(counted, wide, -big).amax() if labels.numel() else wide.new_tensor(-big),
        counted.sum(),
        # NaN is not refused: it stays visible in the loss.
        torch.zeros_like(counted).sum()
        if temperature is None
        else (counted & ((temperature <= 0) | torch.isinf(temperature))).sum(),
    ]
    if cu_seq_lens is not None:
        steps = cu_seq_lens[1:] - cu_seq_lens[:-1]
        first = 0 if shard is None else shard.start
        beyond = torch.arange(first, first + labels.shape[1], device=labels.device) >= cu_seq_lens[-1]
        facts += [cu_seq_lens[0], steps.amin(), cu_seq_lens[-1], (counted[0] & beyond).sum()]
    lowest, highest, count, cold, *offsets = (int(fact) for fact in torch.stack([f.long() for f in facts]).tolist())
    if offsets:
        _check_offsets(offsets, labels.shape[1] if shard is None else shard.length)
    if count and lowest < 0:
        raise BatchError(
            f"shifted_labels contains the negative label {lowest}, but ignore_idx is {ignore_idx}. Set ignore_idx to "
            "the value that marks ignored tokens, or replace the label."
        )
    if cold:
        raise BatchError(
            f"temperature is not a finite number above 0 at {cold} tokens that count. The logits are divided by it; "
            f"greedy sampling has the temperature 1 here."
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


def _offsets(present: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    given, lengths = present.get("cu_seq_lens"), present.get("num_tokens")
    offsets = None if given is None else as_offsets(given, labels)
    if lengths is None:
        return offsets
    counted = offsets_of(lengths, labels.device)
    if offsets is None:
        return as_offsets(counted, labels)
    if not torch.equal(counted, offsets):
        raise BatchError(
            f"num_tokens says {counted.diff().tolist()}, but cu_seq_lens {offsets.tolist()}. Leave one of them out."
        )
    return offsets
