"""`rlloss check` finds what is wrong with a loss, and `rlloss list` names everything that exists."""

from pathlib import Path

import pytest
import torch

from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    CELossContext,
    DistillLossConfig,
    GRPOLossConfig,
    MixedLossConfig,
    OrealLossConfig,
    ValueLossConfig,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.cli import main
from rlloss.cli_check import check_loss
from rlloss.losses.terms import weighted_sum

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def loss():
    """Registers a policy loss for one test."""

    def register(fn, **options):
        if "on_trial" in policy_loss_names():
            unregister_policy_loss("on_trial")
        register_policy_loss("on_trial", **options)(fn)
        return GRPOLossConfig(policy_loss_cfg={"loss_type": "on_trial"})

    yield register
    unregister_policy_loss("on_trial")


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
    ],
    ids=lambda config: type(config).__name__,
)
def test_sound_losses_pass(config):
    assert failed(config) == {}


@pytest.mark.filterwarnings("ignore:GRPOLossConfig. the paper")
@pytest.mark.parametrize("name", policy_loss_names())
def test_every_policy_loss_passes(name):
    given = {"loss_type": name, **({"beta": 0.1} if name == "dro" else {})}
    assert failed(GRPOLossConfig(policy_loss_cfg=given)) == {}


def test_a_token_loss_that_looks_across_tokens_is_found(loss):
    def normalised(log_prob, old_log_prob, advantages):
        ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
        return -advantages * ratio / ratio.mean()

    found = failed(loss(normalised))
    assert "looks across tokens" in found["level"]
    assert {"chunk mode", "splits"} <= found.keys()


def test_the_same_loss_declared_as_a_sequence_loss_still_fails_the_split(loss):
    def normalised(log_prob, old_log_prob, advantages):
        ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
        return -advantages * ratio / ratio.mean()

    found = failed(loss(normalised, level="sequence"))
    assert "splits" in found
    assert not {"level", "chunk mode"} & found.keys()


def test_a_local_denominator_is_found():
    class LocalMean(CELossContext):
        def token_loss(self, stats, loss_kwargs):
            return -stats.log_prob.mean(), {}

    class LocalMeanConfig(CELossConfig):
        @property
        def loss_ctx_cls(self):
            return LocalMean

    assert "counted inside a micro-batch" in failed(LocalMeanConfig())["splits"]


def test_a_wrong_sign_and_a_missing_clamp_are_found(loss):
    found = failed(loss(lambda log_prob, old_log_prob, advantages: advantages * (log_prob - old_log_prob).exp()))
    assert "against the advantage" in found["direction"]
    found = failed(loss(lambda log_prob, old_log_prob, advantages: -advantages * ((log_prob - old_log_prob) * 8).exp()))
    assert "clamp the log-ratio" in found["extreme ratios"]


def test_a_detached_gradient_is_found_unless_it_is_declared(loss):
    def detached(log_prob, old_log_prob, advantages):
        return -advantages * (log_prob - old_log_prob).clamp(-20, 20).exp().detach() * log_prob

    assert "surrogate=True" in failed(loss(detached))["gradient"]
    assert failed(loss(detached, surrogate=True)) == {}


def test_garbage_that_reaches_the_loss_is_found():
    class Leaky(CELossContext):
        def loss_fn(self, hidden_states, head_weight, head_bias, loss_kwargs):
            logits = hidden_states @ head_weight.T
            labels = loss_kwargs.shifted_labels
            log_prob = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
            return -(log_prob * loss_kwargs.loss_weight).sum(), (logits, {})

    class LeakyConfig(CELossConfig):
        @property
        def loss_ctx_cls(self):
            return Leaky

    found = failed(LeakyConfig())
    assert found.keys() == {"ignored positions"}
    assert weighted_sum(torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 2.0])) == 2.0


def test_a_loss_that_raises_is_a_finding(loss):
    assert (
        "the loss raised KeyError" in failed(loss(lambda policy_loss_cfg, log_prob: policy_loss_cfg["gone"]))["level"]
    )


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
