"""Typing small numeric cases: rows with an exact log-prob, the three-word fixture, one optimiser step in a mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import metrics

IGNORED = -100
HEADS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "chunk1": {"mode": "chunk", "chunk_size": 1},
    "chunk2": {"mode": "chunk", "chunk_size": 2},
    "chunk": {"mode": "chunk", "chunk_size": 1024},
    "liger": {"mode": "liger"},
}
every_mode = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
eager_and_chunk = pytest.mark.parametrize(
    "head", [h for h in HEADS.values() if h["mode"] != "liger"], ids=[*HEADS][:-1]
)

W3_HIDDEN = [[1.0, 0.0], [0.0, 1.0]]
W3_WEIGHT = [[0.5, -0.5], [0.0, 1.0], [-1.0, 0.5]]
W3_LABELS = [0, 1]


def eye() -> Tensor:
    """The two-word head for `tok` rows, float64."""
    return torch.eye(2, dtype=torch.float64)


def tok(*log_probs: float) -> Tensor:
    """Hidden rows `[1, T, 2]` whose label 0 has exactly these log-probs under `eye()`."""
    rows = [[lp, math.log(-math.expm1(lp))] for lp in log_probs]
    return torch.tensor([rows], dtype=torch.float64)


def labels(*mask: int) -> Tensor:
    """Labels `[1, T]`: word 0 where the mask is 1, else ignored."""
    return torch.tensor([[0 if counted else IGNORED for counted in mask]])


def row(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A per-token tensor `[1, T]`."""
    return torch.tensor([list(values)], dtype=dtype)


def w3(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Fixture W3: hidden `[1, 2, 2]`, head weight `[3, 2]`, labels `[1, 2]`."""
    return (
        torch.tensor([W3_HIDDEN], dtype=dtype),
        torch.tensor(W3_WEIGHT, dtype=dtype),
        torch.tensor([W3_LABELS]),
    )


@dataclass
class Step:
    """What one optimiser step gave."""

    losses: list[float]
    hidden_grads: list[Tensor]
    weight_grad: Tensor
    bias_grad: Tensor | None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return math.fsum(self.losses)

    @property
    def rows(self) -> list[list[float]]:
        """Gradients of all hidden rows, one after the other."""
        return torch.cat([g.flatten(0, -2) for g in self.hidden_grads]).tolist()


def run_step(
    config: Any,
    batches: Sequence[Mapping[str, Any]],
    hidden: Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **build_batches: Any,
) -> Step:
    """Builds, calibrates and evaluates one step, a backward for each micro-batch; inputs are left alone."""
    contexts = config.loss_ctx_cls.build_batches([config.build(batch) for batch in batches], **build_batches)
    head = (eye() if weight is None else weight).detach().clone().requires_grad_()
    offset = None if bias is None else bias.detach().clone().requires_grad_()
    states = [h.detach().clone().requires_grad_() for h in hidden]
    outputs = []
    for context, leaf in zip(contexts, states, strict=True):
        output = context.forward(leaf, head, offset)
        output.loss.backward()
        outputs.append(output)
    merged = metrics.reduce(metrics.merge([output.extra for output in outputs]))
    grads = [leaf.grad for leaf in states]
    assert head.grad is not None
    assert all(grad is not None for grad in grads)
    return Step(
        losses=[float(output.loss.detach()) for output in outputs],
        hidden_grads=[grad for grad in grads if grad is not None],
        weight_grad=head.grad,
        bias_grad=None if offset is None else offset.grad,
        extra=merged,
    )


def nll_step(config: Any, parts: Sequence[Sequence[float]], **build_batches: Any) -> Step:
    """A step of a supervised loss: each part is a micro-batch, each number the NLL of a token, None an ignored one."""
    batches = [
        {"shifted_labels": labels(*(nll is not None for nll in part)), "num_tokens": [1] * len(part)} for part in parts
    ]
    hidden = [tok(*(-1.0 if nll is None else -nll for nll in part)) for part in parts]
    return run_step(config, batches, hidden, **build_batches)


def assert_same(one: Step, other: Step, tolerance: float = 1e-6, skip: Sequence[str] = ()) -> None:
    """Two steps over the same tokens in the same order agree in loss, gradients and metrics."""
    assert one.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)
    for mine, theirs in ((one.rows, other.rows), (one.weight_grad.tolist(), other.weight_grad.tolist())):
        assert len(mine) == len(theirs)
        scale = max((abs(x) for line in theirs for x in line), default=0.0)
        for left, right in zip(mine, theirs, strict=True):
            assert left == pytest.approx(right, rel=0, abs=tolerance * scale + 1e-12)
    assert one.extra.keys() == other.extra.keys()
    for name, value in one.extra.items():
        if name not in skip:
            assert value == pytest.approx(other.extra[name], rel=tolerance, abs=tolerance), name
