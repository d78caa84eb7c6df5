"""PPO runs: resuming bit for bit, both critics, early stop, the real skip, evaluators, the controller."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloss.errors import ConfigError
from rlloss.losses.value import ValueLossConfig
from rlloss.training.config import GRPOConfig, OptimizerConfig, RolloutConfig, TrainConfig
from rlloss.training.evaluator import Evaluator, SequenceClassifier, imported
from rlloss.training.extras import require
from rlloss.training.logging import read_metrics
from rlloss.training.ppo import PPOPhase
from rlloss.training.ppo_config import CriticConfig, EvaluatorConfig, KLConfig, PPOConfig
from rlloss.training.run import Run
from training.helpers import tiny_config

TRLS = """
objective/kl objective/entropy objective/kl_coef ppo/mean_non_score_reward ppo/mean_scores ppo/std_scores
tokens/responses_len_mean tokens/responses_len_std env/reward_mean env/reward_std
ppo/loss/policy ppo/loss/value ppo/loss/total ppo/policy/entropy ppo/policy/approxkl ppo/policy/policykl
ppo/policy/clipfrac ppo/policy/ratio_mean ppo/returns/mean ppo/returns/var ppo/val/vpred ppo/val/error ppo/val/clipfrac
ppo/val/mean ppo/val/var ppo/val/var_explained time/ppo/rollout time/ppo/optimize_step time/ppo/total
""".split()  # noqa: SIM905


def count_digits(texts: list[str]) -> list[float]:
    """A reward on texts: digits after the equals sign."""
    return [float(sum(c.isdigit() for c in text.partition("=")[2])) for text in texts]


def ppo_config(**changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "steps": 3,
        "rollout": RolloutConfig(prompts=8, group_size=2, max_new_tokens=4),
        "updates_per_epoch": 2,
        "micro_batch_size": 5,
        "kl": KLConfig(coef=0.1, target=0.5, horizon=100.0),
        "optimizer": OptimizerConfig(lr=1e-2),
        "evaluator": EvaluatorConfig(function=f"{__name__}.count_digits", scale=True, clip=3.0),
    }
    loss = PPOConfig().loss.model_copy(update={"entropy_metric": True})
    return tiny_config(grpo=GRPOConfig(steps=0), ppo=PPOConfig(**{**fields, "loss": loss, **changes}))


def phase_of(config: TrainConfig, folder: Path) -> PPOPhase:
    phase = Run(config, folder)._ppo()
    assert isinstance(phase, PPOPhase)
    return phase


def weights(phase: PPOPhase) -> list[torch.Tensor]:
    return [p.detach().clone() for part in (phase.policy.model, phase.models.head) for p in part.parameters()]


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_run_resumes_bit_for_bit(backbone: str, tmp_path: Path) -> None:
    config = ppo_config(critic=CriticConfig(backbone=backbone, warmup_steps=int(backbone == "own")))
    whole = Run(config, tmp_path / "whole")
    whole.train()
    lines = read_metrics(tmp_path / "whole")
    assert set(TRLS) <= set(lines[-1])
    assert all(math.isfinite(value) for value in lines[-1].values() if isinstance(value, float))
    assert (tmp_path / "whole" / "curves.png").exists()
    assert list((tmp_path / "whole" / "tensorboard").iterdir())

    first = Run(config, tmp_path / "cut")
    original, calls = PPOPhase.step, []

    def interrupted(self: PPOPhase, index: int) -> dict[str, float]:
        calls.append(index)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOPhase, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.train()
    second = Run(config, tmp_path / "cut")
    second.train(resume=True)
    for one, other in zip(whole.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again = read_metrics(tmp_path / "cut")
    for one, other in zip(lines, again, strict=True):
        assert {k: v for k, v in one.items() if "time/" not in k and "seconds" not in k} == {
            k: v for k, v in other.items() if "time/" not in k and "seconds" not in k
        }


def test_a_skipped_minibatch_changes_nothing_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed gradients would still let Adam's momentum move the weights; here no step is made."""
    phase = phase_of(ppo_config(), tmp_path)
    phase.step(0)
    before, state = weights(phase), copy.deepcopy(phase.models.tensors())
    monkeypatch.setattr("rlloss.training.ppo._ratio_too_large", lambda metrics, threshold: True)
    found = phase.step(1)
    assert (found["updates"], found["skipped_updates"]) == (0.0, 4.0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(phase), strict=True))
    after = phase.models.tensors()
    assert any(name.endswith("exp_avg") for name in state)
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert all(p.grad is None for p in phase.policy.model.parameters())


def test_a_large_mean_ratio_is_skipped_and_an_early_stop_ends_the_updates(tmp_path: Path) -> None:
    phase = phase_of(ppo_config(ratio_threshold=1.0 + 1e-9, target_kl=None, epochs=4), tmp_path / "a")
    assert phase.step(0)["skipped_updates"] >= 1
    phase = phase_of(ppo_config(target_kl=1e-7, epochs=4), tmp_path / "b")
    found = phase.step(0)
    assert found["early_stops"] == 1.0
    assert found["updates"] == 1.0


def test_the_critic_warms_up_alone(tmp_path: Path) -> None:
    phase = phase_of(ppo_config(critic=CriticConfig(warmup_steps=1)), tmp_path)
    policy, head = [list(part.parameters()) for part in (phase.policy.model, phase.models.head)]
    before = [p.detach().clone() for p in policy], [p.detach().clone() for p in head]
    assert phase.step(0)["objective/kl"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before[0], policy, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[1], head, strict=True))
    phase.step(1)
    assert not all(torch.equal(a, b) for a, b in zip(before[0], policy, strict=True))


def test_the_coefficient_follows_the_kl(tmp_path: Path) -> None:
    phase = phase_of(ppo_config(), tmp_path)
    assert phase.step(0)["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert phase.controller.value == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))
    reference = {name: value.clone() for name, value in phase.reference.items()}
    phase.step(1)
    assert all(torch.equal(value, phase.reference[name]) for name, value in reference.items())


def test_a_sequence_classifier_is_a_reward(tmp_path: Path) -> None:
    transformers = require("transformers")
    run = Run(ppo_config(), tmp_path / "run")
    run.policy.tokenizer.save_pretrained(tmp_path / "reward")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(
        vocab_size=len(run.policy.tokenizer), num_key_value_heads=1, head_dim=8, num_labels=3, **shape
    )
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    given = EvaluatorConfig(folder=str(tmp_path / "reward"), label=1, batch_size=2)
    evaluator = Evaluator(given, run.task, torch.device("cpu"))
    questions = run.task.train[:3]
    scores = evaluator.score(["1", "22", "3"], questions)
    alone = SequenceClassifier(str(tmp_path / "reward"), torch.device("cpu"), label=1)
    for text, question, score in zip(["1", "22", "3"], questions, scores, strict=True):
        assert alone([question.prompt + text]).item() == pytest.approx(score.item(), abs=1e-5)
    phase = phase_of(ppo_config(evaluator=given), tmp_path / "train")
    assert math.isfinite(phase.step(0)["ppo/mean_scores"])
    with pytest.raises(ConfigError, match="nowhere"):
        SequenceClassifier(str(tmp_path / "nowhere"), torch.device("cpu"))


def test_evaluators_and_configs_refuse_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such"):
        imported("math.no_such")
    with pytest.raises(ConfigError, match="expected a function"):
        imported("math.pi")
    with pytest.raises(ConfigError, match="not both"):
        EvaluatorConfig(function="a.b", folder="c")
    with pytest.raises(ConfigError, match="scale=True"):
        EvaluatorConfig(center=True)
    with pytest.raises(ConfigError, match="warmup_steps"):
        CriticConfig(backbone="shared", warmup_steps=2)
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        PPOConfig(loss={"temperature": 0.7})
    with pytest.raises(ConfigError, match="fixed"):
        KLConfig(kind="fixed")
    evaluator = Evaluator(
        EvaluatorConfig(function="builtins.list"), Run(ppo_config(), tmp_path).task, torch.device("cpu")
    )
    evaluator._on_texts = lambda texts: [1.0]
    with pytest.raises(ConfigError, match="1 numbers for 2 texts"):
        evaluator.score(["1", "2"], evaluator.task.train[:2])
    assert PPOConfig(critic={"loss": ValueLossConfig(huber_delta=1.0)}).critic.loss.huber_delta == 1.0
