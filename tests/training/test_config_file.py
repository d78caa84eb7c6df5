"""Config files and overrides: what fits is taken, what does not is refused by a sentence that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlloss.cli import main
from rlloss.config_file import load_config, override
from rlloss.errors import ConfigError, UnknownNameError
from rlloss.training.config import GRPOConfig, ModelConfig, TaskConfig, TrainConfig
from rlloss.training.tasks import Task
from training.helpers import CONFIGS, tiny_config


def test_overrides_reach_every_level() -> None:
    config = override(
        TrainConfig(),
        [
            "seed=7",
            "grpo.optimizer.lr=1e-4",
            "grpo.loss.policy_loss_cfg.cliprange_high=0.3",
            "task.options.max_terms=3",
            "task.name=basic_arithmetic",
            "grpo.optimizer.betas=(0.8, 0.9)",
            "grpo.advantage=dr_grpo",
            "threads=null",
            "model.folder=12",
        ],
    )
    assert config.seed == 7
    assert config.grpo.optimizer.lr == 1e-4
    assert config.grpo.loss.policy_loss_cfg["cliprange_high"] == 0.3
    assert config.task.options == {"max_terms": 3}
    assert config.task.name == "basic_arithmetic"
    assert config.grpo.optimizer.betas == (0.8, 0.9)
    assert config.grpo.advantage == "dr_grpo"
    assert config.threads is None
    assert config.model.folder == "12"


def test_overrides_are_validated_together_and_change_nothing_else() -> None:
    before = TrainConfig()
    after = override(before, ["model.heads=3", "model.kv_heads=3", "model.hidden=48"])
    assert (after.model.heads, before.model.heads) == (3, 8)
    assert after.grpo == before.grpo


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("grpo.stpes=3", "Did you mean 'steps'"),
        ("grpo.rollout.prompt=3", "Did you mean 'prompts'"),
        ("grop.steps=3", "Did you mean 'grpo'"),
        ("grpo.steps=-1", "greater than or equal to 0"),
        ("grpo.steps=many", "steps"),
        ("grpo.optimizer.lr=nan", "lr"),
        ("seed.a=1", "no fields"),
        ("seed", "expected a.b=c"),
        (".seed=1", "expected a.b=c"),
        ("grpo.loss.mode=fused", "mode"),
        ("grpo.loss.policy_loss_cfg.loss_type=vanila", "vanilla"),
        ("grpo.loss.policy_loss_cfg.cliprange=0.1", "cliprange_"),
        ("model.heads=5", "hidden=128"),
        ("grpo.loss.temperature=0.7", "rollout.temperature"),
        ("grpo.advantage=rlo", "Did you mean 'rloo'"),
        ("grpo.advantage=gae", "needs values, mask"),
        ("grpo.advantage=reinforce_plus_plus_baseline", "needs mask; given: rewards, group_ids"),
        ("grpo.advantage_options.normalise_std=false", "Did you mean 'normalize_std'"),
        ("grpo.advantage_options.group_ids=1", "come from the rollout"),
    ],
)
def test_what_does_not_fit_is_refused(assignment: str, sentence: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=sentence.replace(".", r"\.")):
        override(TrainConfig(), [assignment])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1\n", "defines no `config`"),
        ("config = 1\n", "is a int, expected a TrainConfig"),
        ("import nowhere_at_all\n", "cannot be run: ModuleNotFoundError"),
        ("config = (\n", "cannot be run: SyntaxError"),
    ],
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, source: str, sentence: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        load_config(path, TrainConfig)


def test_a_missing_file_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'grpo_arithmetic.py'"):
        load_config(CONFIGS / "grpo_aritmetic.py", TrainConfig)


def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(CONFIGS / "grpo_arithmetic.py"), "--set", "grpo.stpes=3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlloss: --set grpo.stpes=3: ") and "Did you mean 'steps'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_show_prints_a_config_that_builds_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path), "--set", "seed=5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == 5
    assert TrainConfig(**shown) == load_config(path, TrainConfig, ["seed=5"])


def test_skipping_responses_would_skip_their_kl() -> None:
    with pytest.raises(ConfigError, match="skip_zero_advantages"):
        GRPOConfig(skip_zero_advantages=True, loss={"use_kl_loss": True})  # type: ignore[arg-type]


def test_model_sizes_fit() -> None:
    with pytest.raises(ConfigError, match="multiple of kv_heads=3"):
        ModelConfig(kv_heads=3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "chain_sun"}, "Did you mean 'chain_sum'"),
        ({"options": {"max_term": 2}}, "Did you mean 'max_terms'"),
        ({"options": {"seed": 2}}, "data_seed"),
        ({"options": {"min_terms": 0}}, "min_terms must be positive"),
        ({"prompt": "{expresion}"}, "expression"),
        ({"answer_pattern": "("}, "no regular expression"),
        ({"answer_pattern": "a"}, "no group"),
        ({"pool": 50}, "Raise pool=50"),
    ],
)
def test_a_task_that_cannot_be_is_refused(changes: dict[str, object], sentence: str) -> None:
    config = TaskConfig(**{**tiny_config().task.model_dump(), **changes})  # type: ignore[arg-type]
    with pytest.raises((ConfigError, UnknownNameError), match=sentence):
        Task(config)
