"""Properties of every policy loss under every reduction and way: splits, garbage at ignored places, extreme ratios."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import POLICY_LOSSES, built_in_policy_losses
from rlloss import GRPOLossConfig, GRPOLossContext, Totals
from rlloss.errors import BatchError, ConfigError

LOSSES = list(POLICY_LOSSES)
REDUCTIONS = ("token", "sample", "square", "sequence_sum", "constant", "prompt", "sum")
MODES = ("log_probs", "eager", "chunk", "liger")
# liger's log-probs are float32; what a loss makes of them is a few times less exact.
TOLERANCE: dict[str, dict[str, float]] = {"liger": {"rtol": 2e-5, "atol": 5e-6}}
PER_TOKEN = ("shifted_labels", "log_probs", "old_logprobs", "advantages", "ref_logprobs", "rollout_is_weights")
Rows = list[dict[str, Tensor]]


@st.composite
def steps(draw: Any, extreme: bool = False) -> tuple[Rows, list[int], str, str]:
    """Sequences with ignored tokens and a prompt, their micro-batch, a reduction, and a way."""
    seed = draw(st.integers(0, 2**20))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    parts = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in lengths:
        log_prob = -2.5 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.05
        size = 1e4 if extreme else 0.5
        row = {
            "shifted_labels": torch.where(torch.rand(n, generator=generator) < 0.3, -100, 0),
            "log_probs": log_prob,
            "old_logprobs": log_prob + size * torch.randn(n, generator=generator, dtype=torch.float64),
            "advantages": torch.randint(-2, 3, (n,), generator=generator).double() * 0.7,
            "ref_logprobs": log_prob + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64),
            "rollout_is_weights": 0.5 + torch.rand(n, generator=generator, dtype=torch.float64),
            "group": torch.randint(0, 2, (1,), generator=generator),
        }
        rows.append(row)
    return rows, parts, draw(st.sampled_from(REDUCTIONS)), draw(st.sampled_from(MODES))


def configure(loss: str, reduction: str, way: str) -> GRPOLossConfig:
    fields: dict[str, Any] = {"loss_length": 6.0} if reduction == "constant" else {}
    if way != "log_probs":
        fields |= {"mode": way, "chunk_size": 2}
    return GRPOLossConfig(
        policy_loss_cfg=POLICY_LOSSES[loss],
        loss_reduction=reduction,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        **fields,
    )


def evaluate(
    config: GRPOLossConfig, rows: Rows, parts: list[int], way: str, fill: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """The loss of the step, and the gradient in the log-probs (or hidden states) of each sequence."""
    contexts, leaves, members = [], [], []
    for part in sorted(set(parts)):
        chosen = [i for i, p in enumerate(parts) if p == part]
        width = max(rows[i]["log_probs"].shape[0] for i in chosen) + part
        batch = {}
        for name in PER_TOKEN:
            blank = -100 if name == "shifted_labels" else fill
            padded = [
                torch.nn.functional.pad(rows[i][name], (0, width - rows[i][name].shape[0]), value=blank) for i in chosen
            ]
            batch[name] = torch.stack(padded)
        ignored = batch["shifted_labels"] == -100
        for name in PER_TOKEN[1:]:
            batch[name] = torch.where(ignored, fill, batch[name])
        log_probs = batch.pop("log_probs")
        batch |= {"group_ids": torch.cat([rows[i]["group"] for i in chosen]), "num_prompts": 2}
        contexts.append(config.build(batch))
        states = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], -1)
        leaves.append((log_probs if way == "log_probs" else states).detach().requires_grad_())
        members.append(chosen)
    GRPOLossContext.build_batches(contexts)
    total, grads = torch.zeros((), dtype=torch.float64), {}
    for context, leaf, chosen in zip(contexts, leaves, members, strict=True):
        if way == "log_probs":
            loss = context.forward_log_probs(leaf).loss
        else:
            loss = context.forward(leaf, torch.eye(2, dtype=torch.float64)).loss
        loss.backward()
        total = total + loss.detach()
        for row, i in enumerate(chosen):
            grads[i] = leaf.grad[row, : rows[i]["log_probs"].shape[0]]
    return total, [grads[i] for i in range(len(rows))]


@pytest.mark.filterwarnings("ignore:a row .1, T. without")
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(step=steps())
def test_no_split_and_no_way_changes_anything(loss: str, step: tuple[Rows, list[int], str, str]) -> None:
    rows, parts, reduction, way = step
    whole, grads = evaluate(configure(loss, reduction, "log_probs"), rows, [0] * len(rows), "log_probs")
    compare(evaluate(configure(loss, reduction, way), rows, parts, way), (whole, grads), rows, way)


def compare(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], rows: Rows, way: str) -> None:
    """A step in a way against the whole step by log-probs."""
    bounds = TOLERANCE.get(way, {"rtol": 1e-9, "atol": 1e-10})
    torch.testing.assert_close(found[0].double(), expected[0], **bounds)
    for row, mine, theirs in zip(rows, found[1], expected[1], strict=True):
        slope = 1.0 if way == "log_probs" else -torch.expm1(row["log_probs"])
        torch.testing.assert_close(mine if way == "log_probs" else mine[:, 0], theirs * slope, **bounds)


def fixed_step(seed: int, extreme: bool = False) -> tuple[Rows, list[int]]:
    """Five sequences in three micro-batches, one of them fully masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for i, n in enumerate((3, 1, 5, 2, 4)):
        log_prob = -2.5 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.05
        labels = torch.where(torch.rand(n, generator=generator) < (1.0 if i == 3 else 0.25), -100, 0)
        rows.append(
            {
                "shifted_labels": labels,
                "log_probs": log_prob,
                "old_logprobs": log_prob + (1e4 if extreme else 0.5) * normal(n),
                "advantages": torch.randint(-2, 3, (n,), generator=generator).double() * 0.7,
                "ref_logprobs": log_prob + (1e4 if extreme else 0.3) * normal(n),
                "rollout_is_weights": 0.5 + torch.rand(n, generator=generator, dtype=torch.float64),
                "group": torch.tensor([i % 2]),
            }
        )
    return rows, [0, 2, 0, 1, 2]


@cache
def whole_step(loss: str, reduction: str) -> tuple[Tensor, list[Tensor]]:
    """The fixed step of a loss in one batch, by log-probs."""
    rows, _ = fixed_step(LOSSES.index(loss))
    return evaluate(configure(loss, reduction, "log_probs"), rows, [0] * len(rows), "log_probs")


@pytest.mark.filterwarnings("ignore:a row .1, T. without")
@pytest.mark.parametrize("way", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_under_every_reduction_in_every_way(loss: str, way: str) -> None:
    """The split changes nothing; log-ratios of 10^4 to the old and reference policy stay finite."""
    rows, parts = fixed_step(LOSSES.index(loss))
    far, _ = fixed_step(LOSSES.index(loss), extreme=True)
    for reduction in REDUCTIONS:
        compare(evaluate(configure(loss, reduction, way), rows, parts, way), whole_step(loss, reduction), rows, way)
        total, grads = evaluate(configure(loss, reduction, way), far, parts, way)
        assert bool(total.isfinite()), reduction
        assert all(bool(grad.isfinite().all()) for grad in grads), reduction


def test_no_built_in_loss_is_left_out() -> None:
    assert set(built_in_policy_losses()) == set(LOSSES)


@pytest.mark.filterwarnings("ignore:GRPOLossConfig. the paper of policy loss")
@pytest.mark.parametrize("loss", LOSSES)
def test_liger_mode_refuses_by_name(loss: str) -> None:
    policy = POLICY_LOSSES[loss]
    refused = {"entropy_coef": 0.1, "entropy_metric": True, "logit_softcap": 30.0, "logit_scale": 2.0}
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=rf"mode='liger' does not support {name}={value}.*Use mode='chunk'"):
            GRPOLossConfig(policy_loss_cfg=policy, mode="liger", **{name: value})  # type: ignore[arg-type]
    config = GRPOLossConfig(policy_loss_cfg=policy, mode="liger")
    labels, numbers = torch.zeros(1, 2, dtype=torch.long), -torch.ones(1, 2)
    batch = {"shifted_labels": labels, "old_logprobs": numbers, "advantages": numbers, "num_tokens": [2]}
    (context,) = GRPOLossContext.build_batches([config.build(batch | {"temperature": torch.ones(1, 2)})])
    with pytest.raises(ConfigError, match=r"mode='liger' takes one temperature.*Use mode='chunk'"):
        context.forward(torch.zeros(1, 2, 2), torch.eye(2))
    (context,) = GRPOLossContext.build_batches([config.build(batch)])
    with pytest.raises(ConfigError, match=r"mode='liger' cannot take -inf in head_bias.*Use mode='chunk'"):
        context.forward(torch.zeros(1, 2, 2), torch.eye(2), torch.tensor([0.0, -torch.inf]))


@pytest.mark.filterwarnings("ignore:a row .1, T. without")
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(step=steps(), garbage=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30]))
def test_garbage_changes_no_bit(loss: str, step: tuple[Rows, list[int], str, str], garbage: float) -> None:
    rows, parts, reduction, way = step
    config = configure(loss, reduction, way)
    clean, grads = evaluate(config, rows, parts, way, fill=-0.5)
    dirty, dirty_grads = evaluate(config, rows, parts, way, fill=garbage)
    assert torch.equal(clean, dirty)
    assert all(torch.equal(a, b) for a, b in zip(grads, dirty_grads, strict=True))


@pytest.mark.filterwarnings("ignore:a row .1, T. without")
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(step=steps(extreme=True))
def test_extreme_ratios_stay_finite(loss: str, step: tuple[Rows, list[int], str, str]) -> None:
    rows, parts, reduction, way = step
    single = [{name: v.float() if v.is_floating_point() else v for name, v in row.items()} for row in rows]
    config = configure(loss, reduction, way)
    for data in (rows, single):
        total, grads = evaluate(config, data, parts, way)
        assert bool(total.isfinite())
        assert all(bool(grad.isfinite().all()) for grad in grads)


def prompt_step(groups: list[int] | None, prompts: int | None) -> Any:
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, loss_reduction="prompt")
    batch = {
        "shifted_labels": torch.tensor([[0, 0, 0], [0, -100, -100], [0, 0, -100]]),
        "advantages": -torch.ones(3, 3),
        "group_ids": None if groups is None else torch.tensor(groups),
        "num_prompts": prompts,
    }
    return GRPOLossContext.build_batches([config.build(batch)])[0]


def test_prompts_weigh_alike() -> None:
    weights = prompt_step([1, 0, 1], 3).loss_kwargs.policy_loss_weight
    # two of three prompts have tokens: one token of prompt 0, five of prompt 1
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.1, 0.1], [0.5, 0.0, 0.0], [0.1, 0.1, 0.0]]))


@pytest.mark.parametrize(
    ("groups", "prompts", "words"),
    [
        (None, 3, "group_ids"),
        ([0, 1, 0], None, "num_prompts"),
        ([0, 3, 1], 3, "from 0 to 3"),
        ([0, -1, 1], 3, "from -1"),
    ],
)
def test_prompts_that_do_not_fit_are_named(groups: list[int] | None, prompts: int | None, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        prompt_step(groups, prompts)


def test_no_warning_where_nothing_is_odd() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in LOSSES:
            configure(loss, "sample", "chunk")


def test_a_total_below_one() -> None:
    """TRL's items of a step, cut down to a part of it, need not be a whole token."""
    config = GRPOLossConfig(on_policy=True)
    batch = {"shifted_labels": torch.tensor([[0, -100]]), "advantages": torch.ones(1)}
    (context,) = GRPOLossContext.build_batches([config.build(batch)], totals=Totals(tokens=0.25))
    assert context.loss_kwargs.policy_loss_weight.tolist() == [[4.0, 0.0]]
