"""What rlloss does in the golden cases that are not run, case by case.

Each reason of `golden_exclusions.py` has a pin here, but for whole other algorithms and texts of errors. A pin takes
the inputs of an excluded case and compares rlloss with a number of a formula in float64 (the oracles, or plain torch
operations), mostly through the same adapter that runs the other cases of the family.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import golden_cases
import golden_exclusions as reasons
import golden_liger
import oracles
import oracles_policy as policy
import oracles_ppo
import rlloss
from golden_advantages import ids_of
from golden_cases import Case, assert_close, tensor
from golden_ppo import actor_critic
from golden_verl import evaluate
from oracles_policy import Tokens
from rlloss.functional.masked import masked_var, masked_whiten
from rlloss.training.ppo import _ratio_too_large
from rlloss.training.ppo_stats import update_statistics
from test_golden import exclusion_reason

Pin = Callable[[Case, Any], None]
PINS: dict[str, Pin] = {}
WITHOUT_A_PIN = {reasons.OTHER_ALGORITHM, reasons.OTHERS_ERRORS}
AT_MOST = 0.05


def pins(reason: str) -> Callable[[Pin], Pin]:
    def register(pin: Pin) -> Pin:
        PINS[reason] = pin
        return pin

    return register


def rerun(case: Case, variant: Any, outputs: dict[str, Any]) -> None:
    """Runs a case as those of its family are run, with numbers of ours in the place of the recorded ones."""
    family = golden_cases.family_of(case)
    assert family is not None
    family.adapter(dataclasses.replace(case, data={**case.data, "outputs": outputs}), variant)


def excluded() -> list[Any]:
    """One parameter for each excluded case that needs a pin, and each variant of its family."""
    found = []
    for case in golden_cases.read_folder(golden_cases.OWN_FOLDER):
        reason = exclusion_reason(case)
        if reason is not None and reason not in WITHOUT_A_PIN:
            family = golden_cases.family_of(case)
            for variant in family.variants if family else (None,):
                found.append(pytest.param(case, reason, variant, id=f"{case}-{variant}"))
    return found


@pytest.mark.filterwarnings("ignore:1 of . groups have one sequence")
@pytest.mark.parametrize(("case", "reason", "variant"), excluded())
def test_pin(case: Case, reason: str, variant: Any) -> None:
    PINS[reason](case, variant)


def test_every_reason_has_a_pin() -> None:
    """A row added to the table of exclusions fails here until it says what rlloss does instead."""
    assert {row.reason for row in reasons.EXCLUSIONS} == PINS.keys() | WITHOUT_A_PIN


def test_few_cases_are_excluded() -> None:
    """Other algorithms and texts of errors apart, at most one case in twenty."""
    found = Counter(exclusion_reason(case) for case in golden_cases.read_folder(golden_cases.OWN_FOLDER))
    counted = {reason: count for reason, count in found.items() if reason not in WITHOUT_A_PIN}
    assert sum(counted.values()) - counted[None] <= AT_MOST * sum(counted.values())


# verl's policy losses

VERL_ORACLES: dict[str, Callable[[Tokens, dict[str, Any]], policy.Result]] = {
    "vanilla": lambda t, p: policy.vanilla(t, p["clip_ratio"], p["clip_ratio"], p["clip_ratio_c"]),
    "gpg": lambda t, p: policy.reinforce(t),
    "gspo": lambda t, p: policy.gspo(t, p["clip_ratio"], p["clip_ratio"]),
    "dppo_tv": lambda t, p: policy.dppo_tv(t, p["clip_ratio"], p["clip_ratio"], p["clip_ratio_c"]),
    "dppo_kl": lambda t, p: policy.dppo_kl(t, p["clip_ratio"], p["clip_ratio"], p["clip_ratio_c"]),
    "sapo": lambda t, p: policy.sapo(t, p["tau_pos"], p["tau_neg"]),
    "geo_mean": lambda t, p: policy.gmpo(t, p["clip_ratio"], p["clip_ratio"]),
    "cispo": lambda t, p: policy.cispo(t, 1 - p["clip_ratio"], 1 + p["clip_ratio"]),
    "dro": lambda t, p: policy.quadratic(t, p["dro_beta"]),
    "kl_cov": lambda t, p: policy.kl_cov(t, p["kl_cov_ratio"], p["ppo_kl_coef"]),
}
REDUCTIONS = {"token-mean": "token", "seq-mean-token-mean": "sample", "seq-mean-token-sum": "sequence_sum"}
WHOLE_STEP = ("kl_cov", "clip_cov")


def clip_cov(tokens: Tokens, params: dict[str, Any]) -> policy.Result:
    """A share of 1 leaves out every candidate."""
    assert params["clip_cov_ratio"] == 1
    bounds = (params["clip_cov_lb"], params["clip_cov_ub"])
    low = params["clip_ratio"]
    return policy.clip_cov(tokens, policy.clip_cov_candidates(tokens, bounds, low, low), low, low)


def by_formula(case: Case, dropped: Tensor | None = None, factor: float = 1.0) -> dict[str, Any]:
    """Loss and gradient of a verl case from the oracles; masked and dropped tokens are not there at all."""
    params, name = case.data["params"], case.key.split("'")[1]
    inputs = {key: tensor(value) for key, value in case.data["inputs"].items()}
    kept = inputs["response_mask"] != 0
    kept = kept if dropped is None else kept & ~dropped
    own = {"sapo": "sample", "geo_mean": "sample"}
    reduction = own.get(name, REDUCTIONS[params["loss_agg_mode"]])
    weights = oracles.reduction_weights(kept.sum(1).tolist(), reduction)
    oracle = clip_cov if name == "clip_cov" else VERL_ORACLES[name]
    rows = [kept] if name in WHOLE_STEP else [kept & (torch.arange(len(kept)) == i)[:, None] for i in range(len(kept))]
    grad, loss = torch.zeros_like(inputs["log_prob"]), 0.0
    for row in rows:
        if bool(row.any()):
            share = [factor * w for w, n in zip(weights, row.sum(1).tolist(), strict=True) for _ in range(n)]
            given = [inputs[key][row].tolist() for key in ("log_prob", "old_log_prob", "advantages")]
            losses, slopes = oracle(Tokens(*given, share), params)
            loss += math.fsum(w * one for w, one in zip(share, losses, strict=True))
            grad[row] = torch.tensor(slopes, dtype=torch.float64)
    return {"loss": loss, "grad_log_prob": grad.tolist(), "metrics": {}}


@pins(reasons.INFINITE_OLD)
def infinite(case: Case, way: str) -> None:
    """The token is not there: neither in the numerator nor in the count."""
    inputs = case.data["inputs"]
    dropped = tensor(inputs["old_log_prob"]).isinf() | tensor(inputs["log_prob"]).isinf()
    assert int(dropped.sum()) == 1
    expected = by_formula(case, dropped)
    rerun(case, way, expected)
    found = evaluate(case, way, {key: tensor(value) for key, value in inputs.items()})
    assert found.extra["dropped_tokens"] == 1
    assert found.extra["tokens"] == float(tensor(inputs["response_mask"]).sum()) - 1


@pins(reasons.NAN_ROW)
def nan_row(case: Case, way: str) -> None:
    """The other tokens of the row keep their gradient."""
    expected = by_formula(case)
    assert any(expected["grad_log_prob"][0])
    rerun(case, way, expected)


@pins(reasons.BF16)
def bfloat16(case: Case, way: str) -> None:
    """Exact for the numbers that bfloat16 holds; only the gradient handed back is rounded to it."""
    params = {**case.data["params"], "dtype": "bfloat16"}
    expected = by_formula(case)
    inputs = {key: tensor(value) for key, value in case.data["inputs"].items()}
    inputs |= {key: inputs[key].bfloat16() for key in ("log_prob", "old_log_prob")}
    found = evaluate(dataclasses.replace(case, data={**case.data, "params": params}), "log_probs", inputs)
    assert found.loss.dtype in (torch.float32, torch.float64)
    assert_close(found.loss, expected["loss"], 1e-6, "loss")
    assert found.grad.dtype == torch.bfloat16
    exact = tensor(expected["grad_log_prob"])
    assert bool(((found.grad.double() - exact).abs() <= 2.0**-8 * exact.abs()).all())
    if way != "log_probs":
        rerun(case, way, expected)


@pins(reasons.COUNTED)
def counted(case: Case, way: str) -> None:
    """Sequences are counted over the ranks there are, and the factor of a wrapper that averages is the given size."""
    rerun(case, way, by_formula(case, factor=case.data["params"]["global_batch_info"]["dp_size"]))


@pins(reasons.NO_TOKENS)
def no_tokens(case: Case, way: str) -> None:
    """A named error."""
    with pytest.raises(rlloss.errors.ConfigError, match=r"Totals\(tokens=0\).*above 0"):
        evaluate(case, way, {key: tensor(value) for key, value in case.data["inputs"].items()})


# verl's advantages, statistics and rollout correction


@pins(reasons.ALONE)
def group_of_one(case: Case, _: Any) -> None:
    """The best response gets its lead over the second best, over the std of its group if asked; one alone gets 0."""
    inputs = case.data["inputs"]
    normalize = case.data["params"]["config.norm_adv_by_std_in_grpo"]
    rewards, names = [math.fsum(row) for row in inputs["token_level_rewards"]], inputs["index"]
    expected = [0.0] * len(rewards)
    for name in set(names):
        group = sorted((i for i, other in enumerate(names) if other == name), key=lambda i: -rewards[i])
        if len(group) > 1:
            spread = math.sqrt(oracles_ppo.moments([rewards[i] for i in group])[1]) + 1e-6 if normalize else 1.0
            expected[group[0]] = (rewards[group[0]] - rewards[group[1]]) / spread
    given = {"rewards": torch.tensor(rewards, dtype=torch.float64), "group_ids": ids_of(names)}
    with pytest.warns(UserWarning, match="1 of 3 groups have one sequence"):
        found = rlloss.compute_advantages("grpo_passk", **given, normalize_std=normalize)
    assert sum(map(bool, expected)) == 2
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pins(reasons.NO_TOKEN)
def nothing_to_whiten(case: Case, variant: Any) -> None:
    """Zeros for rows without tokens."""
    mask = case.data["inputs"]["response_mask"]
    rerun(case, variant, {"advantages": oracles_ppo.whiten(case.data["inputs"]["token_level_rewards"], mask)})


@pins(reasons.FEW)
def few(case: Case, _: Any) -> None:
    """The variance of fewer than two numbers is 0, and whitening takes the mean away."""
    values, mask = case.data["inputs"]["values"], case.data["inputs"]["mask"]
    kept = [x for row, ms in zip(values, mask, strict=True) for x, m in zip(row, ms, strict=True) if m]
    assert len(kept) < 2
    for unbiased in (True, False):
        variance = masked_var(tensor(values), tensor(mask), unbiased=unbiased)
        assert float(variance) == oracles_ppo.moments(kept, unbiased)[1] == 0.0
    for shift in (True, False):
        whitened = masked_whiten(tensor(values), tensor(mask), shift_mean=shift)
        assert_close(whitened, oracles_ppo.whiten(values, mask, shift), 1e-12, "whitened")


@pins(reasons.DIVIDES_BY_ZERO)
def no_weight_left(case: Case, variant: Any) -> None:
    """Every sequence lies outside of the bounds: weights of 0, whose mean of 0 divides nothing."""
    inputs, mask = case.data["inputs"], case.data["inputs"]["response_mask"]
    gaps = []
    for old, rollout, ms in zip(inputs["old_log_prob"], inputs["rollout_log_prob"], mask, strict=True):
        row = [a - b for a, b, m in zip(old, rollout, ms, strict=True) if m]
        assert not row or not 0.9 <= math.exp(math.fsum(row)) <= 1.1
        gaps += row
    metrics = {
        "kl": -math.fsum(gaps) / len(gaps),
        "k3_kl": math.fsum(math.exp(x) - x - 1.0 for x in gaps) / len(gaps),
        "chi2_token": math.fsum(math.exp(2.0 * x) for x in gaps) / len(gaps) - 1.0,
        "rollout_is_mean": 0.0,
        "rollout_is_eff_sample_size": 0.0,
    }
    expected = {
        "rollout_is_weights": [[0.0] * len(row) for row in mask],
        "modified_response_mask": mask,
        "metrics": {f"rollout_corr/{name}": value for name, value in metrics.items()},
    }
    rerun(case, variant, expected)


# TRL


@pins(reasons.SKIPPED)
def ratio_beyond_the_threshold(case: Case, _: Any) -> None:
    """The ratio is held at exp(20), value and gradients are finite, and the trainer makes no step."""
    params, inputs = case.data["params"], case.data["inputs"]
    mask = tensor(inputs["mask"]) != 0
    names = ("old_logprobs", "values", "advantages", "returns")
    context = actor_critic(params, {name: tensor(inputs[name]) for name in names}, mask)
    log_probs, values = tensor(inputs["logprobs"]).requires_grad_(), tensor(inputs["vpreds"]).requires_grad_()
    entropy = torch.ones_like(log_probs)
    output = context.forward_log_probs(log_probs, entropy, values=values)
    output.loss.backward()

    count = int(mask.sum())
    rows = [tensor(inputs[name])[mask].tolist() for name in ("logprobs", "old_logprobs", "advantages")]
    tokens = Tokens(*rows, [1.0 / count] * count)
    losses, slopes = policy.vanilla(tokens, params["cliprange"], params["cliprange"], None)
    parts = [tensor(inputs[name])[mask].tolist() for name in ("vpreds", "returns", "values")]
    critic = [oracles_ppo.value_loss(*row, params["cliprange_value"], None) for row in zip(*parts, strict=True)]
    value_slopes = [params["vf_coef"] * slope / count for _, slope, _ in critic]
    total = math.fsum(losses) / count + params["vf_coef"] * math.fsum(loss for loss, _, _ in critic) / count
    ratios = [policy.bounded_ratio(d)[0] for d in tokens.log_ratio]

    assert max(ratios) == math.exp(20.0)
    assert float(output.loss.detach()) == pytest.approx(total, rel=1e-12)
    assert log_probs.grad is not None and values.grad is not None
    assert log_probs.grad[mask].tolist() == pytest.approx(slopes, rel=1e-12)
    assert values.grad[mask].tolist() == pytest.approx(value_slopes, rel=1e-12)
    assert not log_probs.grad[~mask].any() and not values.grad[~mask].any()
    seen = update_statistics(output.extra, params["vf_coef"])["policy/ratio_mean"]
    assert seen == pytest.approx(math.fsum(ratios) / count, rel=1e-6)
    assert _ratio_too_large(output.extra, params["ratio_threshold"])


# Liger


def luspo(log_prob: Tensor, inputs: dict[str, Any], params: dict[str, Any]) -> Tensor:
    """`1/B sum_i sum_t (clip_t + beta k3_t)` over the tokens that count, `log_prob` `[B, T]` in float64."""
    found = inputs.get("attention_mask", inputs.get("completion_mask"))
    mask = torch.ones_like(log_prob) if found is None else tensor(found)
    advantages = tensor(inputs["advantages"])[:, None]
    old = tensor(inputs.get("old_per_token_logps", inputs.get("old_logp")))
    gap = log_prob - old
    if params["importance_sampling_level"] == "sequence":
        gap = (gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = gap.exp()
    low, high = params.get("epsilon_low", params.get("eps_low")), params.get("epsilon_high", params.get("eps_high"))
    capped = ratio if params.get("delta") is None else ratio.clamp(max=params["delta"])
    loss = -torch.minimum(capped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if params["beta"]:
        back = tensor(inputs.get("ref_per_token_logps", inputs.get("ref_logp"))) - log_prob
        kl = back.exp() - back - 1
        loss = loss + params["beta"] * (kl * ratio if params.get("use_bias_correction_kl") else kl)
    return (loss * mask).sum() / log_prob.shape[0]


@pins(reasons.LUSPO)
def luspo_over_tokens(case: Case, mode: str) -> None:
    """The sum over a sequence's tokens, averaged over all rows: padding is no token."""
    params, inputs = case.data["params"], case.data["inputs"]
    assert inputs.get("vllm_is_ratio") is None and params.get("upstream_grad", 1.0) == 1.0
    if "logits" in inputs:
        leaf = tensor(inputs["logits"]).requires_grad_()
        logits, labels = leaf[:, :-1], torch.tensor(inputs["completion_ids"])
        leaves = {"grad_logits": leaf}
    else:
        names = {"grad_input": "_input", "grad_weight": "lin_weight", "grad_bias": "bias"}
        leaves = {ours: tensor(inputs[theirs]).requires_grad_() for ours, theirs in names.items()}
        logits = leaves["grad_input"] @ leaves["grad_weight"].T + leaves["grad_bias"]
        labels = torch.tensor(inputs["selected_token_ids"])
    log_prob = (logits / params["temperature"]).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    loss = luspo(log_prob, inputs, params)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    outputs = {"loss": loss.item()} | {name: g.tolist() for name, g in zip(leaves, gradients, strict=True)}
    rerun(case, mode, outputs)


@pins(reasons.NO_LABEL)
def ignored_label(case: Case, _: Any) -> None:
    """An ignored label has log-prob 0 and no gradient, in every mode."""
    inputs = case.data["inputs"]
    labels = inputs["targets"]
    head = oracles.Head(inputs["weight"], inputs["bias"])
    warm = [case.data["params"]["temperature"]] * len(labels)
    kept = [0.0 if label == -100 else 1.0 for label in labels]
    words = [max(label, 0) for label in labels]
    log_probs, _ = oracles.head_forward(head, inputs["hidden"], words, warm)
    grads = oracles.head_backward(head, inputs["hidden"], words, warm, kept, [0.0] * len(labels))
    outputs = {
        "logprobs": [lp if keep else 0.0 for lp, keep in zip(log_probs, kept, strict=True)],
        "grad_hidden": grads.hidden,
        "grad_weight": grads.weight,
        "grad_bias": grads.bias,
    }
    data = {**case.data, "inputs": {**inputs, "upstream": [1.0] * len(labels)}, "outputs": outputs}
    assert labels.count(-100) == 1
    for mode in golden_liger.MODES:
        golden_liger.kernel(dataclasses.replace(case, data=data), mode, {"logprobs": "upstream"})
