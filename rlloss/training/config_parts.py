"""Parts of a run's config that several phases share."""

from typing import Annotated, Literal

from pydantic import Field

from rlloss.losses.config import StrictModel

Average = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(StrictModel):
    """AdamW with a linear warm-up and a cosine to a fraction of the peak."""

    lr: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """Peak learning rate."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps in which the learning rate rises."""
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate of the last step, as a fraction of the peak; 1 keeps it constant."""
    betas: tuple[Average, Average] = (0.9, 0.95)
    """AdamW's averaging factors."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decay of the matrices; vectors (norms, biases) have none."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """The gradient is scaled down to this norm."""


class RolloutConfig(StrictModel):
    """How responses are sampled."""

    prompts: int = Field(default=64, ge=1)
    """Prompts of one step."""
    group_size: int = Field(default=8, ge=1)
    """Responses to each prompt."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Longest response, its end-of-sequence token included."""
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Sampling temperature; the loss divides the logits by the same number."""
    batch_size: int = Field(default=1024, ge=1)
    """Most responses generated at a time (whole groups; at least one group)."""


class LoggingConfig(StrictModel):
    """Where the numbers of a run go beside metrics.jsonl, and what `rlloss report` finds besides."""

    loggers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """TensorBoard events in the folder of the run, Weights & Biases, trackio; none is allowed."""
    project: str = "rlloss"
    """Project of wandb and trackio; the run there has the name of its folder."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline writes into the folder of the run, to be sent later by `wandb sync`."""
    histograms_every: int = Field(default=5, ge=0)
    """Steps between counts of log-ratios and advantages, the first and the last step included; 0 leaves them out."""
    samples_every: int = Field(default=20, ge=0)
    """Steps between samples of responses, the first and the last step included; 0 leaves them out."""
    samples: int = Field(default=4, ge=1)
    """Responses of a sample."""
