"""The tables of peers' names, row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlloss import GRPOLossConfig, GRPOLossContext
from rlloss.compat import names
from rlloss.compat.trl_options import TRL_OPTIONS, trl_loss_config
from rlloss.errors import ConfigError, UnknownNameError

# TRL 1.16's defaults
DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "max_completion_length": 256, "beta": 0.0,
    "use_bias_correction_kl": True, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "temperature": 1.0,
    "entropy_coef": 0.0, "use_adaptive_entropy": False,
}  # fmt: skip

# TRL's option -> the options to set, and our field's value after that
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "loss_type": ({"loss_type": "sapo"}, ("sapo", "sample")),
    "importance_sampling_level": ({"importance_sampling_level": "sequence"}, "sequence_mean"),
    "epsilon": ({"epsilon": 0.1}, 0.1),
    "epsilon_high": ({"epsilon_high": 0.3}, 0.3),
    "delta": ({"delta": 1.5}, 1.5),
    "sapo_temperature_pos": ({"loss_type": "sapo", "sapo_temperature_pos": 2.0}, 2.0),
    "sapo_temperature_neg": ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, 2.0),
    "vespo_k_pos": ({"loss_type": "vespo", "vespo_k_pos": 1.5}, 1.5),
    "vespo_lambda_pos": ({"loss_type": "vespo", "vespo_lambda_pos": 1.5}, 1.5),
    "vespo_k_neg": ({"loss_type": "vespo", "vespo_k_neg": 1.5}, 1.5),
    "vespo_lambda_neg": ({"loss_type": "vespo", "vespo_lambda_neg": 1.5}, 1.5),
    "max_completion_length": ({"loss_type": "dr_grpo", "max_completion_length": 99}, 99.0),
    "beta": ({"beta": 0.04}, 0.04),
    "use_bias_correction_kl": ({"beta": 0.04, "importance_sampling_level": "sequence"}, "sequence_mean"),
    "off_policy_mask_threshold": ({"off_policy_mask_threshold": 0.5}, 0.5),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.2}, 0.2),
    "temperature": ({"temperature": 0.7}, 0.7),
}


def config_of(**options: Any) -> GRPOLossConfig:
    return trl_loss_config(SimpleNamespace(**DEFAULTS | options))


def field_of(config: GRPOLossConfig, path: str) -> Any:
    if " and " in path:
        return tuple(field_of(config, part) for part in path.split(" and "))
    owner, _, name = path.rpartition(".")
    return config.policy_loss_cfg[name] if owner else getattr(config, name)


@pytest.mark.parametrize("option", TRL_OPTIONS)
def test_trl_option(option: str) -> None:
    options, expected = OPTIONS[option]
    assert field_of(config_of(**options), TRL_OPTIONS[option]) == expected


def test_trl_options_that_switch_a_term() -> None:
    assert not config_of().use_kl_loss
    config = config_of(beta=0.1, use_bias_correction_kl=False)
    assert (config.use_kl_loss, config.kl_importance, config.kl_value_cap) == (True, None, None)
    assert config_of(loss_type="cispo", epsilon_high=5.0).policy_loss_cfg["ratio_cap"] == 5.0
    assert config_of().policy_loss_cfg["cliprange_high"] == 0.2
    for options in ({"entropy_coef": 0.1}, {"use_adaptive_entropy": True}):
        with pytest.raises(ConfigError, match="not translated"):
            config_of(**options)
    assert trl_loss_config(SimpleNamespace(**DEFAULTS), mode="liger", on_policy=False).mode == "liger"


def step_of(policy: dict[str, Any], **fields: Any) -> Any:
    """One calibrated, evaluated step with a config out of a table."""
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, -100, 3], [4, 0, 2, -100]])
    batch = {"shifted_labels": labels, "old_logprobs": -torch.rand(2, 4), "advantages": torch.tensor([1.0, -0.5])}
    batch |= {"selection_logprobs": -torch.rand(2, 4), "rollout_logprobs": -torch.rand(2, 4)}
    config = GRPOLossConfig(policy_loss_cfg=policy, **fields)
    (context,) = GRPOLossContext.build_batches([config.build(batch)])
    return context.forward(torch.randn(2, 4, 3), torch.randn(6, 3)).loss


@pytest.mark.parametrize("loss_type", names.TRL_LOSS_TYPES)
def test_trl_loss_type(loss_type: str) -> None:
    peer = names.TRL_LOSS_TYPES[loss_type]
    policy = names.trl_policy_loss(DEFAULTS | {"loss_type": loss_type, "epsilon_high": 0.3 if peer.fields else None})
    assert policy["loss_type"] == peer.policy_loss
    length = {"loss_length": 4.0} if peer.reduction == "constant" else {}
    assert torch.isfinite(step_of(policy, loss_reduction=peer.reduction, **length))
    counts = names.TRLCounts(rows=2, tokens=6, items=6.0, accumulation=2, per_generation=4, processes=3)
    expected = {"sequences": 2 * 2 * 3, "tokens": 6 * 2 * 3, "step_tokens": 6 * 2 / 4}[peer.total]
    totals = names.trl_totals(loss_type, counts)
    assert (totals.sequences if peer.total == "sequences" else totals.tokens) == expected


@pytest.mark.parametrize("level", names.TRL_RATIOS)
def test_trl_level(level: str) -> None:
    policy = names.trl_policy_loss(DEFAULTS | {"loss_type": "grpo", "importance_sampling_level": level})
    assert policy["ratio"] == names.TRL_RATIOS[level]
    assert torch.isfinite(step_of(policy))


VERL_SETTINGS = {
    "clip_ratio": 0.25, "clip_ratio_low": None, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0, "tau_pos": 1.1,
    "tau_neg": 1.2, "clip_cov_ratio": 0.1, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.1,
    "ppo_kl_coef": 0.5, "dro_beta": 0.7,
}  # fmt: skip


@pytest.mark.parametrize("mode", names.VERL_LOSS_MODES)
def test_verl_loss_mode(mode: str) -> None:
    name, fields = names.VERL_LOSS_MODES[mode]
    policy = names.verl_policy_loss(mode, VERL_SETTINGS)
    wanted = {**VERL_SETTINGS, "clip_ratio_low": 0.25}
    assert policy == {"loss_type": name} | {ours: wanted[theirs] for theirs, ours in fields.items()}
    assert torch.isfinite(step_of(policy))


@pytest.mark.parametrize("mode", names.VERL_LOSS_AGG_MODES)
def test_verl_aggregation(mode: str) -> None:
    from rlloss.compat.verl import agg_loss

    losses, mask = torch.rand(3, 4, dtype=torch.float64), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    by_row = (losses * mask).sum(1)
    expected = {
        "token-mean": by_row.sum() / 7,
        "token-sum": by_row.sum(),
        "seq-mean-token-sum": by_row.mean(),
        "seq-mean-token-sum-norm": by_row.mean() / 4,
        "seq-mean-token-mean": (by_row / mask.sum(1)).mean(),
    }[mode]
    torch.testing.assert_close(agg_loss(losses, mask, mode), expected)
    peer = names.VERL_LOSS_AGG_MODES[mode]
    length = {"loss_length": 4.0} if peer.reduction == "constant" else {}
    assert torch.isfinite(step_of({}, loss_reduction=peer.reduction, **length))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'dr_grpo'"):
        names.trl_policy_loss({"loss_type": "drgrpo"})
    with pytest.raises(UnknownNameError, match="Did you mean 'geo_mean'"):
        names.verl_policy_loss("geomean", {})
