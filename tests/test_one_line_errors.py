"""A name that does not exist is answered in one line with the nearest that does; what cannot work together is refused
when the config is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlloss
from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    LogProbConfig,
    MixedLossConfig,
    OrealLossConfig,
    PPOLossConfig,
    RolloutImportanceSampling,
    Term,
    Totals,
    ValueLossConfig,
    compute_advantages,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.cli import main
from rlloss.compat import verl
from rlloss.compat.names import trl_policy_loss, verl_policy_loss
from rlloss.config_file import override
from rlloss.errors import ConfigError, RLLossError
from rlloss.functional.gae import gae
from rlloss.functional.rollout import RolloutRule
from rlloss.training.config import GRPOConfig, ModelConfig, TaskConfig, TrainConfig
from rlloss.training.tasks import Task

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "grpo_arithmetic.py")
ONES = torch.ones(1, 2)


def advantages(name: str = "grpo", **given: Any) -> Any:
    rewards = {"rewards": torch.ones(2), "group_ids": torch.zeros(2, dtype=torch.int64)}
    return compute_advantages(name, **(rewards | given))


# What is written -> the name that is meant.
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "loss": (lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": "vanila"}), "vanilla"),
    "loss of PPO": (lambda: PPOLossConfig(policy_loss_cfg={"loss_type": "sapoo"}), "sapo"),
    "loss of OREAL": (lambda: OrealLossConfig(policy_loss_cfg={"loss_type": "gsp"}), "gspo"),
    "loss by name": (lambda: rlloss.get_policy_loss("cispoo"), "cispo"),
    "loss that is removed": (lambda: unregister_policy_loss("vanila"), "vanilla"),
    "argument of a loss": (lambda: register_policy_loss("odd")(lambda log_probs: log_probs), "log_prob"),
    "field": (lambda: GRPOLossConfig(kl_coef=0.1), "kl_loss_coef"),
    "field of a policy loss": (lambda: GRPOLossConfig(policy_loss_cfg={"cliprange_hi": 0.1}), "cliprange_high"),
    "field of a critic": (lambda: ValueLossConfig(cliprange=0.1), "cliprange_value"),
    "field of actor and critic": (lambda: ActorCriticLossConfig(vf_cof=0.1), "vf_coef"),
    "field of a correction": (lambda: GRPOLossConfig(rollout_is={"rollout_is_levle": "token"}), "rollout_is_level"),
    "field of a rule": (lambda: RolloutImportanceSampling(rules=({"lvel": "token"},)), "level"),
    "field of training": (lambda: TrainConfig(grpo={"stps": 1}), "steps"),
    "field that is set": (lambda: override(TrainConfig(), ["grpo.optimizer.lrr=1"]), "lr"),
    "reduction": (lambda: GRPOLossConfig(loss_reduction="tokens"), "token"),
    "reduction of CE": (lambda: CELossConfig(loss_reduction="sampel"), "sample"),
    "reduction of the entropy": (lambda: GRPOLossConfig(entropy_reduction="promt"), "prompt"),
    "reduction of gradients": (lambda: GRPOLossConfig(grad_reduction="men"), "mean"),
    "mode": (lambda: GRPOLossConfig(mode="chunked"), "chunk"),
    "mode of log-probs": (lambda: LogProbConfig(mode="ligr"), "liger"),
    "mode that is set": (lambda: override(TrainConfig(), ["grpo.loss.mode=eagre"]), "eager"),
    "dtype of logits": (lambda: CELossConfig(logits_dtype="float33"), "float32"),
    "KL kind": (lambda: GRPOLossConfig(kl_loss_type="low_var"), "low_var_kl"),
    "KL kind with +": (lambda: GRPOLossConfig(kl_loss_type="k33+"), "k3"),
    "KL kind of a function": (lambda: rlloss.kl_penalty(ONES, ONES, "abss"), "abs"),
    "KL ratio": (lambda: GRPOLossConfig(kl_importance="sequence"), "sequence_mean"),
    "distance from a teacher": (lambda: DistillLossConfig(kind="top"), "topk"),
    "ratio": (lambda: GRPOLossConfig(policy_loss_cfg={"ratio": "tokens"}), "token"),
    "level": (lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": "topr", "level": "tok"}), "token"),
    "level of a correction": (lambda: RolloutImportanceSampling(rollout_is_level="geometry"), "geometric"),
    "mode of a correction": (lambda: RolloutImportanceSampling(rollout_is_mode="trunc"), "truncate"),
    "level of a rule": (lambda: RolloutRule("tokn"), "token"),
    "statistic of a rule": (lambda: RolloutRule(statistic="ratios"), "ratio"),  # type: ignore[arg-type]
    "action of a rule": (lambda: RolloutRule(action="clmp"), "clamp"),  # type: ignore[arg-type]
    "denominator of a rule": (lambda: RolloutRule(denominator="keep"), "kept"),  # type: ignore[arg-type]
    "field of a rule that is made": (lambda: RolloutRule(levle="token"), "level"),  # type: ignore[call-arg]
    "field of a term": (lambda: Term("mine", len, coeff=1.0), "coef"),  # type: ignore[call-arg, arg-type]
    "total": (lambda: Totals(token=3), "tokens"),  # type: ignore[call-arg]
    "verl's rejection": (
        lambda: RolloutImportanceSampling.verl(rollout_rs="tokn_k2", rollout_rs_threshold=1),
        "token_k2",
    ),
    "part": (lambda: MixedLossConfig(parts={"rl": {"loss": "GRPOLosConfig"}}), "GRPOLossConfig"),
    "part with a factor": (lambda: MixedLossConfig(parts={"rl": GRPOLossConfig()}, coefs={"rrl": 1.0}), "rl"),
    "estimator": (lambda: advantages("grp"), "grpo"),
    "estimator that is removed": (lambda: rlloss.unregister_advantage("rlo"), "rloo"),
    "argument of an estimator": (lambda: advantages(group_idss=None), "group_ids"),
    "group of one": (lambda: advantages(singleton="rw"), "raw"),
    "deviation": (lambda: advantages("scaled", std="bias"), "biased"),
    "NaN rewards": (lambda: advantages("rloo", nan="excl"), "exclude"),
    "alignment": (
        lambda: compute_advantages(
            "optimal_token_baseline",
            rewards=ONES,
            mask=ONES,
            group_ids=torch.zeros(1, dtype=torch.int64),
            squared_norms=ONES,
            align="tokn",
        ),
        "token",
    ),
    "holes": (lambda: gae(ONES, ONES, ONES, holes="skp"), "skip"),
    "task": (lambda: Task(TaskConfig(name="chain_sun")), "chain_sum"),
    "task option": (lambda: Task(TaskConfig(options={"max_term": 2})), "max_terms"),
    "verl's aggregation": (lambda: verl.agg_loss(ONES, ONES, "token-men"), "token-mean"),
    "verl's loss": (lambda: verl_policy_loss("vanila", {}), "vanilla"),
    "TRL's loss": (lambda: trl_policy_loss({"loss_type": "dap"}), "dapo"),
    "TRL's level": (
        lambda: trl_policy_loss({"loss_type": "grpo", "importance_sampling_level": "sequences"}),
        "sequence",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_the_nearest_name_is_offered(case: str) -> None:
    call, meant = NAMES[case]
    with pytest.raises(RLLossError) as caught:
        call()
    assert f"Did you mean {meant!r}?" in str(caught.value)
    assert "\n" not in str(caught.value)


WORDS = {
    "verb": (["trian", CONFIG], "unknown verb 'trian'. Did you mean 'train'?"),
    "option": (["train", CONFIG, "--resme"], "Did you mean '--resume'?"),
    "choice": (["bench", "--batch", "rll"], "Did you mean 'rl'?"),
    "file": (["show", CONFIG.replace("grpo_", "grop_")], "Did you mean 'grpo_arithmetic.py'?"),
    "field": (["show", CONFIG, "--set", "grpo.stpes=3"], "Did you mean 'steps'?"),
    "loss to plot": (["plot", "vanila"], "Did you mean 'vanilla'?"),
    "nothing": ([], "required: VERB"),
    "number": (["check", CONFIG, "--seed", "x"], "invalid int value: 'x'"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_command_line_answers_in_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = WORDS[case]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rlloss: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_the_status_reaches_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlloss", "trian"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlloss: unknown verb 'trian'. Did you mean 'train'? Known: train, ")
    assert done.stderr.count("\n") == 1


MIXED = {"rl": GRPOLossConfig()}
# What cannot work together -> words of the refusal: the field and the way out.
COMBINATIONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "liger, entropy bonus": (
        lambda: GRPOLossConfig(mode="liger", entropy_coef=0.1),
        ("mode='liger'", "entropy_coef=0.1", "Use mode='chunk'"),
    ),
    "liger, entropy metric": (
        lambda: CELossConfig(mode="liger", entropy_metric=True),
        ("mode='liger'", "entropy_metric=True", "Use mode='chunk'"),
    ),
    "liger, soft cap": (
        lambda: LogProbConfig(mode="liger", logit_softcap=30.0),
        ("mode='liger'", "logit_softcap=30.0", "Use mode='chunk'"),
    ),
    "liger, scale": (
        lambda: OrealLossConfig(mode="liger", logit_scale=2.0),
        ("mode='liger'", "logit_scale=2.0", "Use mode='chunk'"),
    ),
    "liger, teacher's words": (
        lambda: DistillLossConfig(mode="liger"),
        ("mode='liger'", "kind='topk'", "Use mode='chunk'"),
    ),
    "liger, a part with entropy": (
        lambda: MixedLossConfig(mode="liger", parts={"rl": GRPOLossConfig(entropy_coef=0.1)}),
        ("mode='liger'", "entropy_coef=0.1", "Use mode='chunk'"),
    ),
    "constant without a length": (
        lambda: GRPOLossConfig(loss_reduction="constant"),
        ("loss_reduction='constant'", "needs a loss_length"),
    ),
    "a length without constant": (
        lambda: ValueLossConfig(loss_length=3.0),
        ("loss_length=3.0", "loss_reduction='token'"),
    ),
    "constant of CE": (lambda: CELossConfig(loss_reduction="constant"), ("constant", "'sequence_sum'")),
    "constant of a teacher": (lambda: DistillLossConfig(loss_reduction="constant"), ("constant", "'sequence_sum'")),
    "dual clip below 1": (
        lambda: GRPOLossConfig(policy_loss_cfg={"clip_ratio_c": 1.0}),
        ("clip_ratio_c=1.0", "greater than 1"),
    ),
    "no room for a ratio": (
        lambda: GRPOLossConfig(policy_loss_cfg={"log_prob_diff_min": 0.0, "log_prob_diff_max": 0.0}),
        ("log_prob_diff_min",),
    ),
    "no room for a ratio of clip_cov": (
        lambda: GRPOLossConfig(
            policy_loss_cfg={"loss_type": "clip_cov", "log_prob_diff_min": 0.0, "log_prob_diff_max": 0.0}
        ),
        ("log_prob_diff_min=0.0",),
    ),
    "no room for a ratio of gmpo": (
        lambda: GRPOLossConfig(
            policy_loss_cfg={"loss_type": "gmpo", "log_prob_diff_min": 0.0, "log_prob_diff_max": 0.0},
            loss_reduction="sample",
        ),
        ("log_prob_diff_min=0.0",),
    ),
    "a cap below the lower bound": (
        lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": "cispo", "cliprange_low": 0.2, "ratio_cap": 0.5}),
        ("ratio_cap=0.5", "1 - cliprange_low=0.8"),
    ),
    "covariance bounds": (
        lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": "clip_cov", "clip_cov_lb": 5.0, "clip_cov_ub": 1.0}),
        ("clip_cov_lb=5.0", "clip_cov_ub=1.0"),
    ),
    "token ratio of gspo": (
        lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo", "ratio": "token"}),
        ("ratio='token'", "'sequence_mean'"),
    ),
    "k1 from a teacher": (lambda: DistillLossConfig(kind="k1"), ("kind='k1'", "Use 'k3' or 'k1+'")),
    "logits of a critic": (lambda: ValueLossConfig(temperature=0.5), ("temperature=0.5", "Leave it at its default")),
    "two clamp rules": (
        lambda: RolloutImportanceSampling(rollout_is_threshold=(0.5, 2.0), rules=(RolloutRule(),)),
        ("more than one clamp rule",),
    ),
    "a clamp of k1": (lambda: RolloutRule(statistic="k1"), ("statistic='k1'", "action='mask'")),
    "a veto of sequences": (lambda: RolloutRule("sequence", action="veto", high=2.0), ("level='sequence'",)),
    "a mask without bounds": (lambda: RolloutRule(action="mask"), ("needs a bound",)),
    "equal bounds": (lambda: RolloutImportanceSampling(rollout_is_threshold=(1.0, 1.0)), ("two different numbers",)),
    "verl's rejection without a threshold": (
        lambda: RolloutImportanceSampling.verl(rollout_rs="token_k1"),
        ("rollout_rs_threshold",),
    ),
    "a critic as a part": (
        lambda: MixedLossConfig(parts={**MIXED, "critic": ValueLossConfig()}),
        ("parts['critic']", "outside"),
    ),
    "two temperatures of one head": (
        lambda: MixedLossConfig(parts={"rl": GRPOLossConfig(temperature=0.5)}, temperature=0.7),
        ("temperature=0.5", "set it on MixedLossConfig"),
    ),
    "a total in words": (lambda: Totals(tokens="3"), ("Totals(tokens='3')", "finite number above 0")),  # type: ignore[arg-type]
    "totals of two steps": (
        lambda: Totals(tokens=torch.tensor([3, 4])),  # type: ignore[arg-type]
        ("Totals(tokens=tensor([3, 4]))", "None to count"),
    ),
    "half a rank": (lambda: Totals(world=2.5), ("Totals(world=2.5)", "number of ranks")),  # type: ignore[arg-type]
    "a bound in words": (lambda: RolloutRule(high="2"), ("RolloutRule(high='2')", "expected a number")),  # type: ignore[arg-type]
    "no part": (lambda: MixedLossConfig(parts={}), ("parts",)),
    "skipped rows and KL": (
        lambda: GRPOConfig(skip_zero_advantages=True, loss={"use_kl_loss": True}),  # type: ignore[arg-type]
        ("skip_zero_advantages",),
    ),
    "heads that do not divide": (lambda: ModelConfig(kv_heads=3), ("kv_heads=3",)),
    "two temperatures of sampling": (
        lambda: override(TrainConfig(), ["grpo.loss.temperature=0.7"]),
        ("rollout.temperature",),
    ),
}


@pytest.mark.filterwarnings("ignore:GRPOLossConfig. the paper of policy loss")
@pytest.mark.parametrize("case", COMBINATIONS)
def test_what_cannot_work_is_refused_when_the_config_is_made(case: str) -> None:
    make, words = COMBINATIONS[case]
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_liger_refuses_a_loss_of_the_users_that_reads_the_entropy() -> None:
    register_policy_loss("entropic")(lambda log_prob, entropy: -log_prob * entropy)
    try:
        GRPOLossConfig(policy_loss_cfg={"loss_type": "entropic"}, mode="chunk")
        with pytest.raises(ConfigError, match=r"'entropic' asks for the entropy, which mode='liger'.*Use mode='chunk'"):
            GRPOLossConfig(policy_loss_cfg={"loss_type": "entropic"}, mode="liger")
    finally:
        unregister_policy_loss("entropic")
