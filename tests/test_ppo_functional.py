"""PPO's functional parts against plain loops, and the faults of kinds I and J that users reported."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracles_ppo as oracle
import rlloss
from rlloss.errors import BatchError, ConfigError, UnknownNameError
from rlloss.functional.controllers import AdaptiveKLController, FixedKLController
from rlloss.functional.gae import gae
from rlloss.functional.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlloss.functional.moments import RunningMoments, clip_scores
from rlloss.functional.ppo_rewards import compute_rewards, full_kl, last_token
from rlloss.functional.value import value_loss

MASK = [[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]


def numbers(seed: int, spoil: bool = True) -> tuple[Tensor, list[list[float]]]:
    """Random numbers `[4, 6]` with NaN and infinities where the mask is 0, and the same without them."""
    clean = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e300, math.nan, -1e300], dtype=torch.float64)
    return torch.where(mask() != 0, clean, garbage) if spoil else clean, clean.tolist()


def mask() -> Tensor:
    return torch.tensor(MASK)


def same(found: Tensor, expected: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_statistics(shift_mean: bool) -> None:
    values, clean = numbers(1)
    counted = [x for row, ms in zip(clean, MASK, strict=True) for x, m in zip(row, ms, strict=True) if m]
    mean, variance = oracle.moments(counted)
    same(masked_sum(values, mask()), math.fsum(counted))
    same(masked_mean(values, mask()), mean)
    same(masked_mean(values, mask() != 0), mean)
    same(masked_mean(values, mask(), 1)[2], 0.0)
    same(masked_var(values, mask()), variance)
    same(masked_var(values, mask(), unbiased=False), oracle.moments(counted, False)[1])
    same(masked_whiten(values, mask(), shift_mean), oracle.whiten(clean, MASK, shift_mean))


def test_masked_mean_keeps_a_graph_and_garbage_has_no_gradient() -> None:
    values, _ = numbers(2)
    values.requires_grad_()
    masked_mean(values, mask()).backward()
    same(values.grad, [[m / 9 for m in row] for row in MASK])


def test_whitening_keeps_its_digits_beside_a_large_mean() -> None:
    values = torch.tensor([[1e6 + 1.0, 1e6 - 1.0]], dtype=torch.float32)
    same(masked_whiten(values, torch.ones(1, 2)).double(), [[math.sqrt(0.5), -math.sqrt(0.5)]], 1e-6)


@pytest.mark.parametrize("holes", ["skip", "steps"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae(gamma: float, lam: float, holes: str) -> None:
    rewards, clean_rewards = numbers(3)
    values, clean_values = numbers(4)
    advantages, returns = gae(rewards, values, mask(), gamma, lam, holes)
    expected = oracle.gae(clean_rewards, clean_values, MASK, gamma, lam, holes)
    same(advantages, expected[0])
    same(returns, expected[1])


def test_gae_of_a_row_with_a_hole_equals_the_row_without_it() -> None:
    rewards, values = torch.randn(1, 4), torch.randn(1, 4)
    whole = gae(rewards, values, torch.ones(1, 4), 0.9, 0.8)[0]
    spaced = [0, 1, 4, 6]
    holes = torch.zeros(1, 7).index_fill(1, torch.tensor(spaced), 1.0)
    wide_rewards, wide_values = torch.randn(1, 7), torch.randn(1, 7)
    wide_rewards[:, spaced], wide_values[:, spaced] = rewards, values
    assert torch.equal(gae(wide_rewards, wide_values, holes, 0.9, 0.8)[0][:, spaced], whole)


def test_gae_refuses_what_does_not_fit() -> None:
    with pytest.raises(BatchError, match=r"\(2, 3\).*\(2, 4\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    with pytest.raises(UnknownNameError, match="skip"):
        gae(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), holes="skips")
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0))[0].shape == (2, 0)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_rewards(kind: str) -> None:
    log_probs, clean = numbers(5)
    refs, clean_refs = numbers(6)
    scores = [1.5, -0.75, 99.0, 0.25]
    found = compute_rewards(torch.tensor(scores), log_probs, refs, mask(), 0.2, kind)
    same(found.rewards, oracle.rewards(scores, clean, clean_refs, MASK, 0.2, kind))
    same(found.penalties, oracle.rewards([0.0] * 4, clean, clean_refs, MASK, 0.2, kind))
    assert torch.equal(found.rewards[2], torch.zeros(6, dtype=torch.float64))
    spread = torch.where(last_token(mask()), torch.tensor(scores)[:, None], math.nan)
    again = compute_rewards(torch.where(mask() != 0, spread.nan_to_num(), math.nan), log_probs, refs, mask(), 0.2, kind)
    same(again.rewards, found.rewards.tolist())


def test_full_kl_of_the_vocabulary() -> None:
    p = torch.tensor([0.5, 0.5, 0.0]).double().log().expand(1, 2, 3)
    q = torch.tensor([0.25, 0.5, 0.25]).double().log().expand(1, 2, 3)
    same(full_kl(p, q), [[0.5 * math.log(2.0)] * 2])
    found = compute_rewards(torch.tensor([1.0]), p, q, torch.tensor([[1, 0]]), 0.1, "full")
    same(found.rewards, [[1.0 - 0.05 * math.log(2.0), 0.0]])
    with pytest.raises(BatchError, match="vocabulary"):
        compute_rewards(torch.tensor([1.0]), p[0], q[0], torch.ones(2, 3), 0.1, "full")
    with pytest.raises(BatchError, match="scores"):
        compute_rewards(torch.ones(3), p[..., 0], q[..., 0], torch.ones(1, 2), 0.1)


def test_kl_controllers() -> None:
    fixed, adaptive = FixedKLController(0.3), AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    expected = 0.2
    for current, error in ((12.0, 0.2), (5.4, -0.1), (-3.0, -0.2), (math.nan, 0.0)):
        fixed.update(current, 8)
        adaptive.update(current, 8)
        expected *= 1 + error * 8 / 100
        assert (fixed.value, adaptive.value) == (0.3, pytest.approx(expected, rel=1e-12))
    twin = AdaptiveKLController(1.0, 6.0, 100.0)
    twin.load_state_dict(adaptive.state_dict())
    assert twin.value == adaptive.value
    with pytest.raises(ConfigError, match="FixedKLController"):
        AdaptiveKLController(0.2, target=0.0, horizon=1.0)


def test_running_moments() -> None:
    moments, seen = RunningMoments(), []
    assert (moments.mean, moments.std) == (0.0, 1.0)
    for batch in ([1.0, 2.0, 4.0], [math.nan], [-3.0], [0.5, 0.5]):
        moments.update(torch.tensor(batch))
        seen += [x for x in batch if x == x]
        mean, variance = oracle.moments(seen)
        assert (moments.mean, moments.std) == (pytest.approx(mean), pytest.approx(math.sqrt(variance) or 1.0))
    twin = RunningMoments()
    twin.load_state_dict(moments.state_dict())
    same(twin.scale(torch.tensor([2.0]).double(), center=True), [(2.0 - mean) / math.sqrt(variance)])
    same(twin.scale(torch.tensor([2.0]).double()), [2.0 / math.sqrt(variance)])
    assert clip_scores(torch.tensor([-3.0, 0.5]), 1.0).tolist() == [-1.0, 0.5]
    assert clip_scores(torch.tensor([-3.0]), None).tolist() == [-3.0]


@pytest.mark.parametrize("delta", [None, 0.7])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss(clip: float | None, delta: float | None) -> None:
    generator = torch.Generator().manual_seed(7)
    values, targets, old = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    loss, found = value_loss(values, targets, old, clip, delta)
    loss.sum().backward()
    rows = list(zip(values.tolist(), targets.tolist(), old.tolist(), strict=True))
    expected = [oracle.value_loss(*row, clip, delta) for row in rows]
    same(loss.detach(), [row[0] for row in expected])
    same(values.grad, [row[1] for row in expected])
    same(found["explained_variance"].compute(), oracle.explained_variance(values.tolist(), targets.tolist()))
    if clip is not None:
        binds = [row[2] for row in expected]
        assert 0 < sum(binds) < 40
        same(found["value_clip_frac"].compute(), sum(binds) / 40)


def test_value_loss_far_away_stays_finite_and_nan_stays_visible() -> None:
    for delta in (None, 1.0):
        values = torch.tensor([1e15, math.nan], requires_grad=True)
        loss, _ = value_loss(values, torch.zeros(2), torch.zeros(2), 0.2, delta)
        loss.sum().backward()
        assert loss[0].isfinite() and loss[1].isnan()
        assert values.grad[0].isfinite() and values.grad[1].isnan()


def test_i01_value_in_a_masked_slot_does_not_bootstrap() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 0]]), 1.0, 0.95)
    same(advantages.double(), [[0.95, 1.0, 0.0]], 1e-6)
    same(returns.double(), [[0.95, 1.0, 0.0]], 1e-6)


def test_i05_whitening_of_one_number_and_of_none() -> None:
    values = torch.tensor([[3.0, math.nan]])
    assert masked_whiten(values, torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert masked_whiten(values, torch.tensor([[1, 0]]), shift_mean=False).tolist() == [[3.0, 0.0]]
    assert masked_whiten(values, torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]
    assert (masked_var(values, torch.tensor([[1, 0]])), masked_mean(values, torch.zeros(1, 2))) == (0.0, 0.0)


def test_i07_whitening_is_over_tokens() -> None:
    advantages = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    counted = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert masked_mean(advantages, counted) == -0.5
    whitened = masked_whiten(advantages, counted)
    same(masked_mean(whitened, counted).double(), 0.0, 1e-6)
    same(masked_var(whitened, counted).double(), 1.0, 1e-6)


def test_reward_whitening_does_not_leak_through_the_recursion() -> None:
    """TRL whitens padding into `mean (1 - 1/std)`, which then flows back into valid tokens."""
    rewards, values = torch.tensor([[5.0, 1.0, 0.0, 0.0]]), torch.zeros(1, 4)
    long = torch.tensor([[1, 1, 0, 0]])
    short = gae(masked_whiten(rewards, long, shift_mean=False)[:, :2], values[:, :2], long[:, :2])[0]
    for holes in ("skip", "steps"):
        padded = gae(masked_whiten(rewards, long, shift_mean=False), values, long, holes=holes)[0]
        assert torch.equal(padded[:, :2], short)


def test_g04_j02_the_clip_is_around_the_old_value_and_is_counted() -> None:
    values = torch.tensor([1.0], requires_grad=True)
    loss, found = value_loss(values, torch.tensor([1.0]), torch.tensor([0.0]), 0.2)
    loss.sum().backward()
    same(loss.detach().double(), [0.5 * 0.8**2], 1e-6)
    assert (found["value_clip_frac"].compute(), values.grad.item()) == (1.0, 0.0)


def test_running_moments_of_few_numbers() -> None:
    moments = RunningMoments()
    assert (moments.std, moments.var) == (1.0, 1.0)
    assert moments.update(torch.tensor([math.nan])) == (0.0, 0.0)
    assert moments.update(torch.tensor([3.0])) == (3.0, 0.0)
    assert (moments.mean, moments.std, moments.var) == (3.0, 1.0, 0.0)
    assert moments.update(torch.tensor([1.0, 5.0])) == (3.0, pytest.approx(math.sqrt(8.0)))
    assert (moments.std, moments.var) == (pytest.approx(2.0), pytest.approx(8.0 / 3.0))
    three = RunningMoments().update(torch.tensor([1.0, 2.0, 6.0]))
    assert three == (3.0, pytest.approx(math.sqrt(7.0)))
    equal = RunningMoments()
    equal.update(torch.tensor([0.5, 0.5]))
    assert equal.scale(torch.tensor([1.0])).tolist() == [pytest.approx(1.0 / torch.finfo(torch.float32).eps)]


def test_a_controller_needs_a_horizon() -> None:
    assert AdaptiveKLController(0.2, target=0.5, horizon=0.5).value == 0.2
    for horizon in (0.0, -1.0):
        with pytest.raises(ConfigError, match="horizon"):
            AdaptiveKLController(0.2, target=0.5, horizon=horizon)


def test_only_the_prediction_gets_a_gradient() -> None:
    values, targets, old = (torch.tensor([x, -x], requires_grad=True) for x in (1.0, 0.25, 0.5))
    loss, found = value_loss(values, targets, old, 0.2)
    loss.sum().backward()
    assert (targets.grad, old.grad) == (None, None)
    same(found["value_error"].compute(), 0.75**2)
    same(found["value_mean"].compute(), 0.0)
    same(found["returns_std"].compute(), math.sqrt(2 * 0.25**2), 1e-7)
    same(found["old_values_std"].compute(), math.sqrt(2 * 0.5**2), 1e-7)


def test_gae_by_default_has_trls_factors_and_no_graph() -> None:
    rewards, clean_rewards = numbers(3)
    values, clean_values = numbers(4)
    given = rewards.requires_grad_(), values.requires_grad_(), mask()
    expected = oracle.gae(clean_rewards, clean_values, MASK, 1.0, 0.95, "skip")
    for found, wanted in ((gae(*given)[0], expected[0]), (gae(*given)[1], expected[1])):
        assert not found.requires_grad
        same(found, wanted)
    same(rlloss.compute_advantages("gae", rewards=given[0], values=given[1], mask=given[2]), expected[0])


@pytest.mark.parametrize("kind", ["kl", "low_var_kl", "full"])
def test_rewards_have_no_graph_and_are_zero_where_the_mask_is(kind: str) -> None:
    shape = (1, 3, 2) if kind == "full" else (1, 3)
    log_probs, refs = (torch.full(shape, x, requires_grad=True) for x in (-0.5, -30.0))
    scores = torch.tensor([1.0], requires_grad=True)
    for found in compute_rewards(scores, log_probs, refs, torch.tensor([[1, 1, 0]]), 0.1, kind):
        assert not found.requires_grad
        assert found[0, 2] == 0.0
    if kind == "low_var_kl":
        same(compute_rewards(scores, log_probs, refs, torch.tensor([[1, 0, 0]]), 0.1, kind).kl[0, :1].double(), [10.0])


def test_whitened_numbers_have_no_graph() -> None:
    values = torch.tensor([[1.0, 3.0]], requires_grad=True)
    assert not masked_whiten(values, torch.ones(1, 2)).requires_grad
    assert not masked_var(values, torch.ones(1, 2)).requires_grad
