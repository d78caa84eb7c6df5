"""`rlloss check`: tries a loss on random data and says in plain words what does not hold."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlloss.cli_trial import Trial
from rlloss.config_file import load_config
from rlloss.losses.config import BaseLossConfig, StrictModel


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        passed: Whether it holds; None where it does not apply.
        detail: What was seen, in a sentence.
    """

    name: str
    passed: bool | None
    detail: str


def run_check(options: argparse.Namespace) -> int:
    """`rlloss check CONFIG`: checks every loss that a config file holds; status 1 when something does not hold."""
    failed = False
    for path, config in losses_in(load_config(options.config, StrictModel, options.set)):
        sys.stdout.write(f"{path}: {type(config).__name__}(mode={config.mode!r})\n")
        for finding in check_loss(config, options.seed):
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.passed]
            sys.stdout.write(f"  {mark} {finding.name:<18} {finding.detail}\n")
            failed |= finding.passed is False
    return int(failed)


def losses_in(config: Any, path: str = "config") -> Iterator[tuple[str, BaseLossConfig]]:
    """Yields every loss config inside a config, with its path."""
    if isinstance(config, BaseLossConfig):
        yield path, config
    elif isinstance(config, StrictModel):
        for name in type(config).model_fields:
            yield from losses_in(getattr(config, name), f"{path}.{name}")


def check_loss(config: BaseLossConfig, seed: int = 0) -> list[Finding]:
    """Checks one loss on small random float64 data.

    Args:
        config: The loss.
        seed: Seed of the data.

    Returns:
        One finding for each check; an error inside a check is a finding that failed.
    """
    trial = Trial(config, seed)
    checks: dict[str, Callable[[], tuple[bool | None, str]]] = {
        "level": trial.level,
        "chunk mode": trial.chunks,
        "liger mode": trial.liger,
        "splits": trial.splits,
        "gradient": trial.gradient,
        "ignored positions": trial.garbage,
        "extreme ratios": trial.extremes,
        "direction": trial.direction,
    }
    findings = []
    for name, check in checks.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                passed, detail = check()
            except Exception as error:
                passed, detail = False, f"the loss raised {type(error).__name__}: {error}"
        findings.append(Finding(name, passed, detail))
    return findings
