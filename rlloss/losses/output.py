"""What `forward` returns."""

from typing import Any, NamedTuple

from torch import Tensor

from rlloss.distributed import Group, all_reduce_sum, world_size
from rlloss.errors import BatchError
from rlloss.losses.token_record import PER_TOKEN, TokenRecord


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

    @property
    def per_token(self) -> TokenRecord:
        """Numbers of each token.

        Raises:
            BatchError: They were not asked for.
        """
        record = self.details.extra.get(PER_TOKEN)
        if not isinstance(record, TokenRecord):
            raise BatchError("per_token is missing: call forward(..., return_tokens=True).")
        return record


def over_ranks(local: Tensor, config: Any, group: Group, world: int | None) -> Tensor:
    """The global value, with the graph of `world * local` for wrappers that average gradients.

    Args:
        local: The loss of this rank's tokens.
        config: `reduce_loss` and `grad_reduction` of a loss config.
        group: The ranks that were counted over.
        world: Their number where it was given.
    """
    world = world_size(group) if world is None else world
    share = local * world if config.grad_reduction == "mean" and world != 1 else local
    if world == 1:
        return share
    if not config.reduce_loss:
        return local * world
    total = all_reduce_sum(local, group)
    # In this order every rank returns the same bits.
    return total + (share - share.detach())
