"""Our policy losses as verl calls them: against verl's recorded numbers, and beside the real verl where it is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlloss
from golden_cases import assert_close, tensor
from rlloss.compat.names import VERL_LOSS_AGG_MODES, VERL_LOSS_MODES
from rlloss.compat.verl import ppo_loss
from rlloss.compat.verl_registry import register_in_verl
from rlloss.errors import BackendUnavailableError, ConfigError

IGNORES_MODE = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "verl.json").read_text())


def registered(**arguments: Any) -> dict[str, Any]:
    """What verl's registry, a dict, holds afterwards."""
    held: dict[str, Any] = {}

    def register(name: str) -> Any:
        return lambda fn: held.setdefault(name, fn)

    assert register_in_verl(register=register, **arguments) == list(held)
    return held


def recorded() -> list[Any]:
    """verl's cases of every loss mode with ordinary numbers, one for each aggregation and seed."""
    found = []
    for entries in GOLDEN.values():
        for case in entries if isinstance(entries, list) else ():
            function = case.get("function", "") if isinstance(case, dict) else ""
            name = function.removeprefix("core_algos policy loss '").removesuffix("'")
            ordinary = (
                not case["name"].startswith("edge/") and "exception" not in case["outputs"] if function else False
            )
            if name in VERL_LOSS_MODES and ordinary and case["params"].get("dtype") != "bfloat16":
                found.append(pytest.param(name, case, id=case["name"]))
    return found[::3]


def by_registry(name: str, config: Any, log_prob: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    ours = VERL_LOSS_MODES[name][0]
    found: tuple[Tensor, dict[str, Any]] = registered()[f"rlloss_{ours}"](
        log_prob=log_prob, loss_agg_mode=config.loss_agg_mode, config=config, **inputs
    )
    return found


def by_worker(name: str, config: Any, log_prob: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """verl's worker has each response behind a prompt, here of one token; the last entry is about no token."""
    rows, width = log_prob.shape
    flat = torch.cat([log_prob, torch.full((rows, 1), torch.nan)], dim=1).reshape(-1)
    ids = [torch.ones(rows, length, dtype=torch.int64) for length in (1, width)]
    data = {"prompts": ids[0], "responses": ids[1], "attention_mask": torch.cat(ids, dim=1)}
    data |= {"old_log_probs": inputs["old_log_prob"], **{key: inputs[key] for key in inputs if key != "old_log_prob"}}
    counts = {key: value for key, value in config.global_batch_info.items() if key != "loss_scale_factor"}
    config.loss_scale_factor = config.global_batch_info.get("loss_scale_factor")
    config.policy_loss = {"loss_mode": name}
    loss, metrics = ppo_loss(config, {"log_probs": flat}, {**data, **counts})
    return loss, {key: value.aggregate() for key, value in metrics.items()}


@pytest.mark.parametrize("way", [by_registry, by_worker])
@pytest.mark.parametrize(("name", "case"), recorded())
def test_verls_numbers(name: str, case: dict[str, Any], way: Any) -> None:
    params, outputs = case["params"], case["outputs"]
    inputs = {key: tensor(value) for key, value in case["inputs"].items()}
    log_prob = inputs.pop("log_prob").requires_grad_()
    config = SimpleNamespace(**{"policy_loss": {}, "global_batch_info": {}} | params)
    config.loss_agg_mode = IGNORES_MODE.get(name, params["loss_agg_mode"])
    if name == "geo_mean":  # a plain mean over all rows in verl
        config.global_batch_info = {"global_batch_size": log_prob.shape[0]}
    loss, metrics = way(name, config, log_prob, inputs)
    loss.backward()
    assert_close(loss, outputs["loss"], 1e-7, "loss")
    assert log_prob.grad is not None
    assert_close(log_prob.grad, outputs["grad_log_prob"], 1e-7, "grad_log_prob")
    if name == "vanilla":
        for key, value in outputs["metrics"].items():
            assert metrics[key] == pytest.approx(value, abs=2e-6), key


def test_settings_and_names() -> None:
    @rlloss.register_policy_loss("compat_plain")
    def plain(log_prob: Tensor, advantages: Tensor, policy_loss_cfg: Any) -> Tensor:
        return -policy_loss_cfg["factor"] * advantages * log_prob

    @rlloss.register_policy_loss("compat_entropic")
    def entropic(log_prob: Tensor, entropy: Tensor) -> Tensor:
        return log_prob * entropy

    try:
        held = registered(settings={"compat_plain": {"factor": 3.0}}, prefix="x/")
        assert {"x/vanilla", "x/topr", "x/compat_plain"} <= held.keys()
        assert "x/compat_entropic" not in held
        torch.manual_seed(0)
        log_prob, advantages, mask = -torch.rand(2, 3), torch.randn(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
        info = {"dp_size": 4, "batch_num_tokens": 10, "global_batch_size": 5, "loss_scale_factor": 7}
        config = SimpleNamespace(global_batch_info=info)
        for mode, divisor in {"token-mean": 10, "token-sum": 1, "seq-mean-token-sum-norm": 35}.items():
            loss, metrics = held["x/compat_plain"](log_prob, log_prob, advantages, mask, mode, config)
            torch.testing.assert_close(loss, -3.0 * (advantages * log_prob * mask).sum() * 4 / divisor)
            assert metrics["actor/ppo_kl"] == 0.0
        with pytest.raises(ConfigError, match=r"settings for 'gspoo'\. Did you mean 'gspo'"):
            registered(settings={"gspoo": {}})
    finally:
        rlloss.unregister_policy_loss("compat_plain")
        rlloss.unregister_policy_loss("compat_entropic")


def verl_or_none() -> Any:
    try:
        return importlib.import_module("verl.trainer.ppo.core_algos")
    except Exception:  # a half-installed verl fails with whatever its own imports raise
        return None


def test_without_verl_the_error_says_so() -> None:
    if verl_or_none() is not None:
        pytest.skip("verl is installed")
    with pytest.raises(BackendUnavailableError, match="verl cannot be imported"):
        register_in_verl()


@pytest.fixture(scope="module")
def verl() -> Any:
    core = verl_or_none()
    if core is None:
        pytest.skip("verl is not importable")
    register_in_verl()
    return core


def actor_config(info: dict[str, Any]) -> Any:
    """verl's own config, with no option at its default."""
    kinds = importlib.import_module("verl.workers.config")
    policy = kinds.PolicyLossConfig(
        clip_cov_ratio=0.3, clip_cov_lb=-5.0, clip_cov_ub=5.0, kl_cov_ratio=0.3, ppo_kl_coef=0.7, dro_beta=0.4
    )
    return kinds.ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.3,
        clip_ratio_c=2.5, tau_pos=1.1, tau_neg=1.2, policy_loss=policy, global_batch_info=info,
    )  # fmt: skip


@pytest.mark.parametrize("aggregation", VERL_LOSS_AGG_MODES)
@pytest.mark.parametrize("mode", sorted(set(VERL_LOSS_MODES) - {"clip_cov"}))  # its choice is random in verl
def test_beside_the_real_verl(verl: Any, mode: str, aggregation: str) -> None:
    torch.manual_seed(len(mode))
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    old, advantages = -0.1 - torch.rand(3, 5, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64).expand(3, 5)
    start = (old + 0.4 * torch.randn(3, 5, dtype=torch.float64)).clamp(max=-0.02)  # a log-prob
    weights = 0.5 + torch.rand(3, 5, dtype=torch.float64)
    ours = VERL_LOSS_MODES[mode][0]
    info: dict[str, Any] = {"dp_size": 2, "batch_num_tokens": 21, "global_batch_size": 6, "loss_scale_factor": 9}
    aggregation = IGNORES_MODE.get(mode, aggregation)
    if mode == "geo_mean":  # a plain mean over all rows in verl
        info = {"global_batch_size": 3}
    config = actor_config(info)
    found = []
    for name in (mode, f"rlloss_{ours}"):
        log_prob = start.clone().requires_grad_()
        loss, metrics = verl.get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask, loss_agg_mode=aggregation,
            config=config, rollout_is_weights=weights,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, log_prob)
        found.append((loss.detach(), grad, metrics))
    (theirs, their_grad, their_metrics), (loss, grad, metrics) = found
    torch.testing.assert_close(loss, theirs, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(grad, their_grad, rtol=1e-7, atol=1e-9)
    if mode == "vanilla":
        assert metrics == pytest.approx(their_metrics, abs=2e-6)
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("aggregation", VERL_LOSS_AGG_MODES)
def test_aggregation_and_kl_beside_the_real_verl(verl: Any, aggregation: str) -> None:
    from rlloss.compat.verl import agg_loss, kl_penalty

    torch.manual_seed(1)
    matrix, mask = torch.randn(3, 5, dtype=torch.float64), (torch.rand(3, 5) < 0.7).double()
    for info in ({}, {"dp_size": 2, "batch_num_tokens": 9, "global_batch_size": 4, "loss_scale_factor": 3}):
        torch.testing.assert_close(
            agg_loss(matrix, mask, aggregation, **info), verl.agg_loss(matrix, mask, aggregation, **info)
        )
    reference = matrix + 0.3
    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"):
        torch.testing.assert_close(kl_penalty(matrix, reference, kind), verl.kl_penalty(matrix, reference, kind))
