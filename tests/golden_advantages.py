"""Advantages and rewards of verl, TRL and XTuner, by name through `compute_advantages`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rlloss
from golden_cases import Case, assert_close, family, tensor
from rlloss.functional.groups import Groups
from rlloss.functional.rewards import combine_rewards, repetition_penalty, soft_overlong_penalty
from rlloss.functional.token_advantages import squared_score_norms

FLOAT32 = 1e-5
# TRL counts in float32 when it divides a variance.
TRL_STD = 1e-7


def ids_of(index: list[str]) -> Tensor:
    """Group ids that are neither dense nor in order."""
    names = sorted(set(index), reverse=True)
    return torch.tensor([7 * names.index(name) - 3 for name in index])


VERL = {
    "grpo_outcome": "grpo",
    "grpo_vectorized_outcome": "grpo_vectorized",
    "grpo_passk_outcome": "grpo_passk",
    "gdpo_outcome": "gdpo",
    "gpg_outcome": "gpg",
    "opo_outcome": "opo",
    "rloo_outcome": "rloo",
    "rloo_vectorized_outcome": "rloo",
}


def outcome_arguments(name: str, case: Case) -> dict[str, Any]:
    """What verl's estimator reads: the sum of a row's rewards, its group, its number of tokens."""
    params, inputs = case.data["params"], case.data["inputs"]
    mask = tensor(inputs["response_mask"])
    given: dict[str, Any] = {
        "rewards": tensor(inputs["token_level_rewards"]).sum(1),
        "group_ids": ids_of(inputs["index"]),
    }
    std = params.get("norm_adv_by_std_in_grpo", params.get("config.norm_adv_by_std_in_grpo"))
    if std is not None and not name.startswith("rloo"):
        given["normalize_std"] = std
    if name in ("opo_outcome", "gdpo_outcome"):
        given["lengths"] = mask.sum(1)
    if name == "gdpo_outcome" and params.get("gdpo_reward_keys"):
        given["rewards"] = torch.stack([tensor(inputs[key]) for key in params["gdpo_reward_keys"]], dim=1)
        weights = params["gdpo_reward_weights"]
        given["weights"] = None if weights is None else tensor(weights)
    if name in ("grpo_outcome", "grpo_vectorized_outcome", "gpg_outcome", "opo_outcome", "rloo_outcome"):
        given["singleton"] = "raw"
    return given


@family(r"core_algos\.compute_(grpo|gdpo|gpg|opo|rloo).*_advantage")
def verl_outcome(case: Case, _: Any) -> None:
    """One number for each response, spread over its tokens."""
    name = case.key.removeprefix("core_algos.compute_").removesuffix("_advantage")
    mask = tensor(case.data["inputs"]["response_mask"])
    found = rlloss.compute_advantages(VERL[name], **outcome_arguments(name, case))
    # float32 in verl, or a raw reward that verl divides by 1 + 1e-6
    assert_close(found[:, None] * mask, case.data["outputs"]["advantages"], FLOAT32, "advantages")


@family(r"core_algos\.compute_reinforce_plus_plus.*_advantage")
def verl_reinforce(case: Case, _: Any) -> None:
    """Whitened over the tokens of the batch."""
    inputs = case.data["inputs"]
    given = {"rewards": tensor(inputs["token_level_rewards"]), "mask": tensor(inputs["response_mask"])}
    if "baseline" in case.key:
        given |= {"rewards": given["rewards"].sum(1), "group_ids": ids_of(inputs["index"])}
        found = rlloss.compute_advantages("reinforce_plus_plus_baseline", **given)
    else:
        found = rlloss.compute_advantages("reinforce_plus_plus", gamma=case.data["params"]["config.gamma"], **given)
    assert_close(found, case.data["outputs"]["advantages"], 1e-7, "advantages")


@family(r"core_algos\.compute_remax_outcome_advantage")
def verl_remax(case: Case, _: Any) -> None:
    """verl leaves numbers at ignored tokens; they are 0 here."""
    inputs = case.data["inputs"]
    mask = tensor(inputs["response_mask"])
    found = rlloss.compute_advantages(
        "remax",
        rewards=tensor(inputs["token_level_rewards"]),
        mask=mask,
        baselines=tensor(inputs["reward_baselines"]),
    )
    assert_close(found, tensor(case.data["outputs"]["advantages"]) * mask, 1e-12, "advantages")


@family(r"core_algos\.compute_(multi_turn_)?optimal_token_baseline_advantage")
def verl_optimal_token_baseline(case: Case, _: Any) -> None:
    """By column, or by the place among the tokens that count."""
    inputs = case.data["inputs"]
    weights = inputs.get("rollout_is_weights")
    found = rlloss.compute_advantages(
        "optimal_token_baseline",
        rewards=tensor(inputs["token_level_rewards"]),
        mask=tensor(inputs["response_mask"]),
        group_ids=ids_of(inputs["index"]),
        squared_norms=squared_score_norms(
            tensor(inputs["old_log_probs"]),
            tensor(inputs["sum_pi_squared"]),
            None if weights is None else tensor(weights),
        ),
        align="token" if "multi_turn" in case.key else "column",
        zero_tail=case.data["params"]["handle_zero_tail"],
    )
    assert_close(found, case.data["outputs"]["advantages"], 1e-9, "advantages")


@family("advantages:.*")
def xtuner(case: Case, _: Any) -> None:
    """One group."""
    name, inputs = case.data["estimator"], case.data["inputs"]
    rewards = tensor(inputs["rewards"])
    given: dict[str, Any] = {"rewards": rewards, "group_ids": torch.full((len(rewards),), 4)}
    if name in ("opo", "drgrpo_xtuner"):
        given["lengths"] = torch.tensor(inputs["lengths"])
    if name == "drgrpo_xtuner":
        given["max_length"] = 16.0
    if name == "passk":
        given["k"] = 3
    if name == "grpo":
        given["eps"] = 1e-8
    found = rlloss.compute_advantages("passk_analytic" if name == "passk" else name, **given)
    assert_close(found, case.data["outputs"], 1e-6, "advantages")


def consecutive(count: int, size: int) -> Tensor:
    return torch.arange(count) // size


@family(r"GRPOTrainer\._generate_and_score_completions advantage slice.*")
def trl(case: Case, _: Any) -> None:
    """Several rewards made one, then scaled; or each scaled, then summed."""
    params, outputs = case.data["params"], case.data["outputs"]
    rewards, weights = tensor(case.data["inputs"]["rewards_per_func"]), tensor(params["reward_weights"])
    ids = consecutive(len(rewards), params["num_generations"])
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        found = rlloss.compute_advantages("gdpo", rewards=rewards, group_ids=ids, weights=weights, eps=1e-4)
    else:
        whole = combine_rewards(rewards, weights)
        assert_close(whole, outputs["rewards"], 1e-12, "rewards")
        found = rlloss.compute_advantages("scaled", rewards=whole, group_ids=ids, scale=params["scale_rewards"])
    assert_close(found, outputs["advantages"], TRL_STD, "advantages")


@family(r"RLOOTrainer advantage slice.*")
def trl_rloo(case: Case, _: Any) -> None:
    """The KL of a response is part of its reward."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    whole = combine_rewards(tensor(inputs["rewards_per_func"]), tensor(params["reward_weights"]))
    kl = rlloss.kl_penalty(tensor(inputs["old_per_token_logps"]), tensor(inputs["ref_per_token_logps"]), "k1")
    whole = whole - params["beta"] * (kl * tensor(inputs["completion_mask"])).sum(1)
    assert_close(whole, outputs["rewards_after_penalty"], 1e-12, "rewards")
    ids = consecutive(len(whole), params["num_generations"])
    found = rlloss.compute_advantages("rloo", rewards=whole, group_ids=ids, nan="exclude")
    if params["normalize_advantages"]:
        found = rlloss.compute_advantages("scaled", rewards=found, group_ids=torch.zeros_like(ids), eps=1e-4)
    assert_close(found, outputs["advantages"], TRL_STD, "advantages")


@family(r"trl\.trainer\.utils\.nanstd.*")
def nanstd(case: Case, _: Any) -> None:
    """A standard deviation of fewer than two numbers is 0 here, and NaN there."""
    values = tensor(case.data["inputs"]["x"])
    rows, columns = values.shape
    ids = {
        "all": torch.zeros(rows * columns, dtype=torch.int64),
        "dim1": torch.arange(rows).repeat_interleave(columns),
        "dim0": torch.arange(columns).repeat(rows),
    }
    for name, groups in ids.items():
        found = Groups(values.reshape(-1), groups, "exclude").std()
        firsts = torch.stack([(groups == group).nonzero()[0, 0] for group in groups.unique()])
        expected = tensor(case.data["outputs"][name]).nan_to_num(0.0).reshape(-1)
        assert_close(found[firsts], expected, TRL_STD, name)


@family(r"trl\.rewards\..*")
def trl_rewards(case: Case, _: Any) -> None:
    """Overlong and repetitive responses."""
    params, ids = case.data["params"], case.data["inputs"]["completion_ids"]
    if "overlong" in case.key:
        lengths = torch.tensor([len(row) for row in ids])
        found = soft_overlong_penalty(lengths, params["max_completion_len"], params["soft_punish_cache"])
    else:
        found = repetition_penalty(ids, params["ngram_size"], params["max_penalty"])
    assert_close(found, case.data["outputs"]["rewards"], 1e-6, "rewards")
