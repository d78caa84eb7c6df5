"""Rollout correction: statistics against plain loops, what a rejected token leaves, and the cases of the field."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import steps
from rlloss import GRPOLossConfig, GRPOLossContext, RolloutImportanceSampling, metrics
from rlloss.errors import BatchError, ConfigError
from rlloss.functional.rollout import RolloutRule, correct_rollout, mismatch_metrics, rollout_statistic
from rlloss.layout import Segments
from steps import labels, row, tok

ALL = {"token": ("ratio", "k1", "k2", "k3"), "sequence": ("ratio", "k1", "k2", "k3")}
ALL |= {"geometric": ("ratio", "k1", "k2", "k3"), "max": ("k1", "k2", "k3")}
PAIRS = [(level, statistic) for level, found in ALL.items() for statistic in found]


def bounded(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def oracle(log_ratios: list[float], level: str, statistic: str) -> list[float]:
    """The statistic of one sequence, token by token, from the definitions."""

    def over(values: list[float]) -> list[float]:
        whole = {"sequence": math.fsum(values), "geometric": math.fsum(values) / len(values), "max": max(values)}
        return values if level == "token" else [whole[level]] * len(values)

    if statistic == "ratio":
        return [math.exp(bounded(value)) for value in over(log_ratios)]
    k = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[statistic]
    return over([k(bounded(x)) for x in log_ratios])


@pytest.mark.parametrize(("level", "statistic"), PAIRS)
def test_statistics_are_those_of_plain_loops(level: Any, statistic: Any) -> None:
    sequences = [[0.1, -1.5, 0.8], [-30.0], [25.0, 0.3, 0.2, -0.4]]
    flat = torch.tensor([x for sequence in sequences for x in sequence], dtype=torch.float64)
    ids = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence])
    found = rollout_statistic(flat, Segments(ids, 4), level, statistic)
    expected = [x for sequence in sequences for x in oracle(sequence, level, statistic)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def batch_of(log_ratios: list[float], per_token_loss: float = 1.0) -> tuple[dict[str, Any], Tensor]:
    """One sequence on policy (ratio 1, so a token's loss is -A) whose old/rollout log-ratios are given."""
    old = [-1.0] * len(log_ratios)
    batch = {
        "shifted_labels": labels(*[1] * len(log_ratios)),
        "num_tokens": [len(log_ratios)],
        "advantages": row(*[-per_token_loss] * len(log_ratios)),
        "old_logprobs": row(*old),
        "rollout_logprobs": row(*(o - x for o, x in zip(old, log_ratios, strict=True))),
    }
    return batch, tok(*old)


A07 = [0.1, -1.5, 0.8, -10.0, 0.3]


@pytest.mark.parametrize(("denominator", "right"), [("all", 0.4910059), ("kept", 1.2275149)])
@steps.every_mode
def test_a07_the_config_names_the_denominator(denominator: str, right: float, head: dict[str, Any]) -> None:
    rule = RolloutImportanceSampling(rollout_is_mode="mask", rollout_is_threshold=(0.5, 2.0), denominator=denominator)
    batch, hidden = batch_of(A07)
    step = steps.run_step(GRPOLossConfig(rollout_is=rule, **head), [batch], [hidden])
    assert step.loss == pytest.approx(right, abs=1e-6)
    singles = [batch_of([x]) for x in A07]
    split = steps.run_step(GRPOLossConfig(rollout_is=rule, **head), [b for b, _ in singles], [h for _, h in singles])
    assert split.loss == pytest.approx(right, abs=1e-6)
    assert split.extra["rollout_rejected_tokens"] == pytest.approx(0.6)


def test_a_rejected_token_leaves_every_term_or_the_policy_term_only() -> None:
    found = {}
    for denominator in ("kept", "all"):
        rule = RolloutImportanceSampling(
            rollout_is_mode="mask", rollout_is_threshold=(0.5, 2.0), denominator=denominator
        )
        config = GRPOLossConfig(rollout_is=rule, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2")
        batch, hidden = batch_of([0.0, 5.0])
        batch["ref_logprobs"] = row(-2.0, -3.0)
        found[denominator] = steps.run_step(config, [batch], [hidden]).extra
    assert found["kept"]["kl_loss"] == pytest.approx(0.5)
    assert found["all"]["kl_loss"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["kept"]["policy_loss"] == pytest.approx(1.0)
    assert found["all"]["policy_loss"] == pytest.approx(0.5)
    assert (found["kept"]["tokens"], found["all"]["tokens"]) == (1.0, 2.0)


def test_c04_a_long_sequence_has_a_finite_weight() -> None:
    batch, hidden = batch_of([0.02] * 5000)
    for rule in (
        RolloutImportanceSampling.tis(2.0, level="sequence"),
        RolloutImportanceSampling(rules=(RolloutRule("sequence", "ratio", "clamp"),)),
    ):
        step = steps.run_step(GRPOLossConfig(rollout_is=rule), [batch], [hidden])
        assert math.isfinite(step.loss)
        assert step.loss == pytest.approx(2.0 if rule.rollout_is_threshold else math.exp(20.0))


def test_g06_levels() -> None:
    batch, _ = batch_of([0.1, 0.2, 0.3])
    right = {"token": [1.1051709, 1.2214028, 1.3498588], "sequence": [1.8221188] * 3, "geometric": [1.2214028] * 3}
    for level, weights in right.items():
        rule = RolloutImportanceSampling.tis(10.0, level=level)
        (context,) = GRPOLossContext.build_batches([GRPOLossConfig(rollout_is=rule).build(batch)])
        assert context.loss_kwargs.is_weights is not None
        assert context.loss_kwargs.is_weights[0].tolist() == pytest.approx(weights, abs=1e-7)


@steps.every_mode
def test_g11_the_weight_multiplies_the_loss_and_has_no_gradient(head: dict[str, Any]) -> None:
    batch, hidden = batch_of([math.log(2.0)])
    plain = steps.run_step(GRPOLossConfig(**head), [batch], [hidden])
    step = steps.run_step(GRPOLossConfig(rollout_is=RolloutImportanceSampling.tis(1.5), **head), [batch], [hidden])
    assert step.loss == pytest.approx(1.5 * plain.loss, abs=1e-6)
    assert step.rows[0] == pytest.approx([1.5 * x for x in plain.rows[0]], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_b03_garbage_at_ignored_tokens_changes_nothing(bad: float, name: str, level: Any) -> None:
    rule = RolloutImportanceSampling(
        rollout_is_level=level,
        rollout_is_mode="both",
        rollout_is_threshold=(0.5, 1.2),
        rollout_is_veto_threshold=(1e-4, 9.0),
    )
    config = GRPOLossConfig(rollout_is=rule)
    batch, hidden = batch_of([0.3, 0.1, -0.2])
    batch["shifted_labels"] = labels(1, 0, 1)
    clean = steps.run_step(config, [batch], [hidden])
    dirty = batch | {name: batch[name].clone()}
    dirty[name][0, 1] = bad
    steps.assert_same(steps.run_step(config, [dirty], [hidden]), clean, 0.0)


def test_b06_an_infinite_log_prob_leaves_the_step_before_the_sequence_is_summed() -> None:
    config = GRPOLossConfig(rollout_is=RolloutImportanceSampling.tis(9.0, level="sequence"))
    batch, hidden = batch_of([0.3, 0.4])
    batch["rollout_logprobs"][0, 1] = -math.inf
    step = steps.run_step(config, [batch], [hidden])
    assert step.loss == pytest.approx(math.exp(0.3))
    assert step.extra["dropped_tokens"] == 1.0


@pytest.mark.parametrize("action", ["clamp", "mask", "veto"])
def test_a_nan_at_a_valid_token_stays_visible(action: Any) -> None:
    rule = RolloutImportanceSampling(rules=(RolloutRule("token", "ratio", action, 0.5, 2.0),))
    batch, hidden = batch_of([0.3, 0.4])
    batch["rollout_logprobs"][0, 1] = math.nan
    assert math.isnan(steps.run_step(GRPOLossConfig(rollout_is=rule), [batch], [hidden]).loss)
    with pytest.raises(BatchError, match="rollout_logprobs is NaN at 1"):
        steps.run_step(GRPOLossConfig(rollout_is=rule, check_finite=True), [batch], [hidden])


def test_labels_and_inputs_are_never_written_to() -> None:
    rule = RolloutImportanceSampling(rollout_is_mode="both", rollout_is_threshold=(0.9, 1.1))
    batch, _ = batch_of(A07)
    before = copy.deepcopy(batch)
    context = GRPOLossConfig(rollout_is=rule).build(batch)
    context.compute_rollout_is()
    GRPOLossContext.build_batches([context])
    assert context.loss_kwargs.shifted_labels.tolist() == before["shifted_labels"].tolist()
    for name, tensor in before.items():
        if isinstance(tensor, Tensor):
            assert torch.equal(batch[name], tensor)


def test_calibration_may_be_repeated_and_a_new_tensor_is_seen() -> None:
    config = GRPOLossConfig(rollout_is=RolloutImportanceSampling.mis(0.5, 2.0))
    batch, hidden = batch_of([0.1, 3.0])
    context = config.build(batch)
    weight = steps.eye()
    losses = []
    for _ in range(2):
        GRPOLossContext.build_batches([context])
        losses.append(float(context.forward(hidden, weight).loss))
    context.loss_kwargs.rollout_logprobs = row(-1.0, -1.0)
    GRPOLossContext.build_batches([pickle.loads(pickle.dumps(context))])
    GRPOLossContext.build_batches([context])
    losses.append(float(context.forward(hidden, weight).loss))
    assert losses == pytest.approx([math.exp(0.1), math.exp(0.1), 1.0])


def test_given_weights_win() -> None:
    config = GRPOLossConfig(rollout_is=RolloutImportanceSampling.mis(0.5, 2.0))
    batch, hidden = batch_of([0.1, 3.0])
    batch["rollout_is_weights"] = row(2.0, 4.0)
    step = steps.run_step(config, [batch], [hidden])
    assert step.loss == pytest.approx(3.0)
    assert "is_weight_mean" not in step.extra


def test_compute_rollout_is_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    import rlloss.losses.rl as module

    batch, _ = batch_of([0.1, 3.0])
    context = GRPOLossConfig(rollout_is=RolloutImportanceSampling.mis(0.5, 2.0)).build(batch)
    mismatch, weights = context.compute_rollout_is()
    assert float(mismatch["mismatch_k1"]) == pytest.approx(-1.55)
    assert float(weights["rollout_rejected_tokens"]) == 0.5
    monkeypatch.setattr(module, "rollout_outcome", lambda *_: pytest.fail("computed twice"))
    GRPOLossContext.build_batches([context])
    assert context.loss_kwargs.keep_mask is not None
    assert context.loss_kwargs.keep_mask.tolist() == [[True, False]]


def test_weights_are_normalized_over_the_whole_step() -> None:
    for level, mean in (("token", (2.0 + 1.0 + 4.0) / 3), ("sequence", (2.0 + 4.0) / 2)):
        rule = RolloutImportanceSampling.verl(
            rollout_is=level, rollout_is_threshold=10.0, rollout_is_batch_normalize=True
        )
        parts = [batch_of([math.log(2.0), 0.0]), batch_of([math.log(4.0)])]
        contexts = [GRPOLossConfig(rollout_is=rule).build(batch) for batch, _ in parts]
        for _ in range(2):
            GRPOLossContext.build_batches(contexts)
        first = contexts[0].loss_kwargs.is_weights
        assert first is not None
        assert float(first[0, 0]) == pytest.approx(2.0 / mean)
        assert float(contexts[0]._step_metrics["is_weight_max"]) == 2.0


def test_the_current_policy_rejects_in_bypass_mode() -> None:
    """The sampling engine's log-probs are the old ones there, and selection_logprobs say what the policy is now."""
    rule = RolloutImportanceSampling.verl(rollout_rs="token_k2", rollout_rs_threshold=0.1, bypass_mode=True)
    batch, hidden = batch_of([0.0, 0.0])
    del batch["old_logprobs"]
    batch["rollout_logprobs"], batch["selection_logprobs"] = row(-1.0, -1.0), row(-1.1, -2.0)
    step = steps.run_step(GRPOLossConfig(rollout_is=rule), [batch], [hidden])
    assert (step.loss, step.extra["tokens"]) == (pytest.approx(1.0), 1.0)


def test_missing_log_probs_are_named_errors() -> None:
    rule = RolloutImportanceSampling.tis(2.0)
    batch, hidden = batch_of([0.1])
    without = {name: value for name, value in batch.items() if name != "old_logprobs"}
    with pytest.raises(BatchError, match="on_policy=True does not replace"):
        steps.run_step(GRPOLossConfig(rollout_is=rule, on_policy=True), [without], [hidden])
    bare = {name: value for name, value in batch.items() if name != "rollout_logprobs"}
    with pytest.warns(UserWarning, match="no rollout_logprobs"):
        steps.run_step(GRPOLossConfig(rollout_is=rule), [bare], [hidden])
    with pytest.raises(BatchError, match="needs rollout_logprobs"):
        GRPOLossConfig(rollout_is=rule).build(bare).compute_rollout_is()


def test_bounds_in_either_order_and_xtuners_fields() -> None:
    rule = RolloutImportanceSampling(
        rollout_is_mode="both",
        rollout_is_threshold=(5, 0),
        rollout_is_mask_threshold=(0.5, 5),
        rollout_is_veto_threshold=(20, 0),
    )
    assert [(r.action, r.low, r.high) for r in rule.compiled()] == [
        ("clamp", 0.0, 5.0),
        ("mask", 0.5, 5.0),
        ("veto", 0.0, 20.0),
    ]
    for round_trip in (RolloutImportanceSampling(**rule.model_dump()), pickle.loads(pickle.dumps(rule))):
        assert round_trip == rule
    preset = RolloutImportanceSampling.verl("token", "0.5_5", "token_k1,seq_max_k3", "0.7_1.4,0.2")
    assert RolloutImportanceSampling.model_validate_json(preset.model_dump_json()) == preset
    assert not RolloutImportanceSampling().compiled()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_is_threshold": (1.0, 1.0)}, "two different numbers"),
        ({"rollout_is_threshold": (-1.0, 1.0)}, "not negative"),
        ({"rollout_is_levl": "token"}, "Did you mean 'rollout_is_level'"),
        ({"rules": ({"action": "mask"},)}, "needs a bound"),
        ({"rules": ({"level": "sequence", "action": "veto", "low": 0.1},)}, "single tokens"),
        ({"rules": ({"statistic": "k1", "action": "clamp", "high": 0.1},)}, "out of ratios"),
        ({"rules": ({"action": "mask", "low": 2.0, "high": 1.0},)}, "lies above"),
        ({"rollout_is_threshold": (1.0, 2.0), "rules": ({"action": "clamp", "high": 3.0},)}, "one importance weight"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutImportanceSampling(**fields)


def test_presets_of_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_truncate"):
        RolloutImportanceSampling.trl("token_clip")
    with pytest.raises(ConfigError, match="at least one bound"):
        RolloutImportanceSampling.trl("token_mask", None, None)
    with pytest.raises(ConfigError, match="Did you mean 'seq_mean_k1'"):
        RolloutImportanceSampling.verl(rollout_rs="seqmean_k1", rollout_rs_threshold=2.0)
    with pytest.raises(ConfigError, match="above 0"):
        RolloutImportanceSampling.verl(rollout_is="token", rollout_is_threshold=-1.0)
    with pytest.warns(UserWarning, match="does nothing"):
        RolloutImportanceSampling(rollout_is_threshold=(0, 2), rollout_is_mask_threshold=(0.5, 2))


def test_verls_k1_bounds_the_inverse_ratio() -> None:
    """ "0.5_1.1" keeps train/rollout in [0.909, 2.0]."""
    rule = RolloutImportanceSampling.verl(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.1").compiled()
    ratios = torch.tensor([0.90, 0.92, 1.99, 2.01], dtype=torch.float64)
    found = correct_rollout(ratios.log(), Segments(torch.zeros(4, dtype=torch.int64), 1), rule)
    assert found.keep.tolist() == [False, True, True, False]


def test_perplexities_are_those_of_sequences() -> None:
    batch, hidden = batch_of([0.0, 0.0, 0.0])
    batch |= {"num_tokens": [1, 2], "old_logprobs": row(-1.0, -2.0, -4.0), "rollout_logprobs": row(-1.0, -1.0, -3.0)}
    step = steps.run_step(GRPOLossConfig(rollout_is=RolloutImportanceSampling.tis(2.0)), [batch], [hidden])
    assert step.extra["train_ppl"] == pytest.approx((math.e + math.exp(3.0)) / 2)
    assert step.extra["rollout_ppl"] == pytest.approx((math.e + math.exp(2.0)) / 2)
    assert step.extra["log_ppl_diff_max"] == pytest.approx(1.0)


RULES = st.builds(
    RolloutRule,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    statistic=st.just("ratio"),
    action=st.just("mask"),
    low=st.sampled_from([None, 0.5, 0.9]),
    high=st.sampled_from([1.1, 2.0]),
    denominator=st.sampled_from(["kept", "all"]),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=4), min_size=2, max_size=5),
    RULES,
    st.sampled_from(["token", "sample", "square", "sequence_sum"]),
    st.booleans(),
    st.data(),
)
def test_no_split_changes_a_corrected_step(
    sequences: list[list[float]], rule: RolloutRule, reduction: Any, normalize: bool, data: st.DataObject
) -> None:
    weigh = RolloutRule(rule.level, "ratio", "clamp", None, 2.5)
    config = GRPOLossConfig(
        rollout_is=RolloutImportanceSampling(rules=(weigh, rule), normalize_weights=normalize), loss_reduction=reduction
    )
    cut = data.draw(st.integers(1, len(sequences) - 1))

    def run(groups: list[list[list[float]]]) -> steps.Step:
        batches, hidden = [], []
        for group in groups:
            batch, states = batch_of([x for sequence in group for x in sequence])
            batches.append(batch | {"num_tokens": [len(sequence) for sequence in group]})
            hidden.append(states)
        return steps.run_step(config, batches, hidden)

    steps.assert_same(run([sequences[:cut], sequences[cut:]]), run([sequences]), 1e-9)


def test_metrics_merge_by_type() -> None:
    found = correct_rollout(torch.zeros(3), Segments(torch.zeros(3, dtype=torch.int64), 1), ())
    assert found.weights.tolist() == [1.0, 1.0, 1.0]
    merged = metrics.reduce(metrics.merge([found.metrics, found.metrics]))
    assert merged["is_weight_ess"] == pytest.approx(1.0)


def test_equal_numbers_have_no_spread_however_they_are_split() -> None:
    values = torch.full((6,), math.exp(1 / 3), dtype=torch.float64)
    whole = metrics.moments_of(values)
    assert float(whole) == float(metrics.moments_of(values[:2]).merge(metrics.moments_of(values[2:]))) == 0.0
    assert float(metrics.moments_of(torch.tensor([1.0, 1.0 + 1e-5], dtype=torch.float64))) == pytest.approx(
        1e-5 / 2**0.5, 1e-4
    )


def test_a_step_of_weights_that_are_all_zero_is_finite() -> None:
    """verl divides by zero here."""
    rule = RolloutImportanceSampling.verl("sequence", "0.9_1.1", rollout_is_batch_normalize=True)
    batch, hidden = batch_of([3.0, 2.0])
    step = steps.run_step(GRPOLossConfig(rollout_is=rule), [batch], [hidden])
    assert step.loss == 0.0
    assert step.extra["is_weight_ess"] == 0.0
    assert all(math.isfinite(value) for value in step.extra.values())


def test_a_bound_is_kept_and_metrics_count_sequences_with_tokens() -> None:
    segments = Segments(torch.tensor([0, 0, 2]), 3)
    log_ratio = torch.tensor([2.0, -1.0, 0.0]).double().requires_grad_()
    for rule in (RolloutRule("token", "k2", "mask", None, 2.0), RolloutRule("token", "k2", "mask", 0.0, None)):
        assert correct_rollout(log_ratio, segments, (rule,)).keep.tolist() == [True, True, True]
    found = correct_rollout(log_ratio, segments, (RolloutRule("token", "ratio", "clamp", 0.5, 2.0),))
    assert not found.weights.requires_grad
    clamped = [float(found.metrics[f"is_clamped_{side}"]) for side in ("low", "high")]
    assert clamped == pytest.approx([1 / 3, 1 / 3])
    above = correct_rollout(log_ratio, segments, (RolloutRule("token", "ratio", "clamp", None, 2.0),)).metrics
    assert float(above["is_clamped_low"]) == 0.0
    at = correct_rollout(log_ratio, segments, (RolloutRule("token", "ratio", "clamp", 1.0, 1.0),)).metrics
    assert float(at["is_clamped_low"]) == float(at["is_clamped_high"]) == pytest.approx(1 / 3), "1 is no clamped ratio"
    distance = mismatch_metrics(log_ratio, torch.zeros(3).double(), segments)
    assert float(distance["mismatch_abs"]) == pytest.approx(1.0)
    assert float(distance["train_log_ppl"]) == pytest.approx(-0.25)


def test_metrics_of_a_sequence_of_one_token_and_of_one_without() -> None:
    """Sequences of two tokens, none, and one, whose log-ratio lies beyond the bound of 20."""
    segments, log_ratio = Segments(torch.tensor([0, 0, 2]), 3), torch.tensor([0.1, 0.2, -30.0]).double()
    rules = (RolloutRule("sequence", "ratio", "clamp", None, 5.0), RolloutRule("token", "ratio", "veto", 0.01, None))
    found = correct_rollout(log_ratio, segments, rules)
    for name in ("rollout_vetoed_sequences", "rollout_rejected_sequences"):
        assert float(found.metrics[name]) == 0.5
    assert float(found.normalizer[1]) == 2.0
    distance = mismatch_metrics(log_ratio, torch.zeros(3).double(), segments)
    assert float(distance["mismatch_abs_max"]) == pytest.approx(30.0)
    k3 = math.fsum(math.expm1(x) - x for x in (0.1, 0.2, -20.0)) / 3
    assert float(distance["mismatch_k3"]) == pytest.approx(k3)
