"""Defects that were found in other projects' loss layers, one row each, and the test that pins their absence here.

Tests that have no better place stand below the table.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss import CELossConfig, DistillLossConfig, GRPOLossConfig, LogProbConfig
from rlloss.heads import native
from rlloss.heads.products import Products
from rlloss.metrics import reduce
from small_tiles import cut_into_tiles
from steps import HEADS, every_mode, eye, labels, row, run_step, tok

TESTS = Path(__file__).parent

DEFECTS = [
    # where, what goes wrong there, the test
    (
        "XTuner",
        "the bf16 head gradient loses digits as chunks get smaller",
        "test_head_accuracy::test_s9_bf16_gradients_are_flat_over_chunk_sizes",
    ),
    (
        "XTuner",
        "NaN at an ignored token makes the loss NaN: masked by multiplication",
        "test_contract::test_garbage_at_ignored_positions_changes_no_bit",
    ),
    (
        "XTuner",
        "cross-entropy in liger mode without a valid token is 0/0",
        "test_contract::test_a_step_without_tokens_is_zero_with_a_graph",
    ),
    ("XTuner", "ratio_min is inf for an empty batch", "test_peer_defects::test_ratios_of_an_empty_batch_are_finite"),
    ("XTuner, Liger", "backward reads grad_output on the host", "test_head_device::test_no_number_is_read_by_the_host"),
    (
        "XTuner",
        "a gradient buffer under no_grad, and for a frozen head",
        "test_head_limits::test_e05_no_gradient_buffer_without_gradients",
    ),
    (
        "XTuner",
        "a frozen head still costs a [V, H] buffer for each chunk",
        "test_head_limits::test_e06_frozen_parts_cost_nothing",
    ),
    (
        "Liger",
        "an overflowing ratio gives NaN gradients",
        "test_cases_masked::test_c_extreme_ratios_are_finite_in_value_and_gradient",
    ),
    (
        "Liger",
        "a masked old log-prob of -inf gives NaN gradients",
        "test_cases_masked::test_b02_overflow_at_a_masked_position_has_no_gradient",
    ),
    (
        "torchtune",
        "a batch without tokens returns a constant without a graph",
        "test_cases_masked::test_b01_an_empty_micro_batch_is_a_zero_with_a_graph",
    ),
    ("torchtune", "the graph of every chunk is kept until backward", "test_head_limits::test_peak_memory_is_one_chunk"),
    ("torchtitan (D8)", "the chunked backward ignores grad_output", "test_every_head::test_any_upstream_gradient"),
    ("several", "the whole [N, V] logits are formed", "test_head_limits::test_e19_no_tensor_of_the_size_of_the_logits"),
    (
        "several",
        "ignored tokens are projected",
        "test_peer_defects::test_only_tokens_that_count_are_projected_and_only_those_with_a_gradient_back",
    ),
    (
        "everyone",
        "tokens whose gradient is exactly zero are projected back",
        "test_peer_defects::test_only_tokens_that_count_are_projected_and_only_those_with_a_gradient_back",
    ),
    (
        "prime-rl, SkyRL",
        "the entropy of the fused path has no gradient",
        "test_every_head::test_values_and_gradients_are_those_of_the_loops",
    ),
    ("prime-rl", "a bias is refused", "test_every_head::test_values_and_gradients_are_those_of_the_loops"),
    (
        "prime-rl",
        "the soft cap is a class of its own, with a host read",
        "test_head_device::test_no_number_is_read_by_the_host",
    ),
    (
        "slime, ROLL, CCE",
        "no temperature of each token, no soft cap, no bias in the fused path",
        "test_every_head::test_values_and_gradients_are_those_of_the_loops",
    ),
    (
        "prime-rl (D10)",
        "the hidden gradient is added up over vocabulary tiles in bf16",
        "test_peer_defects::test_d10_the_hidden_gradient_is_added_up_in_float32_over_vocabulary_tiles",
    ),
    (
        "NeMo-RL",
        "the head gradient is added up over chunks in the weight's dtype",
        "test_head_accuracy::test_s9_bf16_gradients_are_flat_over_chunk_sizes",
    ),
    (
        "NeMo-RL (D6)",
        "log-probs are divided by the temperature instead of logits",
        "test_cases_head::test_f01_temperature_divides_the_logits",
    ),
    (
        "SkyRL",
        "the temperature is multiplied into a bf16 copy of the weight, and rounded",
        "test_peer_defects::test_the_temperature_is_not_rounded_to_the_dtype_of_the_weight",
    ),
    (
        "OpenRLHF (D7)",
        "entropy without and log-prob with temperature; logits divided in place",
        "test_every_head::test_values_and_gradients_are_those_of_the_loops",
    ),
    (
        "ROLL",
        "backward of log-prob and of entropy write into the same logits",
        "test_every_head::test_values_and_gradients_are_those_of_the_loops",
    ),
    ("ROLL", "logits of the caller are overwritten", "test_contract::test_inputs_are_bit_identical_afterwards"),
    (
        "CCE",
        "gradients below a threshold are dropped",
        "test_head_limits::test_nearly_certain_tokens_keep_their_gradients",
    ),
    (
        "ROLL (D1)",
        "token-mean counts tokens outside of the mask",
        "test_cases_calibration::test_a14_masked_tokens_add_nothing",
    ),
    (
        "torchrl (D2)",
        "CISPO differentiates the clipped ratio: no gradient outside of the band",
        "test_peer_defects::test_d2_cispo_has_a_gradient_outside_of_the_band",
    ),
    (
        "AReaL (D3)",
        "a distillation term whose gradient does not contain the teacher",
        "test_peer_defects::test_d3_two_teachers_give_two_gradients",
    ),
    (
        "SkyRL (D4, D5)",
        "covariances of advantages that were divided by the tokens of the step",
        "test_peer_defects::test_d4_d5_a_selection_does_not_depend_on_the_size_of_the_step",
    ),
    ("torchrl (D9)", "KL is a plain mean over padding as well", "test_cases_losses::test_h04_kl_is_a_masked_mean"),
    (
        "prime-rl (D11)",
        "a dropped token whose ratio overflows is 0 * inf",
        "test_peer_defects::test_d11_a_token_outside_of_the_trust_region_is_finite",
    ),
]


@pytest.mark.parametrize("claim", sorted({claim for _, _, claim in DEFECTS}))
def test_the_claimed_test_exists(claim: str) -> None:
    module, _, name = claim.partition("::")
    tree = ast.parse((TESTS / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@every_mode
def test_ratios_of_an_empty_batch_are_finite(head: dict[str, Any]) -> None:
    batch = {"shifted_labels": labels(0, 0), "advantages": row(1.0, 1.0), "old_logprobs": row(-1.0, -1.0)}
    config = GRPOLossConfig(**head)
    contexts = config.loss_ctx_cls.build_batches([config.build(batch)])
    found = reduce(contexts[0].forward(tok(-1.0, -2.0), eye()).extra)
    assert {name: found[name] for name in found if name.startswith("ratio")}
    assert all(abs(value) < float("inf") for value in found.values())


def test_only_tokens_that_count_are_projected_and_only_those_with_a_gradient_back(monkeypatch: Any) -> None:
    """12 tokens, 9 count, 5 of them have an advantage: rows of the three products."""
    rows: dict[str, int] = {"project": 0, "add_hidden": 0, "add_weight": 0}

    def counting(name: str) -> Any:
        real = getattr(Products, name)

        # Hidden states are tokens by hidden size, numbers of a chunk are words by tokens.
        tokens = 0 if name == "project" else 1

        def call(self: Products, matrix: Tensor, *rest: Any) -> None:
            rows[name] += matrix.shape[tokens]
            real(self, matrix, *rest)

        return call

    for name in rows:
        monkeypatch.setattr(Products, name, counting(name))
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 12, 4, generator=make).requires_grad_()
    weight = torch.randn(9, 4, generator=make).requires_grad_()
    targets = torch.randint(0, 9, (1, 12), generator=make)
    targets[0, [0, 5, 11]] = -100
    advantages = torch.tensor([[1.0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1]])
    batch = {"shifted_labels": targets, "advantages": advantages, "old_logprobs": torch.full((1, 12), -2.0)}
    for size in (1, 4, 1024):
        rows.update(project=0, add_hidden=0, add_weight=0)
        config = GRPOLossConfig(mode="chunk", chunk_size=size, policy_loss_cfg={"loss_type": "importance"})
        context = config.loss_ctx_cls.build_batches([config.build(batch)])[0]
        context.forward(hidden, weight).loss.backward()
        assert rows == {"project": 9, "add_hidden": 5, "add_weight": 5}


def test_d10_the_hidden_gradient_is_added_up_in_float32_over_vocabulary_tiles(monkeypatch: Any) -> None:
    cut_into_tiles(monkeypatch, 64 * 16)
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 64, 32, generator=make).bfloat16().requires_grad_()
    weight = torch.randn(4096, 32, generator=make).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (1, 64), generator=make)
    config = CELossConfig(mode="chunk", chunk_size=64, logits_dtype="float32")
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": targets})])[0]
    (found,) = torch.autograd.grad(context.forward(hidden, weight).loss, hidden)
    exact = hidden.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(F.cross_entropy((exact @ weight.detach().double().T)[0], targets[0]), exact)
    rounding = (true.bfloat16().double() - true).norm()
    if native.multiplies_bfloat16():
        # Its operands are bfloat16 too, the label's aside.
        part = (exact @ weight.detach().double().T)[0].softmax(-1).scatter(-1, targets[0, :, None], 0.0) / 64
        rounding = torch.hypot(rounding, ((part.bfloat16().double() - part) @ weight.detach().double()).norm())
    assert (found.double() - true).norm() <= 1.05 * rounding


@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_the_temperature_is_not_rounded_to_the_dtype_of_the_weight(mode: Any) -> None:
    """1/0.7 has no exact bf16 form; bf16 logits are divided by 0.7 in float32."""
    make = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 16, 8, generator=make).bfloat16()
    weight = torch.randn(50, 8, generator=make).bfloat16()
    targets = torch.randint(0, 50, (1, 16), generator=make)
    found = LogProbConfig(mode=mode, temperature=0.7).build({"shifted_labels": targets}).forward(hidden, weight).loss
    logits = F.linear(hidden, weight).double() / 0.7
    expected = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert (found - expected).abs().max() < 2e-5


@every_mode
@pytest.mark.parametrize(("old", "advantage"), [(-2.0, 1.0), (0.0, 1.0)])
def test_d2_cispo_has_a_gradient_outside_of_the_band(head: dict[str, Any], old: float, advantage: float) -> None:
    """Ratios 2.7 and 0.37: the clipped ratio is a constant factor, and `-A * factor` the gradient by the log-prob."""
    batch = {"shifted_labels": labels(1), "advantages": row(advantage), "old_logprobs": row(old)}
    log_prob = tok(-1.0).requires_grad_()
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "cispo"}, **head)
    context = config.loss_ctx_cls.build_batches([config.build(batch)])[0]
    (gradient,) = torch.autograd.grad(context.forward(log_prob, eye()).loss, log_prob)
    assert float(gradient.abs().max()) > 0.1


@every_mode
@pytest.mark.parametrize("kind", ["k2", "k3", "k1+"])
def test_d3_two_teachers_give_two_gradients(kind: str, head: dict[str, Any]) -> None:
    grads = []
    for teacher in (-0.4, -2.0):
        data = {"shifted_labels": labels(1), "num_tokens": [1], "teacher_logprobs": row(teacher)}
        grads.append(run_step(DistillLossConfig(kind=kind, **head), [data], [tok(-1.0)]).rows[0])
    # Towards the teacher: up to the one that gives the word more, down to the one that gives it less.
    assert grads[0][0] < 0.0 < grads[1][0]


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_d4_d5_a_selection_does_not_depend_on_the_size_of_the_step(loss_type: str) -> None:
    """The same tokens eight times over: the same share is chosen, and each token weighs an eighth."""
    make = torch.Generator().manual_seed(3)
    new = -3.0 * torch.rand(1, 40, generator=make, dtype=torch.float64) - 0.05
    old = new + 0.1 * torch.randn(1, 40, generator=make, dtype=torch.float64)
    advantages = 3.0 * torch.randn(1, 40, generator=make, dtype=torch.float64)
    rule: dict[str, Any] = {"loss_type": loss_type, f"{loss_type}_ratio": 0.2}
    if loss_type == "clip_cov":
        rule |= {"clip_cov_lb": 0.1, "clip_cov_ub": 100.0}
    found = []
    for copies in (1, 8):
        batch = {
            "shifted_labels": labels(*[1] * 40).repeat(1, copies),
            "num_tokens": [40] * copies,
            "advantages": advantages.repeat(1, copies),
            "old_logprobs": old.repeat(1, copies),
        }
        step = run_step(
            GRPOLossConfig(policy_loss_cfg=rule, **HEADS["chunk"]),
            [batch],
            [tok(*new[0].tolist()).repeat(1, copies, 1)],
        )
        found.append((step.loss, step.extra["selected_frac"], step.hidden_grads[0].abs().sum()))
    assert 0.1 < found[0][1] <= 0.25
    for one, eight in zip(*found, strict=True):
        assert float(eight) == pytest.approx(float(one), rel=0.15)


@every_mode
@pytest.mark.parametrize("loss_type", ["dppo_tv", "dppo_kl", "vanilla", "cispo"])
def test_d11_a_token_outside_of_the_trust_region_is_finite(loss_type: str, head: dict[str, Any]) -> None:
    """A log-ratio of 800: exp of it is inf in float64 as well."""
    batch = {"shifted_labels": labels(1, 1), "advantages": row(1.0, -1.0), "old_logprobs": row(-801.0, -801.0)}
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": loss_type}, **head)
    step = run_step(config, [batch], [tok(-1.0, -1.0)])
    assert abs(step.loss) < float("inf")
    assert step.hidden_grads[0].isfinite().all()
    assert step.weight_grad.isfinite().all()
