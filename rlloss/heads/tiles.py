"""How the words of a chunk `[V, C]` are cut into tiles, each one block of memory that one product writes."""

from dataclasses import dataclass

from rlloss.heads import passes
from rlloss.heads.products import Products

TILE_ELEMENTS = 1 << 26
"""Most numbers of a tile on a CPU: 256 MiB of float32. Smaller tiles lose more in products than caches give back."""

PASSING_ROWS = 2048
"""Rows that are projected at once where nothing is kept of them."""

SAMPLE_WORDS = 1024
"""Words whose largest logit is the estimate of a row's shift; the first tile has as many where there are as many."""


@dataclass(frozen=True)
class Tiling:
    """Tiles of one width; the last one may have fewer words.

    Attributes:
        vocabulary: V.
        width: Words of a tile.
    """

    vocabulary: int
    width: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First word of each tile, and the one after its last."""
        starts = range(0, self.vocabulary, self.width)
        return [(start, min(start + self.width, self.vocabulary)) for start in starts]


@dataclass(frozen=True)
class ChunkTiles:
    """The tiles of one chunk.

    Attributes:
        rows: Most rows of the batch at once.
        plain: Tiles of a pass with estimated shifts, whose sums do not depend on them.
        exact: Tiles of a pass with exact shifts. They follow the maximum of the tiles so far, so that these are the
            same whether the chunk is kept or not.
        sample: Words that the shift is estimated from.
    """

    rows: int
    plain: Tiling
    exact: Tiling
    sample: int


def choose_tiles(products: Products, chunk_size: int, keep: bool, alone: bool) -> ChunkTiles:
    """Chooses tiles for chunks of `chunk_size` rows, so that no more numbers than theirs are held at once.

    On an accelerator there is one tile, the whole chunk. On a CPU a tile that is not kept has room for more rows than a
    chunk, and each product reads the whole weight.

    Args:
        products: Multiplies with the head weight.
        chunk_size: Rows of a chunk.
        keep: Whether the whole chunk is kept.
        alone: Whether all words are here, and not some on other ranks.
    """
    vocabulary, hidden = products.weight.shape
    whole = Tiling(vocabulary, vocabulary)
    if not products.on_cpu:
        return ChunkTiles(chunk_size, whole, whole, SAMPLE_WORDS)
    chunk = chunk_size * vocabulary
    passing = max(chunk_size, min(PASSING_ROWS, chunk // SAMPLE_WORDS)) if alone else chunk_size

    def tiling(rows: int) -> Tiling:
        width = tile_width(vocabulary, rows, chunk)
        if products.converts:
            # The words of a tile that are converted for its product are half a chunk at most.
            width = min(width, tile_width(vocabulary, hidden, max(chunk // 2, SAMPLE_WORDS * hidden)))
        return Tiling(vocabulary, width)

    exact = tiling(passing)
    sample = min(SAMPLE_WORDS, exact.width)
    if keep:
        return ChunkTiles(chunk_size, tiling(chunk_size), exact, sample)
    return ChunkTiles(passing, exact, exact, sample)


def tile_width(vocabulary: int, rows: int, most: int) -> int:
    """Returns the words of a tile of `rows` numbers each, about `most` in all: all words, or whole strips of them."""
    tiles = max(-(-vocabulary * rows // max(min(most, TILE_ELEMENTS), 1)), 1)
    strips = -(-vocabulary // (tiles * passes.STRIP_WORDS))
    return min(strips * passes.STRIP_WORDS, vocabulary)
