"""Public faults of kinds E and F: fused and chunked heads, temperature, precision. Names are the case ids."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig
from rlloss.errors import BackendUnavailableError, BatchError, ConfigError
from steps import HEADS, assert_same, eager_and_chunk, every_mode, eye, labels, run_step, tok, w3

Head = dict[str, Any]
W3_LOSS = 0.6041306


def w3_context(config: Any) -> Any:
    return config.loss_ctx_cls.build_batches([config.build({"shifted_labels": w3()[2]})])[0]


def w3_leaves() -> tuple[Tensor, Tensor]:
    hidden, weight, _ = w3()
    return hidden.requires_grad_(), weight.requires_grad_()


@every_mode
@pytest.mark.parametrize("factor", [3.0, 65536.0, 0.0])
def test_e02_any_upstream_gradient(head: Head, factor: float) -> None:
    context = w3_context(CELossConfig(**head))
    grads = []
    for scale in (1.0, factor):
        hidden, weight = w3_leaves()
        (scale * context.forward(hidden, weight).loss).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        grads.append(torch.cat([hidden.grad.flatten(), weight.grad.flatten()]))
    # liger's log-probs are float32, and so is the rounding of a product with a number that is no power of two
    assert torch.allclose(grads[1], factor * grads[0], rtol=2e-7 if head["mode"] == "liger" else 1e-12, atol=0.0)


@every_mode
def test_e03_backward_twice(head: Head) -> None:
    hidden, weight = w3_leaves()
    loss = w3_context(CELossConfig(**head)).forward(hidden, weight).loss
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(2.0, dtype=loss.dtype), retain_graph=True)
    for one, copy, two in zip(first, kept, second, strict=True):
        assert torch.equal(one, copy)
        assert torch.equal(two, 2.0 * one)


@every_mode
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_e05_without_gradients(head: Head, guard: Any) -> None:
    context = w3_context(CELossConfig(**head))
    hidden, weight = w3_leaves()
    with guard():
        loss = context.forward(hidden, weight).loss
    assert float(loss) == pytest.approx(W3_LOSS, abs=1e-6)
    assert not loss.requires_grad


@every_mode
@pytest.mark.parametrize(("hidden_frozen", "head_frozen"), [(False, True), (True, False), (True, True)])
def test_e06_frozen_parts(head: Head, hidden_frozen: bool, head_frozen: bool) -> None:
    context = w3_context(CELossConfig(**head))
    full = w3_leaves()
    context.forward(*full).loss.backward()
    hidden, weight = (leaf.detach().clone() for leaf in full)
    hidden.requires_grad_(not hidden_frozen)
    weight.requires_grad_(not head_frozen)
    loss = context.forward(hidden, weight).loss
    assert float(loss) == pytest.approx(W3_LOSS, abs=1e-6)
    assert loss.requires_grad != (hidden_frozen and head_frozen)
    if loss.requires_grad:
        loss.backward()
    for leaf, reference, frozen in zip((hidden, weight), full, (hidden_frozen, head_frozen), strict=True):
        assert reference.grad is not None
        if frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert torch.allclose(leaf.grad, reference.grad, rtol=1e-6, atol=1e-8)


@every_mode
def test_e07_the_bias_counts(head: Head) -> None:
    hidden, weight, targets = w3()
    bias = torch.tensor([0.0, 5.0, 0.0], dtype=torch.float64)
    step = run_step(CELossConfig(**head), [{"shifted_labels": targets}], [hidden], weight, bias)
    assert step.loss == pytest.approx(2.2595355, abs=1e-6)
    logits = hidden[0] @ weight.T + bias
    expected = (logits.softmax(-1) - torch.nn.functional.one_hot(targets[0], 3)).mean(0)
    assert step.bias_grad is not None
    assert step.bias_grad.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@every_mode
@pytest.mark.parametrize(
    ("field", "value", "expected"), [("logit_scale", 0.125, 1.0182847), ("logit_softcap", 1.0, 0.6825573)]
)
def test_e09_scale_and_soft_cap_act_or_are_refused(head: Head, field: str, value: float, expected: float) -> None:
    if head["mode"] == "liger":
        with pytest.raises(ConfigError, match=field):
            CELossConfig(**head, **{field: value})
        return
    hidden, weight, targets = w3()
    config = CELossConfig(**head, **{field: value})
    step = run_step(config, [{"shifted_labels": targets}], [hidden], weight)
    assert step.loss == pytest.approx(expected, abs=1e-6)


def random_batch(n: int, ignored: set[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(1, n, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (1, n), generator=generator)
    for t in ignored:
        targets[0, t] = -100
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize(
    ("n", "size", "ignored"), [(4, 3, set()), (4, 9, set()), (4, 1, set()), (6, 2, {2, 3}), (5, 2, {0})]
)
def test_e12_chunk_sizes_and_ignored_chunks(n: int, size: int, ignored: set[int]) -> None:
    hidden, weight, targets = random_batch(n, ignored)
    steps = [
        run_step(CELossConfig(**head), [{"shifted_labels": targets}], [hidden], weight)
        for head in (HEADS["eager"], {"mode": "chunk", "chunk_size": size})
    ]
    assert_same(steps[1], steps[0], tolerance=1e-12)


@every_mode
def test_e12_no_token_at_all(head: Head) -> None:
    hidden, weight, targets = random_batch(3, set())
    step = run_step(CELossConfig(**head), [{"shifted_labels": targets[:, :0]}], [hidden[:, :0]], weight)
    assert step.loss == 0.0
    assert step.weight_grad.eq(0).all()


@every_mode
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_e14_mixed_dtypes(head: Head, autocast: bool, hidden_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    hidden, weight, targets = random_batch(6, {1}, torch.float32)
    exact = run_step(CELossConfig(**HEADS["eager"]), [{"shifted_labels": targets}], [hidden], weight)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        step = run_step(
            CELossConfig(**head), [{"shifted_labels": targets}], [hidden.to(hidden_dtype)], weight.to(weight_dtype)
        )
    assert step.loss == pytest.approx(exact.loss, rel=1e-2)
    assert step.hidden_grads[0].dtype == hidden_dtype
    assert step.weight_grad.dtype == weight_dtype
    for mine, true in zip(
        (*step.hidden_grads, step.weight_grad), (*exact.hidden_grads, exact.weight_grad), strict=True
    ):
        assert (mine.float() - true).norm() <= 1e-2 * true.norm()


@every_mode
@pytest.mark.parametrize("targets", [[3, 0], [-1, 0]], ids=str)
def test_e15_labels_outside_the_vocabulary_are_refused(head: Head, targets: list[int]) -> None:
    hidden, weight, _ = w3()
    with pytest.raises(BatchError, match="label"):
        run_step(CELossConfig(**head), [{"shifted_labels": torch.tensor([targets])}], [hidden], weight)


@every_mode
@pytest.mark.parametrize("weight_shape", [(0, 2), (0,), (3, 4)], ids=str)
def test_e21_a_head_that_cannot_be_one_is_refused(head: Head, weight_shape: tuple[int, ...]) -> None:
    context = w3_context(CELossConfig(**head))
    with pytest.raises(BatchError, match="head_weight"):
        context.forward(w3()[0], torch.zeros(weight_shape, dtype=torch.float64))


@every_mode
def test_e23_liger_and_all_modes_run_on_the_cpu(head: Head) -> None:
    hidden, weight, targets = w3()
    step = run_step(CELossConfig(**head), [{"shifted_labels": targets}], [hidden], weight)
    assert step.loss == pytest.approx(W3_LOSS, abs=1e-6)


def test_e23_without_liger_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss.fused_linear_ppo", None)
    context = w3_context(CELossConfig(mode="liger"))
    with pytest.raises(BackendUnavailableError, match=r"mode='liger' needs liger_kernel.*pip install.*mode='chunk'"):
        context.forward(*w3_leaves())


@every_mode
def test_f01_temperature_divides_the_logits(head: Head) -> None:
    logits = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64)
    context = LogProbConfig(temperature=0.5, **head).build({"shifted_labels": labels(1)})
    assert float(context.forward(logits, eye()).loss) == pytest.approx(-0.0181499, abs=1e-6)
    hidden, weight, targets = w3()
    step = run_step(CELossConfig(temperature=0.5, **head), [{"shifted_labels": targets}], [hidden], weight)
    assert step.loss == pytest.approx(0.3490122, abs=1e-6)


@eager_and_chunk
def test_f01_temperature_of_each_token(head: Head) -> None:
    hidden, weight, targets = w3()
    batch = {"shifted_labels": targets, "temperature": torch.full((1, 2), 0.5)}
    assert run_step(CELossConfig(**head), [batch], [hidden], weight).loss == pytest.approx(0.3490122, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_f02_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        CELossConfig(temperature=temperature)


@every_mode
def test_f04_bf16_ratios_are_exactly_one_on_policy(head: Head) -> None:
    hidden, weight, targets = random_batch(64, {3, 9}, torch.bfloat16)
    with torch.no_grad():
        old = LogProbConfig(**head).build({"shifted_labels": targets}).forward(hidden, weight).loss
    advantages = torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "vanilla"}, **head)
    batch = {"shifted_labels": targets, "advantages": advantages, "old_logprobs": old}
    step = run_step(config, [batch], [hidden], weight)
    assert old.max() <= 0.0
    assert step.extra["ratio_min"] == step.extra["ratio_max"] == 1.0
    assert step.extra["approx_kl_k1"] == step.extra["approx_kl_k3"] == 0.0
    assert step.extra["clip_frac_low"] == step.extra["clip_frac_high"] == 0.0
    counted = advantages[targets != -100]
    assert step.loss == pytest.approx(-float(counted.mean()), abs=1e-5)


def test_f04_bf16_log_probs_agree_across_modes() -> None:
    hidden, weight, targets = random_batch(64, set(), torch.bfloat16)
    exact = hidden.double() @ weight.double().T
    rounded = exact.bfloat16().double()
    for dtype, logits in (("float32", exact), ("auto", rounded)):
        expected = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        found = [
            LogProbConfig(logits_dtype=dtype, **head).build({"shifted_labels": targets}).forward(hidden, weight).loss
            for head in HEADS.values()
        ]
        for log_probs in found:
            assert (log_probs - found[0]).abs().max() < 1e-3
            assert (log_probs - expected).abs().max() < 1e-4
            assert log_probs.max() <= 0.0


# Eager mode multiplies as the model does, and MKL may sum small products term by term (on some processors all of fewer
# than ten rows or columns); chunk mode sums a small head in float64.
million_tokens = pytest.mark.parametrize(("mode", "width"), [("eager", 16), ("eager", 2), ("chunk", 16), ("chunk", 2)])


@million_tokens
def test_f06_a_million_tokens_in_bfloat16(mode: Any, width: int) -> None:
    """A bfloat16 sum of ones stops at 256: nothing is added up in the dtype of the inputs."""
    n = 1_000_000
    hidden = torch.nn.functional.pad(tok(-1.0, -2.0), (0, width - 2)).bfloat16().repeat(1, n // 2, 1)
    config = CELossConfig(mode=mode, chunk_size=8192, logits_dtype="float32")
    head = torch.eye(width).bfloat16()
    step = run_step(config, [{"shifted_labels": torch.zeros(1, n, dtype=torch.long)}], [hidden], head)
    pair = hidden[0, :2].double()
    log_probs = pair.log_softmax(-1)
    assert step.loss == pytest.approx(-float(log_probs[:, 0].mean()), rel=1e-6)
    assert step.extra["tokens"] == n
    expected = (log_probs.exp() - torch.eye(width)[0]).T @ pair / 2
    own_product = torch.zeros(width, width, dtype=torch.float64)
    if mode == "eager":
        slope = ((log_probs.exp() - torch.eye(width)[0]) / n).float().repeat(n // 2, 1)
        own_product = (slope.T @ hidden[0].float()).double() - expected
    assert ((step.weight_grad.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2 * own_product.abs()).all()


def test_tok_rows_have_their_log_prob() -> None:
    context = LogProbConfig().build({"shifted_labels": labels(1, 1, 0)})
    assert context.forward(tok(-1.0, -10.0, -3.0), eye()).loss[0, :2].tolist() == pytest.approx([-1.0, -10.0])


@pytest.fixture
def one_rank() -> Any:
    """A mesh of one rank, in this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every_mode
@pytest.mark.parametrize("sharded", ["head", "hidden", "both"])
def test_e20_a_dtensor_on_one_rank(head: Head, sharded: str, one_rank: Any) -> None:
    """FSDP2 on one rank: the same loss, and a gradient that is a DTensor where the parameter is one."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    context = w3_context(CELossConfig(**head))
    plain = w3_leaves()
    context.forward(*plain).loss.backward()
    placements = {"hidden": Replicate(), "head": Shard(0)}
    leaves: list[Any] = []
    for name, leaf in zip(placements, w3_leaves(), strict=True):
        made: Any = leaf.detach()
        if sharded in (name, "both"):
            made = distribute_tensor(made, one_rank, [placements[name]])
        leaves.append(made.requires_grad_())
    loss = context.forward(*leaves).loss
    assert float(loss.detach()) == pytest.approx(W3_LOSS, abs=1e-6)
    loss.backward()
    for leaf, reference in zip(leaves, plain, strict=True):
        assert isinstance(leaf.grad, DTensor) == isinstance(leaf, DTensor)
        found = leaf.grad.to_local() if isinstance(leaf, DTensor) else leaf.grad
        assert torch.allclose(found, reference.grad, rtol=1e-6, atol=1e-9)


@every_mode
def test_e24_other_lengths_compile_nothing(head: Head) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    for n in range(3, 13):
        hidden, weight, targets = random_batch(n, {1})
        run_step(CELossConfig(**head), [{"shifted_labels": targets}], [hidden], weight)
    assert counters["stats"]["unique_graphs"] <= 3


@million_tokens
def test_f06_a_million_tokens(mode: Any, width: int) -> None:
    """Float32 sums over a million tokens keep their digits, in the loss and in the gradients."""
    make = torch.Generator().manual_seed(6)
    hidden = torch.randn(1, 1_000_000, width, generator=make)
    weight = torch.randn(width + 1, width, generator=make)
    targets = torch.randint(0, width + 1, (1, 1_000_000), generator=make)
    config = CELossConfig(mode=mode, chunk_size=8192)
    step = run_step(config, [{"shifted_labels": targets}], [hidden], weight)
    rows = hidden[0].double()
    log_p = (rows @ weight.double().T).log_softmax(-1)
    assert step.loss == pytest.approx(-float(log_p.gather(1, targets[0][:, None]).mean()), rel=1e-6)
    slope = (log_p.exp() - torch.nn.functional.one_hot(targets[0], width + 1)) / 1e6
    true = slope.T @ rows
    own_product = (slope.float().T @ hidden[0] - true).abs().max() if mode == "eager" else 0.0
    assert (step.weight_grad - true).abs().max() <= 3e-6 * true.abs().max() + 2 * own_product
    true = slope @ weight.double()
    assert (step.hidden_grads[0][0] - true).abs().max() <= 3e-6 * true.abs().max()
