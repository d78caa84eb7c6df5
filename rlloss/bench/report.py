"""The table, the JSON file and the picture of a measurement."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rlloss.bench.measure import Line
from rlloss.bench.problem import Shape
from rlloss.heads import native

HEADINGS = ("", "seconds", "ratio", "quartiles", "pairs", "noisy", "peak MiB", "hidden error", "head error")


def cells(line: Line) -> tuple[str, ...]:
    """Returns one row of the table."""
    numbers = line.summary()
    spread = "" if line.spread is None else f"{line.spread[0]:.3f}-{line.spread[1]:.3f}"
    return (
        line.name,
        _format(numbers["median_seconds"], ".3f"),
        _format(line.ratio, ".3f"),
        spread,
        str(len(line.ratios)),
        str(line.noisy),
        _format(line.peak_mib, ".0f"),
        _format(line.hidden_error, ".1e"),
        _format(line.weight_error, ".1e"),
    )


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def make_table(shape: Shape, lines: Sequence[Line]) -> Any:
    """Returns a table for the console."""
    from rich.table import Table

    table = Table(*HEADINGS, title=title(shape), title_justify="left")
    for line in lines:
        table.add_row(*cells(line))
    return table


def title(shape: Shape) -> str:
    """Says what was measured."""
    return (
        f"{shape.batch} batch, N={shape.tokens} H={shape.hidden} V={shape.vocabulary} {shape.dtype}, chunk "
        f"{shape.chunk_size}, {shape.device}; one chunk of float32 logits is {shape.chunk_bytes / 2**20:.0f} MiB"
    )


def write_json(path: Path, shape: Shape, lines: Sequence[Line], missing: dict[str, str]) -> None:
    """Writes every number, and what they were measured with."""
    content = {
        "shape": asdict(shape),
        "torch": torch.__version__,
        "compiled": native.compiled(),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "lines": [line.summary() for line in lines],
        "missing": missing,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_picture(path: Path, shape: Shape, lines: Sequence[Line]) -> None:
    """Draws the ratios and the peaks as bars."""
    from matplotlib.figure import Figure

    measured = [line for line in lines if line.ratio is not None][::-1]
    figure = Figure(figsize=(10, 1.5 + 0.4 * len(measured)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [line.name for line in measured]
    ratios = [line.ratio or 0.0 for line in measured]
    spreads = [line.spread or (ratio, ratio) for line, ratio in zip(measured, ratios, strict=True)]
    below = [max(ratio - spread[0], 0.0) for ratio, spread in zip(ratios, spreads, strict=True)]
    above = [max(spread[1] - ratio, 0.0) for ratio, spread in zip(ratios, spreads, strict=True)]
    left.barh(names, ratios, xerr=[below, above], color="tab:blue")
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("time / bare matrix products (median, quartiles)")
    right.barh(names, [line.peak_mib or 0.0 for line in measured], color="tab:orange")
    right.set_xlabel("peak memory, MiB")
    figure.suptitle(title(shape), fontsize=9)
    figure.savefig(path, dpi=120)
