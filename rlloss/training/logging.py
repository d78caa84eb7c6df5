"""What a run shows and leaves behind: a progress bar, metrics.jsonl and what a report needs, loggers, curves.png."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlloss.training.config_parts import LoggingConfig
from rlloss.training.extras import require
from rlloss.training.loggers import make_loggers
from rlloss.training.trace import EDGES, HISTOGRAMS_FILE, SAMPLES_FILE, Trace

METRICS_FILE = "metrics.jsonl"
CURVES_FILE = "curves.png"
SHOWN = ("heldout_exact", "reward_mean", "loss", "entropy")
CURVES = (
    "heldout_exact",
    "reward_mean",
    "loss",
    "entropy",
    "approx_kl_k3",
    "ratio_dev_first_update",
    "clip_frac_high",
    "response_tokens",
    "grad_norm",
    "objective/kl",
    "objective/kl_coef",
    "ppo/mean_scores",
    "explained_variance",
    "value_loss",
)
Metrics = Mapping[str, float]


class RunLog:
    """Writes the metrics of a run to every place at once.

    Args:
        folder: Folder of the run.
        console: A console of rich; a quiet one shows nothing.
        done: Steps that are done already: later lines of an interrupted run are removed; at 0 all of them.
        config: Loggers; None has none.
    """

    def __init__(self, folder: Path, console: Any, done: int = 0, config: LoggingConfig | None = None) -> None:
        self.folder = folder
        self.console = console
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, HISTOGRAMS_FILE, SAMPLES_FILE):
            _keep_lines(folder / name, done)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._loggers = [] if config is None else make_loggers(folder, config, done)
        self._progress: Any = None
        self._bar: Any = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_phase(self, title: str, steps: int, done: int) -> None:
        """Shows a progress bar for a phase, in the place of the one before."""
        self._stop_bar()
        progress = require("rich.progress")
        self._progress = progress.Progress(
            progress.TextColumn("{task.description:<10}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[shown]}"),
            console=self.console,
        )
        self._bar = self._progress.add_task(title, total=steps, completed=done, shown="")
        self._progress.start()

    def write(self, step: int, phase: str, metrics: Metrics, advance: bool = True) -> None:
        """Writes the metrics of one step.

        Args:
            step: Number of the step over all phases, from 1; 0 is what was measured before any.
            phase: Name of the phase.
            metrics: Numbers by name.
            advance: Move the progress bar.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "phase": phase, **finite}) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.log(step, {f"{phase}/{name}": value for name, value in metrics.items()})
        shown = "  ".join(f"{name} {metrics[name]:.3f}" for name in SHOWN if name in metrics)
        if self._progress is not None:
            self._progress.update(self._bar, advance=int(advance), shown=shown)
        if "heldout_exact" in metrics and not self.console.is_terminal:
            self.say(f"{phase}, step {step}: {shown}")  # a file of output shows no bar before the phase ends

    def write_trace(self, step: int, phase: str, trace: Trace | None) -> None:
        """Writes what a step left behind beyond its metrics; every rank calls it, counts are added up over them."""
        if trace is None:
            return
        start = {"step": step, "phase": phase}
        counts = trace.histograms()
        path = self.folder / HISTOGRAMS_FILE
        if counts and not path.exists():
            _append(path, [{"step": 0, "edges": EDGES}])
        _append(path, [{**start, **counts}] if counts else [])
        _append(self.folder / SAMPLES_FILE, [{**start, **sample} for sample in trace.samples])

    def say(self, text: str) -> None:
        """Shows a line above the progress bar."""
        self.console.print(text, highlight=False)

    def close(self) -> None:
        """Flushes everything and draws the curves; may be called twice."""
        self._stop_bar()
        if self._file.closed:
            return
        self._file.close()
        for logger in self._loggers:
            logger.close()
        draw_curves(self.folder)

    def _stop_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class NoLog(RunLog):
    """The log of a rank that leaves the writing to the first one."""

    def __init__(self) -> None:
        """Opens nothing."""

    def start_phase(self, title: str, steps: int, done: int) -> None:
        """Shows nothing."""

    def write(self, step: int, phase: str, metrics: Metrics, advance: bool = True) -> None:
        """Writes nothing."""

    def write_trace(self, step: int, phase: str, trace: Trace | None) -> None:
        """Adds the counts of this rank to those of the first one, which writes them."""
        if trace is not None:
            trace.histograms()

    def say(self, text: str) -> None:
        """Says nothing."""

    def close(self) -> None:
        """Closes nothing."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics; a last line that was cut off is left out, and one of no phase."""
    return [line for line in read_lines(folder / METRICS_FILE) if isinstance(line.get("phase"), str)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file that have a step, one a line; what a kill or a disk left of others is not."""
    return [line for _, line in _written(path)]


def _written(path: Path) -> list[tuple[str, dict[str, Any]]]:
    whole = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines: list[tuple[str, dict[str, Any]]] = []
    for text in whole.splitlines():
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            lines.append((text, found))
    return lines


def draw_curves(folder: Path) -> None:
    """Draws the metrics of a run over its steps; without any line, nothing."""
    lines = read_metrics(folder)
    names = [name for name in CURVES if any(line.get(name) is not None for line in lines)]
    if not names:
        return
    figure_module = require("matplotlib.figure")
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = figure_module.Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw(axes, name, lines)
    figure.savefig(folder / CURVES_FILE, dpi=110)


def _draw(axes: Any, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    for phase in dict.fromkeys(line["phase"] for line in lines):
        points = [(line["step"], line[name]) for line in lines if line["phase"] == phase and line.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else "", markersize=3, label=phase)
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _keep_lines(path: Path, done: int) -> None:
    """Removes the lines of steps that will be made again; at 0 those from before the first step as well."""
    if path.exists():
        kept = [text for text, line in _written(path) if done and line["step"] <= done]
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)  # a kill or a full disk meanwhile leaves the lines as they were


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    if lines:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
