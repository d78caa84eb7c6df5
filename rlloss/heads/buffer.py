"""The one chunk of logits of a sweep: projected and exponentiated some words at a time, in tiles that stay in cache.

The chunk is `[V, C]`, words by rows of the batch: a tile of words is one block of memory, so that a product writes it
and the passes read it from cache, and the product that writes it is the faster one, for the head weight is its left
operand. On an accelerator there is one tile, the whole chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.heads.logits import LOG_FLOOR
from rlloss.heads.products import Products
from rlloss.heads.softmax import RowStats, Transform, row_stats
from rlloss.heads.vocab_parallel import VocabShard
from rlloss.heads.words import WordPlaces, places_of

TILE_ELEMENTS = 1 << 23
"""Numbers of one tile on a CPU: 32 MiB of float32. Smaller tiles lose more to threads than caches give back."""

PIECE_WORDS = 16384
"""Words that the passes with temporaries take at once, so that these are no second chunk."""

PASSING_ROWS = 2048
"""Rows that are projected at once where nothing is kept of them."""

SAMPLE_WORDS = 1024
"""Words whose largest logit is the estimate of a row's shift."""

UNSHIFTED = 20.0
"""Rows whose logits reach no further than this need no shift before `exp`."""

LARGEST_SUM = 1e20
"""Sums of exponentials beyond this have outgrown an estimated shift; the chunk is projected again with exact ones."""


class Piece(NamedTuple):
    """Some words of the chunk: their bounds, and their numbers `[stop - start, rows]`."""

    start: int
    stop: int
    numbers: Tensor


def tile_width(vocabulary: int, rows: int) -> int:
    """Returns the words of a tile on a CPU."""
    tiles = -(-vocabulary * rows // TILE_ELEMENTS)
    return -(-vocabulary // tiles)


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
        self.width = tile_width(self.vocabulary, chunk_size) if products.on_cpu else self.vocabulary
        # A tile that is not kept has room for more rows than a chunk, and each product reads the whole weight. Its
        # words stay the same, so that log-probs alone are those that a loss sees.
        room = max(chunk_size * self.vocabulary // self.width, 1)
        alone = not keep and vocab is None
        self.most_rows = max(chunk_size, min(PASSING_ROWS, room)) if alone else chunk_size
        self._storage = products.weight.new_empty(0, dtype=products.dtype)
        starts = range(0, self.vocabulary, self.width)
        self._tiles = [(start, min(start + self.width, self.vocabulary)) for start in starts]

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
        self._lay_out(hidden.shape[0])
        hidden = self.products.operand(hidden)
        words = [self._places(ids) for ids in (labels[:, None], extra_ids) if ids is not None]
        if self.products.on_cpu and extra_ids is None and not with_entropy and self.vocab is None:
            # One look at the result is cheaper than a search for each row's maximum before it.
            stats = self._pass(hidden, words, temperature, exact=False, with_entropy=False)
            if bool((stats.total <= LARGEST_SUM).all()):
                return stats
        return self._pass(hidden, words, temperature, exact=True, with_entropy=with_entropy)

    def pieces(self, rows: int, whole: bool = False) -> Iterator[Piece]:
        """Yields the first rows of the chunk, some words at a time or all of them."""
        step = self.vocabulary if whole else min(self.width, PIECE_WORDS)
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

    def _lay_out(self, rows: int) -> None:
        self.rows = rows
        size = rows * (self.vocabulary if self.keep else self.width)
        if self._storage.numel() < size:
            self._storage = self.products.new_buffer(size)

    def _places(self, ids: Tensor) -> WordPlaces:
        present = None
        if self.vocab is not None:
            ids, present = self.vocab.local(ids)
        return WordPlaces(ids, len(self._tiles), self.width, present)

    def _tile(self, start: int, stop: int) -> Tensor:
        first = self.rows * start if self.keep else 0
        return self._storage[first : first + self.rows * (stop - start)].view(stop - start, self.rows)

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
        found: list[list[Tensor]] = [[] for _ in words]
        shift: Tensor | None = None
        used: list[Tensor] = []
        for number, (start, stop) in enumerate(self._tiles):
            logits = self._tile(start, stop)
            self.products.project(hidden, slice(start, stop), logits, self.transform.bias)
            self.transform.apply_(logits, temperature)
            _take_words(logits.view(-1), words, number, found)
            if exact or number == 0:
                seen = logits if exact else logits[:SAMPLE_WORDS]
                peak = seen.amax(dim=0).clamp_(min=torch.finfo(logits.dtype).min)
                shift, rest, weighted = _follow(shift, peak, rest, weighted)
                if not exact:
                    shift = torch.where(shift.abs() <= UNSHIFTED, 0.0, shift)
            assert shift is not None
            used.append(shift)
            if exact or bool(shift.any()):
                logits.sub_(shift)
            if weighted is None:
                rest += logits.exp_().sum(dim=0)
            else:
                sums = _exponentiate_with_entropy(logits)
                rest, weighted = rest + sums[0], weighted + sums[1]
        assert shift is not None
        if exact and self.keep:
            self._align(used, shift)
        logits_of = [part.gather(values) for part, values in zip(words, found, strict=True)]
        if self.vocab is not None:
            (rest, weighted), shift, logits_of, factor = self.vocab.combine((rest, weighted), shift, logits_of)
            for piece in self.pieces(self.rows) if self.keep else ():
                piece.numbers.mul_(factor)
        extra = logits_of[1].view(words[1].shape) if len(words) > 1 else None
        return row_stats(rest, weighted, shift, logits_of[0], extra)

    def _align(self, used: list[Tensor], shift: Tensor) -> None:
        """Brings tiles that were exponentiated with an earlier maximum to the last one."""
        for (start, stop), own in zip(self._tiles, used[:-1], strict=False):
            factor = (own - shift).exp()
            if bool((factor != 1).any()):
                self._tile(start, stop).mul_(factor)


def _take_words(flat: Tensor, words: list[WordPlaces], number: int, found: list[list[Tensor]]) -> None:
    """Reads the logits of words that lie in this tile; the label's then becomes -inf, so that its `E` is exactly 0."""
    for part, values in zip(words, found, strict=True):
        values.append(flat.index_select(0, part.of(number)))
    flat.index_fill_(0, words[0].of(number), -torch.inf)


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


def _exponentiate_with_entropy(q: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces q by `E`; returns the sums of `E` and of `E q`."""
    sums = [q.new_zeros(q.shape[1]) for _ in range(2)]
    for part in torch.split(q, PIECE_WORDS):
        exponentials = part.clamp_(min=LOG_FLOOR).exp()
        sums[1] += part.mul_(exponentials).sum(dim=0)
        sums[0] += part.copy_(exponentials).sum(dim=0)
    return sums[0], sums[1]
