"""Liger's numbers, and those of TRL's kernels: from hidden states in every mode, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from golden_heads import LinearConfig
from rlloss import BaseLossContext, GRPOLossConfig, GRPOLossContext, LogProbConfig, Totals
from rlloss.compat.names import TRL_LOSS_TYPES, TRL_RATIOS, TRLCounts, trl_policy_loss, trl_totals

MODES = ("eager", "chunk", "liger")
TOLERANCE = 2e-6  # two float32 computations in different orders


def policy_fields(params: dict[str, Any], has_old: bool) -> dict[str, Any]:
    """Liger's options are TRL's, with names of their own for the clip bounds."""
    options = params | {
        "epsilon": params.get("epsilon_low", params.get("eps_low")),
        "epsilon_high": params.get("epsilon_high", params.get("eps_high")),
    }
    peer = TRL_LOSS_TYPES[params["loss_type"]]
    fields: dict[str, Any] = {
        "policy_loss_cfg": trl_policy_loss(options),
        "loss_reduction": peer.reduction,
        "on_policy": not has_old,
        "temperature": params["temperature"],
        "reduce_loss": False,
    }
    if params["beta"]:
        corrected = params.get("use_bias_correction_kl")
        ratio = TRL_RATIOS[params["importance_sampling_level"]] if corrected else None
        fields |= {"use_kl_loss": True, "kl_loss_coef": params["beta"], "kl_value_cap": None, "kl_importance": ratio}
    return fields


def weights_of(ratio: Any, mask: Tensor, loss_type: str) -> Tensor | None:
    """Importance weights of tokens; vespo multiplies them over the sequence, where Liger counts a row's weight once."""
    if ratio is None:
        return None
    weights = tensor(ratio, torch.float32)
    weights = weights[:, None] if weights.ndim == 1 else weights
    if weights.shape[1] == 1 and loss_type == "vespo":
        weights = weights ** (1.0 / mask.sum(1, keepdim=True).clamp(min=1))
    return weights.expand_as(mask)


def run(
    fields: dict[str, Any], batch: dict[str, Any], totals: Totals, head: tuple[Tensor, Tensor, Tensor | None]
) -> Tensor:
    context = GRPOLossContext.build_batches([GRPOLossConfig(**fields).build(batch)], totals=totals)[0]
    return context.forward(*head).loss


def given(inputs: dict[str, Any], names: dict[str, str]) -> dict[str, Tensor]:
    return {ours: tensor(inputs[key], torch.float32) for ours, key in names.items() if inputs.get(key) is not None}


@family(r"LigerFusedLinearGRPOLoss \(.*", MODES)
def chunked(case: Case, mode: str) -> None:
    """`LigerFusedLinearGRPOLoss`."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = torch.tensor(inputs["attention_mask"])
    hidden = tensor(inputs["_input"], torch.float32).requires_grad_()
    weight = tensor(inputs["lin_weight"], torch.float32).requires_grad_()
    bias = tensor(inputs["bias"], torch.float32).requires_grad_() if inputs.get("bias") is not None else None
    batch: dict[str, Any] = {
        "shifted_labels": torch.where(mask != 0, torch.tensor(inputs["selected_token_ids"]), -100),
        "rollout_is_weights": weights_of(inputs.get("vllm_is_ratio"), mask, params["loss_type"]),
    }
    names = {"advantages": "advantages", "old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps"}
    batch |= given(inputs, names)
    counts = TRLCounts(mask.shape[0], int(mask.sum()), inputs.get("num_items_in_batch") or int(mask.sum()))
    fields = policy_fields(params, "old_logprobs" in batch) | {"mode": mode, "chunk_size": 3}
    if params["loss_type"] == "dr_grpo":
        fields["loss_length"] = float(params["max_completion_length"])
    loss = run(fields, batch, trl_totals(params["loss_type"], counts), (hidden, weight, bias))
    (loss * params["upstream_grad"]).backward()
    assert_close(loss, outputs["loss"], TOLERANCE, "loss")
    for name, leaf in (("grad_input", hidden), ("grad_weight", weight), ("grad_bias", bias)):
        if leaf is not None:
            assert leaf.grad is not None
            assert_close(leaf.grad, outputs[name], TOLERANCE, name)


@family(r"triton_grpo_loss \(.*", MODES)
def triton(case: Case, mode: str) -> None:
    """`triton_grpo_loss`: its logits are hidden states under a head that is the identity."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    logits = tensor(inputs["logits"], torch.float32)
    labels = torch.tensor(inputs["completion_ids"])
    mask = torch.ones_like(labels) if inputs["completion_mask"] is None else torch.tensor(inputs["completion_mask"])
    hidden = logits[:, :-1].clone().requires_grad_()
    head = torch.eye(logits.shape[2])
    batch: dict[str, Any] = {
        "shifted_labels": torch.where(mask != 0, labels, -100),
        "rollout_is_weights": weights_of(inputs["vllm_is_ratio"], mask, params["loss_type"]),
    }
    batch |= given(inputs, {"advantages": "advantages", "old_logprobs": "old_logp", "ref_logprobs": "ref_logp"})
    counts = TRLCounts(mask.shape[0], int(mask.sum()), inputs["num_items_in_batch"] or int(mask.sum()))
    fields = policy_fields(params, "old_logprobs" in batch) | {"mode": mode, "chunk_size": 3}
    if params["loss_type"] == "dr_grpo":
        fields["loss_length"] = float(params.get("max_completion_length") or mask.shape[1])
    if not params["reduce"]:
        fields["loss_reduction"] = "sum"
    loss = run(fields, batch, trl_totals(params["loss_type"], counts), (hidden, head, None))
    loss.backward()
    assert hidden.grad is not None
    if params["reduce"]:
        assert_close(loss, outputs["loss"], TOLERANCE, "loss")
    else:
        assert_close(loss, tensor(outputs["per_token_loss"]).sum(), TOLERANCE, "sum of the per-token loss")
    gradient = outputs["grad_logits"] if params["reduce"] else outputs["grad_logits_of_sum"]
    if gradient is not None:
        padded = torch.cat([hidden.grad, torch.zeros_like(hidden.grad[:, :1])], dim=1)
        assert_close(padded, gradient, TOLERANCE, "grad_logits")


@family(r"chunked_loss\.fused_linear_ppo\._selective_logprob_forward/_backward .*", MODES)
def selective(case: Case, mode: str) -> None:
    """Liger's log-probs of labels and their gradients."""
    kernel(case, mode, {"logprobs": "upstream"})


@family(r"trl\.kernels\.ChunkedLogProbFunction.*", ("eager", "chunk"))
def trl_kernel(case: Case, mode: str) -> None:
    """TRL's log-probs and entropies, with soft cap and scale, and their gradients."""
    kernel(case, mode, {"logprobs": "upstream_grad_logprobs", "entropy": "upstream_grad_entropy"})


def kernel(case: Case, mode: str, upstream: dict[str, str]) -> None:
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    leaves = [tensor(inputs[name], torch.float32).requires_grad_() for name in ("hidden", "weight")]
    bias = tensor(inputs["bias"], torch.float32).requires_grad_() if inputs.get("bias") is not None else None
    labels = torch.tensor([inputs["targets"]])
    fields = {
        "mode": mode,
        "chunk_size": 2,
        "temperature": params["temperature"],
        "logit_softcap": params.get("final_logit_softcapping"),
        "logit_scale": params.get("logit_scale") or 1.0,
    }
    states = (leaves[0][None], leaves[1], bias)
    wants_entropy = "entropy" in upstream
    log_probs, (_, extra) = LogProbConfig(**fields, entropy_metric=wants_entropy).build({"shifted_labels": labels})(
        *states
    )
    assert_close(log_probs[0], outputs["logprobs"], TOLERANCE, "logprobs")
    if wants_entropy:
        assert_close(extra["entropy"][0], outputs["entropy"], TOLERANCE, "entropy")
        g, e = (tensor([inputs[name]], torch.float32) for name in upstream.values())
        batch = {"shifted_labels": labels, "g_log_prob": g, "g_entropy": e}
        (step,) = BaseLossContext.build_batches([LinearConfig(**fields).build(batch)])
        step.forward(*states).loss.backward()
    else:
        (log_probs[0] * tensor(inputs["upstream"], torch.float32)).sum().backward()
    for name, leaf in (("grad_hidden", leaves[0]), ("grad_weight", leaves[1]), ("grad_bias", bias)):
        if leaf is not None and outputs.get(name) is not None:
            assert leaf.grad is not None
            assert_close(leaf.grad, outputs[name], TOLERANCE, name)


@family(r"fused_selective_log_softmax .*", MODES)
def selective_log_softmax(case: Case, mode: str) -> None:
    """Liger's log-softmax at given words, from logits."""
    inputs = case.data["inputs"]
    logits = tensor(inputs["logits"], torch.float32)[:, :-1]
    labels = torch.where(torch.tensor(inputs["mask"]) != 0, torch.tensor(inputs["input_ids"]), -100)
    config = LogProbConfig(mode=mode, temperature=case.data["params"]["temperature"])
    log_probs, _ = config.build({"shifted_labels": labels}).forward(logits, torch.eye(logits.shape[2]))
    assert_close(log_probs, case.data["outputs"]["log_p"], TOLERANCE, "log_p")
