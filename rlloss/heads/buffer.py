"""The one chunk of logits of a sweep: projected and exponentiated some words at a time.

The chunk is `[V, C]`, words by rows of the batch: a tile of words is one block of memory, and the product that writes
it is the faster one, for the head weight is its left operand.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.heads import passes
from rlloss.heads.products import Products
from rlloss.heads.softmax import RowStats, Transform, row_stats
from rlloss.heads.tiles import Tiling, choose_tiles
from rlloss.heads.vocab_parallel import VocabShard
from rlloss.heads.words import WordLogits, WordPlaces, places_of

UNSHIFTED = 20.0
"""Rows whose logits reach no further than this need no shift before `exp`."""

SAMPLE_STEP = 4
"""One in as many of the sampled words is looked at."""

LARGEST_SUM = 1e20
"""Sums of exponentials beyond this have outgrown an estimated shift; the chunk is projected again with exact ones."""


class Piece(NamedTuple):
    """Some words of the chunk: their bounds, and their numbers `[stop - start, rows]`."""

    start: int
    stop: int
    numbers: Tensor


class ChunkLogits:
    """The chunk of logits, and after `fill` of their exponentials with the label's at 0.

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
        self._tiles = choose_tiles(products, chunk_size, keep, alone=vocab is None)
        self.most_rows = self._tiles.rows
        self._storage = products.weight.new_empty(0, dtype=products.dtype)

    def fill(
        self, hidden: Tensor, labels: Tensor, temperature: float | Tensor, extra_ids: Tensor | None, with_entropy: bool
    ) -> RowStats:
        """Projects rows and replaces their logits by `E = exp(z - shift)`, the label's by 0.

        Args:
            hidden: `[C, H]`.
            labels: `[C]` int64.
            temperature: A number, or `[C]`.
            extra_ids: `[C, K]` int64, more words whose log-probs are wanted, or `None`.
            with_entropy: Whether entropies are wanted.

        Returns:
            The numbers of each row.
        """
        hidden = self.products.operand(hidden)
        self.rows = hidden.shape[0]
        if self.products.on_cpu and extra_ids is None and not with_entropy and self.vocab is None:
            # One look at the result is cheaper than a search for each row's maximum before it.
            stats = self._pass_plainly(hidden, labels, temperature)
            if bool((stats.total <= LARGEST_SUM).all()):
                return stats
        return self._pass_exactly(hidden, labels, temperature, extra_ids, with_entropy)

    def pieces(self, rows: int, whole: bool = False) -> Iterator[Piece]:
        """Yields the first rows of the chunk, some words at a time or all of them."""
        step = self.vocabulary if whole else min(self._tiles.plain.width, passes.PIECE_WORDS)
        for start in range(0, self.vocabulary, step):
            stop = min(start + step, self.vocabulary)
            yield Piece(start, stop, self._tile(start, stop)[:, :rows])

    def put_words(self, ids: Tensor, values: Tensor, add: bool = False) -> None:
        """Replaces the numbers of some words of the first rows, or adds to them; both `[C, J]`."""
        present = None
        if self.vocab is not None:
            ids, present = self.vocab.local(ids)
        at, values = places_of(ids, self.rows).reshape(-1), values.reshape(-1)
        if present is not None:
            mine = present.reshape(-1).nonzero().squeeze(1)
            at, values = at.index_select(0, mine), values.index_select(0, mine)
        flat = self._tile(0, self.vocabulary).view(-1)
        flat.index_add_(0, at, values) if add else flat.index_copy_(0, at, values)

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
            piece.numbers.index_copy_(1, holes, piece.numbers.index_select(1, movers))
        return torch.arange(count, device=keep.device).index_copy(0, holes, movers)

    def _pass_plainly(self, hidden: Tensor, labels: Tensor, temperature: float | Tensor) -> RowStats:
        """Walks over the tiles with shifts that are estimated from the first words."""
        tiling = self._tiles.plain
        words = WordLogits([self._places(labels[:, None], tiling)])
        shift, sums = hidden.new_zeros(self.rows, dtype=self.products.dtype), []
        for number, logits in enumerate(self._project(hidden, temperature, tiling)):
            words.take(number, logits)
            if number == 0:
                peak = _peak(logits[: self._tiles.sample : SAMPLE_STEP])
                shift = torch.where(peak.abs() <= UNSHIFTED, 0.0, peak)
            sums.append(passes.exponentiate(logits, shift, self.keep))
        return row_stats(torch.cat(sums).sum(dim=0), None, shift, words.gather()[0], None)

    def _pass_exactly(
        self, hidden: Tensor, labels: Tensor, temperature: float | Tensor, extra_ids: Tensor | None, with_entropy: bool
    ) -> RowStats:
        """Walks over the tiles with shifts that are the maximum of the tiles so far, and at last of all."""
        tiling = self._tiles.exact
        words = WordLogits([self._places(ids, tiling) for ids in (labels[:, None], extra_ids) if ids is not None])
        rest = hidden.new_zeros(self.rows, dtype=self.products.dtype)
        weighted = rest.clone() if with_entropy else None
        shift, used = torch.full_like(rest, torch.finfo(rest.dtype).min), []
        for number, logits in enumerate(self._project(hidden, temperature, tiling)):
            words.take(number, logits)
            shift, rest, weighted = _follow(shift, _peak(logits), rest, weighted)
            used.append(shift)
            if weighted is None:
                rest = rest + passes.exponentiate(logits, shift, self.keep).sum(dim=0)
            else:
                sums, products = passes.exponentiate_with_entropy(logits, shift, self.keep)
                rest, weighted = rest + sums.sum(dim=0), weighted + products.sum(dim=0)
        if self.keep:
            self._align(tiling, used)
        logits_of = words.gather()
        if self.vocab is not None:
            (rest, weighted), shift, logits_of, factor = self.vocab.combine((rest, weighted), shift, logits_of)
            for piece in self.pieces(self.rows) if self.keep else ():
                piece.numbers.mul_(factor)
        extra = None if extra_ids is None else logits_of[1].view(extra_ids.shape)
        return row_stats(rest, weighted, shift, logits_of[0], extra)

    def _project(self, hidden: Tensor, temperature: float | Tensor, tiling: Tiling) -> Iterator[Tensor]:
        """Yields the logits `[words, C]` of each tile in turn."""
        size = self.rows * (self.vocabulary if self.keep else tiling.width)
        if self._storage.numel() < size:
            self._storage = self.products.new_buffer(size)
        for start, stop in tiling.bounds:
            logits = self._tile(start, stop)
            self.products.project(hidden, slice(start, stop), logits, self.transform.bias)
            yield self.transform.apply_(logits, temperature)

    def _places(self, ids: Tensor, tiling: Tiling) -> WordPlaces:
        present = None
        if self.vocab is not None:
            ids, present = self.vocab.local(ids)
        return WordPlaces(ids, len(tiling.bounds), tiling.width, present)

    def _tile(self, start: int, stop: int) -> Tensor:
        first = self.rows * start if self.keep else 0
        return self._storage[first : first + self.rows * (stop - start)].view(stop - start, self.rows)

    def _align(self, tiling: Tiling, used: list[Tensor]) -> None:
        """Brings tiles that were exponentiated with an earlier maximum to the last one."""
        for (start, stop), own in zip(tiling.bounds, used[:-1], strict=False):
            factor = (own - used[-1]).exp()
            if bool((factor != 1).any()):
                self._tile(start, stop).mul_(factor)


def _peak(logits: Tensor) -> Tensor:
    """Largest logit of each row, `[C]`, finite where all are -inf."""
    return logits.amax(dim=0).clamp_(min=torch.finfo(logits.dtype).min)


def _follow(shift: Tensor, peak: Tensor, rest: Tensor, weighted: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Moves the sums so far to the larger of their shift and a new tile's maximum."""
    larger = torch.maximum(shift, peak)
    change = shift - larger
    factor = change.exp()
    if weighted is not None:
        weighted = factor * torch.where(factor == 0, 0.0, weighted + change * rest)
    return larger, rest * factor, weighted
