"""Histograms and samples of a run, and the loggers behind their one interface."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlloss.errors import BackendUnavailableError
from rlloss.training import loggers
from rlloss.training.config import LoggingConfig
from rlloss.training.loggers import make_loggers
from rlloss.training.logging import RunLog, read_lines
from rlloss.training.run import Run
from rlloss.training.trace import EDGES, Trace, count
from training.helpers import tiny_config

pytest.importorskip("reasoning_gym")


def test_counts_are_those_of_a_loop() -> None:
    edges = EDGES["log_ratio"]
    values = [-math.inf, -9.0, edges[0], -0.3, 0.0, 0.004, edges[-1], 77.0, math.inf, math.nan]
    expected = [0] * (len(edges) + 1)
    for value in values[:-1]:
        expected[sum(value >= edge for edge in edges)] += 1
    assert count(torch.tensor(values, dtype=torch.float64), edges).tolist() == expected
    assert count(torch.zeros(0), edges).sum() == 0
    assert all(list(e) == sorted(e) and list(e) == [-x for x in reversed(e)] for e in EDGES.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = tiny_config(logging=LoggingConfig(loggers=(), histograms_every=1, samples=2, samples_every=2))
    run = Run(config, tmp_path_factory.mktemp("traced"))
    assert run.train().finished
    return run


def test_a_run_counts_every_token_that_its_losses_saw(run: Run) -> None:
    head, *lines = read_lines(run.output / "histograms.jsonl")
    assert head == {"step": 0, "edges": {name: list(edges) for name, edges in EDGES.items()}}
    metrics = {line["step"]: line for line in read_lines(run.output / "metrics.jsonl")}
    assert [line["step"] for line in lines] == [4, 5, 6]
    for line in lines:
        assert sum(line["log_ratio"]) == sum(line["advantage"]) == metrics[line["step"]]["tokens"]
        assert metrics[line["step"]]["rollout_logprob_gap"] >= metrics[line["step"]]["rollout_logprob_gap_mean"] >= 0
    middle = len(EDGES["log_ratio"]) // 2
    assert lines[0]["log_ratio"][middle] >= metrics[4]["tokens"] / 3  # the first of two updates begins at ratio 1
    assert not (run.output / "tensorboard").exists()


def test_samples_are_the_responses_as_the_step_left_them(run: Run) -> None:
    lines = read_lines(run.output / "samples.jsonl")
    assert [line["step"] for line in lines] == [4, 4, 6, 6]
    for line in lines:
        assert line["prompt"].endswith("=") and line["length"] == len(line["tokens"]) > 0
        assert len(line["log_ratio"]) == len(line["advantage"]) == line["length"]
        assert any(line["log_ratio"]) and 0.0 <= line["reward"] <= 1.0


def test_what_a_step_leaves_behind_changes_no_number(run: Run, tmp_path: Path) -> None:
    silent = LoggingConfig(loggers=(), histograms_every=0, samples_every=0)
    other = Run(tiny_config(logging=silent), tmp_path)
    other.train()
    for name, value in other.policy.model.state_dict().items():
        assert torch.equal(value, run.policy.model.state_dict()[name]), name
    assert not (tmp_path / "histograms.jsonl").exists() and not (tmp_path / "samples.jsonl").exists()


def test_most_steps_are_not_counted_by_default_but_the_first_and_the_last(tmp_path: Path) -> None:
    """Counts take some milliseconds of a step, and a report joins them to 120 columns."""
    assert LoggingConfig().histograms_every == 5
    run = Run(tiny_config(logging=LoggingConfig(loggers=(), samples_every=0)), tmp_path / "run")
    run.train()
    assert [line["step"] for line in read_lines(run.output / "histograms.jsonl")] == [0, 4, 6]


def test_files_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    def write(log: RunLog, step: int) -> None:
        trace = Trace()
        trace._counts = {name: torch.full((len(edges) + 1,), step) for name, edges in EDGES.items()}
        trace.samples = [{"prompt": "a\u2028", "tokens": ["\ud83d"]}]
        log.write(step, "grpo", {"loss": 1.0})
        log.write_trace(step, "grpo", trace)

    console = SimpleNamespace(print=lambda *a, **k: None)
    for done in (0, 2, 3):
        with RunLog(tmp_path, console, done) as log:
            for step in range(done + 1, 6):
                write(log, step)
        with (tmp_path / "histograms.jsonl").open("a") as file:
            file.write('{"step": 6, "log_ra')
    for name in ("metrics", "samples"):
        assert [line["step"] for line in read_lines(tmp_path / f"{name}.jsonl")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in read_lines(tmp_path / "histograms.jsonl")] == [0, 1, 2, 3, 4, 5]


class Recorder:
    """Stands for wandb and trackio: takes the calls of their public functions, and nothing else."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **arguments: Any) -> Recorder:
        self.calls.append(("init", arguments))
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        self.calls.append(("log", (data, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_optional_loggers_are_called_as_they_are_made_to_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Recorder()
    monkeypatch.setitem(sys.modules, name, fake)
    config = LoggingConfig(loggers=(name,), project="mine", wandb_mode="offline")
    for done in (0, 7):
        (logger,) = make_loggers(tmp_path / "my run", config, done)
        logger.log(done + 1, {"grpo/loss": 0.5})
        logger.close()
    inits = [arguments for call, arguments in fake.calls if call == "init"]
    assert [call for call, _ in fake.calls] == ["init", "log", "finish"] * 2
    assert fake.calls[1][1] == ({"grpo/loss": 0.5}, 1)
    assert all((found["project"], found["name"]) == ("mine", "my run") for found in inits)
    assert [found["resume"] for found in inits] == ([None, "allow"] if name == "wandb" else ["never", "allow"])
    if name == "wandb":
        assert inits[0]["id"] == inits[1]["id"] and " " not in inits[0]["id"] and inits[0]["mode"] == "offline"


def test_events_of_a_run_that_starts_over_are_gone(tmp_path: Path) -> None:
    """Also where both started in one second: then TensorBoard reads them in the order of their names."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggingConfig(loggers=("tensorboard",))
    for last in range(1, 13):
        (logger,) = make_loggers(tmp_path, config)
        for step in range(1, last + 1):
            logger.log(step, {"grpo/loss": float(last)})
        logger.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("grpo/loss")] == [(n, 12.0) for n in range(1, 13)]
    (tmp_path / "tensorboard" / "mine.txt").write_text("kept")
    (resumed,) = make_loggers(tmp_path, config, 12)
    resumed.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_logger_that_is_not_installed_says_how(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendUnavailableError, match=f"pip install {name}"):
        make_loggers(tmp_path, LoggingConfig(loggers=(name,)))
    assert set(loggers._LOGGERS) == {"tensorboard", "wandb", "trackio"}


def test_samples_hold_plain_json(run: Run) -> None:
    for name in ("histograms.jsonl", "samples.jsonl"):
        text = (run.output / name).read_text()
        assert text.isascii() and all(json.loads(line) for line in text.splitlines())


def test_a_resume_that_cannot_write_keeps_the_lines_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of steps to be made again are taken out in a file beside, which then takes the place of the first."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "phase": "grpo"}}\n' for step in range(5)) + "7\n")
    whole = path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            RunLog(tmp_path, None, 2)
    assert path.read_bytes() == whole
    RunLog(tmp_path, None, 2)._file.close()
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2]
