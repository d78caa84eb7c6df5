"""Advantage estimators against plain loops, and what they do with groups of one, holes, NaN and any order of ids."""

from __future__ import annotations

import math
import statistics
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlloss
from rlloss.errors import BatchError, ConfigError, UnknownNameError
from rlloss.functional.groups import Groups
from rlloss.functional.outcome_advantages import length_scaled_grpo_advantages, passk_analytic_advantages
from rlloss.functional.rewards import combine_rewards, repetition_penalty, soft_overlong_penalty
from rlloss.functional.token_advantages import optimal_token_baseline_advantages, rewards_to_go, squared_score_norms

Rewards = list[float]


def loo(group: Rewards) -> Rewards:
    return [r - (math.fsum(group) - r) / (len(group) - 1) for r in group]


def grpo(group: Rewards) -> Rewards:
    mean, std = statistics.fmean(group), statistics.stdev(group)
    return [(r - mean) / (std + 1e-6) for r in group]


def centred(group: Rewards) -> Rewards:
    return [r - statistics.fmean(group) for r in group]


def opo(group: Rewards) -> Rewards:
    lengths = [1.0 + i for i in range(len(group))]
    baseline = math.fsum(n * r for n, r in zip(lengths, group, strict=True)) / math.fsum(lengths)
    return [r - baseline for r in group]


def passk(group: Rewards) -> Rewards:
    first, second = sorted(group, reverse=True)[:2]
    return [
        (first - second) / (statistics.stdev(group) + 1e-6) if r == first and first > second else 0.0 for r in group
    ]


ORACLES = {"rloo": loo, "grpo": grpo, "dr_grpo": centred, "opo": opo, "passk": passk}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=5), min_size=1, max_size=4), st.randoms())
def test_estimators_are_those_of_plain_loops_in_any_order(groups: list[list[int]], random: Any) -> None:
    rows = [(100 - 3 * g, float(r), 1 + i, g, i) for g, group in enumerate(groups) for i, r in enumerate(group)]
    random.shuffle(rows)
    ids = torch.tensor([row[0] for row in rows])
    rewards = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    for name, oracle in ORACLES.items():
        arguments: dict[str, Any] = {"rewards": rewards, "group_ids": ids}
        if name == "opo":
            arguments["lengths"] = torch.tensor([row[2] for row in rows])
        found = rlloss.compute_advantages(name, **arguments)
        for (_, _, _, g, i), value in zip(rows, found.tolist(), strict=True):
            assert value == pytest.approx(oracle([float(r) for r in groups[g]])[i], abs=1e-9), name


def test_i09_eight_rewards_three_of_them_ones() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    ids = torch.zeros(8, dtype=torch.int64)
    right = {"rloo": (0.7142857, -0.4285714), "grpo": (1.2076124, -0.7245674)}
    for name, (one, zero) in right.items():
        found = rlloss.compute_advantages(name, rewards=rewards, group_ids=ids).tolist()
        assert found == pytest.approx([one] * 3 + [zero] * 5, abs=3e-6)
    biased = rlloss.compute_advantages("scaled", rewards=rewards, group_ids=ids, std="biased", eps=0.0)
    assert biased.tolist() == pytest.approx([1.2909944] * 3 + [-0.7745967] * 5, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "opo", "gpg", "passk", "length_scaled_grpo"])
def test_i03_a_group_of_one_is_finite(name: str) -> None:
    given_: dict[str, Any] = {"rewards": torch.tensor([1.0, 2.0, 0.0]), "group_ids": torch.tensor([5, 1, 1])}
    if name in ("opo", "length_scaled_grpo"):
        given_["lengths"] = torch.tensor([3, 1, 2])
    with pytest.warns(UserWarning, match="1 of 2 groups have one sequence"):
        found = rlloss.compute_advantages(name, **given_)
    assert float(found[0]) == 0.0
    assert bool(found.isfinite().all())
    if name != "passk":
        raw = rlloss.compute_advantages(name, **given_, singleton="raw")
        assert float(raw[0]) == pytest.approx(1.5 if name == "gpg" else 1.0)


def test_i03_a_nan_reward_is_a_named_error_or_left_out() -> None:
    rewards, ids = torch.tensor([1.0, math.nan, 0.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    for name in ("grpo", "rloo", "dr_grpo", "passk", "gpg"):
        with pytest.raises(BatchError, match=r"rewards\[1\] is nan"):
            rlloss.compute_advantages(name, rewards=rewards, group_ids=ids)
    left = rlloss.compute_advantages("rloo", rewards=rewards, group_ids=ids, nan="exclude")
    assert left.tolist() == [1.0, 0.0, -1.0, -2.0, 2.0]
    scaled = rlloss.compute_advantages("scaled", rewards=rewards, group_ids=ids, scale="none")
    assert scaled.tolist() == [0.5, 0.0, -0.5, -1.0, 1.0]
    with pytest.raises(BatchError, match=r"is inf"):
        rlloss.compute_advantages("scaled", rewards=rewards.nan_to_num(math.inf), group_ids=ids)


def test_a_group_without_tokens_and_a_batch_without_sequences() -> None:
    found = rlloss.compute_advantages(
        "opo",
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([2, 2]),
        lengths=torch.tensor([0, 0]),
    )
    assert found.tolist() == [0.5, -0.5]
    nothing = {"rewards": torch.zeros(0), "group_ids": torch.zeros(0, dtype=torch.int64)}
    for name in ("grpo", "rloo", "scaled", "dr_grpo", "passk", "passk_analytic", "gpg", "gdpo"):
        assert rlloss.compute_advantages(name, **nothing).shape == (0,)


def test_i05_whitening_one_token_or_none() -> None:
    for mask in ([[1, 0]], [[0, 0]]):
        found = rlloss.compute_advantages(
            "reinforce_plus_plus", rewards=torch.tensor([[2.0, 3.0]]), mask=torch.tensor(mask)
        )
        assert found.tolist() == [[0.0, 0.0]]
    alone = {"rewards": torch.tensor([2.0]), "group_ids": torch.tensor([0]), "mask": torch.zeros(1, 2)}
    assert rlloss.compute_advantages("reinforce_plus_plus_baseline", **alone).tolist() == [[0.0, 0.0]]


def test_i07_whitening_is_over_tokens() -> None:
    rewards, mask = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[1, 0, 0], [1, 1, 1]])
    found = rlloss.compute_advantages(
        "reinforce_plus_plus_baseline", rewards=rewards, group_ids=torch.tensor([0, 0]), mask=mask
    )
    assert found[0, 0] == pytest.approx(1.5, abs=1e-7)
    assert found[1].tolist() == pytest.approx([-0.5] * 3, abs=1e-7)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-9)


def test_a_hole_is_no_time_step_and_garbage_in_it_is_ignored() -> None:
    rewards = torch.tensor([[0.0, math.nan, 1.0, math.inf]])
    found = rewards_to_go(rewards, torch.tensor([[1, 0, 1, 0]]), gamma=0.5)
    assert found.tolist() == [[0.5, 0.0, 1.0, 0.0]]
    with pytest.raises(BatchError, match=r"rewards\[0, 1\] is nan"):
        rewards_to_go(rewards, torch.tensor([[1, 1, 1, 0]]))


def test_the_optimal_baseline_of_a_place_by_loops() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    log_prob = torch.tensor([[-0.5, -1.0, -0.3], [-2.0, -0.7, -9.0]], dtype=torch.float64)
    squares = torch.tensor([[0.5, 0.3, 0.6], [0.2, 0.4, 0.9]], dtype=torch.float64)
    found = rlloss.compute_advantages(
        "optimal_token_baseline",
        rewards=rewards,
        mask=mask,
        group_ids=torch.tensor([3, 3]),
        squared_norms=squared_score_norms(log_prob, squares),
    )
    returns, weights = [[1.0, 1.0, 1.0], [2.0, 2.0]], []
    for i, length in enumerate((3, 2)):
        score = [1 - 2 * math.exp(float(log_prob[i, t])) + float(squares[i, t]) for t in range(length)]
        weights.append([math.fsum(score[: t + 1]) for t in range(length)])
    for t in range(2):
        top = math.fsum(returns[i][t] * weights[i][t] for i in range(2))
        baseline = top / math.fsum(weights[i][t] for i in range(2))
        for i in range(2):
            assert float(found[i, t]) == pytest.approx(returns[i][t] - baseline, abs=1e-6)
    assert float(found[0, 2]) == 1.0
    assert float(found[1, 2]) == 0.0


def test_an_empty_response_is_no_company_for_the_optimal_baseline() -> None:
    norms = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    found = optimal_token_baseline_advantages(
        rewards=torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64),
        mask=torch.tensor([[1, 1], [0, 0]]),
        group_ids=torch.tensor([0, 0]),
        squared_norms=norms,
    )
    assert found.tolist() == [[3.0, 2.0], [0.0, 0.0]]
    assert not found.requires_grad


def test_pass_at_k_of_groups_of_equal_answers_is_zero() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    rewards = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 0, 0])
    found = rlloss.compute_advantages("passk_analytic", rewards=rewards, group_ids=ids, k=2).tolist()
    assert found[:6] == [0.0] * 6
    rho = 1 - 1 / 3
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    assert found[6] == pytest.approx((1 - rho) / sigma)
    assert found[7] == pytest.approx((1 - rho - 1 / 2) / sigma)


def test_gae_by_its_name_gives_advantages_alone() -> None:
    rewards, values = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    found = rlloss.compute_advantages(
        "gae", rewards=rewards, values=values, mask=torch.tensor([[1, 0, 1]]), gamma=0.9, lam=0.8
    )
    last = 1.0 - 0.25
    assert found[0].tolist() == pytest.approx([0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last, 0.0, last])


def test_names() -> None:
    assert {"gae", "grpo", "rloo", "opo", "passk", "gdpo", "remax", "gpg", "dr_grpo"} <= set(rlloss.advantage_names())
    with pytest.raises(UnknownNameError, match="Did you mean 'rloo'"):
        rlloss.compute_advantages("rlo", rewards=torch.zeros(1))
    with pytest.raises(BatchError, match="needs group_ids"):
        rlloss.compute_advantages("rloo", rewards=torch.zeros(1))
    with pytest.raises(BatchError, match="Did you mean 'group_ids'"):
        rlloss.compute_advantages("rloo", rewards=torch.zeros(1), group_id=torch.zeros(1))

    @rlloss.register_advantage("twice")
    def twice(rewards: Tensor) -> Tensor:
        return 2 * rewards

    try:
        assert rlloss.compute_advantages("twice", rewards=torch.ones(1)).tolist() == [2.0]
        with pytest.raises(ConfigError, match="registered already"):
            rlloss.register_advantage("twice")(twice)
    finally:
        rlloss.unregister_advantage("twice")


def test_inputs_that_do_not_fit_are_named() -> None:
    ids = torch.tensor([0, 0])
    with pytest.raises(BatchError, match=r"must both be \[N\]"):
        rlloss.compute_advantages("rloo", rewards=torch.zeros(3), group_ids=ids)
    with pytest.raises(BatchError, match="expected integers"):
        rlloss.compute_advantages("rloo", rewards=torch.zeros(2), group_ids=torch.zeros(2))
    with pytest.raises(BatchError, match="none negative"):
        rlloss.compute_advantages("opo", rewards=torch.ones(2), group_ids=ids, lengths=torch.tensor([1, -1]))
    with pytest.raises(ConfigError, match="expected 'group'"):
        rlloss.compute_advantages("scaled", rewards=torch.zeros(2), group_ids=ids, scale="groups")
    with pytest.raises(BatchError, match=r"expected \[2\] finite"):
        rlloss.compute_advantages("remax", rewards=torch.zeros(2, 1), mask=torch.ones(2, 1), baselines=torch.zeros(3))


def test_reward_helpers() -> None:
    lengths = torch.tensor([6, 7, 10, 12])
    assert soft_overlong_penalty(lengths, 10, 4).tolist() == [0.0, -0.25, -1.0, -1.0]
    assert repetition_penalty([[1, 1, 1, 1], [1, 2]], 3, -2.0).tolist() == [-1.0, 0.0]
    assert soft_overlong_penalty(lengths, 10, 1).tolist() == [0.0, 0.0, -1.0, -1.0]
    with pytest.raises(ConfigError, match="cache=0"):
        soft_overlong_penalty(lengths, 10, 0)
    with pytest.raises(ConfigError, match="max_penalty"):
        repetition_penalty([], 3, 1.0)
    rewards = torch.tensor([[1.0, math.nan], [math.nan, math.nan]])
    found = combine_rewards(rewards, torch.tensor([2.0, 1.0]))
    assert float(found[0]) == 2.0
    assert math.isnan(float(found[1]))


def test_nothing_has_a_graph() -> None:
    rewards = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("grpo", "rloo", "scaled", "dr_grpo", "passk", "gpg", "gdpo"):
            assert not rlloss.compute_advantages(name, rewards=rewards, group_ids=torch.arange(4)).requires_grad


def test_groups_of_one_and_of_none_have_no_spread() -> None:
    groups = Groups(torch.tensor([2.0, 1.0, 3.0, math.nan]), torch.tensor([5, 2, 2, 9]), nan="exclude")
    assert groups.std().tolist() == [0.0, pytest.approx(math.sqrt(2.0)), pytest.approx(math.sqrt(2.0)), 0.0]
    assert groups.std(biased=True).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert groups.values.tolist() == [2.0, 1.0, 3.0, 0.0]
    assert groups.centred().tolist() == [0.0, -1.0, 1.0, 0.0]


PAIR, ONE_GROUP = torch.tensor([1.0, 3.0]).double(), torch.zeros(2, dtype=torch.long)


def test_defaults_and_edges_of_the_estimators() -> None:
    root = math.sqrt(2.0)

    def found(name: str, rewards: Any = PAIR, ids: Any = ONE_GROUP, **more: Any) -> list[float]:
        return rlloss.compute_advantages(name, rewards=rewards, group_ids=ids, **more).tolist()

    close = lambda *numbers: pytest.approx(numbers, rel=1e-10, abs=1e-15)  # noqa: E731
    assert found("scaled", scale="batch", eps=0.5) == close(-1 / (root + 0.5), 1 / (root + 0.5))
    assert found("scaled", scale="batch", std="biased", eps=0.5) == close(-1 / 1.5, 1 / 1.5)
    scaled = [sign / (root + 1e-8) * length / 32768 for sign, length in ((-1, 10), (1, 20))]
    assert length_scaled_grpo_advantages(PAIR, ONE_GROUP, torch.tensor([10, 20])).tolist() == close(*scaled)
    assert found("opo", lengths=torch.tensor([1, 0])) == close(0.0, 2.0)
    assert found("gpg", f_norm=4.0) == close(-0.25, 0.25)
    assert found("gpg", torch.tensor([0.0, 2.0]).double()) == close(-2.0, 2.0)
    assert found("gpg", torch.zeros(2)) == [0.0, 0.0]


def test_edges_of_pass_at_k() -> None:
    five, ids = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]).double(), torch.zeros(5, dtype=torch.long)
    default = passk_analytic_advantages(five, ids)
    assert torch.equal(default, passk_analytic_advantages(five, ids, 4))
    assert not torch.equal(default, passk_analytic_advantages(five, ids, 5))
    assert passk_analytic_advantages(five[:4], ids[:4], 4).tolist() == [0.0] * 4, "of n answers drawn one is right"
    few = passk_analytic_advantages(five[:3], ids[:3], 4, eps=0.0).tolist()
    assert few == pytest.approx([(2 / 3) / math.sqrt(2 / 9)] * 3)
    assert passk_analytic_advantages(five, ids, 1).isfinite().all()
    with pytest.raises(ConfigError, match="k=0"):
        passk_analytic_advantages(five, ids, 0)


def test_gdpo_whitens_over_what_counts() -> None:
    rewards, ids = torch.tensor([[1.0, 5.0], [3.0, 9.0]]).double(), ONE_GROUP

    def found(lengths: list[float] | None, eps: float = 0.5, normalize: bool = False) -> list[float]:
        given = None if lengths is None else torch.tensor(lengths)
        return rlloss.compute_advantages(
            "gdpo", rewards=rewards, group_ids=ids, lengths=given, eps=eps, normalize_std=normalize
        ).tolist()

    # The centred sums are -3 and 3.
    assert found(None) == pytest.approx([-3 / (math.sqrt(18.0) + 0.5), 3 / (math.sqrt(18.0) + 0.5)])
    assert found([1.0, 0.0]) == [0.0, 0.0]
    assert found([2.0, 0.0]) == [0.0, 0.0]
    assert found([1.0, 1.0]) == found(None)


def test_gdpo_leaves_out_a_sequence_without_a_reward_and_survives_equal_groups() -> None:
    rewards, ids, lengths = torch.tensor([1.0, 3.0, math.nan]), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    whole = rlloss.compute_advantages("gdpo", rewards=rewards, group_ids=ids, lengths=lengths)
    part = rlloss.compute_advantages("gdpo", rewards=rewards[:2], group_ids=ids[:2], lengths=lengths[:2])
    assert whole.tolist() == [*part.tolist(), 0.0]
    assert rlloss.compute_advantages("gdpo", rewards=torch.ones(3), group_ids=ids).tolist() == [0.0] * 3


def test_a_batch_of_one_reward_has_no_spread() -> None:
    one = rlloss.compute_advantages("scaled", rewards=torch.ones(1), group_ids=torch.zeros(1).long(), scale="batch")
    assert one.tolist() == [0.0]


def test_token_estimators_have_no_graph_and_no_discount_by_default() -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, 5.0]]).double().requires_grad_()
    mask = torch.ones(2, 2)
    plain = rlloss.compute_advantages("reinforce_plus_plus", rewards=rewards, mask=mask)
    assert torch.equal(
        plain, rlloss.compute_advantages("reinforce_plus_plus", rewards=rewards.detach(), mask=mask, gamma=1.0)
    )
    same = rlloss.compute_advantages("reinforce_plus_plus", rewards=rewards, mask=mask, gamma=0.5)
    assert not torch.allclose(plain, same)
    remax = rlloss.compute_advantages("remax", rewards=rewards, mask=mask, baselines=torch.zeros(2))
    assert not remax.requires_grad
    assert remax.tolist() == [[3.0, 2.0], [5.0, 5.0]]
    one = torch.tensor([[-0.5]]).requires_grad_()
    assert not squared_score_norms(one, one.exp(), one.exp()).requires_grad


def test_defaults_of_the_repetition_penalty() -> None:
    words = [[1, 1, 1, 1, 1], [1, 2, 3, 4, 5]]
    assert repetition_penalty(words).tolist() == repetition_penalty(words, 3, -1.0).tolist()
    assert repetition_penalty(words).tolist()[0] == pytest.approx(-2 / 3)
    assert repetition_penalty(words, 1, 0.0).tolist() == [0.0, 0.0]
    for wrong in ((0, -1.0), (3, 0.5)):
        with pytest.raises(ConfigError):
            repetition_penalty(words, *wrong)
