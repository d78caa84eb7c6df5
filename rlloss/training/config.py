"""What a training run is made of: one typed record, which a config file fills in."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlloss.errors import BatchError, ConfigError
from rlloss.functional.advantage_registry import check_arguments, taken_by
from rlloss.losses.ce import CELossConfig
from rlloss.losses.config import StrictModel
from rlloss.losses.grpo import GRPOLossConfig
from rlloss.training.config_parts import LoggingConfig as LoggingConfig
from rlloss.training.config_parts import OptimizerConfig as OptimizerConfig
from rlloss.training.config_parts import RolloutConfig as RolloutConfig
from rlloss.training.ppo_config import PPOConfig

OF_RESPONSES = ("rewards", "group_ids", "lengths")
"""What a rollout gives to an advantage estimator, one number for each response."""


class TaskConfig(StrictModel):
    """A task with verifiable answers, by its name in reasoning-gym."""

    name: str = "chain_sum"
    """Name of the task in reasoning-gym."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that task, for instance `{"max_terms": 2}`."""
    pool: int = Field(default=10_000, ge=2)
    """Entries drawn from the task's generator; repeated questions are kept once."""
    data_seed: int = Field(default=1, ge=0)
    """Seed of the task's generator. It is not the seed of the run: every run sees the same questions."""
    heldout_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the questions that is held out, chosen by a hash of the question."""
    heldout: int = Field(default=500, ge=1)
    """Held-out questions that an evaluation asks."""
    prompt: str = "{question}\n"
    """Template of a prompt; the names are `question` and the entry's metadata (chain_sum has `expression`)."""
    replace: dict[str, str] = Field(default_factory=dict)
    """Replacements made in prompts, for instance `{" ": ""}` to leave spaces out."""
    chat_template: bool = False
    """Put the prompt into the tokenizer's chat template, as one message of the user."""
    answer_pattern: str | None = None
    """Regular expression whose first group, in its last match, is the answer; None takes the whole response."""
    reward: Literal["score", "exact"] = "score"
    """`score` is what the task's own scorer gives; `exact` gives 1 where that is the full score and 0 elsewhere."""


class ModelConfig(StrictModel):
    """A folder saved by transformers, or the sizes of a small Qwen3 with a random start."""

    folder: str | None = None
    """Folder of a causal language model with its tokenizer. None makes a Qwen3 and a character tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    layers: int = Field(default=2, ge=1)
    """Decoder layers of the small Qwen3."""
    hidden: int = Field(default=128, ge=8)
    """Width of its hidden states; a multiple of `heads`, with an even quotient."""
    heads: int = Field(default=8, ge=1)
    """Attention heads."""
    kv_heads: int = Field(default=8, ge=1)
    """Key and value heads; `heads` is a multiple of it."""
    mlp: int = Field(default=256, ge=8)
    """Width of the gated perceptron."""
    tie_embeddings: bool = False
    """Use the input embeddings as the head."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "ModelConfig":
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"ModelConfig: hidden={self.hidden} does not split into heads={self.heads} of an even width. "
                f"Use a multiple of {2 * self.heads}."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"ModelConfig: heads={self.heads} is no multiple of kv_heads={self.kv_heads}.")
        return self


class SupervisedConfig(StrictModel):
    """Supervised warm start on prompts with their right answers."""

    steps: int = Field(default=0, ge=0)
    """Most optimiser steps; 0 leaves the phase out."""
    target_loss: float | None = Field(default=None, gt=0.0)
    """The phase ends early once the mean training loss of its last 20 steps is below this; None makes all steps."""
    questions: int | None = Field(default=None, ge=1)
    """Training questions whose answers are shown, the first ones; None shows all."""
    batch_size: int = Field(default=128, ge=1)
    """Sequences of one step."""
    micro_batch_size: int = Field(default=128, ge=1)
    """Sequences of one forward pass."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimiser of this phase."""
    loss: CELossConfig = Field(default_factory=lambda: CELossConfig(mode="chunk", loss_reduction="token"))
    """The loss."""


class GRPOConfig(StrictModel):
    """Group relative policy optimisation."""

    steps: int = Field(default=100, ge=0)
    """Rollouts; 0 leaves the phase out."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Sampling."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the responses of one rollout."""
    updates_per_epoch: int = Field(default=2, ge=1)
    """Optimiser steps of one pass."""
    micro_batch_size: int = Field(default=256, ge=1)
    """Sequences of one forward pass."""
    advantage: str = "grpo"
    """Name of the advantage estimator: one that needs nothing but rewards, groups and lengths, such as `rloo`."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Its options, for instance `{"normalize_std": False}`, which makes `grpo` Dr.GRPO's."""
    negative_scale: float = Field(default=1.0, ge=0.0, le=1.0)
    """Advantages below 0 are multiplied by it: 1 is GRPO as published, 0 learns from the better responses of a group
    alone."""
    skip_zero_advantages: bool = False
    """Leave responses whose advantage is 0 out of the updates, above all those of groups with equal rewards."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimiser of this phase; its warm-up counts rollouts."""
    loss: GRPOLossConfig = Field(default_factory=lambda: GRPOLossConfig(policy_loss_cfg={}, mode="chunk"))
    """The loss."""

    @model_validator(mode="after")
    def _check_advantage(self) -> "GRPOConfig":
        known = taken_by(self.advantage, dict.fromkeys(OF_RESPONSES))
        taken = [name for name in self.advantage_options if name in OF_RESPONSES]
        if taken:
            raise ConfigError(f"GRPOConfig: advantage_options={taken} come from the rollout. Leave them out.")
        try:
            check_arguments(self.advantage, [*known, *self.advantage_options])
        except BatchError as error:
            raise ConfigError(f"GRPOConfig: {error}") from error
        return self

    @model_validator(mode="after")
    def _check_fields(self) -> "GRPOConfig":
        if self.loss.temperature != 1.0:
            raise ConfigError(
                f"GRPOConfig: loss.temperature={self.loss.temperature} has no effect here: the loss takes the "
                "temperature of the sampling. Set rollout.temperature instead."
            )
        if self.skip_zero_advantages and (self.loss.use_kl_loss or self.loss.entropy_coef):
            raise ConfigError(
                "GRPOConfig: skip_zero_advantages=True would leave those responses out of the KL loss and the entropy "
                "bonus too. Use loss.use_kl_loss=False and loss.entropy_coef=0, or skip_zero_advantages=False."
            )
        return self


class EvaluationConfig(StrictModel):
    """Greedy answers to the held-out questions."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations within a phase; 0 evaluates at the end of each phase only."""
    batch_size: int = Field(default=512, ge=1)
    """Questions answered at a time."""


class CheckpointConfig(StrictModel):
    """Checkpoints from which a run resumes bit for bit."""

    every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """The newest checkpoints that stay on disk."""


class TrainConfig(StrictModel):
    """A whole run: a task, a model, a supervised warm start, then GRPO or PPO."""

    seed: int = Field(default=0, ge=0)
    """Seed of the weights, the order of the prompts, and the sampling."""
    device: str = "cpu"
    """Where the model lies, as torch names it."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch; None leaves torch's own choice."""
    rank_timeout: float = Field(default=600.0, gt=0.0, le=86_400.0)
    """Seconds that a rank waits for another one that lives but does not come, before the run ends and names it. It must
    be longer than the longest time that a rank may need alone: a slow reward, a checkpoint, the policy at the end."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    """The task."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model."""
    supervised: SupervisedConfig = Field(default_factory=SupervisedConfig)
    """The warm start."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """Reinforcement learning without a critic."""
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    """Reinforcement learning with a critic."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation on the held-out questions."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Loggers, and what is kept for `rlloss report`."""
