"""What a check says, and the line of Python that says it again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlloss.doctor.sequences import Sequence, names_of
from rlloss.doctor.step import Outcome
from rlloss.losses.config import BaseLossConfig

EXACT = 1e-10


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        passed: Whether it holds; None where it does not apply.
        detail: What was seen, in a sentence.
        kind: Which of the faults that the check knows.
        replay: The line of Python that shows it, about sequences named a, b, ...
        shown: The sequences as they were given to the loss, where those differ from the ones that the check got.
    """

    passed: bool | None
    detail: str
    kind: str = ""
    replay: str = ""
    shown: list[Sequence] | None = None


Check = Callable[[BaseLossConfig, list[Sequence]], Verdict]


def same(mine: Outcome, theirs: Outcome) -> bool:
    """Whether two steps agree in every bit."""
    pairs = ((mine.loss, theirs.loss), (mine.grad_hidden, theirs.grad_hidden), (mine.grad_weight, theirs.grad_weight))
    return all(torch.equal(a, b) for a, b in pairs)


def listed(sequences: list[Sequence], part: slice = slice(None)) -> str:
    """Returns the names of sequences as a list in Python."""
    return f"[{', '.join(names_of(sequences)[part])}]"


def distance_line(mine: str, theirs: str, limit: str = "1e-10") -> str:
    """Returns the line that compares two steps."""
    return f"assert step(loss_cfg, {mine}).distance(step(loss_cfg, {theirs})) < {limit}"
