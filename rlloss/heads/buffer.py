"""The one chunk of logits of a sweep: projected, exponentiated and multiplied in column tiles that stay in cache.

A tile is a contiguous block `[rows, columns]`, so that a product writes it, the passes read it from cache, and the
backward products read it once. On an accelerator there is one tile, the whole chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.heads.logits import LOG_FLOOR
from rlloss.heads.products import Products
from rlloss.heads.softmax import RowStats, Transform, row_stats
from rlloss.heads.vocab_parallel import VocabShard
from rlloss.heads.words import WordPlaces

TILE_ELEMENTS = 1 << 22
"""Numbers of one column tile on a CPU: 16 MiB of float32. Smaller tiles lose more to threads than caches give back."""

PIECE_COLUMNS = 16384
"""Columns that the backward passes take at once on an accelerator, so that their temporaries are no second chunk."""

PASSING_ROWS = 2048
"""Rows that are projected at once where nothing is kept of them."""

UNSHIFTED = 20.0
"""Rows whose logits reach no further than this need no shift before `exp`."""

LARGEST_SUM = 1e20
"""Sums of exponentials beyond this have outgrown an estimated shift; the chunk is projected again with exact ones."""


class Piece(NamedTuple):
    """Some columns of the chunk: their bounds, and their numbers `[rows, stop - start]`."""

    start: int
    stop: int
    numbers: Tensor


def tile_width(vocabulary: int, rows: int) -> int:
    """Returns the columns of a tile on a CPU, a multiple of 16, so that every tile is aligned to a cache line."""
    tiles = -(-vocabulary * rows // TILE_ELEMENTS)
    return min(vocabulary, -(-vocabulary // tiles // 16) * 16)


class ChunkLogits:
    """The chunk of logits, and after `fill` of their exponentials with the label's column at 0.

    Args:
        products: Multiplies with the head weight.
        transform: From raw products to logits.
        chunk_size: Rows that are kept at once.
        keep: Whether the exponentials are wanted afterwards; without it one tile is all the memory there is.
        vocab: Which words the weight has, when other ranks hold the rest.
    """

    def __init__(
        self,
        products: Products,
        transform: Transform,
        chunk_size: int,
        keep: bool,
        vocab: VocabShard | None = None,
    ) -> None:
        self.products, self.transform, self.keep, self.vocab = products, transform, keep, vocab
        self.vocabulary = products.weight.shape[0]
        self.rows = 0
        self.width = tile_width(self.vocabulary, chunk_size) if products.on_cpu else self.vocabulary
        # A tile that is not kept has room for more rows than a chunk, and each product reads the whole weight. Its
        # columns stay the same, so that log-probs alone are those that a loss sees.
        room = max(chunk_size * self.vocabulary // self.width, 1)
        alone = not keep and vocab is None
        self.most_rows = max(chunk_size, min(PASSING_ROWS, room)) if alone else chunk_size
        self._storage = products.weight.new_empty(0, dtype=products.dtype)

    def fill(
        self, hidden: Tensor, labels: Tensor, temperature: float | Tensor, extra_ids: Tensor | None, with_entropy: bool
    ) -> RowStats:
        """Projects rows and replaces their logits by `E = exp(z - shift)`, the label's column by 0.

        Args:
            hidden: `[C, H]`.
            labels: `[C]` int64.
            temperature: A number, or `[C]`.
            extra_ids: `[C, K]` int64, more words whose log-probs are wanted, or `None`.
            with_entropy: Whether entropies are wanted.

        Returns:
            The numbers of each row.
        """
        self._lay_out(hidden.shape[0])
        hidden = self.products.operand(hidden)
        words = [self.places(labels[:, None])] + ([] if extra_ids is None else [self.places(extra_ids)])
        if self.products.on_cpu and extra_ids is None and not with_entropy and self.vocab is None:
            # One look at the result is cheaper than a search for each row's maximum before it.
            stats = self._pass(hidden, words, temperature, exact=False, with_entropy=False)
            if bool((stats.total <= LARGEST_SUM).all()):
                return stats
        return self._pass(hidden, words, temperature, exact=True, with_entropy=with_entropy)

    def pieces(self, rows: int) -> Iterator[Piece]:
        """Yields the first rows of the chunk, some columns at a time."""
        for start, stop in self._tiles():
            tile = self._tile(start, stop)[:rows]
            step = stop - start if tile.device.type == "cpu" else PIECE_COLUMNS
            for left in range(start, stop, step):
                right = min(left + step, stop)
                yield Piece(left, right, tile[:, left - start : right - start])

    def places(self, ids: Tensor) -> WordPlaces:
        """Finds where words of the first rows stand: `[C, J]` int64."""
        if self.vocab is None:
            return WordPlaces(ids, self.vocabulary, self.width)
        rows, present = self.vocab.local(ids)
        return WordPlaces(rows, self.vocabulary, self.width, present)

    def put_words(self, ids: Tensor, values: Tensor, add: bool = False) -> None:
        """Replaces the numbers of some words of the first rows, or adds to them; both `[C, J]`."""
        places = self.places(ids)
        values = values.reshape(-1)
        for number, (start, stop) in enumerate(self._tiles()):
            at, which = places.of(number)
            flat = self._tile(start, stop).view(-1)
            chosen = values if which is None else values.index_select(0, which)
            flat.index_add_(0, at, chosen) if add else flat.index_copy_(0, at, chosen)

    def compact(self, keep: Tensor) -> Tensor | None:
        """Moves the rows that are kept to the front; returns their old numbers in the new order, or `None` for all."""
        before = keep.cumsum(0)
        last = before[-1:]
        count, ahead = torch.cat([last, before[(last - 1).clamp(min=0)]]).tolist()
        if count == keep.shape[0]:
            return None
        moved = count - ahead if count else 0
        # Rows that are kept, and after them the others, each in order.
        order = (~keep).to(torch.uint8).argsort(stable=True)
        movers, holes = order[count - moved : count], order[count : count + moved]
        for piece in self.pieces(self.rows):
            piece.numbers.index_copy_(0, holes, piece.numbers.index_select(0, movers))
        return torch.arange(count, device=keep.device).index_copy(0, holes, movers)

    def _lay_out(self, rows: int) -> None:
        self.rows = rows
        size = rows * (self.vocabulary if self.keep else self.width)
        if self._storage.numel() < size:
            self._storage = self.products.new_buffer(size)

    def _tiles(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.vocabulary, self.width):
            yield start, min(start + self.width, self.vocabulary)

    def _tile(self, start: int, stop: int) -> Tensor:
        first = self.rows * start if self.keep else 0
        return self._storage[first : first + self.rows * (stop - start)].view(self.rows, stop - start)

    def _pass(
        self,
        hidden: Tensor,
        words: list[WordPlaces],
        temperature: float | Tensor,
        exact: bool,
        with_entropy: bool,
    ) -> RowStats:
        """Walks over the tiles once; an exact shift follows the maximum of the tiles so far."""
        rest = self._storage.new_zeros(self.rows)
        weighted = rest.clone() if with_entropy else None
        found = [rest.new_zeros(part.count) for part in words]
        shift: Tensor | None = None
        used: list[Tensor] = []
        for number, (start, stop) in enumerate(self._tiles()):
            logits = self._tile(start, stop)
            self.products.project(hidden, slice(start, stop), logits, self.transform.bias)
            self.transform.apply_(logits, temperature)
            _take_words(logits.view(-1), words, number, found)
            if exact or number == 0:
                peak = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
                shift, rest, weighted = _follow(shift, peak, rest, weighted)
                if not exact:
                    shift = torch.where(shift.abs() <= UNSHIFTED, 0.0, shift)
            assert shift is not None
            used.append(shift)
            if exact or bool(shift.any()):
                logits.sub_(shift[:, None])
            if weighted is None:
                rest += logits.exp_().sum(dim=-1)
            else:
                sums = _exponentiate_with_entropy(logits, PIECE_COLUMNS)
                rest, weighted = rest + sums[0], weighted + sums[1]
        assert shift is not None
        if exact and self.keep:
            self._align(used, shift)
        if self.vocab is not None:
            (rest, weighted), shift, found, factor = self.vocab.combine((rest, weighted), shift, found)
            for piece in self.pieces(self.rows) if self.keep else ():
                piece.numbers.mul_(factor[:, None])
        extra = found[1].view(words[1].shape) if len(found) > 1 else None
        return row_stats(rest, weighted, shift, found[0], extra)

    def _align(self, used: list[Tensor], shift: Tensor) -> None:
        """Brings tiles that were exponentiated with an earlier maximum to the last one."""
        for (start, stop), own in zip(self._tiles(), used[:-1], strict=False):
            factor = (own - shift).exp()
            if bool((factor != 1).any()):
                self._tile(start, stop).mul_(factor[:, None])


def _take_words(flat: Tensor, words: list[WordPlaces], number: int, found: list[Tensor]) -> None:
    """Reads the logits of words that lie in this tile; the label's then becomes -inf, so that its `E` is exactly 0."""
    for part, values in zip(words, found, strict=True):
        at, which = part.of(number)
        taken = flat.index_select(0, at)
        values.copy_(taken) if which is None else values.index_copy_(0, which, taken)
    flat.index_fill_(0, words[0].of(number)[0], -torch.inf)


def _follow(
    shift: Tensor | None, peak: Tensor, rest: Tensor, weighted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Moves the sums so far to the larger of their shift and a new tile's maximum."""
    if shift is None:
        return peak, rest, weighted
    larger = torch.maximum(shift, peak)
    change = shift - larger
    factor = change.exp()
    if weighted is not None:
        weighted = factor * torch.where(factor == 0, 0.0, weighted + change * rest)
    return larger, rest * factor, weighted


def _exponentiate_with_entropy(q: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Replaces q by `E`; returns the sums of `E` and of `E q`."""
    sums = [q.new_zeros(q.shape[0]) for _ in range(2)]
    for start in range(0, q.shape[1], step):
        part = q[:, start : start + step].clamp_(min=LOG_FLOOR)
        exponentials = part.exp()
        sums[1] += part.mul_(exponentials).sum(dim=-1)
        sums[0] += part.copy_(exponentials).sum(dim=-1)
    return sums[0], sums[1]
