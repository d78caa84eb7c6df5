"""The problem that everyone is measured on: hidden states, a head, and a batch that looks like training."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEQUENCES, GROUP = 16, 4
ROTATION = 3
IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """What is measured.

    Attributes:
        tokens: N, all positions of the batch.
        hidden: H.
        vocabulary: V.
        chunk_size: Rows of a chunk.
        dtype: Of hidden states and head.
        batch: "dense": every token counts and has a gradient (cross-entropy); "rl": 35 % prompt tokens, a quarter of
            the groups with equal rewards, some clipped tokens (clipped policy loss).
        device: Where it runs.
    """

    tokens: int = 2048
    hidden: int = 512
    vocabulary: int = 32000
    chunk_size: int = 512
    dtype: str = "float32"
    batch: Literal["dense", "rl"] = "dense"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.tokens % SEQUENCES:
            raise ConfigError(f"--tokens {self.tokens}: expected a multiple of {SEQUENCES}, the number of sequences.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Size of one chunk of float32 logits."""
        return 4 * self.chunk_size * self.vocabulary


@dataclass(frozen=True)
class Problem:
    """One batch.

    Attributes:
        shape: Its shape.
        hidden: Several hidden states `[B, T, H]`, used in turn, so that no cache keeps one.
        weight: `[V, H]`.
        labels: `[B, T]`, -100 where ignored.
        advantages: `[B, T]`; all 1 in a dense batch.
        old_logprobs: `[B, T]`, nats.
    """

    shape: Shape
    hidden: list[Tensor]
    weight: Tensor
    labels: Tensor
    advantages: Tensor
    old_logprobs: Tensor

    @property
    def mask(self) -> Tensor:
        """The tokens that count, `[B, T]` bool."""
        return self.labels != IGNORED

    def loss_of(self, log_probs: Tensor, rows: Tensor) -> Tensor:
        """The loss of some tokens, summed and divided by the tokens of the whole batch.

        Args:
            log_probs: `[n]`, of the labels.
            rows: `[n]`, their places in the flattened batch; all of them count.
        """
        count = int(self.mask.sum())
        if self.shape.batch == "dense":
            return -log_probs.sum() / count
        advantages = self.advantages.reshape(-1)[rows].to(log_probs.dtype)
        ratio = (log_probs - self.old_logprobs.reshape(-1)[rows].to(log_probs.dtype)).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / count


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    """Draws a problem whose labels come from the head's own distribution, nearly, as after sampling."""
    make = torch.Generator().manual_seed(seed)
    length = shape.tokens // SEQUENCES

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=make)

    device, dtype = shape.device, shape.torch_dtype
    hidden = [normal(SEQUENCES, length, shape.hidden).to(device, dtype) for _ in range(ROTATION)]
    weight = (2.0 * normal(shape.vocabulary, shape.hidden) / shape.hidden**0.5).to(device, dtype)
    labels = torch.randint(0, shape.vocabulary, (SEQUENCES, length), generator=make)
    advantages = torch.ones(SEQUENCES, length)
    if shape.batch == "rl":
        labels[:, : round(0.35 * length)] = IGNORED
        # One group in four was answered equally well or badly: no advantage, no gradient.
        per_sequence = normal(SEQUENCES)
        per_sequence[:GROUP] = 0.0
        advantages = per_sequence[:, None].expand(-1, length).clone()
    labels, advantages = labels.to(device), advantages.to(device)
    # exp(0.1 * normal) leaves the clip range of 0.2 for about one token in twenty, half of them where it binds.
    noise = 0.1 * normal(SEQUENCES, length).to(device)
    old = _log_probs(hidden[0], weight, labels) + noise
    return Problem(shape, hidden, weight, labels, advantages, old)


def _log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, block: int = 256) -> Tensor:
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).clamp(min=0)
    found = [
        -F.cross_entropy(F.linear(part.float(), weight.float()), target, reduction="none")
        for part, target in zip(torch.split(rows, block), torch.split(targets, block), strict=True)
    ]
    return torch.cat(found).reshape(labels.shape)


def exact_gradients(problem: Problem, block: int = 128) -> tuple[Tensor, Tensor]:
    """Gradients of the loss in float64, by automatic differentiation of a few rows at a time: hidden and head."""
    rows = problem.mask.reshape(-1).nonzero().squeeze(1)
    weight = problem.weight.double().requires_grad_()
    hidden = problem.hidden[0].double().reshape(-1, problem.shape.hidden).requires_grad_()
    labels = problem.labels.reshape(-1)
    for part in torch.split(rows, block):
        logits = F.linear(hidden[part], weight)
        problem.loss_of(-F.cross_entropy(logits, labels[part], reduction="none"), part).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad
