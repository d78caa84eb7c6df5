"""Curves as inline SVG, with the numbers beside them for whoever points at one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlloss.report.data import RunData
from rlloss.report.panels import Chart, Section
from rlloss.report.text import as_json, escaped, number, percent

WIDTH, HEIGHT = 360, 168
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 22
MOST_POINTS = 500
"""Points of a curve that are drawn; longer ones are thinned to the lowest and highest of each stretch."""

Point = tuple[int, float | None]


def section_html(section: Section, run: RunData) -> str:
    """Returns a section with the panels that have a value, or nothing."""
    found = [(chart, _curves(chart, run)) for chart in section.charts]
    found = [(chart, curves) for chart, curves in found if curves]
    if not found:
        return ""
    steps = [int(line["step"]) for line in run.lines if not section.phases or line["phase"] in section.phases]
    span = (min(steps), max(steps))
    starts = [] if section.phases else _starts(run)
    panels = "".join(_panel(chart, curves, span, starts) for chart, curves in found)
    return (
        f'<section><h2>{escaped(section.title)}<span class="note">{escaped(section.note)}</span></h2>'
        f'<div class="grid">{panels}</div></section>'
    )


def _curves(chart: Chart, run: RunData) -> dict[str, list[Point]]:
    found = {
        label: run.series(name, chart.phases) for name, label in chart.series.items() if run.series(name, chart.phases)
    }
    if chart.logarithmic:
        found = {label: [(x, y if y and y > 0 else None) for x, y in points] for label, points in found.items()}
    kept: dict[str, list[Point]] = {}
    for label, points in found.items():
        if any(y is not None for _, y in points) and points not in kept.values():
            kept[label] = points
    return kept


def _starts(run: RunData) -> list[tuple[int, str]]:
    """Where a phase begins, without the first one."""
    first = {phase: next(int(line["step"]) for line in run.lines if line["phase"] == phase) for phase in run.phases}
    return [(step, phase) for phase, step in first.items()][1:]


def _panel(
    chart: Chart, curves: dict[str, list[Point]], span: tuple[int, int], starts: Sequence[tuple[int, str]]
) -> str:
    write = percent if chart.fraction else number
    lasts = {label: next(y for _, y in reversed(points) if y is not None) for label, points in curves.items()}
    heads = "".join(
        f'<span class="key c{place}">{escaped(label) if len(curves) > 1 else ""} <b>{write(lasts[label])}</b></span>'
        for place, label in enumerate(curves)
    )
    drawn = {label: thinned(points) for label, points in curves.items()}
    axis = Axis.over([y for points in drawn.values() for _, y in points if y is not None], chart)
    data = {
        "span": span,
        "y": [axis.low, axis.high, axis.logarithmic],
        "percent": chart.fraction,
        "series": [{"name": label, "x": [x for x, _ in p], "y": [y for _, y in p]} for label, p in drawn.items()],
    }
    return (
        f'<figure class="chart"><figcaption><span class="title">{escaped(chart.title)}</span>'
        f'<span class="unit">{escaped(chart.unit)}</span><span class="keys">{heads}</span></figcaption>'
        f"{_svg(chart, drawn, axis, span, starts)}"
        f'<script type="application/json">{as_json(data)}</script></figure>'
    )


def _svg(
    chart: Chart,
    curves: dict[str, list[Point]],
    axis: "Axis",
    span: tuple[int, int],
    starts: Sequence[tuple[int, str]],
) -> str:
    def x_of(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5)

    write: Callable[[float], str] = (lambda v: percent(v, axis.digits)) if chart.fraction else number
    parts = [
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axis.place(tick):.1f}" y2="{axis.place(tick):.1f}"/>'
        f'<text class="y" x="{LEFT - 6}" y="{axis.place(tick) + 3.5:.1f}">{write(tick)}</text>'
        for tick in axis.ticks
    ]
    parts += [
        f'<line class="phase" x1="{x_of(step):.1f}" x2="{x_of(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for step, _ in starts
    ]
    for step, anchor in _step_ticks(span):
        parts.append(f'<text class="x" text-anchor="{anchor}" x="{x_of(step):.1f}" y="{HEIGHT - 6}">{step:,}</text>')
    for place, points in enumerate(curves.values()):
        parts.append(f'<path class="line c{place}" d="{_path(points, x_of, axis)}"/>')
        parts += [_dot(place, point, x_of, axis) for point in _alone(points)]
        parts += [
            f'<text class="bad" x="{x_of(x):.1f}" y="{TOP + 8}">×</text>'
            for x, y in points
            if y is None and not chart.logarithmic
        ][:50]
    label = f"{chart.title}, steps {span[0]} to {span[1]}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a panel: its ends, and the numbers that are written at it."""

    low: float
    high: float
    ticks: list[float]
    logarithmic: bool
    digits: int = 0

    @classmethod
    def over(cls, values: Sequence[float], chart: Chart) -> "Axis":
        """Returns an axis that has room for some numbers."""
        low, high = min(values), max(values)
        if chart.logarithmic:
            bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
            top = top + 1 if top == bottom else top
            every = -(-(top - bottom) // 4)
            return cls(10.0**bottom, 10.0**top, [10.0**power for power in range(bottom, top + 1, every)], True)
        if chart.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if high == low:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        step = _nice((high - low) / 3.5)
        first, last = math.floor(low / step + 0.02), math.ceil(high / step - 0.02)
        digits = max(0, -math.floor(math.log10(100 * step) + 1e-9)) if chart.fraction else 0
        return cls(first * step, last * step, [round(k * step, 12) for k in range(first, last + 1)], False, digits)

    def place(self, value: float) -> float:
        """Returns the height of a number in the picture."""
        if self.logarithmic:
            share = math.log10(value / self.low) / math.log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Returns a curve of at most about `most` points that has the same outline."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        block = list(points[start : start + size])
        finite = [point for point in block if point[1] is not None]
        ends = {min(finite, key=_height), max(finite, key=_height)} if finite else set()
        holes = [point for point in block if point[1] is None][:1]
        kept += sorted([*ends, *holes], key=lambda point: point[0])
    return kept


def _height(point: Point) -> float:
    assert point[1] is not None
    return point[1]


def _path(points: Sequence[Point], x_of: Callable[[int], float], axis: Axis) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x_of(x):.1f} {axis.place(y):.1f}")
        pen = "L"
    return "".join(parts)


def _alone(points: Sequence[Point]) -> list[Point]:
    """Points that a line would not show: those with no neighbour, and all of a short curve."""
    finite = [point for point in points if point[1] is not None]
    if len(finite) <= 40:
        return finite
    padded = [(0, None), *points, (0, None)]
    return [
        here
        for before, here, after in zip(padded, padded[1:], padded[2:], strict=False)
        if here[1] is not None and before[1] is None and after[1] is None
    ]


def _dot(place: int, point: Point, x_of: Callable[[int], float], axis: Axis) -> str:
    return f'<circle class="dot c{place}" r="2" cx="{x_of(point[0]):.1f}" cy="{axis.place(_height(point)):.1f}"/>'


def _step_ticks(span: tuple[int, int]) -> list[tuple[int, str]]:
    low, high = span
    if low == high:
        return [(low, "middle")]
    step = max(1, int(_nice((high - low) / 5)))
    inner = [
        k
        for k in range(-(-low // step) * step, high, step)
        if low + 0.12 * (high - low) < k < high - 0.12 * (high - low)
    ]
    return [(low, "start"), *((k, "middle") for k in inner), (high, "end")]


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
