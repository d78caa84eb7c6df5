"""A reasoning-gym task: its questions, their split, the prompts, and the scores of answers."""

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from rlloss.errors import ConfigError, UnknownNameError, nearest
from rlloss.training.config import TaskConfig
from rlloss.training.extras import require

FULL_SCORE = 1.0


@dataclass(frozen=True)
class Question:
    """One entry of a task."""

    prompt: str
    answer: str
    entry: dict[str, Any]
    """What reasoning-gym generated; its scorer reads it."""


class Task:
    """The questions of a task, cut into disjoint train and held-out lists."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self._dataset = _dataset(config)
        self._pattern = _compiled(config.answer_pattern)
        entries = {entry["question"]: entry for entry in self._dataset}
        train: list[Question] = []
        heldout: list[Question] = []
        for question, entry in entries.items():
            part = heldout if _hashed_fraction(question) < config.heldout_fraction else train
            part.append(Question(_prompt(config, entry), str(entry["answer"]), entry))
        if len(heldout) < config.heldout or not train:
            raise ConfigError(
                f"TaskConfig: {config.name!r} gave {len(entries)} different questions, {len(heldout)} of them held "
                f"out, and heldout={config.heldout} are wanted. Raise pool={config.pool} or "
                f"heldout_fraction={config.heldout_fraction}, or ask fewer questions."
            )
        self.train = train
        self.heldout = heldout[: config.heldout]

    def extract(self, response: str) -> str:
        """Returns the answer within a response."""
        if self._pattern is None:
            return response.strip()
        matches = list(self._pattern.finditer(response))
        return matches[-1].group(1).strip() if matches else ""

    def score(self, response: str, question: Question) -> float:
        """Returns what the task's own scorer gives for the answer in a response, 1.0 for a right one."""
        return float(self._dataset.score_answer(self.extract(response), question.entry))

    def reward(self, response: str, question: Question) -> float:
        """Returns the reward of a response, as the config wants it."""
        score = self.score(response, question)
        return score if self.config.reward == "score" else float(score >= FULL_SCORE)


def _dataset(config: TaskConfig) -> Any:
    require("reasoning_gym")
    factory = require("reasoning_gym.factory")
    if config.name not in factory.DATASETS:
        raise UnknownNameError(
            f"reasoning-gym has no task {config.name!r}.{nearest(config.name, factory.DATASETS)} "
            f"It has {len(factory.DATASETS)} tasks; `reasoning_gym.factory.DATASETS` lists them."
        )
    known = [field.name for field in dataclasses.fields(factory.DATASETS[config.name][1])]
    reserved = {"seed": "data_seed", "size": "pool"}
    for option in config.options:
        if option in reserved:
            raise ConfigError(f"TaskConfig: options[{option!r}] is given by the field {reserved[option]!r}; set that.")
        if option not in known:
            raise ConfigError(f"TaskConfig: {config.name!r} has no option {option!r}.{nearest(option, known)}")
    try:
        return factory.create_dataset(config.name, size=config.pool, seed=config.data_seed, **config.options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"TaskConfig: {config.name!r} refuses options={config.options}: {error}") from error


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"TaskConfig: answer_pattern={pattern!r} is no regular expression: {error}") from error
    if compiled.groups < 1:
        raise ConfigError(f"TaskConfig: answer_pattern={pattern!r} has no group. Put the answer in parentheses.")
    return compiled


def _prompt(config: TaskConfig, entry: dict[str, Any]) -> str:
    names = {**entry.get("metadata", {}), "question": entry["question"]}
    try:
        text = config.prompt.format(**names)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"TaskConfig: prompt={config.prompt!r} cannot be filled in ({type(error).__name__}: {error}). "
            f"The names are {sorted(names)}."
        ) from error
    for old, new in config.replace.items():
        text = text.replace(old, new)
    return text


def _hashed_fraction(question: str) -> float:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") / 2**64
