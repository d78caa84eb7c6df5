"""Where single words of each row stand in a chunk of logits `[V, C]` that is cut into tiles of words."""

import torch
from torch import Tensor


def places_of(ids: Tensor, rows: int) -> Tensor:
    """Returns where the words `[C, J]` of the first C rows stand in a flattened chunk of `rows` rows, `[C, J]`."""
    return ids * rows + torch.arange(ids.shape[0], device=ids.device)[:, None]


class WordPlaces:
    """Places of words `[C, J]`, grouped by the tile that holds them.

    Args:
        ids: `[C, J]` int64 in `[0, V)`.
        tiles: Number of tiles.
        width: Words of a tile; the last one may have fewer.
        present: `[C, J]` bool, words that stand in the chunk at all, or `None`: all.
    """

    def __init__(self, ids: Tensor, tiles: int, width: int, present: Tensor | None = None) -> None:
        self.shape = ids.shape
        if tiles == 1 and present is None:
            self._order, self._places = None, places_of(ids, ids.shape[0]).reshape(-1)
            self._bounds = [0, ids.numel()]
            return
        tile = ids // width
        places = places_of(ids - tile * width, ids.shape[0]).reshape(-1)
        flat = (tile if present is None else torch.where(present, tile, tiles)).reshape(-1)
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat, minlength=tiles)[:tiles]
        self._bounds = [0, *sizes.cumsum(0).tolist()]
        self._order = order[: self._bounds[-1]]
        self._places = places.index_select(0, self._order)

    def of(self, tile: int) -> Tensor:
        """Returns the places within a flattened tile of the words that it holds."""
        return self._places[self._bounds[tile] : self._bounds[tile + 1]]

    def gather(self, parts: list[Tensor]) -> Tensor:
        """Joins numbers of the words of each tile to `[C * J]`; 0 for words that are not present."""
        found = torch.cat(parts)
        if self._order is None:
            return found
        return found.new_zeros(self.shape.numel()).index_copy_(0, self._order, found)


class WordLogits:
    """Logits of the label and of more words of each row, read tile by tile while a chunk is projected.

    Args:
        places: Of the labels `[C, 1]`, and perhaps of more words `[C, K]`.
    """

    def __init__(self, places: list[WordPlaces]) -> None:
        self._places = places
        self._found: list[list[Tensor]] = [[] for _ in places]

    def take(self, number: int, tile: Tensor) -> None:
        """Reads what stands in a tile; the label's logit then becomes -inf, so that its `E` is exactly 0."""
        flat = tile.view(-1)
        for places, found in zip(self._places, self._found, strict=True):
            found.append(flat.index_select(0, places.of(number)))
        flat.index_fill_(0, self._places[0].of(number), -torch.inf)

    def gather(self) -> list[Tensor]:
        """Returns the logits, in the order of the rows and of their words: of labels `[C]`, of more words `[C * K]`."""
        return [places.gather(found) for places, found in zip(self._places, self._found, strict=True)]
