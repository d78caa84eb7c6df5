"""TRL's numbers: GRPO in all its loss types, RLOO, and the trainers around them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from golden_steps import WAYS, Outcome, labels_of, run_log_probs
from rlloss import AdaptiveEntropyCoef, GRPOLossConfig, GRPOLossContext, Totals, gather_logprobs
from rlloss.compat.names import TRL_LOSS_TYPES, TRL_RATIOS, TRLCounts, trl_policy_loss, trl_totals
from rlloss.functional.opd import iw_opd_weights
from rlloss.functional.policy_score import gamma_factor
from rlloss.layout import token_layout

TOLERANCE = 1e-9
FLOAT32 = 1e-6
UNBOUNDED = {"log_prob_diff_min": -700.0, "log_prob_diff_max": 700.0}


def counts_of(case: Case, mask: Tensor) -> TRLCounts:
    params = case.data["params"]
    training = params["mode"] == "train"
    return TRLCounts(
        rows=mask.shape[0],
        tokens=int(mask.sum()),
        items=case.data["inputs"].get("num_items_in_batch") or 0,
        accumulation=params["gradient_accumulation_steps"] if training else 1,
        per_generation=params["steps_per_generation"] if training else 1,
        processes=params["num_processes"],
    )


def kl_fields(params: dict[str, Any]) -> dict[str, Any]:
    """TRL's KL is k3 without a cap; its correction takes the policy's ratio."""
    if not params["beta"]:
        return {}
    ratio = TRL_RATIOS[params["importance_sampling_level"]] if params["use_bias_correction_kl"] else None
    return {"use_kl_loss": True, "kl_loss_coef": params["beta"], "kl_value_cap": None, "kl_importance": ratio}


def case_batch(inputs: dict[str, Any], mask: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """TRL's micro-batch under our names."""
    keys = {
        "old_logprobs": "old_per_token_logps",
        "ref_logprobs": "ref_per_token_logps",
        "rollout_logprobs": "sampling_per_token_logps",
        "selection_entropy": "entropies",
        "advantages": "advantages",
    }
    batch: dict[str, Any] = {"shifted_labels": labels_of(mask)}
    batch |= {ours: tensor(inputs[theirs], dtype) for ours, theirs in keys.items() if inputs.get(theirs) is not None}
    if inputs.get("importance_sampling_ratio") is not None:
        batch["rollout_is_weights"] = tensor(inputs["importance_sampling_ratio"], dtype)
    return batch


def grpo_fields(case: Case, params: dict[str, Any]) -> dict[str, Any]:
    peer = TRL_LOSS_TYPES[params["loss_type"]]
    # TRL picks tau by torch.where on two plain floats, which gives float32 numbers.
    names = ("sapo_temperature_pos", "sapo_temperature_neg")
    params = params | {name: float(torch.tensor(params[name], dtype=torch.float32)) for name in names}
    fields: dict[str, Any] = {
        "policy_loss_cfg": trl_policy_loss(params),
        "loss_reduction": peer.reduction,
        "on_policy": case.data["inputs"].get("old_per_token_logps") is None,
        "off_policy_limit": params["off_policy_mask_threshold"],
        "top_entropy_quantile": params["top_entropy_quantile"],
        **kl_fields(params),
    }
    if peer.reduction == "constant":
        fields["loss_length"] = float(params["max_completion_length"])
    return fields


def entropy_fields(case: Case, params: dict[str, Any], kept: float, totals: Totals) -> dict[str, Any]:
    """TRL divides the bonus by the tokens that it keeps and by the accumulation, whatever the loss type."""
    if not params["entropy_coef"]:
        return {}
    divisor = kept * params["gradient_accumulation_steps"]
    ours = kept if totals.tokens is None else totals.tokens
    return {"entropy_coef": params["entropy_coef"] * ours / divisor, "entropy_reduction": "token"}


@family(r"GRPOTrainer\._compute_loss .*", WAYS)
def grpo(case: Case, way: str) -> None:
    """One micro-batch of `_compute_loss`."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    if "trace" in outputs:
        entropy_trace(case)
        return
    mask = tensor(inputs["completion_mask"])
    if inputs.get("tool_mask") is not None:
        mask = mask * tensor(inputs["tool_mask"])
    single = case.name.endswith("float32")
    batch = case_batch(inputs, mask, torch.float32 if single else torch.float64)
    totals = trl_totals(params["loss_type"], counts_of(case, mask))
    kept = float(mask.sum())
    fields = grpo_fields(case, params) | entropy_fields(case, params, kept, totals)
    leaf = tensor(inputs["per_token_logps"]).to(batch["advantages"].dtype)
    if fields.get("entropy_coef") or outputs["grad_entropies"] is not None:
        way = "log_probs"
    found = run_log_probs(fields, batch, leaf, entropy=tensor(inputs["entropies"]), totals=totals, way=way)
    tolerance = FLOAT32 if single else TOLERANCE
    assert_close(found.loss, outputs["loss"], tolerance, "loss")
    assert_close(found.grad, outputs["grad_per_token_logps"], tolerance, "grad_per_token_logps")
    if outputs["grad_entropies"] is not None:
        assert found.entropy_grad is not None
        assert_close(found.entropy_grad, outputs["grad_entropies"], tolerance, "grad_entropies")
    check_metrics(case, found, mask)


def check_metrics(case: Case, found: Outcome, mask: Tensor) -> None:
    """TRL's token means that are the same quantity here."""
    metrics = case.data["outputs"].get("metrics", {})
    if "kl" in metrics and bool(mask.any()):
        assert_close(torch.tensor(found.extra["kl"]), metrics["kl"], FLOAT32, "kl")


def entropy_trace(case: Case) -> None:
    """The adaptive entropy coefficient over optimiser steps of two micro-batches."""
    params, inputs = case.data["params"], case.data["inputs"]
    mask = tensor(inputs["completion_mask"])
    control = AdaptiveEntropyCoef(
        params["entropy_coef"],
        params["entropy_target"],
        params["entropy_coef_delta"],
        params["entropy_coef_min"],
        params["entropy_coef_max"],
    )
    totals = trl_totals("grpo", counts_of(case, mask))
    seen: list[Tensor] = []
    rows = zip(inputs["entropies_per_microbatch"], inputs["sync_gradients"], case.data["outputs"]["trace"], strict=True)
    for values, boundary, expected in rows:
        entropy = tensor(values)
        coef = control.value / params["gradient_accumulation_steps"]
        fields = grpo_fields(case, params) | {"entropy_coef": coef, "entropy_reduction": "token"}
        found = run_log_probs(
            fields, case_batch(inputs, mask), tensor(inputs["per_token_logps"]), entropy=entropy, totals=totals
        )
        assert_close(found.loss, expected["loss"], TOLERANCE, "loss")
        seen.append(entropy[mask != 0])
        if boundary:
            control.update(float(torch.cat(seen).mean()))
            control.load_state_dict(control.state_dict())
            seen = []


@family(r"experimental gspo_token GRPOTrainer\._compute_loss.*", WAYS)
def gspo_token(case: Case, way: str) -> None:
    """GSPO-token, TRL's level "sequence_token"."""
    grpo(case, way)


@family(r"experimental DPPOTrainer\._compute_loss.*", WAYS)
def dppo(case: Case, way: str) -> None:
    """DPPO with binary KL against the sampling policy, epsilon the trust region."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["completion_mask"])
    batch = case_batch(inputs, mask) | {"old_logprobs": tensor(inputs["sampling_per_token_logps"])}
    epsilon = params["epsilon"]
    policy = {"loss_type": "dppo_kl", "divergence_low": epsilon, "divergence_high": epsilon, "ratio_cap": 20.0}
    fields = {"policy_loss_cfg": policy, **kl_fields(params | {"use_bias_correction_kl": False})}
    totals = trl_totals("dapo", counts_of(case, mask))
    found = run_log_probs(fields, batch, tensor(inputs["per_token_logps"]), totals=totals, way=way)
    assert_close(found.loss, outputs["loss"], TOLERANCE, "loss")
    assert_close(found.grad, outputs["grad_per_token_logps"], TOLERANCE, "grad_per_token_logps")


@family(r"experimental GMPOTrainer\._compute_loss.*", WAYS)
def gmpo(case: Case, way: str) -> None:
    """GMPO: sequences averaged, its KL a mean of sequence means without a correction."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["completion_mask"])
    policy = {"loss_type": "gmpo", "clip_log_ratio_low": params["epsilon"], "clip_log_ratio_high": params["epsilon"]}
    fields = {"policy_loss_cfg": policy, "loss_reduction": "sample"}
    fields |= kl_fields(params | {"use_bias_correction_kl": False})
    totals = trl_totals("grpo", counts_of(case, mask))
    batch = case_batch(inputs, mask)
    found = run_log_probs(fields, batch, tensor(inputs["per_token_logps"]), totals=totals, way=way)
    assert_close(found.loss, outputs["loss"], TOLERANCE, "loss")
    assert_close(found.grad, outputs["grad_per_token_logps"], TOLERANCE, "grad_per_token_logps")


@family(r"RLOOTrainer\._compute_loss.*", WAYS)
def rloo(case: Case, way: str) -> None:
    """RLOO: the ratio of the whole sequence, sequences averaged; only the sum of the old log-probs is known."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["completion_mask"])
    share = tensor(inputs["old_logps"]) / mask.sum(1)
    batch = {
        "shifted_labels": labels_of(mask),
        "advantages": tensor(inputs["advantages"]),
        "old_logprobs": share[:, None].expand_as(mask),
    }
    policy = {
        "ratio": "sequence_product",
        "cliprange_low": params["epsilon_low"],
        "cliprange_high": params["epsilon_high"],
        "clip_ratio_c": None,
    }
    fields = {"policy_loss_cfg": policy, "loss_reduction": "sample"}
    totals = Totals(sequences=mask.shape[0])
    found = run_log_probs(fields, batch, tensor(inputs["per_token_logps"]), totals=totals, way=way)
    assert_close(found.loss, outputs["loss"], TOLERANCE, "loss")
    assert_close(found.grad, outputs["grad_per_token_logps"], TOLERANCE, "grad_per_token_logps")


@family(r"experimental AsyncGRPOTrainer\.compute_loss.*", WAYS)
def async_grpo(case: Case, way: str) -> None:
    """Asynchronous GRPO on one packed row."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    log_probs, segments = tensor([inputs["log_probs"]]), torch.tensor(inputs["segment_id"])
    batch = {
        "shifted_labels": torch.zeros_like(log_probs, dtype=torch.long),
        "num_tokens": torch.bincount(segments),
        "old_logprobs": tensor([inputs["old_log_probs"]]),
        "advantages": tensor([inputs["advantages"]]),
    }
    policy = {"cliprange_low": params["epsilon_low"], "cliprange_high": params["epsilon_high"], "clip_ratio_c": None}
    steps, processes = params["gradient_accumulation_steps"], params["num_processes"]
    totals = Totals(tokens=inputs["global_n_tokens"] * steps, world=processes)
    found = run_log_probs({"policy_loss_cfg": policy}, batch, log_probs, totals=totals, way=way)
    assert_close(found.loss, outputs["loss"], TOLERANCE, "loss")
    assert_close(found.grad[0], outputs["grad_log_probs"], TOLERANCE, "grad_log_probs")
    assert math.isclose(found.extra["ratio_mean"], outputs["metrics"]["ratio"], rel_tol=1e-6)


@family(r"GRPOTrainer\.get_high_entropy_mask.*")
def high_entropy_mask(case: Case, _: Any) -> None:
    """The tokens of highest entropy: the others have no gradient."""
    inputs = case.data["inputs"]
    mask = tensor(inputs["mask"])
    fields = {
        "policy_loss_cfg": {"loss_type": "reinforce"},
        "top_entropy_quantile": case.data["params"]["top_entropy_quantile"],
    }
    batch = case_batch({"advantages": torch.ones_like(mask).tolist(), "entropies": inputs["entropies"]}, mask)
    found = run_log_probs(fields, batch, -torch.ones_like(mask))
    assert (found.grad != 0).tolist() == case.data["outputs"]["mask"]


@family(r"GRPOTrainer\.get_off_policy_mask.*")
def off_policy_mask(case: Case, _: Any) -> None:
    """Sequences that drifted from the sampling policy: they have no gradient."""
    inputs = case.data["inputs"]
    mask = tensor(inputs["mask"])
    fields = {
        "policy_loss_cfg": {"loss_type": "reinforce"},
        "off_policy_limit": case.data["params"]["off_policy_threshold"],
        "on_policy": True,
    }
    batch = case_batch(inputs, mask)
    found = run_log_probs(fields, batch, tensor(inputs["per_token_logps"]))
    kept = (found.grad != 0).any(dim=1, keepdim=True)
    assert kept.long().tolist() == case.data["outputs"]["mask"]


@family(r"GRPOTrainer\.get_gamma_weights.*")
def gamma_weights(case: Case, _: Any) -> None:
    """VESPO's factor of each sequence."""
    params, inputs = case.data["params"], case.data["inputs"]
    mask = tensor(inputs["mask"]) != 0
    segments = token_layout(mask, None, int(mask.sum())).segments
    phi = gamma_factor(
        tensor(inputs["log_ratio_per_token"])[mask],
        tensor(inputs["advantages"]).expand(mask.shape)[mask],
        segments,
        (params["k_pos"], params["lambda_pos"]),
        (params["k_neg"], params["lambda_neg"]),
    )
    expected = tensor(case.data["outputs"]["phi"]).expand(mask.shape)[mask]
    assert_close(phi, expected, TOLERANCE, "phi")


@family(r"experimental IWOPDTrainer\..*", ("eager", "chunk", "liger"))
def iw_opd(case: Case, mode: str) -> None:
    """On-policy distillation with early tokens favoured; logits are hidden states under the identity."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    logits = tensor(inputs["student_logits"]).requires_grad_()
    labels = torch.tensor(inputs["labels"])
    student = gather_logprobs(logits.detach(), labels, params["temperature"])
    rollout = student if inputs["rollout_logprobs"] is None else tensor(inputs["rollout_logprobs"])
    gap = tensor(inputs["teacher_actual_logprobs"]) - rollout
    weights = iw_opd_weights(gap, labels != -100, params["iw_opd_gamma"], params["iw_opd_epsilon"])
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, temperature=params["temperature"], mode=mode)
    totals = Totals(tokens=inputs["num_items_in_batch"])
    batch = {"shifted_labels": labels, "advantages": weights * gap}
    (context,) = GRPOLossContext.build_batches([config.build(batch)], totals=totals)
    loss, _ = context.forward(logits, torch.eye(logits.shape[2], dtype=torch.float64))
    loss.backward()
    assert logits.grad is not None
    tolerance = FLOAT32 if mode == "liger" else TOLERANCE
    assert_close(loss, outputs["loss"], tolerance, "loss")
    assert_close(logits.grad, outputs["grad_logits"], tolerance, "grad_logits")
