"""One field of a batch: what `build`, or an assignment after it, may give, and the tensor that it becomes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.layout import Shard, spread_over_tokens
from rlloss.losses.kwargs import BaseLossKwargs, Offsets, PerSequence, PerToken


def as_labels(labels: Any) -> Tensor:
    """Returns labels `[B, T]`, int32 or int64; the same tensor where it is that already.

    Raises:
        BatchError: They are not integers of two dimensions.
    """
    if not isinstance(labels, Tensor) or labels.is_nested or labels.ndim != 2:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise BatchError(f"shifted_labels is {given}, expected an integer tensor [B, T] (packed: [1, T]).")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise BatchError(f"shifted_labels has dtype {labels.dtype}, expected an integer type.")
    # A narrow type cannot hold every ignore_idx: compared with uint8, -100 would be the word 156.
    return labels if labels.dtype in (torch.int32, torch.int64) else labels.long()


def as_integers(name: str, given: Any, shape: str, device: torch.device | None) -> Tensor:
    """Returns integers of one dimension on a device; the same tensor where it is that already.

    Args:
        name: What they are called.
        given: A tensor or a list.
        shape: How their shape is written.
        device: None leaves them where they are.

    Raises:
        BatchError: They are no integers.
    """
    try:
        found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"{name} is a {type(given).__name__}, expected an integer tensor {shape}.") from error
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise BatchError(f"{name} has dtype {found.dtype}, expected an integer type.")
    return found if found.ndim == 1 else found.reshape(-1)


def as_offsets(given: Any, labels: Tensor) -> Tensor:
    """Returns offsets `[S+1]` int32 on the device of the labels; the same tensor where it is that already.

    Raises:
        BatchError: They are not integers, too few, or go with padded rows.
    """
    offsets = as_integers("cu_seq_lens", given, "[S+1]", labels.device).to(torch.int32)
    if offsets.shape[0] < 2:
        raise BatchError(f"cu_seq_lens has {offsets.shape[0]} entries, expected at least 2: the start 0 and an end.")
    if labels.shape[0] != 1:
        raise BatchError(
            f"cu_seq_lens or num_tokens goes with one packed row [1, T], but shifted_labels has shape "
            f"{tuple(labels.shape)}. Drop it for padded rows, or pack the rows."
        )
    return offsets


@dataclass(frozen=True)
class RowShape:
    """What the tensors of a batch must fit: its whole labels, offsets, and the part of the rows that is kept."""

    labels: Tensor
    offsets: Tensor | None
    shard: Shard | None

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of the labels."""
        return int(self.labels.shape[0]), int(self.labels.shape[1])

    @property
    def length(self) -> int:
        """Columns of whole rows."""
        return self.rows[1] if self.shard is None else self.shard.length

    @property
    def bounds(self) -> list[int]:
        """Where sequences of a packed row begin and end, read by the host."""
        return [0, self.length] if self.offsets is None else self.offsets.tolist()

    def fits(self, value: Tensor, length: int, wide: bool) -> bool:
        """Whether a tensor is `[B, length]`, or `[B, length, K]` where wide."""
        return tuple(value.shape[:2]) == (self.rows[0], length) and value.ndim == (3 if wide else 2)

    @property
    def sequences(self) -> int:
        """Number of sequences S."""
        return self.rows[0] if self.offsets is None else int(self.offsets.shape[0]) - 1


def as_field(cls: type[BaseLossKwargs], name: str, key: str, value: Any, shape: RowShape) -> Any:
    """Returns a field as the kwargs hold it, without a graph; the same tensor where it is that already.

    Args:
        cls: The kwargs class, whose annotation says what the field must look like.
        name: The field.
        key: Its name for the user.
        value: What was given.
        shape: What it must fit.

    Raises:
        BatchError: It does not.
    """
    role = cls.role(name)
    if not isinstance(value, Tensor):
        if isinstance(role, (PerToken, PerSequence)):
            raise BatchError(f"{key} is a {type(value).__name__}, expected a tensor.")
        return value
    if isinstance(role, Offsets):
        return value
    if value.device != shape.labels.device:
        raise BatchError(
            f"{key} is on {value.device}, but shifted_labels is on {shape.labels.device}. Move the batch to one device."
        )
    value = value.detach() if value.requires_grad else value
    if isinstance(role, PerSequence):
        if tuple(value.shape) != (shape.sequences,):
            raise BatchError(
                f"{key} has shape {tuple(value.shape)}, expected ({shape.sequences},), one for each sequence."
            )
        return value
    return _per_token(key, role, value, shape) if isinstance(role, PerToken) else value


def _per_token(key: str, role: PerToken, value: Tensor, shape: RowShape) -> Tensor:
    if role.kind == "mask":
        value = value if value.dtype == torch.bool else value != 0
    elif role.kind == "id":
        if value.is_floating_point() or value.dtype == torch.bool:
            raise BatchError(f"{key} has dtype {value.dtype}, expected an integer type.")
        value = value.long()
    elif value.is_complex():
        raise BatchError(f"{key} has dtype {value.dtype}, expected real numbers.")
    elif not value.is_floating_point():
        value = value.float()
    lengths = (shape.length,) if shape.shard is None else (shape.length, shape.shard.local_length)
    if any(shape.fits(value, length, role.wide) for length in lengths):
        return value
    if role.spread and tuple(value.shape) in ((shape.sequences,), (shape.sequences, 1)):
        return spread_over_tokens(value.reshape(-1), (shape.rows[0], shape.length), shape.offsets)
    options = f"{(*shape.rows, 'K') if role.wide else shape.rows}"
    options += f" or ({shape.sequences},), one for each sequence" if role.spread else ""
    if shape.shard is not None:
        options += f", or T={shape.shard.local_length} (this rank's part) or T={shape.length} (whole rows)"
    raise BatchError(f"{key} has shape {tuple(value.shape)}, expected {options}; shifted_labels is {shape.rows}.")
