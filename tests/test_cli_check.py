"""`rlloss check` finds what is wrong with a loss, and `rlloss list` names everything that exists."""

from pathlib import Path

import pytest

from batches import POLICY_LOSSES, built_in_policy_losses
from broken_losses import BROKEN, detached_ratio
from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    MixedLossConfig,
    OrealLossConfig,
    RolloutImportanceSampling,
    ValueLossConfig,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.cli import main
from rlloss.cli_check import check_loss
from rlloss.errors import RLLossError

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def _forget_registered_losses():
    before = set(policy_loss_names())
    yield
    for name in set(policy_loss_names()) - before:
        unregister_policy_loss(name)


def failed(config) -> dict[str, str]:
    return {finding.name: finding.detail for finding in check_loss(config) if finding.passed is False}


@pytest.mark.parametrize(
    "config",
    [
        GRPOLossConfig(use_kl_loss=True, kl_loss_type="k3", entropy_coef=0.1, loss_reduction="sample"),
        GRPOLossConfig(),
        CELossConfig(loss_reduction="square"),
        ValueLossConfig(),
        ActorCriticLossConfig(),
        OrealLossConfig(),
        DistillLossConfig(),
        MixedLossConfig(parts={"rl": GRPOLossConfig(), "sft": CELossConfig()}),
        GRPOLossConfig(loss_reduction="prompt", top_entropy_quantile=0.5, off_policy_limit=0.2),
        GRPOLossConfig(loss_reduction="constant", loss_length=9, rollout_is=RolloutImportanceSampling.icepop(0.5, 2.0)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_sound_losses_pass(config):
    assert failed(config) == {}


@pytest.mark.filterwarnings("ignore:GRPOLossConfig. the paper")
@pytest.mark.parametrize("name", built_in_policy_losses())
def test_every_policy_loss_passes(name):
    assert failed(GRPOLossConfig(policy_loss_cfg=POLICY_LOSSES[name])) == {}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_fault_is_found_with_a_small_input(broken):
    config = broken.config()
    faults = {finding.name: finding for finding in check_loss(config) if finding.passed is False}
    assert set(broken.fails) <= faults.keys()
    first = faults[broken.fails[0]]
    assert broken.words in first.detail
    assert len(first.example) <= 2
    assert sum(len(columns["labels"]) for columns in first.example) <= broken.tokens
    for fault in faults.values():
        assert len(fault.example) <= 2 and all(len(columns["labels"]) <= 3 for columns in fault.example)
        assert len(fault.table().splitlines()) == 1 + sum(len(columns["labels"]) for columns in fault.example)
        with pytest.raises((AssertionError, RLLossError, RuntimeError, KeyError)):
            run_snippet(fault, config)


def run_snippet(finding, config):
    exec(finding.snippet("given"), {"given": config})


def test_a_snippet_passes_when_the_fault_is_gone():
    config = BROKEN[0].config()
    sound = GRPOLossConfig()
    for finding in check_loss(config):
        if finding.passed is False:
            run_snippet(finding, sound)


def test_a_detached_gradient_may_be_declared():
    register_policy_loss("declared", surrogate=True)(detached_ratio)
    assert failed(GRPOLossConfig(policy_loss_cfg={"loss_type": "declared"})) == {}


def test_the_command_reports_every_loss_of_a_config_file(capsys, tmp_path):
    assert main(["check", str(CONFIGS / "grpo_arithmetic.py")]) == 0
    printed = capsys.readouterr().out
    assert "config.supervised.loss: CELossConfig" in printed
    assert "config.grpo.loss: GRPOLossConfig" in printed
    assert "FAIL" not in printed
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import torch\nfrom rlloss import GRPOLossConfig, register_policy_loss\n"
        "@register_policy_loss('batch_mean')\n"
        "def batch_mean(log_prob, advantages):\n    return -(advantages - advantages.mean()) * log_prob\n"
        "config = GRPOLossConfig(policy_loss_cfg={'loss_type': 'batch_mean'})\n"
    )
    try:
        assert main(["check", str(broken)]) == 1
    finally:
        unregister_policy_loss("batch_mean")
    assert "FAIL level" in capsys.readouterr().out


def test_list_names_everything(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in (*policy_loss_names(), "sequence_sum", "low_var_kl", "chunk", "liger"):
        assert name in printed
