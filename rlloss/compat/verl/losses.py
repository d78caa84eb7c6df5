"""verl's worker losses as contexts with verl's counts."""

import copy
from typing import Any

import torch
from torch import Tensor

from rlloss.compat.verl.counts import IGNORE, aggregation_of, counts_of, length_of, reduction_of, rows_of, totals_of
from rlloss.compat.verl.metric import AggregationType, Metric
from rlloss.compat.verl.padding import dense, no_padding_2_padding, offsets_of, read, require_entries, response_mask_of
from rlloss.compat.verl.policy import loss_mode, own_policy_loss, policy_loss_cfg, setting
from rlloss.errors import BatchError
from rlloss.functional.kl import kl_penalty as token_kl
from rlloss.functional.masked import masked_mean
from rlloss.losses.ce import CELossConfig, CELossContext
from rlloss.losses.grpo import GRPOLossConfig, GRPOLossContext
from rlloss.losses.value import ValueLossConfig, ValueLossContext

Result = tuple[Tensor, dict[str, Any]]


def sft_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Result:
    """Cross-entropy over the tokens that the loss mask counts, as a mean over the whole mini-batch.

    Args:
        config: Not read.
        model_output: `log_probs`, jagged `[B, j]` (entry j is about token j + 1), or padded `[B, R]`.
        data: `loss_mask` jagged over tokens, or `response_mask` `[B, R]`; `batch_num_tokens`, `dp_size`.
        dp_group: Ranks to count over where a count is missing.

    Returns:
        The loss, times `dp_size`, and no metrics. verl rolls the flat mask, so that a counted first token of a sample
        lands on the sample before; here the shift ends at the sample's border.
    """
    log_probs = model_output["log_probs"]
    if not log_probs.is_nested:
        require_entries(data, ("response_mask",), "sft_loss on padded log-probs")
        mask = read(data, "response_mask") != 0
        return _cross_entropy(rows_of(mask), log_probs, "token-mean", counts_of(data), dp_group), {}
    require_entries(data, ("loss_mask",), "sft_loss on jagged log-probs")
    loss_mask, offsets = read(data, "loss_mask"), offsets_of(log_probs)
    if not loss_mask.is_nested or not torch.equal(offsets_of(loss_mask), offsets):
        raise BatchError("sft_loss: loss_mask must be jagged with the lengths of log_probs, one entry for each token.")
    flat = loss_mask.values() != 0
    following = torch.cat([flat[1:], flat.new_zeros(1)])
    last = torch.zeros_like(flat).index_fill(0, offsets[1:].long() - 1, True)
    batch: dict[str, Any] = rows_of((following & ~last)[None]) | {"num_tokens": offsets.diff()}
    return _cross_entropy(batch, log_probs.values()[None], "token-mean", counts_of(data), dp_group), {}


def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Result:
    """Policy loss, entropy bonus and KL loss of an actor.

    Every loss takes the `loss_agg_mode`; verl's own sapo and geo_mean ignore it, and are always seq-mean-token-mean.

    Args:
        config: Actor config: `policy_loss.loss_mode` and its options, `clip_ratio*`, `loss_agg_mode`, `entropy_coeff`,
            `use_kl_loss`, `kl_loss_coef`, `kl_loss_type`, `loss_scale_factor`; an object or a mapping, only read.
        model_output: `log_probs`, and optionally `entropy`, over prompts and responses.
        data: `prompts`, `responses`, `response_mask`, `old_log_probs`, `advantages`; optionally `ref_log_prob`,
            `rollout_is_weights`; `dp_size`, `batch_num_tokens`, `global_batch_size`.
        dp_group: Ranks to count over where a count is missing.

    Returns:
        The loss, times `dp_size`, and metrics under verl's names.
    """
    reference = ("ref_log_prob",) if setting(config, "use_kl_loss", False) else ()
    require_entries(data, ("response_mask", "old_log_probs", "advantages", *reference), "ppo_loss")
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    entropy = read(model_output, "entropy")
    entropy = None if entropy is None else no_padding_2_padding(entropy, data)
    width = log_prob.shape[1]
    mask = response_mask_of(data, width)
    mode, counts = str(setting(config, "loss_agg_mode", "token-mean")), counts_of(data)
    counts["loss_scale_factor"] = setting(config, "loss_scale_factor")
    loss_cfg = _actor_config(config, mode, width, counts, entropy is not None)
    batch = {
        **rows_of(mask),
        "old_logprobs": dense(read(data, "old_log_probs"), width),
        "selection_logprobs": log_prob.detach(),
        "advantages": dense(read(data, "advantages"), width),
        "rollout_is_weights": dense(read(data, "rollout_is_weights"), width),
        "ref_logprobs": dense(read(data, "ref_log_prob"), width) if reference else None,
    }
    own = own_policy_loss(loss_mode(config))
    pg_loss: Any = None
    found: dict[str, Any] = {}
    if own is not None:
        pg_loss, found = _own_loss(own, config, batch, log_prob, mode, counts)
        # With advantages of 0 the context adds KL and entropy only.
        batch["advantages"] = torch.zeros_like(log_prob)
    (context,) = GRPOLossContext.build_batches([loss_cfg.build(batch)], group=dp_group, totals=totals_of(mode, counts))
    loss, (_, extra) = context.forward_log_probs(log_prob, entropy)
    scale = float(counts["dp_size"])
    if pg_loss is None:
        found |= policy_metrics(extra)
        pg_loss = float(extra["policy_loss"]) * scale
    else:
        loss = loss + pg_loss
    kind = aggregation_of(counts)
    found["actor/pg_loss"] = Metric(kind, pg_loss)
    if entropy is not None:
        summed = _aggregated(entropy.detach(), mask, mode, counts, dp_group)
        found["actor/entropy_loss"] = Metric(kind, summed)
    if reference:
        # Not out of the loss: a coefficient of 0 has no term there, and verl still reports the divergence.
        kl = token_kl(log_prob.detach(), batch["ref_logprobs"], loss_cfg.kl_loss_type or "k3")
        summed = _aggregated(kl, mask, mode, counts, dp_group)
        found |= {"kl_loss": Metric(kind, summed), "kl_coef": loss_cfg.kl_loss_coef}
    return loss, found


def value_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Result:
    """The clipped value loss of a critic.

    Args:
        config: Critic config: `cliprange_value`, `loss_agg_mode`, `loss_scale_factor`.
        model_output: `values` over prompts and responses.
        data: `prompts`, `responses`, `response_mask`, `values`, `returns`, and the counts of `ppo_loss`.
        dp_group: Ranks to count over where a count is missing.

    Returns:
        The loss, times `dp_size`, and metrics under verl's names.
    """
    require_entries(data, ("response_mask", "values", "returns"), "value_loss")
    predicted = no_padding_2_padding(model_output["values"], data)
    width = predicted.shape[1]
    mask = response_mask_of(data, width)
    mode, counts = str(setting(config, "loss_agg_mode", "token-mean")), counts_of(data)
    counts["loss_scale_factor"] = setting(config, "loss_scale_factor")
    loss_cfg = ValueLossConfig(
        cliprange_value=setting(config, "cliprange_value", 0.5),
        reduce_loss=False,
        loss_reduction=reduction_of(mode),
        loss_length=length_of(mode, width, counts),
    )
    batch = {
        **rows_of(mask),
        "values": dense(read(data, "values"), width),
        "returns": dense(read(data, "returns"), width),
    }
    context = ValueLossContext(loss_cfg, loss_cfg.build(batch).loss_kwargs)
    ValueLossContext.build_batches([context], group=dp_group, totals=totals_of(mode, counts))
    loss, (_, extra) = context.forward_values(predicted)
    return loss, {
        "critic/vf_loss": Metric(aggregation_of(counts), loss),
        "critic/vf_clipfrac": float(extra["value_clip_frac"]),
        "critic/vpred_mean": float(masked_mean(predicted.detach(), mask)),
    }


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregates the losses of tokens as verl does.

    Args:
        loss_mat: `[B, R]`, with a graph.
        loss_mask: `[B, R]`, bool or 0/1. NaN where it is 0 has no part in value or gradient, in every mode.
        loss_agg_mode: A key of `REDUCTIONS`.
        dp_size: The result is multiplied by it.
        batch_num_tokens: Tokens of the whole mini-batch; None counts these.
        global_batch_size: Sequences of the whole mini-batch; None counts the rows that have a token.
        loss_scale_factor: Divisor of seq-mean-token-sum-norm; None is R.

    Returns:
        0-dim. Without any token 0 (verl: NaN).

    Raises:
        UnknownNameError: The mode.
        BatchError: `dp_size` above 1 without the count that the mode needs.
    """
    counts = {"dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    counts["loss_scale_factor"] = loss_scale_factor
    return _aggregated(loss_mat, loss_mask, loss_agg_mode, counts, None)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates the KL divergence from the reference, token by token; see `rlloss.kl_penalty`.

    Args:
        logprob: Any shape, nats.
        ref_logprob: The same shape.
        kl_penalty: kl, k1, abs, mse, k2, low_var_kl, k3, each also with "+".
    """
    return token_kl(logprob, ref_logprob, kl_penalty)


def _aggregated(values: Tensor, mask: Tensor, mode: str, counts: dict[str, Any], group: Any) -> Tensor:
    loss = _cross_entropy(rows_of(mask != 0), -values, mode, counts, group)
    length = length_of(mode, values.shape[1], counts)
    return loss if length is None else loss / length


def _cross_entropy(batch: dict[str, Any], log_probs: Tensor, mode: str, counts: dict[str, Any], group: Any) -> Tensor:
    reduction = reduction_of(mode)
    config = CELossConfig(loss_reduction="sequence_sum" if reduction == "constant" else reduction, reduce_loss=False)
    totals = totals_of(mode, counts)
    (context,) = CELossContext.build_batches([config.build(batch)], group=group, totals=totals)
    return context.forward_log_probs(log_probs).loss


def _actor_config(config: Any, mode: str, width: int, counts: dict[str, Any], has_entropy: bool) -> GRPOLossConfig:
    name = loss_mode(config)
    return GRPOLossConfig(
        policy_loss_cfg=policy_loss_cfg(name, config) if own_policy_loss(name) is None else {},
        use_kl_loss=bool(setting(config, "use_kl_loss", False)),
        kl_loss_coef=setting(config, "kl_loss_coef", 0.001),
        kl_loss_type=setting(config, "kl_loss_type"),
        entropy_coef=setting(config, "entropy_coeff", 0.0) if has_entropy else 0.0,
        loss_reduction=reduction_of(mode),
        loss_length=length_of(mode, width, counts),
        reduce_loss=False,
    )


def _own_loss(
    fn: Any, config: Any, batch: dict[str, Any], log_prob: Tensor, mode: str, counts: dict[str, Any]
) -> Result:
    twin = copy.copy(config)
    if isinstance(twin, dict):
        twin["global_batch_info"] = dict(counts)
    else:
        object.__setattr__(twin, "global_batch_info", dict(counts))
    mask = batch["shifted_labels"] != IGNORE
    result: Result = fn(
        old_log_prob=batch["old_logprobs"],
        log_prob=log_prob,
        advantages=batch["advantages"],
        response_mask=mask,
        loss_agg_mode=mode,
        config=twin,
        rollout_is_weights=batch["rollout_is_weights"],
    )
    return result


def policy_metrics(extra: dict[str, Any]) -> dict[str, Metric]:
    """Names the metrics of a policy loss as verl does; those that the loss does not have are left out."""
    names = {"actor/ppo_kl": ("approx_kl_k1",), "actor/pg_clipfrac": ("clip_frac_low", "clip_frac_high")}
    names["actor/pg_clipfrac_lower"] = ("clip_frac_dual",)
    return {
        name: Metric(AggregationType.MEAN, sum(float(extra[part]) for part in parts))
        for name, parts in names.items()
        if all(part in extra for part in parts)
    }
