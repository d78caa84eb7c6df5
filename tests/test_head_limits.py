"""What the heads must not do: hold whole logits, work on gradients nobody wants, lose small gradients."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlloss import CELossConfig, GRPOLossConfig

PRODUCTS = {"mm", "addmm", "addmm_", "mv", "addmv", "addmv_", "bmm", "baddbmm", "matmul"}


class Watcher(TorchDispatchMode):
    """Notes the shape of every tensor that an operator makes (views of `inputs` aside), and counts matrix products."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.shapes: list[tuple[int, ...]] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.shapes += [tuple(leaf.shape) for leaf in leaves if leaf.untyped_storage().data_ptr() not in self.known]
        self.products += func.overloadpacket.__name__ in PRODUCTS
        return result

    @property
    def largest(self) -> int:
        return max(math.prod(shape) for shape in self.shapes)


def context_of(config: Any, tokens: int, words: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Tensor] = {"shifted_labels": torch.randint(0, words, (1, tokens), generator=generator)}
    if isinstance(config, GRPOLossConfig):
        batch["old_logprobs"] = torch.full((1, tokens), -math.log(words))
        batch["advantages"] = torch.randn(1, tokens, generator=generator)
    return config.loss_ctx_cls.build_batches([config.build(batch)])[0]


def leaves_of(tokens: int, words: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, tokens, width, generator=generator)
    return hidden.requires_grad_(), (torch.randn(words, width, generator=generator) * 0.1).requires_grad_()


@pytest.mark.parametrize("kind", [CELossConfig, GRPOLossConfig])
def test_chunk_mode_never_holds_the_logits(kind: Any) -> None:
    tokens, words, width, size = 700, 1100, 8, 100
    context = context_of(kind(mode="chunk", chunk_size=size), tokens, words)
    hidden, weight = leaves_of(tokens, words, width)
    with Watcher() as watcher:
        context.forward(hidden, weight).loss.backward()
    assert watcher.largest <= size * words < tokens * words


def test_liger_mode_never_holds_the_logits() -> None:
    tokens, words, width = 2100, 4200, 4
    context = context_of(GRPOLossConfig(mode="liger"), tokens, words)
    hidden, weight = leaves_of(tokens, words, width)
    with Watcher() as watcher:
        context.forward(hidden, weight).loss.backward()
    assert watcher.largest < tokens * words


def test_the_watcher_sees_the_logits_of_eager_mode() -> None:
    tokens, words, width = 70, 110, 8
    context = context_of(GRPOLossConfig(mode="eager"), tokens, words)
    with Watcher() as watcher:
        context.forward(*leaves_of(tokens, words, width)).loss.backward()
    assert watcher.largest >= tokens * words


def chunk_run(hidden_frozen: bool, head_frozen: bool, guard: Any = None) -> Watcher:
    tokens, words, width = 60, 90, 7
    context = context_of(GRPOLossConfig(mode="chunk", chunk_size=20), tokens, words)
    hidden, weight = leaves_of(tokens, words, width)
    hidden.requires_grad_(not hidden_frozen)
    weight.requires_grad_(not head_frozen)
    with Watcher(hidden, weight) as watcher:
        if guard is None:
            loss = context.forward(hidden, weight).loss
            if loss.requires_grad:
                loss.backward()
        else:
            with guard():
                context.forward(hidden, weight)
    return watcher


HEAD_SHAPE, HIDDEN_SHAPES, CHUNKS = (90, 7), {(60, 7), (1, 60, 7)}, 3


def test_a_frozen_head_costs_neither_buffer_nor_product() -> None:
    full, frozen = chunk_run(False, False), chunk_run(False, True)
    assert full.products == 3 * CHUNKS
    assert HEAD_SHAPE in full.shapes
    assert frozen.products == 2 * CHUNKS
    assert HEAD_SHAPE not in frozen.shapes


def test_frozen_hidden_states_cost_neither_buffer_nor_product() -> None:
    full, frozen = chunk_run(False, False), chunk_run(True, False)
    assert frozen.products == 2 * CHUNKS
    assert HIDDEN_SHAPES & set(full.shapes)
    assert not HIDDEN_SHAPES & set(frozen.shapes)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, None], ids=["no_grad", "inference", "frozen"])
def test_without_gradients_there_is_one_product_and_no_buffer(guard: Any) -> None:
    watcher = chunk_run(guard is None, guard is None, guard)
    assert watcher.products == CHUNKS
    assert HEAD_SHAPE not in watcher.shapes


def test_ignored_and_finished_tokens_are_not_projected() -> None:
    """Of 60 tokens 20 are ignored, 20 have advantage 0: one sweep over 40 rows forward, 20 rows backward."""
    config = GRPOLossConfig(mode="chunk", chunk_size=20)
    labels = torch.zeros(1, 60, dtype=torch.int64)
    labels[0, :20] = -100
    advantages = torch.ones(1, 60)
    advantages[0, 20:40] = 0.0
    batch = {"shifted_labels": labels, "advantages": advantages, "old_logprobs": torch.full((1, 60), -4.0)}
    context = config.loss_ctx_cls.build_batches([config.build(batch)])[0]
    with Watcher() as watcher:
        context.forward(*leaves_of(60, 90, 7)).loss.backward()
    assert watcher.products == 2 + 2  # two chunks forward; one chunk back, into hidden states and head


@pytest.mark.parametrize("rest", [10.0**-k for k in range(2, 10)])
@pytest.mark.parametrize("size", [1, 64])
def test_nearly_certain_tokens_keep_their_gradient(rest: float, size: int) -> None:
    """`d loss / d hidden` of a token with `1 - p = rest`, in float32, to 1e-5 of its float64 value."""
    words = 16
    gap = math.log((1.0 - rest) * (words - 1) / rest)
    hidden = torch.tensor([[[gap, 1.0]]])
    weight = torch.zeros(words, 2)
    weight[0, 0], weight[:, 1] = 1.0, torch.linspace(-0.5, 0.5, words)
    config = CELossConfig(mode="chunk", chunk_size=size)
    context = config.loss_ctx_cls.build_batches(
        [config.build({"shifted_labels": torch.zeros(1, 1, dtype=torch.int64)})]
    )[0]

    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    context.forward(leaf, head).loss.backward()
    exact_logits = hidden.double()[0, 0] @ weight.double().T
    off = (exact_logits - exact_logits[0]).exp()
    off[0] = 0.0
    slope = off / (1.0 + off.sum())
    slope[0] = -off.sum() / (1.0 + off.sum())
    assert leaf.grad is not None
    assert head.grad is not None
    for got, right in ((leaf.grad[0, 0], slope @ weight.double()), (head.grad, slope[:, None] * hidden.double()[0])):
        assert ((got.double() - right).abs() <= 1e-5 * right.abs().clamp(min=1e-30)).all()


def test_ligers_function_is_as_expected() -> None:
    """`chunk_forward` is no documented interface: a release that changes it must be noticed here."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    parameters = list(inspect.signature(LigerFusedLinearPPOBase.chunk_forward).parameters)
    assert parameters[:3] == ["input_chunk", "weight", "selected_token_ids"]
    assert {"bias", "temperature"} <= set(parameters)


TRITON_PROGRAM = """
import torch
from rlloss.heads.inputs import HeadInputs
from rlloss.heads.liger import liger_cross_entropy
from rlloss.layout import token_layout

g = torch.Generator().manual_seed(0)
hidden, weight = torch.randn(1, 6, 5, generator=g), torch.randn(11, 5, generator=g)
labels = torch.randint(0, 11, (1, 6), generator=g)
mask = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
layout = token_layout(mask, None, 5)
found = []
for kind in ("liger", "torch"):
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if kind == "liger":
        loss = liger_cross_entropy(HeadInputs(h, w, None, layout.take(labels), 1.0, layout))
    else:
        loss = torch.nn.functional.cross_entropy((h @ w.T)[mask], labels[mask], reduction="sum")
    (2.0 * loss).backward()
    found.append((loss.detach(), h.grad, w.grad))
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
print("equal")
"""


@pytest.fixture
def interpreter_environment() -> Iterator[dict[str, str]]:
    """Triton reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own."""
    yield os.environ | {"TRITON_INTERPRET": "1"}


def test_ligers_triton_cross_entropy_in_the_interpreter(interpreter_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRITON_PROGRAM], env=interpreter_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
