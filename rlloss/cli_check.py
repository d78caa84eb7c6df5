"""`rlloss check`: tries a loss on random data and says in plain words what does not hold."""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from rlloss.config_file import load_config
from rlloss.doctor import Finding, check_loss
from rlloss.losses.config import BaseLossConfig, StrictModel

__all__ = ["Finding", "check_loss", "losses_in", "run_check"]
INDENT = " " * 9


def run_check(options: argparse.Namespace) -> int:
    """`rlloss check CONFIG`: checks every loss that a config file holds; status 1 when something does not hold."""
    failed = False
    for path, config in losses_in(load_config(options.config, StrictModel, options.set)):
        sys.stdout.write(f"{path}: {type(config).__name__}(mode={config.mode!r})\n")
        arguments = ", ".join(repr(given) for given in (str(options.config), path, *options.set))
        for finding in check_loss(config, options.seed):
            sys.stdout.write(report(finding, f"loss_of({arguments})"))
            failed |= finding.passed is False
    return int(failed)


def report(finding: Finding, loss_cfg: str) -> str:
    """Returns the lines about one finding: of a fault, with the smallest input and how to see it again."""
    mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.passed]
    text = f"  {mark} {finding.name:<18} {finding.detail}\n"
    if not finding.example:
        return text
    count, tokens = len(finding.example), sum(len(columns["labels"]) for columns in finding.example)
    size = f"{count} sequence{'s' * (count > 1)}, {tokens} token{'s' * (tokens > 1)}"
    return (
        f"{text}\n{INDENT}The smallest input that shows it ({size}):\n{_block(finding.table())}\n"
        f"{INDENT}To see it again (it passes when the fault is gone):\n{_block(finding.snippet(loss_cfg))}\n"
    )


def losses_in(config: Any, path: str = "config") -> Iterator[tuple[str, BaseLossConfig]]:
    """Yields every loss config inside a config, with its path."""
    if isinstance(config, BaseLossConfig):
        yield path, config
    elif isinstance(config, StrictModel):
        for name in type(config).model_fields:
            yield from losses_in(getattr(config, name), f"{path}.{name}")


def _block(text: str) -> str:
    return textwrap.indent(text, INDENT + "  ") + "\n"
