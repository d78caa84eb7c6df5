"""What `forward` returns."""

from typing import Any, NamedTuple

from torch import Tensor


class LossDetails(NamedTuple):
    """Whole logits `[B, T, V]` in eager mode (else None), and metrics by name."""

    logits: Tensor | None
    extra: dict[str, Any]


class LossOutput(NamedTuple):
    """What `forward` returns; it unpacks as `loss, (logits, extra)`."""

    loss: Tensor
    details: LossDetails

    @property
    def logits(self) -> Tensor | None:
        """Whole logits in eager mode, else None."""
        return self.details.logits

    @property
    def extra(self) -> dict[str, Any]:
        """Metrics by name."""
        return self.details.extra
