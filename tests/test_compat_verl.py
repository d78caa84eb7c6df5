"""verl's functions: layouts, sample borders, counts, its registry, and what they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss.compat import verl
from rlloss.errors import BatchError, ConfigError, UnknownNameError

PROMPTS, RESPONSES = [3, 1, 2], [4, 2, 5]
TOTAL = sum(PROMPTS) + sum(RESPONSES)
COUNTS = {"dp_size": 2, "batch_num_tokens": 25, "global_batch_size": 6}


def jagged(rows: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def ids(lengths: list[int]) -> Tensor:
    return jagged([[1] * length for length in lengths], torch.int64)


def random_rows(seed: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]


def jagged_data() -> dict[str, Any]:
    names = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "values", "returns")
    data = {name: jagged(random_rows(seed, RESPONSES)) for seed, name in enumerate(names)}
    mask = jagged([[1, 1, 0, 1], [1, 1], [0, 1, 1, 1, 1]])
    return {"prompts": ids(PROMPTS), "responses": ids(RESPONSES), "response_mask": mask, **data, **COUNTS}


def outputs(seed: int = 9) -> dict[str, Tensor]:
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return {name: jagged(random_rows(seed + i, lengths)).requires_grad_() for i, name in enumerate(KINDS)}


KINDS = ("log_probs", "entropy", "values")
ACTOR = SimpleNamespace(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.02, loss_agg_mode="seq-mean-token-mean")
CRITIC = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean"}


def padded_data() -> dict[str, Any]:
    """The same as `jagged_data` with left-padded prompts and right-padded responses."""
    given = jagged_data()
    wide = {
        name: value.to_padded_tensor(math.nan if value.is_floating_point() else 0)
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    attention = torch.zeros(3, max(PROMPTS) + max(RESPONSES), dtype=torch.int64)
    for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        attention[row, max(PROMPTS) - p : max(PROMPTS) + r] = 1
    wide["response_mask"] = wide["response_mask"].nan_to_num()
    return {**wide, "attention_mask": attention, **COUNTS}


def gradients(data: Any, flat: bool = False) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    given = outputs()
    seen = {name: value.values() if flat else value for name, value in given.items()}
    actor, found = verl.ppo_loss(ACTOR, seen, data)
    critic, more = verl.value_loss(CRITIC, seen, data)
    (actor + critic).backward()
    return [actor.item(), critic.item()], [given[name].grad.values() for name in KINDS], found | more


def same(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    numbers = [
        {name: m.aggregate() if isinstance(m, verl.Metric) else m for name, m in found[2].items()}
        for found in (one, other)
    ]
    assert numbers[0] == pytest.approx(numbers[1])


def test_padded_and_flat_and_jagged_are_one() -> None:
    expected = gradients(jagged_data())
    same(gradients(padded_data()), expected)
    same(gradients(jagged_data(), flat=True), expected)


def test_tensordict_equals_dict() -> None:
    tensordict = pytest.importorskip("tensordict")
    given = jagged_data()
    data = tensordict.TensorDict({k: v for k, v in given.items() if isinstance(v, Tensor)}, batch_size=[3])
    for name, value in COUNTS.items():
        data.set_non_tensor(name, value)
    same(gradients(data), gradients(given))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_add_up(mode: str) -> None:
    config = SimpleNamespace(**{**vars(ACTOR), "loss_agg_mode": mode, "loss_scale_factor": 8})
    whole, _ = verl.ppo_loss(config, outputs(), jagged_data())
    total = 0.0
    for row in range(3):
        data = {k: jagged([v.unbind()[row]], v.dtype) if isinstance(v, Tensor) else v for k, v in jagged_data().items()}
        part = {name: jagged([value.unbind()[row].detach()]) for name, value in outputs().items()}
        total += verl.ppo_loss(config, part, data)[0].item()
    assert total == pytest.approx(whole.item(), rel=1e-12)


def test_the_shift_ends_at_the_border_of_a_sample() -> None:
    """A counted first token has no log-prob of its own; rolled over the whole row it would land on its neighbour."""
    log_probs = jagged([[-1.0, -2.0, -100.0], [-3.0, -200.0]]).requires_grad_()
    data = {"loss_mask": jagged([[1, 1, 1], [1, 1]]), "dp_size": 1, "batch_num_tokens": 3}
    loss, _ = verl.sft_loss(None, {"log_probs": log_probs}, data)
    loss.backward()
    assert loss.item() == pytest.approx(2.0)
    torch.testing.assert_close(log_probs.grad.values() * -3, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).double())


def test_sft_on_padded_log_probs() -> None:
    log_probs = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]], dtype=torch.float64)
    data = {"response_mask": torch.tensor([[1, 0], [1, 1]]), "dp_size": 2, "batch_num_tokens": 6}
    assert verl.sft_loss(None, {"log_probs": log_probs}, data)[0].item() == pytest.approx(2.0)


def test_slices_take_no_entry_of_a_neighbour() -> None:
    data = {"prompts": ids([2, 1]), "responses": ids([0, 2])}
    values = torch.arange(5.0)
    assert verl.no_padding_2_padding(values, data).tolist() == [[0.0, 0.0], [2.0, 3.0]]
    assert verl.slice_response_from_unpad_output(values, {**data, "max_response_len": 3}).shape == (2, 3)
    assert verl._slice_response_from_unpad_output is verl.slice_response_from_unpad_output
    wide = verl.no_padding_2_padding(torch.arange(10.0).reshape(5, 2), data)
    assert wide[1].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    with pytest.raises(BatchError, match="4 entries for 5 tokens"):
        verl.no_padding_2_padding(values[:4], data)
    with pytest.raises(BatchError, match="shortest prompt"):
        verl.no_padding_2_padding(values, {"prompts": ids([2, 0]), "responses": ids([1, 2])})


def test_left_right_2_no_padding_writes_nothing() -> None:
    attention = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    data = {"input_ids": torch.arange(8).reshape(2, 4), "attention_mask": attention}
    data["response_mask"] = torch.tensor([[1, 1], [1, 0]])
    before = dict(data)
    found = verl.left_right_2_no_padding(data)
    assert data == before
    assert [row.tolist() for row in found["input_ids"].unbind()] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_agg_loss_survives_garbage(mode: str) -> None:
    loss = torch.tensor([[1.0, math.nan], [2.0, 3.0], [math.inf, math.nan]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    found = verl.agg_loss(loss, mask, mode)
    found.backward()
    expected = {"token-mean": 2.0, "token-sum": 6.0, "seq-mean-token-sum": 3.0, "seq-mean-token-mean": 1.75}
    assert found.item() == pytest.approx(expected[mode])
    assert loss.grad.isfinite().all()
    assert verl.agg_loss(loss, mask, mode, dp_size=4, batch_num_tokens=6, global_batch_size=6).isfinite()


def test_agg_loss_mistakes() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(UnknownNameError, match="token-mean"):
        verl.agg_loss(ones, ones, "token-men")
    with pytest.raises(BatchError, match="batch_num_tokens"):
        verl.agg_loss(ones, ones, "token-mean", dp_size=2)
    with pytest.raises(BatchError, match="global_batch_size"):
        verl.agg_loss(ones, ones, "seq-mean-token-sum", dp_size=2, batch_num_tokens=4)
    assert verl.agg_loss(ones, torch.zeros(1, 2), "token-mean").item() == 0.0
    assert verl.agg_loss(ones, torch.zeros(1, 2), "token-mean", batch_num_tokens=0).item() == 0.0
    assert verl.agg_loss(ones, ones, "seq-mean-token-sum-norm", loss_scale_factor=8).item() == 0.25


def test_a_policy_loss_in_verls_form() -> None:
    @verl.register_policy_loss("own_ratio")
    def own_ratio(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        loss = -advantages * (log_prob - old_log_prob).exp() * rollout_is_weights
        return verl.agg_loss(loss, response_mask, loss_agg_mode, **config.global_batch_info), {"own/metric": 1.0}

    wide = SimpleNamespace(**vars(ACTOR), clip_ratio=1.0, clip_ratio_high=99.0, clip_ratio_c=1e9)
    own = SimpleNamespace(**vars(wide), policy_loss={"loss_mode": "own_ratio"})
    before = dict(vars(own))
    expected, found = outputs(), outputs()
    loss, metrics = verl.ppo_loss(own, found, jagged_data())
    plain, _ = verl.ppo_loss(wide, expected, jagged_data())
    loss.backward()
    plain.backward()
    # agg_loss hands over no float64 tensor but the losses, so its token weights are float32.
    assert loss.item() == pytest.approx(plain.item(), rel=1e-7)
    torch.testing.assert_close(
        found["log_probs"].grad.values(), expected["log_probs"].grad.values(), rtol=1e-6, atol=1e-7
    )
    assert metrics["own/metric"] == 1.0
    assert vars(own) == before
    assert verl.get_policy_loss_fn("own_ratio") is not None
    with pytest.raises(ConfigError, match="own_ratio"):
        verl.register_policy_loss("own_ratio")(lambda **_: None)


def test_metrics() -> None:
    metric = verl.Metric("sum", 1.0)
    metric.append(torch.tensor([2.0]))
    metric.append(verl.Metric(verl.AggregationType.SUM, [3.0, 4.0]))
    assert (metric.aggregate(), metric.values) == (10.0, [1.0, 2.0, 3.0, 4.0])
    assert verl.reduce_metrics({"a": [1.0, 3.0], "b_max": metric}) == {"a": 2.0, "b_max": 10.0}
    for wrong in (lambda: metric.append(verl.Metric("max", 1.0)), lambda: verl.Metric("median")):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match=r"\[1, 4\]"):
        verl.Metric.aggregate_dp([metric, verl.Metric("sum", 1.0)])


@pytest.mark.parametrize(("coef", "kind", "value"), [(0.0, None, 0.3678794), (0.5, "k2", 0.5), (0.0, "kl", 1.0)])
def test_the_reported_kl_needs_no_coefficient(coef: float, kind: str | None, value: float) -> None:
    """log-prob -1 and reference -2 at each token of each of two micro-batches: half of the mean in each."""
    ids = [torch.ones(1, length, dtype=torch.int64) for length in (1, 2)]
    data = {"prompts": ids[0], "responses": ids[1], "attention_mask": torch.ones(1, 3), "response_mask": ids[1]}
    data |= {"old_log_probs": torch.full((1, 2), -1.0), "advantages": torch.zeros(1, 2), "batch_num_tokens": 4}
    data["ref_log_prob"] = torch.full((1, 2), -2.0)
    config = SimpleNamespace(use_kl_loss=True, kl_loss_coef=coef, kl_loss_type=kind)
    loss, found = verl.ppo_loss(config, {"log_probs": torch.full((3,), -1.0)}, data)
    assert float(loss) == pytest.approx(coef * value / 2, abs=1e-6)
    assert found["kl_loss"].aggregate() == pytest.approx(value / 2, abs=1e-6)
    assert (found["kl_loss"].aggregation, found["kl_coef"]) == (verl.AggregationType.SUM, coef)
    del data["ref_log_prob"]
    with pytest.raises(BatchError, match="'ref_log_prob'"):
        verl.ppo_loss(config, {"log_probs": torch.full((3,), -1.0)}, data)


def test_missing_entries_are_named() -> None:
    data = jagged_data()
    del data["advantages"]
    with pytest.raises(BatchError, match=r"'advantages'.*'prompts'"):
        verl.ppo_loss(ACTOR, outputs(), data)
    assert verl.kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), "k1").item() == 1.0
