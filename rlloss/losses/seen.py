"""A tensor that was read, and how to tell whether it still holds the same numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """A tensor as it was read, or None.

    Attributes:
        tensor: The tensor itself.
        version: Its count of changes in place.
        copy: Its numbers, where it does not count them (an inference tensor).
    """

    tensor: Tensor | None
    version: int
    copy: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor | None) -> "Seen":
        """Remembers a tensor."""
        if tensor is None:
            return cls(None, 0, None)
        # An inference tensor does not count its changes: only its numbers tell.
        return cls(tensor, 0, tensor.clone()) if tensor.is_inference() else cls(tensor, tensor._version, None)

    def is_still(self, tensor: Tensor | None) -> bool:
        """Tells whether a tensor is the one that was read, unchanged; an inference tensor is read by the host."""
        if tensor is not self.tensor:
            return False
        if tensor is None:
            return True
        return tensor._version == self.version if self.copy is None else torch.equal(tensor, self.copy)
