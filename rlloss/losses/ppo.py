"""PPO: the actor, and actor and critic together on one backbone."""

from dataclasses import replace
from typing import Any, TypedDict, Unpack

from pydantic import Field, field_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import BatchError
from rlloss.heads import HeadOutput, TokenStats
from rlloss.heads.joint import evaluate_all
from rlloss.heads.vocab_parallel import Vocabulary, check_counted
from rlloss.layout import require_tensor
from rlloss.losses.grpo import GRPOLossConfig, GRPOLossContext, GRPOLossKwargs
from rlloss.losses.head_inputs import stats_of_log_probs
from rlloss.losses.kwargs import TokenTensor, WeightTensor
from rlloss.losses.output import LossOutput
from rlloss.losses.policy_registry import get_policy_loss
from rlloss.losses.terms import Term, evaluate
from rlloss.losses.token_record import Watch, exported, flat_record
from rlloss.losses.value import ValueStats, check_value_fields, predict_values, value_term
from rlloss.metrics import Metric


class PPOLossConfig(GRPOLossConfig):
    """The actor of PPO (arXiv:1707.06347): GRPO's class with PPO's defaults.

    The clip is the paper's, `1 +- 0.2` without the dual clip, and a KL penalty lies in the rewards, not in the loss.
    """

    @field_validator("policy_loss_cfg", mode="plain")
    @classmethod
    def _resolve_policy_loss(cls, given: Any) -> Any:
        if isinstance(given, dict) and get_policy_loss(given.get("loss_type") or "vanilla").name == "vanilla":
            given = {"clip_ratio_c": None, **given}
        return GRPOLossConfig._resolve_policy_loss(given)

    @property
    def loss_ctx_cls(self) -> type["PPOLossContext"]:
        """`PPOLossContext`."""
        return PPOLossContext

    @property
    def _loss_kwargs_cls(self) -> type["PPOLossKwargs"]:
        return PPOLossKwargs


class PPOLossKwargs(GRPOLossKwargs):
    """Tensors of a PPO actor."""


class PPOLossContext(GRPOLossContext):
    """The actor on one micro-batch."""

    loss_cfg: PPOLossConfig
    loss_kwargs: PPOLossKwargs


class ActorCriticLossConfig(PPOLossConfig):
    """Actor and critic on one backbone: `actor loss + vf_coef * value loss`, the metrics of both.

    Example:
        >>> from rlloss import ActorCriticLossConfig
        >>> ActorCriticLossConfig(mode="chunk").vf_coef
        0.1
    """

    vf_coef: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Factor of the value term."""
    cliprange_value: float | None = Field(default=0.2, gt=0.0)
    """How far a value may move from the old one before the clip binds; None leaves the clip out (no old values)."""
    huber_delta: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Huber's loss, linear beyond this error; None is half the squared error."""

    @property
    def loss_ctx_cls(self) -> type["ActorCriticLossContext"]:
        """`ActorCriticLossContext`."""
        return ActorCriticLossContext

    @property
    def _loss_kwargs_cls(self) -> type["ActorCriticLossKwargs"]:
        return ActorCriticLossKwargs

    def terms(self) -> tuple[Term, ...]:
        """The actor's terms and the value term."""
        return (*self.actor_terms(), value_term(self, self.vf_coef))

    def actor_terms(self) -> tuple[Term, ...]:
        """Policy, KL and entropy."""
        return super().terms()


class ActorCriticLossKwargs(PPOLossKwargs):
    """Tensors of actor and critic.

    Attributes:
        returns: What the critic should have said.
        values: What it said when the returns were made.
        value_loss_weight: Token weights of the value term, `vf_coef` included.
    """

    returns: TokenTensor = None
    values: TokenTensor = None
    value_loss_weight: WeightTensor = None


class HeadCall(TypedDict, total=False):
    """Keyword arguments of `BaseLossContext.forward` beside the tensors."""

    vocab_group: Group
    vocab_mesh: DeviceMesh | None
    return_tokens: bool


class ActorCriticLossContext(PPOLossContext):
    """Actor and critic on one micro-batch."""

    loss_cfg: ActorCriticLossConfig
    loss_kwargs: ActorCriticLossKwargs

    def check(self) -> None:
        """Checks the tensors of both; a token with an infinite log-prob leaves the step for both."""
        check_value_fields(self.loss_cfg, self.loss_kwargs)
        super().check()

    def token_loss(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Sums the actor's terms; the value term is added in `forward`, it does not look at log-probs."""
        return evaluate(self.loss_cfg.actor_terms(), stats, loss_kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None = None,
        value_weight: Tensor | None = None,
        value_bias: Tensor | None = None,
        **options: Unpack[HeadCall],
    ) -> LossOutput:
        """Computes both losses of this micro-batch from the same hidden states.

        Args:
            hidden_states: `[B, T, H]`.
            head_weight: `[V, H]`.
            head_bias: `[V]` or None.
            value_weight: `[1, H]` or `[H]`; required.
            value_bias: `[1]` or None.
            **options: `vocab_group`, `vocab_mesh` and `return_tokens` of `BaseLossContext.forward`.

        Returns:
            Their sum, logits in eager mode, and the metrics of both; see `BaseLossContext.forward`.

        Raises:
            BatchError: `value_weight` is missing, or a shape does not fit.
        """
        if value_weight is None:
            raise BatchError(
                "ActorCriticLossContext.forward got no value_weight; expected the value head [1, H]. For an actor "
                "alone use PPOLossConfig."
            )
        values = predict_values(hidden_states, value_weight, value_bias, self.layout)
        vocab, return_tokens = _head_call(**options)
        watch = Watch(self._objective(), return_tokens)
        inputs = self._inputs(hidden_states, head_weight, head_bias, vocab)
        check_counted(inputs.vocab, self._group)
        output = self._run_head(inputs, watch.objective)
        return self._with_values(output, values, watch.stats(self, inputs))

    __call__ = forward

    def forward_log_probs(
        self,
        log_probs: Tensor,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
        *,
        return_tokens: bool = False,
    ) -> LossOutput:
        """Computes both losses from what an engine already has.

        Args:
            log_probs: `[B, T]`, nats.
            entropy: `[B, T]`, nats, where the loss needs it.
            values: `[B, T]`; required.
            return_tokens: Add `per_token` to the output; see `BaseLossContext.forward`.
        """
        expected = tuple(self.loss_kwargs.shifted_labels.shape)
        require_tensor("values", values, f"{expected}")
        assert values is not None
        if tuple(values.shape) != expected:
            raise BatchError(f"values has shape {tuple(values.shape)}, expected {expected}, that of shifted_labels.")
        stats = stats_of_log_probs(self, log_probs, entropy)
        loss, metrics = evaluate_all(stats, self._objective())
        taken = self.layout.take(values.to(loss.dtype))
        return self._with_values(HeadOutput(loss, metrics, None), taken, stats if return_tokens else None)

    def _with_values(self, actor: HeadOutput, values: Tensor, asked: TokenStats | None) -> LossOutput:
        flat = self.loss_kwargs.take(self.layout)
        seen = ValueStats(values, self.layout.segments)
        critic = (value_term(self.loss_cfg, self.loss_cfg.vf_coef),)
        loss, found = evaluate(critic, seen, flat)

        def both(stats: TokenStats, loss_kwargs: Any) -> Tensor:
            own = seen._replace(value=values.detach())
            return self.token_loss(stats, loss_kwargs)[0] + evaluate(critic, own, loss_kwargs)[0]

        extra: dict[str, Any] = {**actor.metrics, **found}
        for name, record in exported(self, asked, lambda stats: flat_record(self, stats, both)).items():
            extra[name] = replace(record, value=self.layout.put(values.detach()))
        return self._finish(actor.loss + loss.to(actor.loss.dtype), actor.logits, extra)


def _head_call(
    vocab_group: Group = None, vocab_mesh: DeviceMesh | None = None, return_tokens: bool = False
) -> tuple[Vocabulary, bool]:
    return (vocab_group, vocab_mesh), return_tokens
