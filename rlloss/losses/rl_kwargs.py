"""The tensors of losses on a policy."""

from typing import Annotated, TypeVar

from torch import Tensor

from rlloss.errors import BatchError
from rlloss.losses.kwargs import BaseLossKwargs, PerToken, TokenTensor, WeightTensor

K = TypeVar("K", bound="BaseRLLossKwargs")


class BaseRLLossKwargs(BaseLossKwargs):
    """Tensors of losses on a policy, all `[B, T]` and aligned with the labels.

    Attributes:
        advantages: Advantages; a batch may give one for each sequence.
        old_logprobs: Log-probs of the policy that the ratio is taken against, nats.
        ref_logprobs: Log-probs of the reference policy, nats.
        rollout_logprobs: Log-probs of the sampling engine, nats.
        selection_logprobs: Log-probs of the current policy at the start of the step, for choices that it makes, nats;
            None: the old ones, equal to them in the first update of a step.
        is_weights: Importance weights of the policy term (`rollout_is_weights` in a batch).
        policy_loss_weight: Token weights of the policy term, coefficient and importance weights included.
        kl_loss_weight: Token weights of the KL term, its coefficient included.
        entropy_loss_weight: Token weights of the entropy term, its coefficient included.
    """

    advantages: Annotated[Tensor, PerToken(spread=True)]
    old_logprobs: TokenTensor = None
    ref_logprobs: TokenTensor = None
    rollout_logprobs: TokenTensor = None
    selection_logprobs: TokenTensor = None
    is_weights: Annotated[Tensor | None, PerToken(1.0, spread=True, key="rollout_is_weights")] = None
    policy_loss_weight: WeightTensor = None
    kl_loss_weight: WeightTensor = None
    entropy_loss_weight: WeightTensor = None

    @classmethod
    def cat(cls: type[K], chunks: list[K]) -> K:
        """Joins packed rows along T; see `BaseLossKwargs.cat`.

        Raises:
            BatchError: A field is set in some of the chunks only, or importance weights are given in some only.
        """
        if len({"is_weights" in chunk._computed for chunk in chunks}) > 1:
            raise BatchError(
                f"{cls.__name__}.cat: is_weights were given in some of the chunks, and computed by build_batches in "
                f"the others. Give them in all, or in none."
            )
        return super().cat(chunks)
