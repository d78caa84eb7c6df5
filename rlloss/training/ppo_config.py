"""What a PPO phase is made of."""

from typing import Literal

from pydantic import Field, model_validator

from rlloss.errors import ConfigError
from rlloss.functional.kl import resolve_kl_kind
from rlloss.losses.config import StrictModel
from rlloss.losses.ppo import PPOLossConfig
from rlloss.losses.value import ValueLossConfig
from rlloss.training.config_parts import OptimizerConfig, RolloutConfig


class EvaluatorConfig(StrictModel):
    """Who scores a response, and how scores are scaled."""

    function: str | None = None
    """Dotted path of a function from texts (prompt and response) to numbers; None takes the task's own reward."""
    folder: str | None = None
    """Folder of a sequence-classification model of transformers, in the place of a function."""
    label: int = Field(default=-1)
    """Which of the model's labels is the score, when it has more than one."""
    batch_size: int = Field(default=256, ge=1)
    """Texts that the model reads at a time."""
    scale: bool = False
    """Divide scores by their running standard deviation."""
    center: bool = False
    """Subtract their running mean as well."""
    clip: float | None = Field(default=None, gt=0.0)
    """Clamp scores to this size; None leaves them."""

    @model_validator(mode="after")
    def _check_source(self) -> "EvaluatorConfig":
        if self.function is not None and self.folder is not None:
            raise ConfigError("EvaluatorConfig: give function or folder, not both: there is one score for a response.")
        if self.center and not self.scale:
            raise ConfigError("EvaluatorConfig: center=True has no effect without scale=True. Set both.")
        return self


class KLConfig(StrictModel):
    """The penalty for leaving the reference policy, which lies in the rewards."""

    kind: str = "kl"
    """Estimator for each token: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    coef: float = Field(default=0.05, ge=0.0, allow_inf_nan=False)
    """Coefficient of the first step."""
    target: float | None = Field(default=None, gt=0.0)
    """KL of a whole response to aim at, nats: the coefficient adapts. None keeps it fixed."""
    horizon: float = Field(default=10_000.0, gt=0.0)
    """Responses over which the adaptive coefficient may change by a fifth."""

    @model_validator(mode="after")
    def _check_kind(self) -> "KLConfig":
        resolve_kl_kind(self.kind)
        return self


class CriticConfig(StrictModel):
    """The critic."""

    backbone: Literal["own", "shared"] = "own"
    """A copy of the policy's backbone, trained for itself, or a second head on the policy's."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimiser of an own backbone; a shared one is trained by the policy's."""
    vf_coef: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Factor of the value loss beside the policy loss, on a shared backbone."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained (own backbone)."""
    loss: ValueLossConfig = Field(default_factory=ValueLossConfig)
    """The loss."""

    @model_validator(mode="after")
    def _check_warmup(self) -> "CriticConfig":
        if self.warmup_steps and self.backbone == "shared":
            raise ConfigError(
                f"CriticConfig: warmup_steps={self.warmup_steps} would change a shared backbone, and with it the "
                f"policy. Use backbone='own', or warmup_steps=0."
            )
        return self


class PPOConfig(StrictModel):
    """Proximal policy optimisation with a critic."""

    steps: int = Field(default=0, ge=0)
    """Rollouts; 0 leaves the phase out."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(prompts=512, group_size=1))
    """Sampling."""
    evaluator: EvaluatorConfig = Field(default_factory=EvaluatorConfig)
    """Scores."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """KL penalty."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """Decay of the advantage estimator."""
    whiten_rewards: bool = False
    """Scale rewards to variance 1 over the rollout, keeping their mean."""
    negative_scale: float = Field(default=1.0, ge=0.0, le=1.0)
    """Advantages below 0 are multiplied by it, after whitening. Where right responses are alike and wrong ones differ,
    pushing down wrong ones is mostly noise, and a small scale learns faster."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the responses of one rollout."""
    updates_per_epoch: int = Field(default=4, ge=1)
    """Optimiser steps (minibatches) of one pass."""
    micro_batch_size: int = Field(default=256, ge=1)
    """Sequences of one forward pass."""
    target_kl: float | None = Field(default=None, gt=0.0)
    """End the updates of a rollout when a minibatch has moved further than 1.5 times this (k3, nats a token)."""
    ratio_threshold: float | None = Field(default=10.0, gt=1.0)
    """Leave a minibatch out whose mean ratio exceeds this: no optimiser step at all."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The policy's optimiser; its warm-up counts rollouts."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The critic."""
    loss: PPOLossConfig = Field(default_factory=lambda: PPOLossConfig(mode="chunk"))
    """The policy's loss."""

    @model_validator(mode="after")
    def _check_fields(self) -> "PPOConfig":
        if self.loss.temperature != 1.0:
            raise ConfigError(
                f"PPOConfig: loss.temperature={self.loss.temperature} has no effect here: the loss takes the "
                "temperature of the sampling. Set rollout.temperature instead."
            )
        for name in ("loss_reduction", "loss_length"):
            critic, actor = getattr(self.critic.loss, name), getattr(self.loss, name)
            if self.critic.backbone == "shared" and name in self.critic.loss.model_fields_set and critic != actor:
                raise ConfigError(
                    f"PPOConfig: critic.loss.{name}={critic!r} has no effect on a shared backbone, where one loss has "
                    f"the actor's loss.{name}={actor!r}. Give both the same, or use critic.backbone='own'."
                )
        return self
