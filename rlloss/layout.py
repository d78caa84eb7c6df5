"""The one inner layout of a batch: the flat list of tokens that count, and the sequences they belong to.

Users give padded `[B, T]` or packed `[1, T]` tensors. `TokenLayout` turns each of them into `[N]`, the tokens
that count in row-major order, and `Segments` says which sequence each token belongs to. Heads and losses see
nothing else, so garbage at ignored positions cannot reach them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlloss.distributed import Group, all_reduce_max, differentiable_sum
from rlloss.errors import BatchError


@dataclass(frozen=True)
class Segments:
    """Which sequence each of N tokens belongs to.

    Attributes:
        ids: `[N]` int64, the sequence of each token.
        count: Number of sequences S, those without any token included.
        group: Sequence-parallel ranks that hold other tokens of the same sequences, or `None`.
    """

    ids: Tensor
    count: int
    group: Group = None

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sums over each sequence: `[N]` -> `[S]`, differentiable, over all ranks that share it."""
        totals = values.new_zeros(self.count).index_add(0, self.ids, values)
        return differentiable_sum(totals, self.group)

    @property
    def sizes(self) -> Tensor:
        """Number of tokens of each sequence, `[S]` float64."""
        return self.sum(torch.ones_like(self.ids, dtype=torch.float64))

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over each sequence: `[N]` -> `[S]`; 0 for a sequence without tokens."""
        return self.sum(values) / self.sizes.clamp(min=1).to(values.dtype)

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum over each sequence, without a graph: `[N]` -> `[S]`; -inf for one without tokens."""
        highest = values.new_full((self.count,), -torch.inf)
        highest = highest.scatter_reduce(0, self.ids, values.detach(), "amax")
        return highest if self.group is None else all_reduce_max(highest, self.group)

    def broadcast(self, values: Tensor) -> Tensor:
        """Returns the number of each token's sequence: `[S]` -> `[N]`."""
        return values.index_select(0, self.ids)

    def rows(self, start: int, stop: int) -> "Segments":
        """Returns the segments of a slice of tokens; sums over it are partial sums."""
        return replace(self, ids=self.ids[start:stop])


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens that count stand in a `[B, T]` batch.

    Attributes:
        shape: `(B, T)` of the user's tensors.
        index: `[N]` int64, their places in the flattened batch, or `None` when every token counts.
        segments: The sequence of each of them.
    """

    shape: tuple[int, int]
    index: Tensor | None
    segments: Segments

    @property
    def num_tokens(self) -> int:
        """Number of tokens that count, N."""
        return int(self.segments.ids.shape[0])

    def take(self, values: Tensor) -> Tensor:
        """Picks the tokens that count: `[B, T, ...]` -> `[N, ...]`, differentiable."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Puts numbers back: `[N]` -> `[B, T]` with `fill` at ignored positions, differentiable."""
        if self.index is None:
            return values.reshape(self.shape)
        rows, columns = self.shape
        return values.new_full((rows * columns,), fill).index_copy(0, self.index, values).reshape(self.shape)


def token_layout(mask: Tensor, cu_seq_lens: Tensor | None, num_tokens: int, group: Group = None) -> TokenLayout:
    """Builds the layout of a padded or packed batch, without a host synchronisation.

    Args:
        mask: `[B, T]` bool, the tokens that count.
        cu_seq_lens: `[S+1]` offsets of packed sequences (B is 1 then), or `None`: each row is one sequence.
        num_tokens: Number of True entries in `mask`, known on the host.
        group: Ranks of a sequence-parallel group, or `None`.
    """
    rows, columns = mask.shape
    full = num_tokens == rows * columns
    flat = torch.arange(num_tokens, device=mask.device)
    if not full:
        flat = torch.nonzero_static(mask.reshape(-1), size=num_tokens).squeeze(1)
    if cu_seq_lens is None:
        segments = Segments(flat // max(columns, 1), rows, group)
    else:
        segments = Segments(sequence_of(flat, cu_seq_lens), int(cu_seq_lens.shape[0]) - 1, group)
    return TokenLayout((rows, columns), None if full else flat, segments)


def from_jagged(tensor: Tensor) -> Tensor:
    """Returns a jagged tensor `[B, j, ...]` as one packed row `[1, T, ...]`, differentiable; any other as it is."""
    if not tensor.is_nested:
        return tensor
    return _contiguous(tensor).values()[None]


def jagged_offsets(tensor: Tensor) -> Tensor:
    """Returns the offsets `[B+1]` int32 of the rows of a jagged tensor.

    Raises:
        BatchError: It is nested in the older layout.
    """
    offsets: Tensor = _contiguous(tensor).offsets()  # type: ignore[attr-defined]
    return offsets.to(torch.int32)


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.jagged:
        raise BatchError(
            f"a nested tensor has layout {tensor.layout}, expected torch.jagged. Make it with "
            f"torch.nested.nested_tensor(rows, layout=torch.jagged)."
        )
    return tensor.contiguous()


def sequence_of(positions: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Returns the packed sequence that each position of a row lies in; past the end: the last one."""
    bounds = cu_seq_lens[1:].to(positions.dtype).contiguous()
    return torch.searchsorted(bounds, positions, right=True).clamp(max=max(int(bounds.shape[0]) - 1, 0))


def spread_over_tokens(values: Tensor, shape: tuple[int, int], cu_seq_lens: Tensor | None) -> Tensor:
    """Spreads one number for each sequence over its tokens: `[S]` -> `[B, T]`."""
    rows, columns = shape
    if cu_seq_lens is None:
        return values[:, None].expand(rows, columns)
    positions = torch.arange(columns, device=values.device)
    return values.index_select(0, sequence_of(positions, cu_seq_lens))[None]


def shift_response(values: Tensor, prompt_length: int, total_length: int, fill: float = 0.0) -> Tensor:
    """Aligns response tensors with shifted labels: `[B, R]` -> `[B, total_length]`.

    The response token r of a row `prompt | response` stands at place `prompt_length + r` and is predicted by the
    hidden state one place before; verl and TRL keep `[B, R]`, rlloss is aligned with the labels.

    Args:
        values: `[B, R]`, one number for each response token.
        prompt_length: Padded prompt width, at least 1.
        total_length: Width of the hidden states, `prompt_length + R` (or one less).
        fill: Value for prompt positions.
    """
    start = prompt_length - 1
    aligned = values.new_full((values.shape[0], total_length), fill)
    index = torch.arange(start, start + values.shape[1], device=values.device)
    return aligned.index_copy(1, index, values)


def response_part(values: Tensor, prompt_length: int, response_length: int) -> Tensor:
    """Cuts the response out of a label-aligned tensor: `[B, T]` -> `[B, R]`, the inverse of `shift_response`."""
    return values[:, prompt_length - 1 : prompt_length - 1 + response_length]
