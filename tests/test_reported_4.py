"""Faults that a hostile user found: each was silent, or an error that did not say what to do."""

import pytest
from torch import Tensor

from rlloss import GRPOLossConfig, MixedLossConfig, PPOLossConfig, register_policy_loss
from rlloss.config_file import override
from rlloss.errors import ConfigError
from rlloss.losses import (
    CELossConfig,
    DPPOConfig,
    GSPOConfig,
    ReinforceConfig,
    VanillaConfig,
)
from rlloss.losses.policy_registry import PolicyLossConfig, unregister_policy_loss

B, T, H, V = 2, 5, 4, 11


class Steep(VanillaConfig):
    """A config of a user's own loss that inherits PPO's bounds."""

    tau: float = 2.0


def steep(log_prob: Tensor, policy_loss_cfg: Steep) -> Tensor:
    return -policy_loss_cfg.tau * log_prob


def test_a_typed_config_names_its_loss() -> None:
    register_policy_loss("steep", config=Steep)(steep)
    try:
        assert GRPOLossConfig(policy_loss_cfg=Steep()).policy_loss.fn is steep
        # What was "vanilla" for every one of them: the loss was PPO's, without a word.
        for typed, name in ((ReinforceConfig(), "reinforce"), (GSPOConfig(cliprange_low=0.1), "gspo")):
            config = GRPOLossConfig(policy_loss_cfg=typed, loss_reduction="sample")
            assert (config.policy_loss.name, config.policy_loss_cfg["loss_type"]) == (name, name)
            assert GRPOLossConfig.model_validate_json(config.model_dump_json()) == config
            assert PPOLossConfig(policy_loss_cfg=typed, loss_reduction="sample").policy_loss.name == name
            assert config.policy_loss_cfg.get("cliprange_low", 0.1) == 0.1
        assert GRPOLossConfig(policy_loss_cfg=VanillaConfig(delta=2.0)).policy_loss_cfg == VanillaConfig(delta=2.0)
        assert GRPOLossConfig(policy_loss_cfg=PolicyLossConfig()).policy_loss.name == "vanilla"
        named = GRPOLossConfig(policy_loss_cfg=DPPOConfig(loss_type="dppo_kl"))
        assert named.policy_loss.name == "dppo_kl"
        with pytest.raises(ConfigError, match="DPPOConfig is the config of dppo_tv, dppo_kl: give it the loss_type"):
            GRPOLossConfig(policy_loss_cfg=DPPOConfig())
    finally:
        unregister_policy_loss("steep")
    with pytest.raises(ConfigError, match="Steep is not the config of a registered loss"):
        GRPOLossConfig(policy_loss_cfg=Steep())


def test_another_loss_from_the_command_line_has_its_own_defaults() -> None:
    config = override(GRPOLossConfig(), ["policy_loss_cfg.loss_type=gspo", "loss_reduction=sample"])
    assert config == GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    given = GRPOLossConfig(policy_loss_cfg={"clip_ratio_c": 4.0})
    with pytest.raises(ConfigError, match="GSPOConfig: unknown field 'clip_ratio_c'"):
        override(given, ["policy_loss_cfg.loss_type=gspo", "loss_reduction=sample"])
    with pytest.warns(UserWarning, match="loss_reduction='sample'"):  # a field that was not given stays so
        override(GRPOLossConfig(), ["policy_loss_cfg.loss_type=gspo"])
    mixed = MixedLossConfig(parts={"rl": GRPOLossConfig(kl_loss_coef=0.5), "sft": CELossConfig()}, mode="chunk")
    changed = override(mixed, ["mode=eager", "parts.rl.entropy_coef=0.25"])
    assert isinstance(changed.parts["rl"], GRPOLossConfig)
    assert (changed.parts["rl"].mode, changed.parts["rl"].kl_loss_coef) == ("eager", 0.5)
    assert changed.parts["rl"].entropy_coef == 0.25
