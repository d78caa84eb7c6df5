"""The oracles reproduce what verl's and XTuner's own code gave, so that a test against an oracle means something."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import golden_cases
import oracles
import oracles_policy as policy
from golden_cases import Case
from oracles_policy import Tokens

Params = dict[str, Any]
VERL: dict[str, Callable[[Tokens, Params], policy.Result]] = {
    "vanilla": lambda t, p: policy.vanilla(t, *clip(p), p["clip_ratio_c"]),
    "gpg": lambda t, p: policy.reinforce(t),
    "cispo": lambda t, p: policy.cispo(t, 1.0 - clip(p)[0], 1.0 + clip(p)[1]),
    "sapo": lambda t, p: policy.sapo(t, p["tau_pos"], p["tau_neg"]),
    "dppo_tv": lambda t, p: policy.dppo_tv(t, *clip(p), p["clip_ratio_c"]),
    "dppo_kl": lambda t, p: policy.dppo_kl(t, *clip(p), p["clip_ratio_c"]),
    "dro": lambda t, p: policy.quadratic(t, p["dro_beta"]),
    "gspo": lambda t, p: policy.gspo(t, *clip(p)),
    "geo_mean": lambda t, p: policy.gmpo(t, *clip(p)),
    "kl_cov": lambda t, p: policy.kl_cov(t, p["kl_cov_ratio"], p["ppo_kl_coef"]),
}
WHOLE_STEP = {"kl_cov"}
OWN_REDUCTION = {"sapo": "seq-mean-token-mean", "geo_mean": "mean-of-rows"}


def clip(params: Params) -> tuple[float, float]:
    low, high = params["clip_ratio_low"], params["clip_ratio_high"]
    return (params["clip_ratio"] if low is None else low), (params["clip_ratio"] if high is None else high)


def verl_weights(mode: str, counts: list[int], width: int, info: Params) -> list[float]:
    """The weight of each token of row i in `agg_loss`."""
    ranks = info.get("dp_size") or 1
    rows = info.get("global_batch_size") or sum(1 for n in counts if n)
    if mode == "token-mean":
        return [ranks / (info.get("batch_num_tokens") or sum(counts))] * len(counts)
    if mode == "token-sum":
        return [float(ranks)] * len(counts)
    if mode == "seq-mean-token-mean":
        return [ranks / (rows * n) if n else 0.0 for n in counts]
    if mode == "mean-of-rows":
        return [1.0 / (len(counts) * n) if n else 0.0 for n in counts]
    scale = (info.get("loss_scale_factor") or width) if mode.endswith("-norm") else 1.0
    return [ranks / (rows * scale)] * len(counts)


def name_of(case: Case) -> str:
    return case.key.rpartition("'")[0].rpartition("'")[2]


def is_verl(case: Case) -> bool:
    return (
        "loss" in case.data["outputs"]
        and case.name.startswith("policy/")
        and case.key.startswith("core_algos policy loss")
        and name_of(case) in VERL
    )


def verl_result(case: Case) -> tuple[float, list[list[float]]]:
    """Loss and gradient `[B][T]` by the oracle."""
    inputs, params, name = case.data["inputs"], case.data["params"], name_of(case)
    mask = inputs["response_mask"]
    mode = OWN_REDUCTION.get(name, params["loss_agg_mode"])
    weights = verl_weights(mode, [sum(map(bool, m)) for m in mask], len(mask[0]), params["global_batch_info"])
    factors = inputs.get("rollout_is_weights")
    places = [(i, t) for i, row in enumerate(mask) for t, counts in enumerate(row) if counts]
    groups = [places] if name in WHOLE_STEP else [[p for p in places if p[0] == i] for i in range(len(mask))]
    total, grads = 0.0, [[0.0] * len(row) for row in mask]
    for group in (g for g in groups if g):
        columns = [[inputs[key][i][t] for i, t in group] for key in ("log_prob", "old_log_prob", "advantages")]
        scale = [weights[i] * (factors[i][t] if factors else 1.0) for i, t in group]
        if name == "geo_mean" and factors:  # a sequence's factor is the geometric mean of its tokens'
            mean = math.exp(math.fsum(math.log(factors[i][t]) for i, t in group) / len(group))
            scale = [weights[i] * mean for i, _ in group]
        losses, group_grads = VERL[name](Tokens(*columns, scale), params)
        total += math.fsum(w * loss for w, loss in zip(scale, losses, strict=True))
        for (i, t), grad in zip(group, group_grads, strict=True):
            grads[i][t] = grad
    return total, grads


@pytest.mark.parametrize("case", [*filter(is_verl, golden_cases.all_cases())], ids=str)
def test_policy_loss_equals_verl(case: Case) -> None:
    loss, grads = verl_result(case)
    # verl's masked means over float64 add 1e-8 to a denominator of a few tokens
    golden_cases.assert_close(golden_cases.tensor(loss), case.data["outputs"]["loss"], 1e-7, "loss")
    golden_cases.assert_close(golden_cases.tensor(grads), case.data["outputs"]["grad_log_prob"], 1e-7, "grad")


@pytest.mark.parametrize("name", VERL)
def test_every_loss_is_compared(name: str) -> None:
    assert sum(is_verl(case) and name_of(case) == name for case in golden_cases.all_cases()) >= 10


def is_kl(case: Case) -> bool:
    return case.key == "core_algos.kl_penalty" and "exception" not in case.data["outputs"]


@pytest.mark.parametrize("case", [*filter(is_kl, golden_cases.all_cases())], ids=str)
def test_kl_equals_verl(case: Case) -> None:
    inputs, outputs = case.data["inputs"], case.data["outputs"]
    kind = case.data["params"]["kl_penalty"]
    pairs = list(zip(inputs["logprob"], inputs["ref_logprob"], strict=True))
    values = [oracles.kl(lp, ref, kind)[0] for lp, ref in pairs]
    grads = [oracles.kl(lp, ref, kind)[1] for lp, ref in pairs]
    golden_cases.assert_close(golden_cases.tensor(values), outputs["kl"], 1e-12, "kl")
    golden_cases.assert_close(golden_cases.tensor(grads), outputs["grad_logprob_of_sum"], 1e-12, "grad")


XTUNER = [case for case in golden_cases.all_cases() if case.key in ("cases:GRPO", "cases:CE")]


def xtuner_weights(case: Case) -> list[list[float]]:
    """The weight of each position of each micro-batch."""
    reduction = case.data["config"].get("loss_reduction", "token")
    rows = case.data["micro_batches"]
    spans = []
    for m, row in enumerate(rows):
        start = 0
        for length in row["seq_lens"]:
            spans.append((m, [t for t in range(start, start + length) if row["shifted_labels"][t] != -100]))
            start += length
    weights = [[0.0] * len(row["shifted_labels"]) for row in rows]
    shares = oracles.reduction_weights([len(places) for _, places in spans], reduction)
    for (m, places), share in zip(spans, shares, strict=True):
        for t in places:
            weights[m][t] = share
    return weights


def xtuner_token(case: Case, row: Params, log_prob: float, t: int) -> tuple[float, float]:
    """Loss of one token and its derivative in the log-prob."""
    config = case.data["config"]
    if case.data["loss"] == "CE":
        return -log_prob, -1.0
    rule = config["policy_loss_cfg"]
    factor = row["is_weights"][t] if row["is_weights"] else 1.0
    token = Tokens([log_prob], [row["old_logprobs"][t]], [row["advantages"][t]], [1.0])
    bounds = (rule.get("log_prob_diff_min", -20.0), rule.get("log_prob_diff_max", 20.0))
    losses, grads = policy.vanilla(
        token, rule["cliprange_low"], rule["cliprange_high"], rule.get("clip_ratio_c", 3.0), bounds
    )
    loss, grad = losses[0] * factor, grads[0] * factor
    if config.get("use_kl_loss"):
        value, slope = oracles.kl(log_prob, row["ref_logprobs"][t], config["kl_loss_type"])
        loss, grad = loss + config["kl_loss_coef"] * value, grad + config["kl_loss_coef"] * slope
    return loss, grad


@pytest.mark.parametrize("case", XTUNER, ids=str)
def test_head_and_loss_equal_xtuner(case: Case) -> None:
    outputs = case.data["outputs"]
    head = oracles.Head(case.data["head_weight"])
    weight_grad = golden_cases.tensor([[0.0] * len(row) for row in head.weight])
    for m, (row, weights) in enumerate(zip(case.data["micro_batches"], xtuner_weights(case), strict=True)):
        places = [t for t, w in enumerate(weights) if w]
        hidden, labels = [row["hidden"][t] for t in places], [row["shifted_labels"][t] for t in places]
        ones, zeros = [1.0] * len(places), [0.0] * len(places)
        log_probs, _ = oracles.head_forward(head, hidden, labels, ones)
        pairs = [xtuner_token(case, row, lp, t) for lp, t in zip(log_probs, places, strict=True)]
        loss = math.fsum(weights[t] * value for t, (value, _) in zip(places, pairs, strict=True))
        assert loss == pytest.approx(outputs["losses"][m], abs=1e-6)
        slopes = [weights[t] * slope for t, (_, slope) in zip(places, pairs, strict=True)]
        grads = oracles.head_backward(head, hidden, labels, ones, slopes, zeros)
        weight_grad += golden_cases.tensor(grads.weight)
        expected = [outputs["grad_hidden"][m][t] for t in places]
        golden_cases.assert_close(golden_cases.tensor(grads.hidden), expected, 1e-6, "grad_hidden")
    golden_cases.assert_close(weight_grad, outputs["grad_head_weight"], 1e-6, "grad_head_weight")
