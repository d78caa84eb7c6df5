"""Rollout correction of XTuner, verl and TRL: weights, rejection and metrics through `build` and `build_batches`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from golden_steps import WAYS, run_log_probs, typeable
from golden_verl import reduction_fields
from rlloss import GRPOLossConfig, GRPOLossContext, RolloutImportanceSampling
from rlloss.compat.names import verl_policy_loss, verl_totals

# The peers' masked means add 1e-8 to a count of a few tokens.
MEANS = 1e-7


def corrected(rule: RolloutImportanceSampling, batch: dict[str, Any]) -> GRPOLossContext:
    """The calibrated context of one batch under a correction."""
    (context,) = GRPOLossContext.build_batches([GRPOLossConfig(rollout_is=rule).build(batch)])
    return context


def labels_of(mask: Any) -> Tensor:
    return torch.where(tensor(mask) != 0, 0, -100)


def outcome(context: GRPOLossContext) -> tuple[Tensor, Tensor]:
    """Weights, 0 at ignored tokens, and the mask of the tokens that stay."""
    kwargs = context.loss_kwargs
    counted = kwargs.shifted_labels != -100
    weights = torch.ones_like(kwargs.advantages) if kwargs.is_weights is None else kwargs.is_weights
    kept = counted if kwargs.keep_mask is None else counted & kwargs.keep_mask
    return torch.where(counted, weights, 0.0), kept.double()


def compare(context: GRPOLossContext, expected: dict[str, Any], names: dict[str, str]) -> None:
    """Compares the metrics that both know; `names` maps the peer's to ours."""
    known = {name: value for name, value in expected.items() if name in names}
    assert known
    for name, value in known.items():
        assert_close(context._step_metrics[names[name]].compute(), value, MEANS, name)


# XTuner takes perplexities of a packed row as if it were one sequence; ours are those of its sequences.
XTUNER_MISMATCH = {
    "mismatch/mismatch_kl": "mismatch_k1",
    "mismatch/mismatch_k3_kl": "mismatch_k3",
    "mismatch/mismatch_logprob_abs_diff": "mismatch_abs",
}
XTUNER_WEIGHTS = {
    "mismatch/rollout_is_max": "is_ratio_max",
    "mismatch/rollout_is_min": "is_ratio_min",
    "mismatch/rollout_is_veto_fraction": "rollout_vetoed_sequences",
}


@family("rollout_is", ("build_batches", "compute_rollout_is"))
def xtuner(case: Case, call: str) -> None:
    """A packed row; the result is the same when it is asked for before `build_batches`."""
    given, inputs, outputs = case.data["config"], case.data["inputs"], case.data["outputs"]
    rule = RolloutImportanceSampling(
        rollout_is_level=given["level"],
        rollout_is_mode=given["mode"],
        rollout_is_threshold=given["threshold_upper_lower"],
        rollout_is_mask_threshold=given["mask_threshold_upper_lower"],
        rollout_is_veto_threshold=given["veto_upper_lower"],
    )
    batch = {
        "shifted_labels": labels_of([inputs["mask"]]),
        "num_tokens": torch.tensor(inputs["seq_lens"]),
        "advantages": tensor([inputs["mask"]]),
        "old_logprobs": tensor([inputs["old_logprobs"]]),
        "rollout_logprobs": tensor([inputs["rollout_logprobs"]]),
    }
    if call == "build_batches":
        context = corrected(rule, batch)
    else:
        lengths = batch.pop("num_tokens")
        context = GRPOLossConfig(rollout_is=rule).build(batch)
        mismatch, _ = context.compute_rollout_is(None, lengths)
        assert_close(mismatch["mismatch_k1"].compute(), outputs["mismatch"]["mismatch/mismatch_kl"], MEANS, "kl")
        GRPOLossContext.build_batches([context])
    weights, kept = outcome(context)
    assert_close(weights, [outputs["weights"]], MEANS if given["level"] == "geometric" else 1e-12, "weights")
    assert_close(kept, [outputs["mask"]], 0.0, "mask")
    compare(context, outputs["mismatch"], XTUNER_MISMATCH)
    compare(context, outputs["metrics"], XTUNER_WEIGHTS)


VERL_TOKENS = {
    "rollout_corr/kl": "mismatch_k1",
    "rollout_corr/k3_kl": "mismatch_k3",
    "rollout_corr/chi2_token": "mismatch_chi2",
    "rollout_corr/rollout_is_mean": "is_weight_mean",
    "rollout_corr/rollout_is_eff_sample_size": "is_weight_ess",
}
# verl counts a row without tokens as a sequence of perplexity 1 here; it is no sequence of ours (DESIGN.md section 9).
VERL_SEQUENCES = {
    "rollout_corr/training_ppl": "train_ppl",
    "rollout_corr/training_log_ppl": "train_log_ppl",
    "rollout_corr/rollout_ppl": "rollout_ppl",
    "rollout_corr/rollout_log_ppl": "rollout_log_ppl",
    "rollout_corr/log_ppl_diff": "log_ppl_diff",
    "rollout_corr/log_ppl_abs_diff": "log_ppl_abs_diff",
    "rollout_corr/log_ppl_diff_max": "log_ppl_diff_max",
    "rollout_corr/log_ppl_diff_min": "log_ppl_diff_min",
    "rollout_corr/ppl_ratio": "ppl_ratio",
    "rollout_corr/rollout_rs_seq_masked_fraction": "rollout_rejected_sequences",
}


@family(r"rollout_corr_helper\..*")
def verl(case: Case, _: Any) -> None:
    """Padded rows; verl's names and number formats go through `RolloutImportanceSampling.verl`."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    if "exception" in outputs and outputs["exception"] == "ValueError":
        with pytest.raises(ValueError, match=r"rollout_(is|rs)"):
            RolloutImportanceSampling.verl(**params)
        return
    mask = inputs["response_mask"]
    batch = {
        "shifted_labels": labels_of(mask),
        "advantages": tensor(mask),
        "old_logprobs": tensor(inputs["old_log_prob"]),
        "rollout_logprobs": tensor(inputs["rollout_log_prob"]),
    }
    context = corrected(RolloutImportanceSampling.verl(**params), batch)
    weights, kept = outcome(context)
    if outputs["rollout_is_weights"] is not None:
        assert_close(weights, outputs["rollout_is_weights"], MEANS, "weights")
    assert_close(kept, outputs["modified_response_mask"], 0.0, "mask")
    if not RolloutImportanceSampling.verl(**params).compiled():
        assert not context._step_metrics  # nothing is measured where nothing is corrected
        return
    full = all(any(row) for row in mask)
    metrics = {key: value for key, value in outputs["metrics"].items() if key in VERL_TOKENS or full}
    rejected = "rollout_corr/rollout_rs_masked_fraction"
    compare(context, metrics, VERL_TOKENS | VERL_SEQUENCES | {rejected: "rollout_rejected_tokens"})


@family(r"GRPOTrainer vLLM importance-sampling slice.*")
def trl(case: Case, _: Any) -> None:
    """The ratio of each token; TRL's 1 at ignored tokens is no number of ours."""
    params, inputs = case.data["params"], case.data["inputs"]
    mask = tensor(inputs["completion_mask"])
    if inputs["tool_mask"] is not None:
        mask = mask * tensor(inputs["tool_mask"])
    batch = {
        "shifted_labels": labels_of(mask.tolist()),
        "advantages": mask,
        "old_logprobs": tensor(inputs["old_per_token_logps"]),
        "rollout_logprobs": tensor(inputs["sampling_per_token_logps"]),
    }
    rule = RolloutImportanceSampling.trl(params["mode"], params["clip_min"], params["clip_max"])
    weights, kept = outcome(corrected(rule, batch))
    assert_close(kept, mask, 0.0, "a masked ratio keeps its place in the count")
    expected = tensor(case.data["outputs"]["ratio"]).expand_as(mask)
    assert_close(weights, torch.where(mask != 0, expected, 0.0), 1e-12, "ratio")


@family("core_algos policy loss 'bypass_mode'", WAYS)
def verl_bypass(case: Case, way: str) -> None:
    """The sampling engine's log-probs are the old ones, and the current policy weighs and rejects."""
    params, outputs = case.data["params"], case.data["outputs"]
    inputs = {key: tensor(value) for key, value in case.data["inputs"].items()}
    given = {key: value for key, value in params["rollout_correction"].items() if key != "loss_type"}
    kind = params["rollout_correction"]["loss_type"]
    if outputs.get("exception") == "ValueError":
        with pytest.raises(ValueError, match="unknown policy loss 'foo'"):
            GRPOLossConfig(policy_loss_cfg={"loss_type": kind})
        return
    if kind == "ppo_clip":
        given["rollout_is"] = None
    policy = verl_policy_loss("vanilla" if kind == "ppo_clip" else "gpg", params)
    info, mask = params["global_batch_info"], inputs["response_mask"]
    fields = {
        "policy_loss_cfg": policy,
        "rollout_is": RolloutImportanceSampling.verl(**given),
        **reduction_fields(params["loss_agg_mode"], mask.shape[1], info.get("loss_scale_factor")),
    }
    batch: dict[str, Any] = {
        "shifted_labels": labels_of(mask.tolist()),
        "rollout_logprobs": inputs["old_log_prob"],
        "selection_logprobs": inputs["log_prob"],
        "advantages": inputs["advantages"],
    }
    totals = verl_totals(info.get("batch_num_tokens"), info.get("global_batch_size"), info.get("dp_size"))
    way = way if typeable(inputs["log_prob"], mask) else "log_probs"
    found = run_log_probs(fields, batch, inputs["log_prob"], totals=totals, way=way)
    assert_close(found.loss, outputs["loss"], MEANS, "loss")
    assert_close(found.grad, outputs["grad_log_prob"], MEANS, "grad_log_prob")
