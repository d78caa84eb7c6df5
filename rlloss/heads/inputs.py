"""The records that go in and out of a head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlloss.heads.vocab_parallel import VocabShard
from rlloss.layout import Segments, TokenLayout
from rlloss.metrics import Metric

Mode = Literal["eager", "chunk", "liger"]


@dataclass(frozen=True)
class HeadOptions:
    """What a head computes, apart from its tensors.

    Attributes:
        chunk_size: Tokens of one chunk in chunk mode, or `None`: chosen from the shape.
        logit_scale: The logits are multiplied by it (Cohere; Granite divides: give `1 / logits_scaling`).
        logit_softcap: Final soft cap c, `c * tanh(logits / c)` (Gemma 2), or `None`.
        float32_logits: Form the product in float32 even for 16-bit inputs.
        entropy: Whether entropies are wanted not at all, as a number, or with their gradient.
        skip_zero_rows: Leave rows without a gradient out of the two backward products.
    """

    chunk_size: int | None = 1024
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    float32_logits: bool = False
    entropy: Literal["none", "value", "gradient"] = "none"
    skip_zero_rows: bool = True


@dataclass(frozen=True)
class HeadInputs:
    """The tensors of one call.

    Attributes:
        hidden: `[B, T, H]`.
        weight: `[V, H]`.
        bias: `[V]` or `None`.
        labels: `[N]` int64, the labels of the tokens that count, all in `[0, V)`.
        temperature: A number, or `[N]`.
        layout: Where these tokens stand.
        extra_ids: `[N, K]` int64, K more words of each token whose log-probs are wanted (a teacher's top-k), or `None`.
        vocab: Which rows of the whole head weight and bias are, or `None`: all.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: float | Tensor
    layout: TokenLayout
    extra_ids: Tensor | None = None
    vocab: VocabShard | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Log-probs and losses are float32, or float64 for float64 inputs."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


class TokenStats(NamedTuple):
    """What a loss sees of the model: numbers for the N tokens that count.

    Attributes:
        log_prob: `[N]`, log-prob of each label, nats.
        entropy: `[N]`, entropy of each predicted distribution, nats, or `None` when not asked for.
        segments: Which sequence each token belongs to.
        labels: `[N]` int64.
        extra_log_prob: `[N, K]`, log-probs of K more words of each token, nats, or `None` when not asked for.
    """

    log_prob: Tensor
    entropy: Tensor | None
    segments: Segments
    labels: Tensor
    extra_log_prob: Tensor | None = None


LossFn = Callable[[TokenStats, slice], tuple[Tensor, dict[str, Metric]]]
"""A loss over the tokens of a slice: their stats -> a scalar that is already weighted, and metrics."""


@dataclass(frozen=True)
class Objective:
    """The loss to evaluate.

    Attributes:
        fn: The loss.
        additive: Whether it is a sum over tokens, so that it can be evaluated one chunk at a time.
    """

    fn: LossFn
    additive: bool


class HeadOutput(NamedTuple):
    """A scalar loss with a graph, its metrics, and whole logits `[B, T, V]` in eager mode only."""

    loss: Tensor
    metrics: dict[str, Metric]
    logits: Tensor | None
