"""Distributions over time: a column for a few steps, a row for a bin, darker where more of the tokens are."""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlloss.report.data import RunData
from rlloss.report.files import LARGEST, is_number
from rlloss.report.text import as_json, escaped, number

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 8, 30
MOST_COLUMNS = 120
LEVELS = 9
FLOOR = 1e-4
"""Share of the tokens of a column that the faintest colour begins at."""


@dataclass(frozen=True)
class HeatMap:
    """One picture.

    Attributes:
        name: Which counts.
        title: What it shows.
        unit: What a row is.
        ticks: Where the axis is labelled.
        write: From a tick to its label.
        lines: Rows that are marked, such as clip bounds, with their label.
    """

    name: str
    title: str
    unit: str
    ticks: Sequence[float]
    write: Callable[[float], str]
    lines: Sequence[tuple[float, str]] = ()


def distributions_html(run: RunData) -> str:
    """Returns the section of distributions, or nothing where none was counted."""
    maps = [
        HeatMap(
            "log_ratio",
            "Ratio of the current to the old policy",
            "tokens as the loss saw them",
            [
                math.log(ratio)
                for ratio in (0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 10.0, 100.0)
            ],
            lambda tick: number(math.exp(tick)),
            clip_lines(run.config),
        ),
        HeatMap(
            "advantage",
            "Advantages",
            "of the tokens",
            [-10.0, -5.0, -3.0, -2.0, -1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0],
            number,
        ),
    ]
    drawn = "".join(_figure(which, run) for which in maps)
    if not drawn:
        return ""
    legend = "".join(f'<i class="h{level}"></i>' for level in range(1, LEVELS + 1))
    return (
        '<section><h2>Distributions<span class="note">a column is all tokens of its steps; rows grow wider from the '
        f'middle out</span></h2><div class="legend">0.01 %<span class="ramp">{legend}</span>100 % of the tokens of a '
        f'column</div><div class="wide">{drawn}</div></section>'
    )


def clip_lines(config: Any) -> list[tuple[float, str]]:
    """Returns the clip bounds of a run's policy loss as log-ratios, where it has some."""
    phase = "ppo" if (config.get("ppo") or {}).get("steps") else "grpo"
    loss = (((config.get(phase) or {}).get("loss") or {}).get("policy_loss_cfg")) or {}
    low, high, dual = (bound(loss, name) for name in ("cliprange_low", "cliprange_high", "clip_ratio_c"))
    found = [(math.log(1 - low), "clip low")] if low and low < 1 else []
    found += [(math.log1p(high), "clip high")] if high else []
    return found + ([(math.log(dual), "dual clip")] if dual else [])


def bound(loss: Mapping[str, Any], name: str) -> float | None:
    """Returns a bound of a policy loss; None where it has none, or a loss of a user's means something else by it."""
    found = loss.get(name)
    return float(found) if is_number(found) and 0 <= found <= LARGEST else None


def columns_of(lines: Sequence[Any], name: str) -> list[tuple[int, int, list[int]]]:
    """Joins the counts of neighbouring steps until few enough columns are left: first and last step, counts."""
    found = [(int(line["step"]), line[name]) for line in lines if name in line]
    size = -(-len(found) // MOST_COLUMNS)
    blocks = [found[start : start + size] for start in range(0, len(found), size or 1)]
    return [(b[0][0], b[-1][0], [sum(c) for c in zip(*(counts for _, counts in b), strict=True)]) for b in blocks]


def _figure(which: HeatMap, run: RunData) -> str:
    columns = columns_of(run.histograms, which.name)
    edges = list(run.edges.get(which.name, ()))
    columns = [column for column in columns if len(column[2]) == len(edges) + 1]
    if not columns or not any(sum(counts) for _, _, counts in columns):
        return ""
    used = [row for row in range(len(edges) + 1) if any(counts[row] for _, _, counts in columns)]
    centre = len(edges) // 2
    reach = min(centre, max(centre - used[0], used[-1] - centre, 6) + 1)
    first, last = centre - reach, centre + reach
    rows = _Rows(edges, first, last)
    data = {
        "cols": [[a, b, sum(counts), counts[first : last + 1]] for a, b, counts in columns],
        "edges": [None if not 0 <= k < len(edges) else edges[k] for k in range(first - 1, last + 1)],
        "name": which.name,
        "box": [LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM],
    }
    return (
        f'<figure class="heat"><figcaption><span class="title">{escaped(which.title)}</span>'
        f'<span class="unit">{escaped(which.unit)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(which.title)}">'
        f"{_cells(columns, first, last)}{_axes(which, columns, rows)}"
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<rect class="spot"/></svg><script type="application/json">{as_json(data)}</script></figure>'
    )


def _cells(columns: Sequence[tuple[int, int, list[int]]], first: int, last: int) -> str:
    """One path for each level of colour."""
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    height = (HEIGHT - TOP - BOTTOM) / (last - first + 1)
    paths: dict[int, list[str]] = {}
    for place, (_, _, counts) in enumerate(columns):
        total = sum(counts)
        for row in range(first, last + 1):
            level = level_of(counts[row] / total if total else 0.0)
            if level:
                x, y = LEFT + place * width, TOP + (last - row) * height
                paths.setdefault(level, []).append(f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z")
    return "".join(f'<path class="h{level}" d="{"".join(paths[level])}"/>' for level in sorted(paths))


def level_of(share: float) -> int:
    """Returns the colour of a share of the tokens: 0 is none, equal steps are equal factors."""
    if share <= 0:
        return 0
    position = 1 - math.log10(max(share, FLOOR)) / math.log10(FLOOR)
    return 1 + min(LEVELS - 1, int(position * LEVELS))


class _Rows:
    """The rows between two bins, from the bottom up."""

    def __init__(self, edges: Sequence[float], first: int, last: int) -> None:
        self.edges, self.first, self.last = edges, first, last

    def place(self, value: float) -> float | None:
        """Returns the height of a number in the picture; None outside of it."""
        row = bisect.bisect_right(self.edges, value)
        inside = 0 < row < len(self.edges) and self.first <= row <= self.last
        if not inside:
            return None
        low, high = self.edges[row - 1], self.edges[row]
        share = row - self.first + (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM) / (self.last - self.first + 1)


def _axes(which: HeatMap, columns: Sequence[tuple[int, int, list[int]]], rows: _Rows) -> str:
    parts, last = [], math.inf
    for tick in which.ticks:
        y = rows.place(tick)
        if y is not None and last - y > 15:
            parts.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4.5:.1f}">{which.write(tick)}</text>')
            last = y
    for value, label in which.lines:
        y = rows.place(value)
        if y is not None:
            parts.append(
                f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="bound" x="{WIDTH - RIGHT - 6}" y="{y - 4:.1f}">{escaped(label)}</text>'
            )
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    count = min(6, len(columns))
    for k in range(count):
        place = round(k * (len(columns) - 1) / (count - 1)) if count > 1 else 0
        x = LEFT + (place + 0.5) * width
        parts.append(f'<text class="x" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - 7}">{columns[place][0]:,}</text>')
    return "".join(parts)
