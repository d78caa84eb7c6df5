"""liger mode's Triton cross-entropy, interpreted on the CPU in a process of its own: Triton reads its switch once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlloss import CELossConfig
from rlloss.errors import ConfigError

SCRIPT = """
import torch
from rlloss import CELossConfig
from rlloss.metrics import reduce
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

LigerFusedLinearPPOBase.chunk_forward = None  # the other route would fail
make = torch.Generator().manual_seed(0)
hidden, weight, bias = (torch.randn(*size, generator=make) for size in ((2, 3, 4), (5, 4), (5,)))
labels = torch.tensor([[0, 4, -100], [2, -100, 1]])
found = []
for mode in ("eager", "liger"):
    config = CELossConfig(mode=mode)
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels})])[0]
    leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
    output = context.forward(*leaves)
    grads = torch.autograd.grad(3.0 * output.loss, leaves)
    reduced = reduce(output.extra)
    metrics = [reduced[name] for name in ("nll", "ce_loss", "loss", "tokens")]
    found.append([output.loss.detach(), *grads, torch.tensor(metrics)])
for mine, theirs in zip(*found):
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
assert float(found[1][0]) > 0.1
# Case E25: the logits of the report, under a head that is the identity.
report = torch.tensor([
    [-0.1118, 0.0162, 0.0956], [-0.1134, 0.0088, 0.1046], [-0.1737, 0.1315, 0.0422], [-0.0921, 0.0728, 0.0194]
])
reported = CELossConfig(mode="liger")
(case,) = reported.loss_ctx_cls.build_batches([reported.build({"shifted_labels": torch.zeros(1, 4, dtype=torch.long)})])
logits = report[None].clone().requires_grad_()
loss = case.forward(logits, torch.eye(3)).loss
loss.backward()
assert abs(float(loss.detach()) - 1.2258632) < 2e-5, loss
expected = (report.softmax(-1) - torch.tensor([1.0, 0.0, 0.0])) / 4
torch.testing.assert_close(logits.grad[0], expected, rtol=1e-5, atol=1e-6)
try:
    loss = context.forward(*leaves).loss
    torch.autograd.grad(loss, leaves, create_graph=True)
except RuntimeError as error:
    assert "liger" in str(error)
else:
    raise SystemExit("a graph of the gradients was not refused")
# Unequal weights take the route through log-probs, which is switched off here.
context.loss_kwargs.loss_weight = context.loss_kwargs.loss_weight * torch.tensor([[1.0], [2.0]])
try:
    context.forward(*leaves)
except TypeError:
    print("fine")
"""


def test_e25_the_kernel_gives_eager_numbers() -> None:
    """The report's loss is 1.2258632 (its logits are printed to four digits); it got 0."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def test_minus_infinity_in_the_bias_is_refused_by_name() -> None:
    config = CELossConfig(mode="liger")
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([[0, 1]])})])[0]
    with pytest.raises(ConfigError, match="-inf in head_bias"):
        context.forward(torch.eye(2)[None], torch.eye(2), torch.tensor([0.0, -torch.inf]))
