"""Whole runs: resuming bit for bit, Ctrl-C, the first ratio, the shipped configs, a folder of transformers."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloss import compute_advantages
from rlloss.cli import main, resume_command
from rlloss.config_file import load_config
from rlloss.errors import ConfigError
from rlloss.training.config import CheckpointConfig, EvaluationConfig, SupervisedConfig, TrainConfig
from rlloss.training.logging import read_metrics
from rlloss.training.phase import Phase
from rlloss.training.run import Run
from training.helpers import CONFIGS, tiny_config

TIMES = ("seconds_rollout", "seconds_update")


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.policy.model.state_dict().items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(folder)]


class Killed(BaseException):
    """Stands for a kill: nothing on the way may handle it."""


def die() -> None:
    raise Killed


def kill_at(monkeypatch: pytest.MonkeyPatch, place: tuple[str, int], action: Callable[[], None]) -> None:
    """Runs `action` once within a step, given by its phase and index, before the weights change."""
    original = Phase.apply_gradients
    done = False

    def stepping(self: Phase, index: int) -> dict[str, float]:
        nonlocal done
        if (self.name, index) == place and not done:
            done = True
            action()
        return original(self, index)

    monkeypatch.setattr(Phase, "apply_gradients", stepping)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tiny_config(), tmp_path_factory.mktemp("straight"))
    assert run.train().finished
    return run


@pytest.mark.parametrize("place", [("supervised", 2), ("grpo", 0), ("grpo", 2)])
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Run, place: tuple[str, int]
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, place, die)
        with pytest.raises(Killed):
            Run(tiny_config(), tmp_path).train()
    resumed = Run(tiny_config(), tmp_path)
    report = resumed.train(resume=True)
    assert report.finished and report.step == 6
    assert_same_bits(weights_of(resumed), weights_of(straight))
    assert without_times(tmp_path) == without_times(straight.output)
    for name in ("histograms.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_text() == (straight.output / name).read_text()
    assert report.heldout == straight.report.heldout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Run, number: signal.Signals
) -> None:
    config = tiny_config(checkpoint=CheckpointConfig(every=100))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        kill_at(patch, ("grpo", 1), lambda: os.kill(os.getpid(), number))
        report = Run(config, tmp_path).train()
    assert not report.finished and report.step == 5
    assert signal.getsignal(number) == before
    assert (tmp_path / "curves.png").stat().st_size > 0
    resumed = Run(config, tmp_path)
    assert resumed.train(resume=True).finished
    assert_same_bits(weights_of(resumed), weights_of(straight))


def test_the_command_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.py"
    config.write_text("from training.helpers import tiny_config\nconfig = tiny_config()\n")
    arguments = ["train", str(config), "--set", "seed=3", "--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        kill_at(patch, ("grpo", 1), lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(arguments) == 130
    said = capsys.readouterr().out
    command = next(line.split() for line in said.splitlines() if line.endswith("--resume"))
    assert main(command[command.index("train") :]) == 0
    assert "after GRPO" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "report.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("world", "here", "words"),
    [
        (None, None, "rlloss train"),
        ("2", "2", "torchrun --nproc-per-node 2 -m rlloss train"),
        ("16", "8", "torchrun ... -m rlloss train"),
    ],
)
def test_a_run_on_several_ranks_resumes_on_several(
    world: str | None, here: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    options = argparse.Namespace(config="c.py", set=["seed=3"])
    assert resume_command(options, Path("runs/c")) == f"{words} c.py --set seed=3 --output runs/c --resume"


def test_first_ratio_is_one_and_generation_saw_the_same(straight: Run) -> None:
    lines = [line for line in read_metrics(straight.output) if "ratio_dev_first_update" in line]
    assert lines
    for line in lines:
        assert line["ratio_dev_first_update"] <= 2e-6
        assert line["rollout_logprob_gap"] <= 5e-6


def test_a_run_leaves_its_files(straight: Run) -> None:
    folder = straight.output
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3, 4, 5, 6]
    report = json.loads((folder / "report.json").read_text())
    assert set(report["heldout"]) == {"start", "supervised", "grpo"}
    assert set(report["seconds"]) == {"supervised", "grpo"}
    assert len(straight.checkpoints.saved()) == 2


def test_a_folder_in_use_is_not_overwritten(straight: Run) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        Run(tiny_config(), straight.output).train()


def test_a_folder_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    """Its checkpoints would pass for none: the run would start over, and its lines be removed."""
    old = tmp_path / "checkpoints" / "step_00000050"
    old.mkdir(parents=True)
    (old / "state.pt").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_text('{"step": 50, "phase": "grpo"}\n')
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"earlier version \(state\.pt in step_00000050\)(.|\n)*--output"):
            Run(tiny_config(), tmp_path).train(resume=resume)
    assert [line["step"] for line in read_metrics(tmp_path)] == [50]


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Run
) -> None:
    """Nothing of it stays: neither the line of the start, nor events, nor the edges of the histograms."""
    with monkeypatch.context() as patch:
        kill_at(patch, ("supervised", 1), die)
        with pytest.raises(Killed):
            Run(tiny_config(), tmp_path).train()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert Run(tiny_config(), tmp_path).train().finished
    assert without_times(tmp_path) == without_times(straight.output)
    for name in ("histograms.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_text() == (straight.output / name).read_text()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("start/heldout_exact")] == [0]
    assert [event.step for event in events.Scalars("supervised/loss")] == [1, 2, 3]


def test_a_file_of_output_is_told_of_every_evaluation(tmp_path: Path) -> None:
    """A bar shows itself in a terminal; elsewhere nothing would be seen before a phase ends."""
    consoles = pytest.importorskip("rich.console")
    said = io.StringIO()
    config = tiny_config(evaluation=EvaluationConfig(every=2), supervised=SupervisedConfig(steps=0))
    Run(config, tmp_path, consoles.Console(file=said, width=100)).train()
    lines = [line for line in said.getvalue().splitlines() if ", step " in line]
    assert [line.partition(":")[0] for line in lines] == ["start, step 0", "grpo, step 2", "grpo, step 3"]
    assert all("heldout_exact " in line for line in lines)


def test_every_step_says_how_long_it_took(straight: Run) -> None:
    lines = {line["step"]: line for line in read_metrics(straight.output)}
    assert all(lines[step]["seconds_update"] > 0 for step in range(1, 7))
    assert [step for step in lines if "seconds_rollout" in lines[step]] == [4, 5, 6]


def test_resuming_needs_a_checkpoint_and_the_same_config(tmp_path: Path, straight: Run) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        Run(tiny_config(), tmp_path).train(resume=True)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        Run(tiny_config(seed=1), straight.output).train(resume=True)


def test_the_trained_policy_is_a_folder_that_trains(tmp_path: Path, straight: Run) -> None:
    overrides = [f"model.folder={straight.output / 'policy'}", "grpo.steps=2", "supervised.steps=0"]
    config = load_config(_tiny_file(tmp_path), TrainConfig, overrides)
    run = Run(config, tmp_path / "run")
    assert run.train().heldout["start"] == straight.report.heldout["grpo"]


def test_another_architecture_of_transformers_trains(tmp_path: Path) -> None:
    """GPT-2 has absolute positions, biases, dropout, and a head tied to its embeddings."""
    transformers = pytest.importorskip("transformers")
    from rlloss.training.model import character_tokenizer

    folder = tmp_path / "gpt2"
    tokenizer = character_tokenizer(["0123456789+-=."])
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = load_config(_tiny_file(tmp_path), TrainConfig, [f"model.folder={folder}", "grpo.loss.use_kl_loss=true"])
    run = Run(config, tmp_path / "run")
    assert run.train().finished
    lines = [line for line in read_metrics(run.output) if "ratio_dev_first_update" in line]
    assert lines and max(line["ratio_dev_first_update"] for line in lines) <= 2e-6
    assert max(line["rollout_logprob_gap"] for line in lines) <= 5e-6


TINY = [
    "threads=1",
    "task.pool=400",
    "task.heldout=5",
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.mlp=16",
    "grpo.rollout.prompts=4",
    "grpo.rollout.group_size=2",
]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("grpo_arithmetic.py", ["supervised.steps=2", "grpo.steps=2"]),
        ("sft_arithmetic.py", ["supervised.steps=2"]),
        ("grpo_any_model.py", ["grpo.steps=1"]),
        ("ppo_arithmetic.py", ["supervised.steps=1", "ppo.steps=1", "ppo.rollout.prompts=8", "task.pool=2000"]),
    ],
)
def test_the_shipped_configs_run(tmp_path: Path, name: str, steps: list[str]) -> None:
    assignments = [part for text in (*TINY, *steps) for part in ("--set", text)]
    assert main(["train", str(CONFIGS / name), *assignments, "--output", str(tmp_path)]) == 0


def test_every_shipped_config_is_tested() -> None:
    tested = {"grpo_arithmetic.py", "sft_arithmetic.py", "grpo_any_model.py", "ppo_arithmetic.py"}
    assert {path.name for path in CONFIGS.glob("*.py")} == tested


def _tiny_file(folder: Path) -> Path:
    path = folder / "tiny_config.py"
    path.write_text("from training.helpers import tiny_config\nconfig = tiny_config()\n")
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [("grpo", {}), ("grpo", {"normalize_std": False}), ("rloo", {}), ("opo", {}), ("passk_analytic", {"k": 2})],
)
def test_advantages_by_name(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """The phase gives an estimator what it asks for, lengths among it, and takes its options."""
    config = tiny_config()
    grpo = config.grpo.model_copy(update={"advantage": name, "advantage_options": options, "updates_per_epoch": 1})
    phase = Run(config.model_copy(update={"grpo": grpo}), tmp_path)._grpo()
    rewards, seen = torch.arange(24.0) % 5 % 3, []
    original = phase._batch
    phase._batch = lambda *arguments: seen.append((arguments, original(*arguments))) or seen[-1][1]
    phase._rewards = lambda *arguments: rewards
    phase.step(0)
    (((rollout, *_), batch),) = seen
    lengths = [sum(label != -100 for label in row) for row in rollout.labels.tolist()]
    groups = torch.arange(24) // 4
    given = {"rewards": rewards, "group_ids": groups} | ({"lengths": torch.tensor(lengths)} if name == "opo" else {})
    assert torch.equal(batch["advantages"], compute_advantages(name, **given, **options))
    assert batch["advantages"].unique().numel() > 2


def test_better_responses_alone(tmp_path: Path) -> None:
    """Without negative advantages and those that are 0, the updates see the responses above their group's mean."""
    overrides = ["grpo.negative_scale=0", "grpo.skip_zero_advantages=true", "grpo.updates_per_epoch=1"]
    run = Run(load_config(_tiny_file(tmp_path), TrainConfig, [*overrides, "grpo.steps=1"]), tmp_path / "run")
    phase = run._grpo()
    seen = []
    original = phase._batch
    phase._batch = lambda *arguments: seen.append(original(*arguments)) or seen[-1]
    rewards = torch.zeros(24)
    rewards[[0, 5, 6]] = 1.0  # groups of four: one right, two right, and four groups without any
    phase._rewards = lambda *arguments: rewards
    metrics = phase.step(0)
    assert metrics["sequences"] == 3
    assert bool((seen[0]["advantages"] > 0).all())


def test_the_warm_start_ends_at_its_target_and_resumes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["supervised.target_loss=100", "supervised.steps=30", "supervised.questions=9", "grpo.steps=1"]
    config = load_config(_tiny_file(tmp_path), TrainConfig, overrides)
    with monkeypatch.context() as patch:
        kill_at(patch, ("grpo", 0), die)
        with pytest.raises(Killed):
            Run(config, tmp_path / "run").train()
    report = Run(config, tmp_path / "run").train(resume=True)
    assert report.finished and report.step == 21  # twenty steps make a mean
    assert set(report.heldout) == {"start", "supervised", "grpo"}
