"""verl's numbers: policy losses, aggregation and KL, by log-probs and through the two-word head."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from golden_steps import WAYS, Outcome, labels_of, run_log_probs, typeable
from rlloss import GRPOLossConfig, Totals, kl_penalty
from rlloss.compat.names import VERL_LOSS_AGG_MODES, verl_policy_loss, verl_totals
from rlloss.errors import ConfigError

# verl adds 1e-8 to the denominators of its masked means
TOLERANCE = 1e-7
# verl's fractions are float32
METRIC_TOLERANCE = 1e-6
OWN_REDUCTION = {"sapo": "sample", "geo_mean": "sample"}
UNBOUNDED = {"log_prob_diff_min": -700.0, "log_prob_diff_max": 700.0}
WITHOUT_BOUNDS = ("gmpo", "clip_cov", "kl_cov")
METRICS = {
    "vanilla": {"actor/ppo_kl": "approx_kl_k1", "actor/pg_clipfrac_lower": "clip_frac_dual"},
    "dppo_tv": {"actor/ppo_kl": "approx_kl_k1", "actor/pg_clipfrac": "trust_region_frac"},
    "dppo_kl": {"actor/ppo_kl": "approx_kl_k1", "actor/pg_clipfrac": "trust_region_frac"},
    "gspo": {"actor/ppo_kl": "approx_kl_k1"},
    "clip_cov": {"actor/pg_clipfrac": "selected_frac"},
    "dro": {"actor/ppo_kl": "approx_kl_k1"},
}
# verl is NaN there and rlloss is not: what is finite must be equal, and garbage must change nothing.
PEER_NAN = re.compile(r"edge/(all_masked|nan_\w+_at_masked)/.*")


def reduction_fields(mode: str, width: int, scale: float | None) -> dict[str, Any]:
    reduction = VERL_LOSS_AGG_MODES[mode].reduction
    fields: dict[str, Any] = {"loss_reduction": reduction}
    return fields | ({"loss_length": float(scale or width)} if reduction == "constant" else {})


def evaluate(case: Case, way: str, inputs: dict[str, Tensor]) -> Outcome:
    """The case through the public API."""
    params, name = case.data["params"], case.key.rpartition("'")[0].rpartition("'")[2]
    info = params["global_batch_info"]
    mask = inputs["response_mask"]
    policy = verl_policy_loss(name, params)
    if policy["loss_type"] in WITHOUT_BOUNDS:
        policy |= UNBOUNDED
    fields = {
        "policy_loss_cfg": policy,
        **reduction_fields(params["loss_agg_mode"], mask.shape[1], info.get("loss_scale_factor")),
    }
    totals = verl_totals(info.get("batch_num_tokens"), info.get("global_batch_size"), info.get("dp_size"))
    if name in OWN_REDUCTION:
        fields = {"policy_loss_cfg": policy, "loss_reduction": OWN_REDUCTION[name]}
    if name == "geo_mean":
        totals = Totals(sequences=mask.shape[0])
    batch: dict[str, Any] = {
        "shifted_labels": labels_of(mask),
        "old_logprobs": inputs["old_log_prob"],
        "selection_logprobs": inputs["log_prob"],
        "advantages": inputs["advantages"],
        "rollout_is_weights": inputs.get("rollout_is_weights"),
    }
    return run_log_probs(fields, batch, inputs["log_prob"], totals=totals, way=way)


@family(r"core_algos policy loss '(?!bypass_mode).*'", WAYS)
def policy_loss(case: Case, way: str) -> None:
    """Every policy loss of verl's registry, bypass_mode apart."""
    outputs = case.data["outputs"]
    inputs = {key: tensor(value) for key, value in case.data["inputs"].items()}
    if "exception" in outputs:
        with pytest.raises(ConfigError):
            evaluate(case, way, inputs)
        return
    if case.data["params"].get("dtype") == "bfloat16":
        inputs |= {key: inputs[key].bfloat16() for key in ("log_prob", "old_log_prob")}
    mask = inputs["response_mask"]
    if way != "log_probs" and not typeable(inputs["log_prob"], mask):
        assert "neginf" in case.name or float(inputs["log_prob"][mask != 0].max()) >= 0.0
        way = "log_probs"
    found = evaluate(case, way, inputs)
    loss, grad = tensor(outputs["loss"]), tensor(outputs["grad_log_prob"])
    if PEER_NAN.fullmatch(case.name):
        kept = {"response_mask": mask}
        clean = evaluate(case, way, {key: torch.where(mask != 0, value, -0.5) for key, value in inputs.items()} | kept)
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.grad, clean.grad)
        assert found.loss.isfinite()
        loss, grad = (
            torch.where(loss.isnan(), clean.loss.double(), loss),
            torch.where(grad.isnan(), clean.grad.double(), grad),
        )
    assert_close(found.loss, loss, TOLERANCE, "loss")
    assert_close(found.grad, grad, TOLERANCE, "grad_log_prob")
    check_metrics(case, found, mask)


def check_metrics(case: Case, found: Outcome, mask: Tensor) -> None:
    """Means over the tokens of the micro-batch, where verl's are over the same tokens."""
    name = case.key.rpartition("'")[0].rpartition("'")[2]
    expected = case.data["outputs"]["metrics"]
    if case.name.startswith("edge/") or not bool((mask != 0).any()):
        return
    for theirs, ours in METRICS.get(name, {}).items():
        if theirs in expected:
            assert_close(torch.tensor(found.extra[ours]), expected[theirs], METRIC_TOLERANCE, theirs)
    if name in ("vanilla", "gspo", "cispo"):
        total = torch.tensor(found.extra["clip_frac_low"] + found.extra["clip_frac_high"])
        assert_close(total, expected["actor/pg_clipfrac"], METRIC_TOLERANCE, "clip fraction")


@family(r"core_algos\.agg_loss", WAYS)
def agg_loss(case: Case, way: str) -> None:
    """`agg_loss` of a matrix: REINFORCE with A = -1 is the matrix itself."""
    params, outputs = case.data["params"], case.data["outputs"]
    matrix, mask = tensor(case.data["inputs"]["loss_mat"]), tensor(case.data["inputs"]["loss_mask"])
    # A log-prob is below 0, a loss need not be: shift, and take the shift back by the linearity of a mean.
    shift = torch.zeros(()) if way == "log_probs" else torch.tensor(4.0)
    batch = {"shifted_labels": labels_of(mask), "advantages": -torch.ones_like(matrix)}
    fields = {
        "policy_loss_cfg": {"loss_type": "reinforce"},
        **reduction_fields(params["loss_agg_mode"], mask.shape[1], params.get("loss_scale_factor")),
    }
    totals = verl_totals(params.get("batch_num_tokens"), params.get("global_batch_size"), params.get("dp_size"))
    found = run_log_probs(fields, batch, matrix - shift, totals=totals, way=way)
    assert_close(found.grad, outputs["grad_loss_mat"], TOLERANCE, "grad_loss_mat")
    assert_close(found.loss + (found.grad * shift).sum(), outputs["loss"], TOLERANCE, "loss")


@family(r"core_algos\.kl_penalty", WAYS)
def kl(case: Case, way: str) -> None:
    """KL estimators: the function, and the KL term of a loss whose policy term is 0."""
    kind, inputs, outputs = case.data["params"]["kl_penalty"], case.data["inputs"], case.data["outputs"]
    if "exception" in outputs:
        with pytest.raises(ConfigError):
            GRPOLossConfig(kl_loss_type=kind)
        return
    log_probs, reference = tensor([inputs["logprob"]]), tensor([inputs["ref_logprob"]])
    assert_close(kl_penalty(log_probs, reference, kind)[0], outputs["kl"], 1e-12, "kl")
    batch = {
        "shifted_labels": torch.zeros_like(log_probs, dtype=torch.long),
        "advantages": torch.zeros_like(log_probs),
        "ref_logprobs": reference,
    }
    fields = {
        "policy_loss_cfg": {"loss_type": "reinforce"},
        "use_kl_loss": True,
        "kl_loss_coef": 1.0,
        "kl_loss_type": kind,
        "loss_reduction": "sum",
    }
    found = run_log_probs(fields, batch, log_probs, way=way)
    # The head's float64 logits round a log-prob of -30 next to one of -1e-13.
    assert_close(found.loss, tensor(outputs["kl"]).sum(), 1e-9, "sum of kl")
    assert_close(found.grad[0], outputs["grad_logprob_of_sum"], 1e-9, "grad")
