"""Random optimiser steps, and the many ways to cut the same sequences into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss import metrics, policy_loss_names
from rlloss.losses.policy_registry import get_policy_loss

IGNORED = -100
PER_TOKEN = ("old_logprobs", "ref_logprobs", "advantages", "temperature")


POLICY_LOSSES: dict[str, dict[str, Any]] = {
    name: {"loss_type": name}
    for name in (
        "vanilla", "reinforce", "importance", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "topr", "opmd", "gspo",
        "gmpo", "vespo", "clip_cov", "kl_cov",
    )
}  # fmt: skip
"""Every loss of rlloss itself as a `policy_loss_cfg`, with what it needs on a step of a few tokens."""
POLICY_LOSSES["dro"] |= {"beta": 0.2}
POLICY_LOSSES["clip_cov"] |= {"clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
POLICY_LOSSES["kl_cov"] |= {"kl_cov_ratio": 0.3}


def built_in_policy_losses() -> list[str]:
    """The losses of rlloss itself, without those that other tests have registered by now."""
    return [name for name in policy_loss_names() if get_policy_loss(name).fn.__module__.startswith("rlloss.")]


@dataclass
class Step:
    """Sequences of one optimiser step: each a mapping with hidden `[L, H]`, labels `[L]` and per-token numbers."""

    sequences: list[dict[str, Tensor]]
    weight: Tensor
    bias: Tensor | None

    def cast(self, dtype: torch.dtype) -> Step:
        def change(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        sequences = [{name: change(value) for name, value in sequence.items()} for sequence in self.sequences]
        return Step(sequences, change(self.weight), None if self.bias is None else change(self.bias))


def random_step(seed: int, lengths: Sequence[int], *, vocabulary: int = 13, width: int = 6, bias: bool = True) -> Step:
    """Builds float64 sequences whose ratios keep a distance of 1e-3 from the clip bounds 0.8, 1.2, 1.28 and 3.

    Advantages lean to one side: a loss whose terms cancel to a tenth of their size has a tenth of float32's digits.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, offset = normal(vocabulary, width), normal(vocabulary) if bias else None
    sequences = []
    for length in lengths:
        hidden = normal(length, width)
        labels = torch.randint(0, vocabulary, (length,), generator=generator)
        logits = hidden @ weight.T + (0.0 if offset is None else offset)
        log_prob = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        ratios = torch.tensor([0.3, 0.75, 0.9, 1.0, 1.1, 1.24, 1.5, 3.5], dtype=torch.float64)
        picked = ratios[torch.randint(0, 8, (length,), generator=generator)]
        log_ratio = picked.log() + 1e-3 * normal(length).clamp(-2, 2)
        ignored = torch.rand(length, generator=generator) < 0.3
        ignored[: length // 4] = True
        sequences.append(
            {
                "hidden": hidden,
                "shifted_labels": labels.masked_fill(ignored, IGNORED),
                "old_logprobs": log_prob - log_ratio,
                "ref_logprobs": log_prob + 0.3 * normal(length),
                "advantages": (normal(1) + 1.0).expand(length).clone(),
                "temperature": 1.0 + 0.5 * torch.rand(length, generator=generator, dtype=torch.float64),
            }
        )
    return Step(sequences, weight, offset)


def padded(sequences: list[dict[str, Tensor]], keys: Sequence[str]) -> tuple[dict[str, Any], Tensor]:
    """Lays sequences out as rows `[B, T]`, garbage in the padding."""
    length = max(len(sequence["hidden"]) for sequence in sequences)

    def rows(name: str, fill: float) -> Tensor:
        out = []
        for sequence in sequences:
            value = sequence[name]
            tail = value.new_full((length - len(value), *value.shape[1:]), fill)
            out.append(torch.cat([value, tail]))
        return torch.stack(out)

    def garbage(name: str) -> float:
        return float("nan") if sequences[0][name].is_floating_point() else -7

    batch = {name: rows(name, garbage(name)) for name in keys}
    return {**batch, "shifted_labels": rows("shifted_labels", IGNORED)}, rows("hidden", 7.0)


def packed(sequences: list[dict[str, Tensor]], keys: Sequence[str]) -> tuple[dict[str, Any], Tensor]:
    """Lays sequences out in one row `[1, T]` with offsets."""

    def row(name: str) -> Tensor:
        return torch.cat([sequence[name] for sequence in sequences])[None]

    lengths = [len(sequence["hidden"]) for sequence in sequences]
    batch: dict[str, Any] = {name: row(name) for name in (*keys, "shifted_labels")}
    return {**batch, "num_tokens": torch.tensor(lengths)}, row("hidden")


LAYOUTS = {"padded": padded, "packed": packed}


def split(items: list[Any], parts: int) -> list[list[Any]]:
    """Cuts a list into consecutive parts of unequal size, none empty."""
    bounds = [0, *sorted({1 + (index * (len(items) - 1)) // parts for index in range(1, parts)}), len(items)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


@dataclass
class Result:
    """What a step gave: summed loss, gradients and reduced metrics."""

    loss: float
    grad_hidden: list[Tensor]
    grad_weight: Tensor
    grad_bias: Tensor | None
    metrics: dict[str, float]
    extras: list[dict[str, Any]]


def run_step(
    config: Any, step: Step, parts: int = 1, layout: str = "padded", keys: Sequence[str] = PER_TOKEN
) -> Result:
    """Builds, calibrates and evaluates a step cut into `parts` micro-batches; gradients back in sequence order."""
    groups = split(step.sequences, parts)
    laid = [LAYOUTS[layout](group, [key for key in keys if key in group[0]]) for group in groups]
    contexts = [config.build(batch) for batch, _ in laid]
    contexts = type(contexts[0]).build_batches(contexts)
    weight = step.weight.clone().requires_grad_()
    bias = None if step.bias is None else step.bias.clone().requires_grad_()
    hidden = [value.clone().requires_grad_() for _, value in laid]
    total, extras = 0.0, []
    for context, states in zip(contexts, hidden, strict=True):
        loss, (_, extra) = context.forward(states, weight, bias)
        loss.backward()
        total += loss.item()
        extras.append(extra)
    gradients = []
    for group, states in zip(groups, hidden, strict=True):
        lengths = [len(sequence["hidden"]) for sequence in group]
        rows = states.grad[0].split(lengths) if layout == "packed" else states.grad
        gradients += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    reduced = metrics.reduce(metrics.merge(extras))
    return Result(total, gradients, weight.grad, None if bias is None else bias.grad, reduced, extras)


def distance(found: Tensor | float, expected: Tensor | float) -> float:
    """`max|a-b| / max|b|`, and 0 for two zeros."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    gap = float((found - expected).abs().max()) if expected.numel() else 0.0
    return gap / scale if scale else gap


def assert_same(found: Result, expected: Result, bound: float, metric_bound: float) -> None:
    """Compares two results tensor by tensor, and metrics absolutely or relatively."""
    pairs = {
        "loss": (found.loss, expected.loss),
        "grad_hidden": (torch.cat(found.grad_hidden), torch.cat(expected.grad_hidden)),
        "grad_weight": (found.grad_weight, expected.grad_weight),
    }
    if expected.grad_bias is not None:
        pairs["grad_bias"] = (found.grad_bias, expected.grad_bias)
    for name, (mine, theirs) in pairs.items():
        assert distance(mine, theirs) <= bound, f"{name}: off by {distance(mine, theirs):.2e} of its largest entry"
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        gap = abs(found.metrics[name] - value)
        assert gap <= metric_bound * max(1.0, abs(value)), f"{name}: {found.metrics[name]} instead of {value}"
    for name in ("tokens", "sequences", "dropped_tokens"):
        assert found.metrics.get(name) == expected.metrics.get(name)
