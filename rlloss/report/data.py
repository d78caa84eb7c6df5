"""What a run has left in its folder, read as it is: finished, interrupted or still going."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlloss.errors import ConfigError
from rlloss.report.files import (
    LARGEST,
    Place,
    each,
    finite,
    is_count,
    is_number,
    is_number_or_null,
    is_text,
    read_object,
    read_objects,
)
from rlloss.training.logging import METRICS_FILE
from rlloss.training.run import REPORT_FILE
from rlloss.training.trace import EDGES, HISTOGRAMS_FILE, SAMPLES_FILE

RECENT_SECONDS = 300.0
"""A run whose last line is younger than this is taken to be still going."""

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
            (int(line["step"]), finite(line[name]))
            for line in self.lines
            if name in line and (not phases or line["phase"] in phases)
        ]

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a metric."""
        return next((value for _, value in reversed(self.series(name)) if value is not None), None)


def read_run(folder: Path) -> RunData:
    """Reads the folder of a run.

    Raises:
        ConfigError: It holds no run, or a file in it is not as a run writes it; the file, line and field are named.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        missing = "there is no such folder" if not folder.exists() else f"there is no {METRICS_FILE} in it"
        raise ConfigError(
            f"{folder} holds no run: {missing}. Give a folder that `rlloss train` wrote, such as runs/NAME."
        )
    lines = [_metrics(place) for place in read_objects(metrics)]
    counted = read_objects(folder / HISTOGRAMS_FILE)
    edges = next((_edges(place) for place in counted if "edges" in place.found), EDGES)
    report = _report(read_object(folder / REPORT_FILE))
    age = time.time() - metrics.stat().st_mtime
    ended = bool(report) and report["step"] == (lines[-1]["step"] if lines else 0)
    return RunData(
        name=folder.resolve().name,
        config=_config(read_object(folder / "config.json")),
        lines=lines,
        histograms=[_counts(place, edges) for place in counted if "edges" not in place.found],
        edges=edges,
        samples=[_sample(place) for place in read_objects(folder / SAMPLES_FILE)],
        finished=report["finished"] if ended else None,
        recent=age < RECENT_SECONDS,
        seconds=report.get("seconds", {}),
    )


def _step(place: Place) -> None:
    place.need("step", is_count, "a whole number from 0")


def _metrics(place: Place) -> Mapping[str, Any]:
    _step(place)
    place.need("phase", is_text, "the name of a phase")
    for name in place.found.keys() - {"step", "phase"}:
        place.need(name, is_number_or_null, "a number or null")
    return place.found


def _edges(place: Place) -> Mapping[str, Sequence[float]]:
    found = place.part("edges")
    for name in EDGES:
        found.need(name, _rises, "a list of finite numbers that rise")
    return found.found


def _rises(value: Any) -> bool:
    return each(is_number)(value) and value == sorted({x for x in value if abs(x) <= LARGEST})


def _counts(place: Place, edges: Mapping[str, Sequence[float]]) -> Mapping[str, Any]:
    _step(place)
    for name in EDGES.keys() & place.found.keys():
        counts = place.need(name, each(is_count), "a list of whole numbers from 0")
        bins = len(edges[name]) + 1
        if len(counts) != bins:
            raise place.wrong(name, f"{bins} counts, one more than there are edges")
    return place.found


def _sample(place: Place) -> Mapping[str, Any]:
    _step(place)
    place.need("prompt", is_text, "a text")
    place.need("tokens", each(is_text), "a list of texts")
    place.need("length", is_count, "a whole number from 0")
    for name in ("log_ratio", "advantage"):
        place.need(name, each(is_number_or_null), "a list of numbers and nulls")
    place.need("reward", is_number_or_null, "a number or null")
    return place.found


def _report(place: Place) -> Mapping[str, Any]:
    if place.found:
        _step(place)
        place.need("finished", lambda value: isinstance(value, bool), "true or false")
        seconds = place.part("seconds")
        for name in seconds.found:
            seconds.need(name, is_number, "a number")
    return place.found


def _config(place: Place) -> Mapping[str, Any]:
    """Checks the fields that the page reads; each may be missing, or null."""
    place.part("task")
    place.part("model")
    for phase in ("supervised", *RL_PHASES):
        own = place.part(phase)
        own.allow("steps", is_count, "a whole number from 0")
        own.part("rollout")
        own.part("optimizer").allow("lr", is_number, "a number")
        own.part("kl").allow("coef", is_number, "a number")
        own.part("loss").part("policy_loss_cfg")
        own.part("loss").allow("kl_loss_coef", is_number, "a number")
    return place.found
