"""PPO's numbers of TRL (old `step()` and newer) and of verl: rewards, advantages, controllers, losses, whole steps.

What other code leaves at masked positions is not compared: nothing of rlloss looks there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from rlloss import ActorCriticLossConfig, ActorCriticLossContext, gather_logprobs
from rlloss.compat import verl
from rlloss.functional.controllers import AdaptiveKLController, FixedKLController
from rlloss.functional.gae import gae
from rlloss.functional.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlloss.functional.moments import RunningMoments
from rlloss.functional.ppo_rewards import compute_rewards
from rlloss.training.ppo_stats import update_statistics

# Both libraries compute some means with float32 masks.
TOLERANCE = 1e-6


def masked(values: Any, mask: Tensor) -> Tensor:
    """Numbers where the mask counts, 0 elsewhere."""
    return torch.where(mask != 0, tensor(values), 0.0)


def check(found: Tensor, expected: Any, mask: Tensor, what: str) -> None:
    assert_close(masked(found.tolist(), mask), masked(expected, mask), TOLERANCE, what)


def number(value: Any) -> Tensor:
    """A 0-dim tensor of a float, a tensor or a metric of rlloss."""
    return torch.tensor(float(value.detach() if isinstance(value, Tensor) else value))


def check_numbers(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for name, value in expected.items():
        assert_close(
            number(found[name]),
            value,
            tolerance,
            name,
        )


@family(r"trl\.core\.masked_mean.*|torch_functional masked_sum.*")
def statistics(case: Case, _: None) -> None:
    values, mask = tensor(case.data["inputs"]["values"]), tensor(case.data["inputs"]["mask"])
    out = case.data["outputs"]
    rows = out.get("masked_mean_axis1", out.get("masked_mean_rows"))
    plain = out.get("masked_whiten_noshift", out.get("masked_whiten_no_shift"))
    assert_close(masked_mean(values, mask), out["masked_mean"], TOLERANCE, "mean")
    assert_close(masked_mean(values, mask, 1), rows, TOLERANCE, "mean of rows")
    assert_close(masked_var(values, mask), out["masked_var_unbiased"], TOLERANCE, "unbiased")
    assert_close(masked_var(values, mask, unbiased=False), out["masked_var_biased"], TOLERANCE, "biased")
    check(masked_whiten(values, mask), out["masked_whiten"], mask, "whiten")
    check(masked_whiten(values, mask, shift_mean=False), plain, mask, "whiten without shift")
    if "masked_sum" in out:
        assert_close(masked_sum(values, mask), out["masked_sum"], TOLERANCE, "sum")
    if "whiten" in out:
        every = torch.ones_like(mask)
        check(masked_whiten(values, every), out["whiten"], every, "whiten of all")
        check(masked_whiten(values, every, shift_mean=False), out["whiten_noshift"], every, "whiten of all, no shift")


@family(r"trl\.core\.clip_by_value.*")
def clip_by_value(case: Case, _: None) -> None:
    from rlloss.functional.bounds import bound

    inputs = case.data["inputs"]
    found = bound(tensor(inputs["x"]), tensor(inputs["tensor_min"]), tensor(inputs["tensor_max"]))
    assert_close(found, case.data["outputs"]["out"], TOLERANCE, "clipped")


@family(r"trl\.core\.logprobs_from_logits.*")
def logits_to_log_probs(case: Case, _: None) -> None:
    logits, labels = tensor(case.data["inputs"]["logits"]), torch.tensor(case.data["inputs"]["labels"])
    assert_close(gather_logprobs(logits, labels), case.data["outputs"]["logprobs"], TOLERANCE, "log-probs")
    assert_close(entropy_of(logits), case.data["outputs"]["entropy"], TOLERANCE, "entropy")


def entropy_of(logits: Tensor) -> Tensor:
    """Entropies `[B, T]` by a log-prob context over an identity head."""
    from rlloss import LogProbConfig

    labels = torch.zeros(logits.shape[:2], dtype=torch.int64)
    context = LogProbConfig(entropy_metric=True).build({"shifted_labels": labels})
    return context.forward(logits, torch.eye(logits.shape[-1], dtype=logits.dtype)).extra["entropy"]


@family(r"(AdaptiveKLController\.update|core_algos\.(Adaptive|Fixed)KLController).*")
def kl_controller(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    updates = inputs.get("updates") or [[current, params["n_steps"]] for current in inputs["current"]]
    if "horizon" in params:
        target = params.get("target", params.get("target_kl"))
        controller: Any = AdaptiveKLController(params["init_kl_coef"], target, params["horizon"])
    else:
        controller = FixedKLController(params["kl_coef"])
    values = []
    for current, n_steps in updates:
        controller.update(current, n_steps)
        values.append(controller.value)
    assert_close(torch.tensor(values).double(), out.get("values", out.get("value_after")), TOLERANCE, "values")


@family(r"RunningMoments\.update.*")
def running_moments(case: Case, _: None) -> None:
    moments = RunningMoments()
    for batch, expected in zip(case.data["inputs"]["batches"], case.data["outputs"]["after"], strict=True):
        mean, std = moments.update(tensor(batch))
        found = {"batch_mean": mean, "batch_std": std, "mean": moments.mean, "std": moments.std, "var": moments.var}
        check_numbers({**found, "count": moments.count}, expected)


@family(r"PPOTrainer\.compute_rewards.*")
def rewards(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["masks"])
    given = (tensor(inputs[name]) for name in ("scores", "logprobs", "ref_logprobs"))
    found = compute_rewards(*given, mask, params["kl_coef"], params["kl_penalty"])
    check(found.rewards, out["rewards"], mask, "rewards")
    check(found.penalties, out["non_score_rewards"], mask, "penalties")
    check(found.kl, out["kls"], mask, "kl")


def trl_advantages(values: Tensor, given: Tensor, mask: Tensor, params: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """TRL's treatment: every column is a step, and whitened rewards keep what whitening puts into the padding."""
    whitened = torch.where(mask != 0, given, 0.0)
    if params["whiten_rewards"]:
        mean, variance = masked_mean(given, mask), masked_var(given, mask)
        whitened = (whitened - mean) * torch.rsqrt(variance + 1e-8) + mean
    every = torch.ones_like(mask)
    advantages, returns = gae(whitened, torch.where(mask != 0, values, 0.0), every, params["gamma"], params["lam"])
    return masked_whiten(advantages, mask), returns


@family(r"PPOTrainer\.compute_advantages.*")
def advantages(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    values, given, mask = (tensor(inputs[name]) for name in ("values", "rewards", "mask"))
    found, returns = trl_advantages(values, given, mask, params)
    check(found, out["advantages"], mask, "advantages")
    check(returns, out["returns"], mask, "returns")
    if not params["whiten_rewards"]:
        steps, returns = gae(given, values, mask, params["gamma"], params["lam"], holes="steps")
        check(masked_whiten(steps, mask), out["advantages"], mask, "advantages by holes=steps")
        check(returns, out["returns"], mask, "returns by holes=steps")


@family(r"core_algos\.compute_gae_advantage_return")
def verl_gae(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    given, values, mask = (tensor(inputs[name]) for name in ("token_level_rewards", "values", "response_mask"))
    found, returns = gae(given, values, mask, params["gamma"], params["lam"])
    check(masked_whiten(found, mask), out["advantages"], mask, "advantages")
    check(returns, out["returns"], mask, "returns")


def actor_critic(params: dict[str, Any], batch: dict[str, Tensor], mask: Tensor, **fields: Any) -> Any:
    """A calibrated context with TRL's names of the clips."""
    low = {"cliprange_low": params["cliprange"], "cliprange_high": params["cliprange"]}
    config = ActorCriticLossConfig(
        policy_loss_cfg=low, vf_coef=params["vf_coef"], cliprange_value=params["cliprange_value"], **fields
    )
    labels = torch.where(mask != 0, 0, -100)
    (context,) = ActorCriticLossContext.build_batches([config.build({"shifted_labels": labels, **batch})])
    return context


@family(r"PPOTrainer\.loss.*")
def trl_loss(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["mask"])
    names = {"old_logprobs": "old_logprobs", "values": "values", "advantages": "advantages", "returns": "returns"}
    context = actor_critic(params, {ours: tensor(inputs[theirs]) for ours, theirs in names.items()}, mask)
    log_probs, values = tensor(inputs["logprobs"]).requires_grad_(), tensor(inputs["vpreds"]).requires_grad_()
    loss, (_, extra) = context.forward_log_probs(log_probs, entropy_of(tensor(inputs["logits"])), values=values)
    found, expected = update_statistics(extra, params["vf_coef"]), dict(out["stats"])
    if found["policy/ratio_mean"] > params["ratio_threshold"]:
        # The trainer makes no step at all; TRL multiplies by 0.
        assert (out["pg_loss"], out["vf_coef_times_vf_loss"]) == (0.0, 0.0)
        loss = loss * 0.0
        expected = {name: value for name, value in expected.items() if not name.startswith("loss/")}
    else:
        assert_close(extra["policy_loss"].compute(), out["pg_loss"], TOLERANCE, "pg_loss")
        assert_close(extra["value_loss"].compute(), out["vf_coef_times_vf_loss"], TOLERANCE, "vf_loss")
    loss.backward()
    assert_close(log_probs.grad, out["grad_logprobs"], TOLERANCE, "grad_logprobs")
    assert_close(values.grad, out["grad_vpreds"], TOLERANCE, "grad_vpreds")
    check(tensor(inputs["advantages"]), expected.pop("policy/advantages"), mask, "advantages")
    check((log_probs - tensor(inputs["old_logprobs"])).exp().detach(), expected.pop("policy/ratio"), mask, "ratio")
    found["policy/advantages_mean"] = float(masked_mean(tensor(inputs["advantages"]), mask))
    found["policy/entropy"] = float(masked_mean(entropy_of(tensor(inputs["logits"])), mask))
    check_numbers(found, expected)


@family(r"experimental PPOTrainer\.train slice.*")
def newer_ppo(case: Case, _: None) -> None:
    if "new_logprobs" in case.data["inputs"]:
        newer_loss(case.data["params"], case.data["inputs"], case.data["outputs"])
        return
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    log_probs, refs, values = (tensor(inputs[name]) for name in ("logprobs", "ref_logprobs", "values"))
    last = torch.tensor(inputs["sequence_lengths"])[:, None]
    places = torch.arange(log_probs.shape[1])[None]
    tokens, through_end = places <= last, places <= last + 1
    # The score lies one place past the response, where both log-probs are set to the same constant.
    log_probs, refs = torch.where(tokens, log_probs, 1.0), torch.where(tokens, refs, 1.0)
    found = compute_rewards(
        tensor(inputs["scores"]), log_probs, refs, through_end, params["kl_coef"], params["kl_estimator"], None
    )
    given = found.rewards
    if params["whiten_rewards"]:
        given = masked_whiten(given, through_end, shift_mean=False)
    advantages, returns = gae(given, values, through_end, params["gamma"], params["lam"])
    check(found.kl, out["kl"], tokens, "kl")
    check(given, out["rewards"], through_end, "rewards")
    check(masked_whiten(advantages, tokens), out["advantages"], tokens, "advantages")
    check(returns, out["returns"], through_end, "returns")
    assert_close(found.kl.sum(1).mean(), out["mean_kl"], TOLERANCE, "mean kl")


def newer_loss(params: dict[str, Any], inputs: dict[str, Any], out: dict[str, Any]) -> None:
    """Policy over the tokens, values over one more: two losses."""
    from rlloss import PPOLossConfig, PPOLossContext, ValueLossConfig, ValueLossContext

    tokens = ~torch.tensor(inputs["padding_mask"])
    through_end = ~torch.tensor(inputs["padding_mask_p1"])
    log_probs, values = tensor(inputs["new_logprobs"]).requires_grad_(), tensor(inputs["vpred"]).requires_grad_()
    clip = {"cliprange_low": params["cliprange"], "cliprange_high": params["cliprange"]}
    actor_batch = {"advantages": tensor(inputs["mb_advantage"]), "old_logprobs": tensor(inputs["mb_logprobs"])}
    critic_batch = {"values": tensor(inputs["mb_values"]), "returns": tensor(inputs["mb_return"])}
    actor = PPOLossConfig(policy_loss_cfg=clip).build({"shifted_labels": torch.where(tokens, 0, -100), **actor_batch})
    critic = ValueLossConfig(cliprange_value=params["cliprange_value"]).build(
        {"shifted_labels": torch.where(through_end, 0, -100), **critic_batch}
    )
    pg_loss, (_, pg) = PPOLossContext.build_batches([actor])[0].forward_log_probs(log_probs)
    vf_loss, (_, vf) = ValueLossContext.build_batches([critic])[0].forward_values(values)
    (pg_loss + params["vf_coef"] * vf_loss).backward()
    assert_close(pg_loss, out["pg_loss"], TOLERANCE, "pg_loss")
    assert_close(vf_loss, out["vf_loss"], TOLERANCE, "vf_loss")
    assert_close(log_probs.grad, out["grad_new_logprobs"], TOLERANCE, "grad_new_logprobs")
    assert_close(values.grad, out["grad_vpred"], TOLERANCE, "grad_vpred")
    clipped = float(pg["clip_frac_low"]) + float(pg["clip_frac_high"])
    check_numbers(
        {"vf_clipfrac": vf["value_clip_frac"], "pg_clipfrac": clipped, "loss": pg_loss + params["vf_coef"] * vf_loss},
        {name: out[name] for name in ("vf_clipfrac", "pg_clipfrac", "loss")},
    )


@family(r"core_algos\.compute_rewards")
def verl_rewards(case: Case, _: None) -> None:
    inputs = case.data["inputs"]
    given = (tensor(inputs[name]) for name in ("token_level_scores", "old_log_prob", "ref_log_prob"))
    scores, old, ref = given
    found = compute_rewards(scores, old, ref, torch.ones_like(old), case.data["params"]["kl_ratio"])
    assert_close(found.rewards, case.data["outputs"]["token_level_rewards"], TOLERANCE, "rewards")


@family(r"ray_trainer\.apply_kl_penalty")
def verl_kl_in_reward(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    mask = tensor(inputs["response_mask"])
    controller: Any = FixedKLController(params["kl_coef"])
    if params["ctrl"] == "adaptive":
        controller = AdaptiveKLController(params["kl_coef"], params["target_kl"], params["horizon"])
    scores, old, ref = (tensor(inputs[name]) for name in ("token_level_scores", "old_log_probs", "ref_log_prob"))
    found = compute_rewards(scores, old, ref, mask, controller.value, params["kl_penalty"])
    current = float(masked_mean(found.kl, mask, 1).mean())
    check(found.rewards, out["token_level_rewards"], mask, "rewards")
    expected = out["metrics"]
    check_numbers({"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": controller.value}, expected)
    controller.update(current, len(mask))
    assert_close(torch.tensor(controller.value).double(), out["kl_coef_after"], TOLERANCE, "kl_coef")


def jagged(rows: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nested.as_nested_tensor([tensor(row, dtype).reshape(len(row)) for row in rows], layout=torch.jagged)


def verl_data(case: Case, *names: str) -> dict[str, Any]:
    """Jagged data as verl's workers see it."""
    inputs, params = case.data["inputs"], case.data["params"]
    data: dict[str, Any] = {name: jagged(inputs[name]) for name in names if name in inputs}
    for name in ("prompts", "responses"):
        lengths = inputs.get(f"{name[:-1]}_lens")
        if lengths is not None:
            data[name] = jagged([[1] * length for length in lengths], torch.int64)
    counts = ("dp_size", "batch_num_tokens", "global_batch_size")
    return {**data, **{name: params[name] for name in counts if name in params}}


def check_jagged(found: Tensor, expected: list[Any], what: str) -> None:
    for i, (row, wanted) in enumerate(zip(found.unbind(), expected, strict=True)):
        assert_close(row, wanted, TOLERANCE, f"{what}[{i}]")


def check_verl_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert found[name].aggregation.name == value["aggregation"], name
            assert_close(torch.tensor(found[name].values).double(), value["values"], TOLERANCE, name)
        else:
            assert_close(
                number(found[name]),
                value,
                TOLERANCE,
                name,
            )


@family(r"workers\.utils\.losses\.ppo_loss")
def verl_ppo_loss(case: Case, _: None) -> None:
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    names = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
    data = verl_data(case, *names)
    output = {"log_probs": jagged(inputs["log_probs_full"]).requires_grad_()}
    if "entropy_full" in inputs:
        output["entropy"] = jagged(inputs["entropy_full"]).requires_grad_()
    config = SimpleNamespace(**params, policy_loss={"loss_mode": params["loss_mode"]})
    loss, found = verl.ppo_loss(config, output, data, None)
    loss.backward()
    assert_close(loss, out["loss"], TOLERANCE, "loss")
    check_jagged(output["log_probs"].grad, out["grad_log_probs_full"], "grad_log_probs")
    if out["grad_entropy_full"] is not None:
        check_jagged(output["entropy"].grad, out["grad_entropy_full"], "grad_entropy")
    check_verl_metrics(found, out["metrics"])


@family(r"workers\.utils\.losses\.value_loss")
def verl_value_worker(case: Case, _: None) -> None:
    inputs, out = case.data["inputs"], case.data["outputs"]
    values = jagged(inputs["values_full"]).requires_grad_()
    config = SimpleNamespace(**case.data["params"])
    loss, found = verl.value_loss(config, {"values": values}, verl_data(case, "response_mask", "values", "returns"))
    loss.backward()
    assert_close(loss, out["loss"], TOLERANCE, "loss")
    check_jagged(values.grad, out["grad_values_full"], "grad_values")
    check_verl_metrics(found, out["metrics"])


@family(r"core_algos\.compute_value_loss")
def verl_value_loss(case: Case, _: None) -> None:
    """The same door with dense responses: each sample is one prompt token and its padded row."""
    params, inputs, out = case.data["params"], case.data["inputs"], case.data["outputs"]
    given = {name: tensor(inputs[name]) for name in ("values", "returns", "response_mask")}
    predicted = tensor(inputs["vpreds"])
    rows, width = predicted.shape
    full = torch.cat([predicted, predicted.new_zeros(rows, 1)], 1).reshape(-1).requires_grad_()
    ids = torch.ones(rows, width + 1)
    data = {**given, "prompts": ids[:, :1], "responses": ids[:, 1:], "attention_mask": ids}
    data |= {name: params.get(name) for name in ("batch_num_tokens", "global_batch_size")}
    data["dp_size"] = params.get("dp_size") or 1
    loss, found = verl.value_loss(SimpleNamespace(**params), {"values": full}, data)
    loss.backward()
    assert_close(loss, out["loss"], TOLERANCE, "loss")
    assert_close(full.grad.reshape(rows, -1)[:, :width], out["grad_vpreds"], TOLERANCE, "grad_vpreds")
    assert_close(torch.tensor(found["critic/vf_clipfrac"]), out["vf_clipfrac"], TOLERANCE, "clip fraction")


@family(r"workers\.utils\.losses\.sft_loss")
def verl_sft_loss(case: Case, _: None) -> None:
    log_probs = jagged(case.data["inputs"]["log_probs_full"]).requires_grad_()
    loss, found = verl.sft_loss(None, {"log_probs": log_probs}, verl_data(case, "loss_mask"))
    loss.backward()
    assert_close(loss, case.data["outputs"]["loss"], TOLERANCE, "loss")
    check_jagged(log_probs.grad, case.data["outputs"]["grad_log_probs_full"], "grad_log_probs")
    assert found == {}


@family(r"workers\.utils\.padding")
def verl_padding(case: Case, _: None) -> None:
    inputs, out = case.data["inputs"], case.data["outputs"]
    if "model_output_full" in inputs:
        data, values = verl_data(case), jagged(inputs["model_output_full"])
        assert_close(verl.no_padding_2_padding(values, data), out["padded"], TOLERANCE, "padded")
        cut = verl.response_from_nested(values, data["responses"])
        check_jagged(cut, out["response_from_nested"], "response_from_nested")
        return
    names = ("input_ids", "attention_mask", "response_mask", "position_ids")
    data = {name: torch.tensor(inputs[name]) for name in names}
    found = verl.left_right_2_no_padding(data)
    for name in ("input_ids", "position_ids"):
        assert [row.tolist() for row in found[name].unbind()] == out[name]
    assert found["indices"].tolist() == out["indices"]
    assert found["input_ids"].offsets().tolist() == out["offsets"]
    assert found["loss_mask"].tolist() == out["loss_mask"]
    assert (found["max_seq_len"], found["max_response_len"]) == (out["max_seq_len"], out["max_response_len"])
    width = inputs["prompt_width"]
    split = {"prompts": data["input_ids"][:, :width], "responses": data["input_ids"][:, width:]}
    padded = verl.no_padding_2_padding(tensor(inputs["model_output_flat"]), {**found, **split})
    assert_close(padded, out["no_padding_2_padding_of_model_output"], TOLERANCE, "padded")


@family(r"utils\.metric\..*")
def verl_metrics(case: Case, _: None) -> None:
    inputs, out = case.data["inputs"], case.data["outputs"]
    if "metrics" in inputs:
        check_numbers(verl.reduce_metrics(inputs["metrics"]), out["result"])
        return
    ranks = [verl.Metric(case.data["params"]["aggregation"], values) for values in inputs["per_rank_values"]]
    assert verl.Metric.aggregate_dp(ranks) == out["result"]
    assert ranks[0].aggregate() == out["single_rank"]
