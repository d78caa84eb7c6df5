"""A whole run: its phases one after another, with evaluation, checkpoints, and a report."""

import json
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.training.checkpoint import Checkpoints, random_states, restore_random_states
from rlloss.training.config import TrainConfig
from rlloss.training.extras import require
from rlloss.training.grpo import GRPOPhase
from rlloss.training.interrupt import StopRequest
from rlloss.training.logging import NoLog, RunLog
from rlloss.training.model import Policy, load_policy
from rlloss.training.phase import Phase
from rlloss.training.ppo import PPOPhase
from rlloss.training.ranks import check_alike, is_main, on_any_rank, weight_sums
from rlloss.training.rollout import greedy
from rlloss.training.sharding import distributed_policy
from rlloss.training.supervised import SupervisedPhase
from rlloss.training.tasks import FULL_SCORE, Task
from rlloss.training.trace import Trace

REPORT_FILE = "report.json"
FREE_TO_CHANGE = ("checkpoint", "evaluation", "device", "logging", "rank_timeout")
"""What of the config may differ when a run resumes."""

OF_ONE_RANK = ("device", "threads")
"""Fields of the config that may differ between ranks."""


@dataclass
class Report:
    """What a run has reached."""

    output: str
    finished: bool = False
    step: int = 0
    """Steps of all phases that are done."""
    heldout: dict[str, float] = field(default_factory=dict)
    """Greedy exact match on the held-out questions at the start, and after each phase."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, evaluations included."""
    questions: int = 0
    """Held-out questions."""


class Run:
    """One run in one folder.

    Args:
        config: What to do.
        output: Folder of the run.
        console: A console of rich; None shows nothing.
    """

    def __init__(self, config: TrainConfig, output: Path, console: Any = None) -> None:
        self.config = config
        self.output = output
        self.console = console or require("rich.console").Console(quiet=True)
        self.checkpoints = Checkpoints(output / "checkpoints", config.checkpoint.keep)
        self.report = Report(str(output))
        _check_device(config.device)
        _seed_everything(config)
        self.task = Task(config.task)
        self.report.questions = len(self.task.heldout)
        texts = [text for part in (self.task.train, self.task.heldout) for q in part for text in (q.prompt, q.answer)]
        policy = load_policy(config.model, texts, config.device)
        self._start = {"questions": zlib.crc32(repr(texts).encode()), **weight_sums(policy.model)}
        self.policy: Policy = distributed_policy(policy)

    def train(self, resume: bool = False) -> Report:
        """Runs every phase that is not done yet.

        Args:
            resume: Go on from the newest checkpoint in the folder.

        Returns:
            The report; `finished` is False when Ctrl-C stopped the run, which then saved a checkpoint.

        Raises:
            ConfigError: `resume` without a checkpoint, or with a config that differs; a folder in use, one of an
                earlier version, or none that can be made; ranks that do not start alike.
        """
        self._check_alike(resume)
        self.checkpoints.refuse_earlier()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output: {self.output} cannot be made: {error.strerror}. Give another folder."
            ) from error
        saved = self._read() if resume else None
        if saved is None and self.checkpoints.saved():
            raise ConfigError(f"{self.output} already holds a run. Add --resume, or choose another --output.")
        with (
            self._log() as log,
            StopRequest(lambda: log.say("stopping after this step; press Ctrl-C again to stop at once")) as stop,
        ):
            if saved is not None:
                log.say(f"going on with {self.output} after step {self.report.step}")
            self.report.finished = self._run_phases(log, stop, saved)
        if is_main():
            (self.output / REPORT_FILE).write_text(json.dumps(asdict(self.report), indent=2))
        if self.report.finished:
            with self.policy.whole() as policy:
                if is_main():
                    policy.save(self.output / "policy")
        return self.report

    def _check_alike(self, resume: bool) -> None:
        """Compares what every rank starts from: weights that differ would be sharded into one without a word."""
        config = {f"config.{name}": value for name, value in _flat(self._config()) if name not in OF_ONE_RANK}
        saved = [path.name for path in self.checkpoints.saved()]
        check_alike({"--resume": resume, "output": str(self.output), "checkpoints": saved, **config, **self._start})

    def _log(self) -> RunLog:
        if not is_main():
            return NoLog()
        log = RunLog(self.output, self.console, self.report.step, self.config.logging)
        (self.output / "config.json").write_text(json.dumps(self._config(), indent=2))
        return log

    def evaluate(self) -> dict[str, float]:
        """Answers the held-out questions greedily; returns exact matches and the mean score, both as fractions."""
        task, questions = self.task, self.task.heldout
        rollout = self.config.ppo.rollout if self.config.ppo.steps else self.config.grpo.rollout
        length = rollout.max_new_tokens
        prompts = [self._encode(question.prompt) for question in questions]
        texts = greedy(self.policy, prompts, length, self.config.evaluation.batch_size)
        scores = [task.score(text, question) for text, question in zip(texts, questions, strict=True)]
        exact = sum(score >= FULL_SCORE for score in scores)
        return {"heldout_exact": exact / len(questions), "heldout_score": sum(scores) / len(questions)}

    def _run_phases(self, log: RunLog, stop: StopRequest, saved: dict[str, Any] | None) -> bool:
        """Returns whether all phases came to their end."""
        phases: dict[str, tuple[int, Callable[[], Phase]]] = {
            SupervisedPhase.name: (self.config.supervised.steps, self._supervised),
            GRPOPhase.name: (self.config.grpo.steps, self._grpo),
            PPOPhase.name: (self.config.ppo.steps, self._ppo),
        }
        order = [name for name, (steps, _) in phases.items() if steps]
        current = saved["phase"] if saved else None
        for name in order[order.index(current) if current else 0 :]:
            phase = phases[name][1]()
            done = 0
            if saved is not None and name == current:
                self.checkpoints.load(self._tensors(phase))
                phase.restore(saved["phase_facts"])
                restore_random_states(saved["random"])
                done = saved["phase_step"]
            elif not self.report.heldout:
                self._record(log, "start", self.evaluate())
            if not self._run_phase(phase, log, stop, done):
                return False
        return True

    def _run_phase(self, phase: Phase, log: RunLog, stop: StopRequest, done: int) -> bool:
        log.start_phase(phase.title, phase.steps, done)
        seconds = self.report.seconds.get(phase.name, 0.0) - time.perf_counter()
        every = self.config.evaluation.every
        for index in range(done, phase.steps):
            if phase.enough():  # a run that resumes right after its last step
                break
            phase.trace = self._trace(index, index + 1 == phase.steps)
            metrics = phase.step(index)
            stopping = on_any_rank(stop.requested)
            last = index + 1 == phase.steps or phase.enough()
            if last or (every and (index + 1) % every == 0):
                metrics |= self.evaluate()
            self.report.step += 1
            self.report.seconds[phase.name] = seconds + time.perf_counter()
            log.write(self.report.step, phase.name, metrics)
            log.write_trace(self.report.step, phase.name, phase.trace)
            if last:
                self.report.heldout[phase.name] = metrics["heldout_exact"]
            if last or stopping or (index + 1) % self.config.checkpoint.every == 0:
                self._save(phase, index + 1)
            if stopping and not last:
                return False
        log.say(f"{phase.title}: held-out exact match {self.report.heldout[phase.name]:.3f}")
        return not on_any_rank(stop.requested)

    def _trace(self, index: int, last: bool) -> Trace | None:
        """What a step is to leave behind for the report."""
        cfg = self.config.logging
        counted = cfg.histograms_every and (last or index % cfg.histograms_every == 0)
        sampled = cfg.samples_every and (last or index % cfg.samples_every == 0)
        return Trace(cfg.samples if sampled else 0) if counted or sampled else None

    def _record(self, log: RunLog, name: str, metrics: dict[str, float]) -> None:
        self.report.heldout[name] = metrics["heldout_exact"]
        log.write(self.report.step, name, metrics, advance=False)

    def _encode(self, prompt: str) -> list[int]:
        return self.policy.encode_prompt(prompt, self.config.task.chat_template)

    def _supervised(self) -> Phase:
        pairs = [(self._encode(q.prompt), self.policy.encode(q.answer)) for q in self.task.train]
        return SupervisedPhase(self.policy, pairs, self.config.supervised, self.config.seed)

    def _grpo(self) -> Phase:
        prompts = [self._encode(question.prompt) for question in self.task.train]
        return GRPOPhase(self.policy, self.task, prompts, self.config.grpo, self.config.seed)

    def _ppo(self) -> Phase:
        prompts = [self._encode(question.prompt) for question in self.task.train]
        return PPOPhase(self.policy, self.task, prompts, self.config.ppo, self.config.seed)

    def _config(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def _tensors(self, phase: Phase) -> dict[str, Tensor]:
        weights = {f"policy.{name}": value for name, value in self.policy.model.state_dict().items()}
        return {**weights, **phase.tensors()}

    def _save(self, phase: Phase, done: int) -> None:
        facts = {
            "config": self._config(),
            "phase": phase.name,
            "phase_step": done,
            "phase_facts": phase.facts(),
            "report": asdict(self.report),
            "random": random_states(),
        }
        self.checkpoints.save(self.report.step, self._tensors(phase), facts)

    def _read(self) -> dict[str, Any]:
        facts = self.checkpoints.facts()
        _check_same(self.output, facts["config"], self._config())
        self.report = Report(**{**facts["report"], "output": str(self.output)})
        return facts


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"TrainConfig: device={name!r} cannot be used: {reason}. Take one that torch sees here."
        ) from error


def _seed_everything(config: TrainConfig) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    random.seed(config.seed)
    require("numpy").random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to resume under another config: the steps to come would not be those of the run."""
    old, new = dict(_flat(before)), dict(_flat(now))
    changed = [
        f"{path} was {old.get(path)!r} and is {new.get(path)!r}"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and path.partition(".")[0] not in FREE_TO_CHANGE
    ]
    if changed:
        raise ConfigError(
            f"--resume: the config differs from that of the run in {folder}: {'; '.join(changed[:3])}. "
            "Take the same values, name the folder of the run that is meant with --output, or leave out --resume."
        )


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(path, value)]
    return [item for key, inner in value.items() for item in _flat(inner, f"{path}.{key}" if path else str(key))]
