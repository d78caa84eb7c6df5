"""What a run has left in its folder, read as it is: finished, interrupted or still going."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlloss.errors import ConfigError
from rlloss.training.logging import METRICS_FILE, read_lines
from rlloss.training.run import REPORT_FILE
from rlloss.training.trace import EDGES, HISTOGRAMS_FILE, SAMPLES_FILE

RECENT_SECONDS = 300.0
"""A run whose last line is younger than this is taken to be still going."""

LARGEST = 1e300
"""Beyond it a number is shown as not finite, and as 0 below its inverse: an axis needs room on both sides."""

RL_PHASES = ("grpo", "ppo")

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunData:
    """A run.

    Attributes:
        name: Name of its folder.
        config: Its config, as JSON holds it; empty when it is missing.
        lines: Metrics of each step, in order.
        histograms: Counts of each step that was counted.
        edges: Bounds between their bins, by name.
        samples: Responses, in order.
        finished: Whether it came to its end; None: it is still going, or was killed.
        recent: Whether it was written to in the last minutes.
        seconds: Seconds of each phase, once the run has said so.
    """

    name: str
    config: Mapping[str, Any]
    lines: Lines
    histograms: Lines
    edges: Mapping[str, Sequence[float]]
    samples: Lines
    finished: bool | None
    recent: bool
    seconds: Mapping[str, float]

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def phases(self) -> list[str]:
        """Phases that have a step, in order."""
        return list(dict.fromkeys(line["phase"] for line in self.lines if line["phase"] != "start"))

    def series(self, name: str, phases: Sequence[str] = ()) -> list[tuple[int, float | None]]:
        """Returns `(step, value)` of a metric, None where it was not finite; of all phases, or of some."""
        return [
            (int(line["step"]), _number(line[name]))
            for line in self.lines
            if name in line and (not phases or line["phase"] in phases)
        ]

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a metric."""
        return next((value for _, value in reversed(self.series(name)) if value is not None), None)


def read_run(folder: Path) -> RunData:
    """Reads the folder of a run.

    Raises:
        ConfigError: It holds no run.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        missing = "there is no such folder" if not folder.exists() else f"there is no {METRICS_FILE} in it"
        raise ConfigError(
            f"{folder} holds no run: {missing}. Give a folder that `rlloss train` wrote, such as runs/NAME."
        )
    lines = [line for line in read_lines(metrics) if isinstance(line.get("phase"), str)]
    counted = read_lines(folder / HISTOGRAMS_FILE)
    edges = next((line["edges"] for line in counted if "edges" in line), EDGES)
    report = _json(folder / REPORT_FILE)
    age = time.time() - metrics.stat().st_mtime
    ended = bool(report) and report.get("step") == (lines[-1]["step"] if lines else 0)
    return RunData(
        name=folder.resolve().name,
        config=_json(folder / "config.json"),
        lines=lines,
        histograms=[line for line in counted if "edges" not in line],
        edges=edges,
        samples=read_lines(folder / SAMPLES_FILE),
        finished=bool(report.get("finished")) if ended else None,
        recent=age < RECENT_SECONDS,
        seconds=report.get("seconds", {}),
    )


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= 1 / LARGEST else 0.0


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
