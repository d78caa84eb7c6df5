"""Where single words of each row stand in a chunk of logits that is cut into column tiles."""

import torch
from torch import Tensor


class WordPlaces:
    """Places of words `[C, J]`, grouped by the tile that holds them.

    Args:
        ids: `[C, J]` int64 in `[0, V)`.
        vocabulary: V.
        width: Columns of a tile; the last one may have fewer.
        present: `[C, J]` bool, words that stand in the chunk at all, or `None`: all.
    """

    def __init__(self, ids: Tensor, vocabulary: int, width: int, present: Tensor | None = None) -> None:
        self.count, self.shape = ids.numel(), ids.shape
        row = torch.arange(ids.shape[0], device=ids.device)[:, None]
        self._order: Tensor | None = None
        self._bounds = [0, self.count]
        if width >= vocabulary:
            self._places = (row * vocabulary + ids).reshape(-1)
            if present is not None:
                self._order = present.reshape(-1).nonzero().squeeze(1)
                self._places = self._places.index_select(0, self._order)
                self._bounds = [0, int(self._order.shape[0])]
            return
        tile = ids // width
        start = tile * width
        columns = (vocabulary - start).clamp(max=width)
        places = (row * columns + ids - start).reshape(-1)
        tiles = -(-vocabulary // width)
        flat = (tile if present is None else torch.where(present, tile, tiles)).reshape(-1)
        self._order = flat.argsort(stable=True)
        self._places = places.index_select(0, self._order)
        sizes = torch.bincount(flat, minlength=tiles)
        self._bounds = [0, *sizes.cumsum(0).tolist()]

    def of(self, tile: int) -> tuple[Tensor, Tensor | None]:
        """Returns places within a flattened tile, and which of the C * J words they are (`None`: all, in order)."""
        part = slice(self._bounds[tile], self._bounds[tile + 1])
        return self._places[part], None if self._order is None else self._order[part]
