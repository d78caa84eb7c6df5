"""The one inner layout of a batch: the flat list of tokens that count, and the sequences they belong to.

Users give padded `[B, T]` or packed `[1, T]` tensors. `TokenLayout` turns each of them into `[N]`, the tokens
that count in row-major order, and `Segments` says which sequence each token belongs to. Heads and losses see
nothing else, so garbage at ignored positions cannot reach them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import Group, all_gather, all_reduce_max, differentiable_sum, rank
from rlloss.errors import BatchError


def require_tensor(name: str, value: Any, expected: str) -> None:
    """Refuses what is no tensor of real floating numbers.

    Args:
        name: What it is called.
        value: What was given.
        expected: Its shape in words, "[B, T, H]".

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} is a {type(value).__name__}, expected a tensor {expected}.")
    if not value.is_floating_point():
        raise BatchError(f"{name} has dtype {value.dtype}, expected a floating one.")


@dataclass(frozen=True)
class Shard:
    """The part of every row that this rank holds under sequence parallelism: `length` columns, padded and split evenly.

    Attributes:
        group: The ranks that hold the other parts; `None` once the shard has been pickled.
        number: Which part this is, from 0.
        ranks: Number of parts.
        length: T of the whole rows, before padding.
    """

    group: Group
    number: int
    ranks: int
    length: int

    @property
    def local_length(self) -> int:
        """Columns of each part."""
        return -(-self.length // self.ranks)

    @property
    def start(self) -> int:
        """First column of this part in the padded whole."""
        return self.number * self.local_length

    def __getstate__(self) -> dict[str, Any]:
        # A process group belongs to its process.
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shard":
        return self

    def split(self, values: Tensor, pad: float) -> Tensor:
        """Pads whole rows at their end and returns this rank's part: `[B, T, ...]` -> `[B, local_length, ...]`."""
        part = values[:, self.start : self.start + self.local_length]
        missing = self.local_length - int(part.shape[1])
        if not missing:
            return part
        return torch.cat([part, part.new_full((part.shape[0], missing, *part.shape[2:]), pad)], dim=1)


@dataclass(frozen=True)
class Segments:
    """Which sequence each of N tokens belongs to.

    Attributes:
        ids: `[N]` int64, the sequence of each token.
        count: Number of sequences S, those without any token included.
        group: Sequence-parallel ranks that hold other tokens of the same sequences, or `None`.
        counts_sequences: Whether this rank is the one of its group that counts the sequences.
        known_sizes: `[S]` float64, tokens of each sequence over all ranks of the group, once they were exchanged.
        before: `[S]` float64, tokens of each sequence on lower ranks of the group; `None` is none.
    """

    ids: Tensor
    count: int
    group: Group = None
    counts_sequences: bool = True
    known_sizes: Tensor | None = None
    before: Tensor | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sums over each sequence: `[N]` -> `[S]`, differentiable, over all ranks that share it."""
        totals = values.new_zeros(self.count).index_add(0, self.ids, values)
        return differentiable_sum(totals, self.group)

    @property
    def sizes(self) -> Tensor:
        """Number of tokens of each sequence over all ranks that share it, `[S]` float64."""
        if self.known_sizes is not None:
            return self.known_sizes
        return self.sum(torch.ones_like(self.ids, dtype=torch.float64))

    @property
    def counted(self) -> Tensor:
        """1 for each sequence that has tokens and that this rank is to count, else 0: `[S]` float64."""
        return (self.sizes > 0).double() if self.counts_sequences else self.sizes.new_zeros(self.count)

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
        values = normal(values)
        flat = values.reshape(-1, *values.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Puts numbers back: `[N]` -> `[B, T]` with `fill` at ignored positions, differentiable."""
        if self.index is None:
            return values.reshape(self.shape)
        rows, columns = self.shape
        return values.new_full((rows * columns,), fill).index_copy(0, self.index, values).reshape(self.shape)


def normal(values: Tensor) -> Tensor:
    """Returns a tensor that autograd may keep: a copy of an inference tensor, any other as it is."""
    return values.clone() if values.is_inference() and not torch.is_inference_mode_enabled() else values


def exchange_sizes(parts: Sequence[tuple[Segments, Sequence[Tensor]]]) -> list[tuple[Segments, list[Tensor]]]:
    """Counts the tokens of each sequence, all of them and those under each mask, in one collective.

    Args:
        parts: Segments, all of one group, with masks `[N]` bool of their tokens.

    Returns:
        Segments that know their sizes, and the number of tokens `[S]` float64 under each mask.
    """
    local: list[Tensor] = []
    for segments, masks in parts:
        ones = torch.ones_like(segments.ids, dtype=torch.float64)
        zeros = ones.new_zeros(segments.count)
        local += [zeros.index_add(0, segments.ids, part) for part in (ones, *(mask.double() for mask in masks))]
    group = parts[0][0].group
    if group is None:
        every, lower = torch.cat(local), None
    else:
        gathered = all_gather(torch.cat(local)[None], group)
        every, lower = gathered.sum(dim=0), gathered[: rank(group)].sum(dim=0)
    found, start = [], 0
    for segments, masks in parts:
        bounds = [start + segments.count * place for place in range(len(masks) + 2)]
        columns = [every[left:right] for left, right in itertools.pairwise(bounds)]
        before = None if lower is None else lower[start : start + segments.count]
        found.append((replace(segments, known_sizes=columns[0], before=before), columns[1:]))
        start = bounds[-1]
    return found


def _places(mask: Tensor, count: int) -> Tensor:
    """Returns where the `count` True entries of `[N]` stand; torch.nonzero_static is on CUDA since torch 2.7 only."""
    number = torch.where(mask, mask.cumsum(0) - 1, count)
    places = torch.arange(mask.shape[0], device=mask.device)
    return places.new_zeros(count + 1).scatter_(0, number, places)[:count]


def token_layout(mask: Tensor, cu_seq_lens: Tensor | None, num_tokens: int, shard: Shard | None = None) -> TokenLayout:
    """Builds the layout of a padded or packed batch, without a host synchronisation.

    Args:
        mask: `[B, T]` bool, the tokens that count.
        cu_seq_lens: `[S+1]` offsets of packed sequences (B is 1 then), or `None`: each row is one sequence.
        num_tokens: Number of True entries in `mask`, known on the host.
        shard: Which part of the rows `mask` is, under sequence parallelism; the offsets are those of the whole row.
    """
    rows, columns = mask.shape
    full = num_tokens == rows * columns
    flat = torch.arange(num_tokens, device=mask.device)
    if not full:
        flat = _places(mask.reshape(-1), num_tokens)
    ids, count = flat // max(columns, 1), rows
    if cu_seq_lens is not None:
        first = 0 if shard is None else shard.start
        ids, count = sequence_of(flat + first, cu_seq_lens), int(cu_seq_lens.shape[0]) - 1
    segments = Segments(ids, count)
    if shard is not None:
        segments = Segments(ids, count, shard.group, counts_sequences=shard.number == 0)
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
