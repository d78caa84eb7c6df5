"""Runs every check on a loss, and writes down the smallest input of those that fail."""

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloss.config_file import load_config
from rlloss.doctor.behaviour import ignored
from rlloss.doctor.checks import CHECKS, runs
from rlloss.doctor.diagnosis import explain
from rlloss.doctor.sequences import Sequence, log_probs, names_of, random_sequences
from rlloss.doctor.shrink import shrink
from rlloss.doctor.verdict import Check, Verdict
from rlloss.errors import ConfigError
from rlloss.losses.config import BaseLossConfig, StrictModel

NAMES = ("How", "against", "ignored_sequence", "loss_of", "sequence", "slope_gap", "step", "written")
"""What a snippet may import from `rlloss.doctor`."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        passed: Whether it holds; None where it does not apply.
        detail: What was seen, in a sentence.
        example: The smallest input that shows a fault.
        replay: The line of Python that shows it.
    """

    name: str
    passed: bool | None
    detail: str
    example: list[Sequence] = field(default_factory=list)
    replay: str = ""

    def table(self) -> str:
        """Returns the example, one line for each token."""
        shown = [_shown(one) for one in self.example]
        columns: dict[str, list[str]] = {"sequence": [], "token": []}
        for name, one in zip(names_of(self.example), shown, strict=True):
            length = len(one["log_prob"])
            cells = {"sequence": [name] * length, "token": [str(index) for index in range(length)], **one}
            for column in dict.fromkeys(["sequence", "token", *(name for each in shown for name in each)]):
                # A sequence whose tokens all count does not say so.
                columns.setdefault(column, []).extend(cells.get(column, ["1" if column == "counted" else ""] * length))
        widths = {name: max(len(name), *map(len, values)) for name, values in columns.items()}
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(widths[name]) for cell, name in zip(row, columns, strict=True)) for row in rows
        )

    def snippet(self, loss_cfg: str) -> str:
        """Returns Python that raises as long as the fault is there.

        Args:
            loss_cfg: The expression that makes the loss config.
        """
        lines = [f"loss_cfg = {loss_cfg}"]
        for name, one in zip(names_of(self.example), self.example, strict=True):
            given = ", ".join(f"{column}={_literal(values)}" for column, values in _given(one).items())
            lines.append(f"{name} = sequence({given})")
        body = [*lines, *self.replay.split("; ")]
        names = [name for name in NAMES if any(re.search(rf"\b{name}\b", line) for line in body)]
        torch_too = ["import torch"] if any("torch." in line for line in body) else []
        return "\n".join([*torch_too, f"from rlloss.doctor import {', '.join(names)}", "", *body])


def check_loss(config: BaseLossConfig, seed: int = 0) -> list[Finding]:
    """Checks one loss on small random float64 data.

    Args:
        config: The loss.
        seed: Seed of the data.

    Returns:
        One finding for each check; an error inside a check is a finding that failed.
    """
    sequences = random_sequences(config, seed)
    findings: dict[str, Finding] = {}
    for name, (check, after) in CHECKS.items():
        cause = next((other for other in after if findings[other].passed is False), None)
        if cause is not None:
            findings[name] = Finding(name, None, f"not tried: mend {cause!r} first")
            continue
        verdict = _verdict(check, config, sequences)
        example: list[Sequence] = []
        if verdict.passed is False:
            verdict, example = _smallest(check, config, sequences, verdict)
        findings[name] = Finding(name, verdict.passed, verdict.detail, example, verdict.replay)
    return list(findings.values())


def loss_of(path: str | Path, where: str = "config", *overrides: str) -> BaseLossConfig:
    """Loads a config file and returns the loss at a path inside its config.

    Args:
        path: The config file.
        where: Such as "config.grpo.loss".
        *overrides: Assignments `a.b=c`.

    Raises:
        ConfigError: There is no loss.
    """
    found: Any = load_config(path, StrictModel, overrides)
    for name in where.split(".")[1:]:
        found = found[name] if isinstance(found, dict) else getattr(found, name, None)
    if not isinstance(found, BaseLossConfig):
        raise ConfigError(f"{path}: {where} is a {type(found).__name__}, expected a loss config.")
    return found


def _verdict(check: Check, config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(config, sequences)
        except Exception as error:
            kind, detail = explain(error)
            return Verdict(
                False, detail, f"raised {kind}", f"{check.__name__}(loss_cfg, {names_of(sequences)})".replace("'", "")
            )


def _smallest(
    check: Check, config: BaseLossConfig, sequences: list[Sequence], verdict: Verdict
) -> tuple[Verdict, list[Sequence]]:
    def fails(candidate: list[Sequence]) -> bool:
        found = _verdict(check, config, candidate)
        sound = check in (runs, ignored) or _verdict(runs, config, candidate).passed
        return bool(sound) and found.passed is False and found.kind == verdict.kind

    smallest = shrink(sequences, fails)
    last = _verdict(check, config, smallest)
    return last, last.shown or smallest


def _given(columns: Sequence) -> dict[str, Tensor]:
    """The arguments of `sequence` that write these columns down."""
    given = {name: values for name, values in columns.items() if name not in ("logits", "labels", "counted")}
    if columns["logits"].shape[1] == 2 and not bool(columns["labels"].any()):
        given = {"log_prob": log_probs(columns), **given}
    else:
        given = {"logits": columns["logits"], "labels": columns["labels"], **given}
    return given if bool(columns["counted"].all()) else {**given, "counted": columns["counted"].long()}


def _shown(columns: Sequence) -> dict[str, list[str]]:
    given = {"log_prob": log_probs(columns), **_given(columns)}
    given.pop("logits", None)
    return {name: [_cell(value) for value in values.tolist()] for name, values in given.items()}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.4g}"


def _literal(values: Tensor) -> str:
    if not values.is_floating_point():
        return str(values.tolist())
    short = values.round(decimals=10)
    return str((short if torch.equal(short.round(decimals=3), short) else values).tolist())
