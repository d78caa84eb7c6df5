"""Logits more than 1e4 nats apart: one value and one gradient in eager and chunk mode, those of a float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import far_logits

HEADS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "chunk1": {"mode": "chunk", "chunk_size": 1},
    "chunk3": {"mode": "chunk", "chunk_size": 3},
    "chunk": {"mode": "chunk"},
    "no zero rows": {"mode": "chunk", "skip_zero_rows": False},
}


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("loss", far_logits.LOSSES)
@pytest.mark.parametrize("case", far_logits.BIASES)
@pytest.mark.parametrize("head", HEADS)
def test_values_and_gradients(head: str, case: str, loss: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiles > 1:
        monkeypatch.setattr("rlloss.heads.tiles.tile_width", lambda vocabulary, *_: -(-vocabulary // tiles))
    wanted = far_logits.expected(loss, case)
    for dtype in (torch.float64, torch.float32):
        context = far_logits.context_of(far_logits.config_of(loss, **HEADS[head]))
        found = far_logits.step(context, *far_logits.tensors(case, dtype))
        far_logits.assert_same(found, wanted, far_logits.tolerance(case, dtype))
