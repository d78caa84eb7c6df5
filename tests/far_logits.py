"""Logits further apart than a log-prob reaches: cases, a step on them, and what the formulas say in plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracles
from rlloss import DistillLossConfig, GRPOLossConfig

FLOOR = -1e4
INF = math.inf
BIASES = {
    "labels far below": (0.0, -2e4, 0.4, -3e4, -0.1, 0.2, 0.3),
    "around the floor": (0.0, -9.99e3, -1e4, -1.0001e4, -2e4, 0.3, -1e4),
    "one word far above": (0.0, -0.5, 3e4, -1e4, 0.1, 0.2, 0.3),
    "two words far above": (3e4, 0.5, 3e4, -INF, 0.1, 0.2, 0.3),
    "words of probability 0": (0.0, -INF, 0.4, -INF, -0.1, 0.2, 0.3),
    "all but one of probability 0": (-INF, -INF, -INF, -INF, -INF, 0.5, -INF),
    "the first words of probability 0": (-INF, -INF, -INF, -INF, 0.1, -0.3, 0.5),
}
WORDS, WIDTH, COEF = 7, 3, 0.25
LABELS = list(range(WORDS))
EXTRA = [[(word + 1) % WORDS, word] for word in LABELS]
TEACHER = [-1.5, -0.7]
LOSSES = ("label", "label and entropy", "more words")


@dataclass
class Found:
    """What a step gave: the loss, log-probs and entropies of the tokens, gradients."""

    loss: float
    log_prob: Tensor
    entropy: Tensor | None
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def tensors(case: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `[1, N, H]`, weight `[V, H]` and bias `[V]`."""
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, len(LABELS), WIDTH, generator=make, dtype=torch.float64)
    weight = torch.randn(WORDS, WIDTH, generator=make, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), torch.tensor(BIASES[case], dtype=dtype)


def config_of(loss: str, **head: Any) -> Any:
    """`-sum A log p`, the same with an entropy bonus, or the distance from a teacher on two words of each token."""
    if loss == "more words":
        return DistillLossConfig(loss_reduction="sum", clamp_negative=False, **head)
    reinforce = {"loss_type": "reinforce"}
    coef = COEF if loss == "label and entropy" else 0.0
    return GRPOLossConfig(on_policy=True, policy_loss_cfg=reinforce, loss_reduction="sum", entropy_coef=coef, **head)


def advantages() -> list[float]:
    return [1.0 - 0.3 * place for place in range(len(LABELS))]


def context_of(config: Any, **options: Any) -> Any:
    """A calibrated context."""
    count = len(LABELS)
    batch = {
        "shifted_labels": torch.tensor([LABELS]),
        "num_tokens": [count],
        "advantages": torch.tensor([advantages()], dtype=torch.float64),
        "teacher_topk_ids": torch.tensor([EXTRA]),
        "teacher_topk_logprobs": torch.tensor(TEACHER, dtype=torch.float64).expand(1, count, 2),
    }
    return config.loss_ctx_cls.build_batches([config.build(batch)], **options)[0]


def step(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Found:
    """Evaluates a context on a head, or on this rank's words of it."""
    leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
    output = context.forward(*leaves, return_tokens=True, **options)
    gradients = torch.autograd.grad(output.loss, leaves)
    record = output.per_token
    return Found(
        output.loss.item(), record.log_prob[0], None if record.entropy is None else record.entropy[0], *gradients
    )


def expected(loss: str, case: str) -> Found:
    """Log-probs end at the floor; their gradient is that of log-softmax, `1[j = y] - p_j`."""
    hidden, weight, bias = (part.tolist() for part in tensors(case))
    head, ones = oracles.Head(weight, bias), [1.0] * len(LABELS)

    def log_probs(words: list[int]) -> list[float]:
        return [max(number, FLOOR) for number in oracles.head_forward(head, hidden[0], words, ones)[0]]

    def gradients(words: list[int], slopes: list[float], bend: float) -> list[Tensor]:
        found = oracles.head_backward(head, hidden[0], words, ones, slopes, [bend] * len(words))
        return [torch.tensor(part, dtype=torch.float64) for part in (found.hidden, found.weight, found.bias)]

    own, entropies = log_probs(LABELS), oracles.head_forward(head, hidden[0], LABELS, ones)[1]
    if loss == "more words":
        shares = [math.exp(teacher) for teacher in TEACHER]
        columns = [[words[place] for words in EXTRA] for place in range(2)]
        value = math.fsum(
            share * (teacher - number)
            for share, teacher, words in zip(shares, TEACHER, columns, strict=True)
            for number in log_probs(words)
        )
        parts = [gradients(words, [-share] * len(words), 0.0) for share, words in zip(shares, columns, strict=True)]
        total = [one + other for one, other in zip(*parts, strict=True)]
    else:
        coef = COEF if loss == "label and entropy" else 0.0
        value = -math.fsum(a * number for a, number in zip(advantages(), own, strict=True)) - coef * math.fsum(
            entropies
        )
        total = gradients(LABELS, [-a for a in advantages()], -coef)
    spread = torch.tensor(entropies, dtype=torch.float64) if loss == "label and entropy" else None
    return Found(value, torch.tensor(own, dtype=torch.float64), spread, total[0][None], total[1], total[2])


def assert_same(found: Found, wanted: Found, tolerance: float) -> None:
    """Compares everything, relative to the largest number of each tensor."""
    assert abs(found.loss - wanted.loss) <= tolerance * max(1.0, abs(wanted.loss))
    assert (found.entropy is None) == (wanted.entropy is None)
    for name in ("log_prob", "entropy", "grad_hidden", "grad_weight", "grad_bias"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        if theirs is not None:
            # The largest numbers are log-probs at the floor, but small ones must be right as well.
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=10 * tolerance)


def tolerance(case: str, dtype: torch.dtype) -> float:
    """What rounding leaves: a logit of 3e4 has few digits behind the point."""
    peak = max(1.0, *(number for number in BIASES[case] if math.isfinite(number)))
    return max(4 * peak * torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else 1e-5)
