"""Chunk mode against eager mode in float64 on random heads: every option at once, certain labels, banned words."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss.heads import HeadInputs, HeadOptions, Objective, TokenStats, run_head, token_stats
from rlloss.layout import token_layout
from small_tiles import cut_into_tiles


def draw(seed: int) -> tuple[HeadInputs, HeadOptions, Objective]:
    """A head of 1 to 300 words, logits up to a few hundred, labels that are often the largest."""
    rng, make = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    words, width, length = rng.choice([1, 2, 3, 7, 17, 300]), rng.choice([1, 3]), rng.choice([1, 4, 20])
    mask = torch.rand(1, length, generator=make) < 0.8
    n = int(mask.sum())
    hidden, weight = rng.choice([0.1, 1.0, 30.0]) * normal(1, length, width), normal(words, width)
    bias = normal(words) if rng.random() < 0.6 else None
    allowed = torch.arange(words)
    if bias is not None and rng.random() < 0.5:
        bias[torch.rand(words, generator=make) < 0.5] = -torch.inf
        bias[0] = 0.0
        allowed = bias.isfinite().nonzero().squeeze(1)
    labels = allowed[torch.randint(0, len(allowed), (n,), generator=make)]
    if rng.random() < 0.5:
        labels = (hidden[mask] @ weight.T + (0.0 if bias is None else bias)).argmax(-1)
    more = rng.choice([0, 0, 3])
    ids = allowed[torch.randint(0, len(allowed), (n, more), generator=make)] if more else None
    temperature = rng.choice([1.0, 0.5, 3.0, torch.rand(n, generator=make, dtype=torch.float64) + 0.3])
    leaves = [None if part is None else part.requires_grad_() for part in (hidden, weight, bias)]
    assert leaves[0] is not None
    assert leaves[1] is not None
    layout = token_layout(mask, None, n)
    inputs = HeadInputs(leaves[0], leaves[1], leaves[2], labels, temperature, layout, ids)
    options = HeadOptions(
        chunk_size=rng.choice([1, 3, 1000]),
        logit_scale=rng.choice([1.0, 0.3, 2.0]),
        logit_softcap=rng.choice([None, 1.5, 30.0]),
        entropy=rng.choice(["none", "value", "gradient"]),
        skip_zero_rows=rng.random() < 0.7,
    )
    g, e, x = normal(n), normal(n), normal(n, max(more, 1))
    idle = torch.rand(n, generator=make) < 0.3
    g[idle], e[idle], x[idle] = 0.0, 0.0, 0.0

    def loss(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        total = (g[rows] * stats.log_prob).sum()
        if stats.entropy is not None and options.entropy == "gradient":
            total = total + (e[rows] * stats.entropy).sum()
        if stats.extra_log_prob is not None:
            total = total + (x[rows] * stats.extra_log_prob).sum()
        return total, {}

    return inputs, options, Objective(loss, additive=rng.random() < 0.6)


@pytest.mark.parametrize("block", range(6))
def test_chunk_equals_eager(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * 40, block * 40 + 40):
        cut_into_tiles(monkeypatch, [32, 64, 1 << 22][seed % 3])
        inputs, options, objective = draw(seed)
        leaves = [part for part in (inputs.hidden, inputs.weight, inputs.bias) if part is not None]
        found = []
        for mode in ("eager", "chunk"):
            output = run_head(mode, inputs, options, objective)  # type: ignore[arg-type]
            stats, _ = token_stats(mode, inputs, options)  # type: ignore[arg-type]
            numbers = [output.loss, stats.log_prob, stats.entropy, stats.extra_log_prob]
            found.append([*numbers, *torch.autograd.grad(1.7 * output.loss, leaves)])
        for theirs, mine in zip(*found, strict=True):
            if theirs is not None and theirs.numel():
                assert mine is not None
                bound = 1e-10 * max(float(theirs.detach().abs().max()), 1e-3)
                assert float((mine - theirs).detach().abs().max()) <= bound, seed
