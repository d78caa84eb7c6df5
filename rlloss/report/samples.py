"""Responses token by token, coloured by how much the step moved each log-prob."""

from collections.abc import Mapping
from typing import Any

from rlloss.report.data import RunData
from rlloss.report.files import finite
from rlloss.report.text import MINUS, escaped, number

STRONGEST = 1.0
"""Log-ratio, nats, that the strongest colour begins at."""
LEVELS = 6
MOST_STEPS = 8
"""Steps whose responses are shown, the last one open."""
MOST_TOKENS = 20_000
"""Tokens on the page; longer responses are cut, so that the page stays small."""


def samples_html(run: RunData) -> str:
    """Returns the section of responses, or nothing where there is none."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        by_step.setdefault(int(sample["step"]), []).append(sample)
    steps = sorted(by_step)
    if not steps:
        return ""
    shown = sorted({steps[round(k * (len(steps) - 1) / (MOST_STEPS - 1))] for k in range(MOST_STEPS)})
    longest = max(24, MOST_TOKENS // sum(len(by_step[step]) for step in shown))
    blocks = "".join(_step_html(step, by_step[step], longest, step == shown[-1]) for step in reversed(shown))
    down = "".join(f'<i class="d{level}"></i>' for level in range(LEVELS, 0, -1))
    up = "".join(f'<i class="u{level}"></i>' for level in range(1, LEVELS + 1))
    return (
        '<section><h2>Generations<span class="note">colour: log-ratio of each token to the policy that wrote it, after '
        f'the updates of the step</span></h2><div class="legend">less likely now, {MINUS}{STRONGEST:g} nat'
        f'<span class="ramp">{down}<i class="zero">0</i>{up}</span>+{STRONGEST:g} nat, more likely now</div>'
        f"{blocks}</section>"
    )


def level_of(log_ratio: float) -> int:
    """Returns the strength of a colour, 0 for none; a square root, so that small moves are seen."""
    return min(LEVELS, int(LEVELS * (abs(log_ratio) / STRONGEST) ** 0.5))


def _step_html(step: int, samples: list[Mapping[str, Any]], longest: int, is_open: bool) -> str:
    cards = "".join(_sample_html(sample, longest) for sample in samples)
    count = f"{len(samples)} response" + ("s" if len(samples) != 1 else "")
    return (
        f'<details class="step"{" open" if is_open else ""}><summary>Step {step:,}<span class="note">{count}</span>'
        f'</summary><div class="samples">{cards}</div></details>'
    )


def _sample_html(sample: Mapping[str, Any], longest: int) -> str:
    tokens = sample["tokens"]
    ratios, advantages = ([finite(value) for value in sample[name]] for name in ("log_ratio", "advantage"))
    pieces = [
        _token(token, ratios[k] if k < len(ratios) else None, advantages[k] if k < len(advantages) else None)
        for k, token in enumerate(tokens[:longest])
    ]
    left = sample["length"] - len(pieces)
    if left > 0:
        pieces.append(f'<span class="more"> … {left:,} more tokens</span>')
    known = [value for value in advantages if value is not None]
    mean = finite(sum(known) / len(known)) if known else None
    facts = [
        ("reward", number(finite(sample["reward"])), ""),
        ("advantage", number(mean), _sign(mean)),
        ("tokens", f"{sample['length']:,}", ""),
    ]
    chips = "".join(f'<span>{name} <b class="{mark}">{text}</b></span>' for name, text, mark in facts)
    return (
        f'<article class="sample"><div class="facts">{chips}</div>'
        f'<div class="prompt" dir="auto">{escaped(sample["prompt"][-4000:])}</div>'
        f'<div class="answer" dir="auto">{"".join(pieces)}</div></article>'
    )


def _token(text: str, log_ratio: float | None, advantage: float | None) -> str:
    level = 0 if log_ratio is None else level_of(log_ratio)
    colour = f"{'u' if (log_ratio or 0) > 0 else 'd'}{level}" if level else "n" if log_ratio is None else ""
    shown = escaped(text).replace("\n", "⏎\n").replace("\t", "⇥\t")
    return f'<bdi class="t {colour}" data-r="{_plain(log_ratio)}" data-a="{_plain(advantage)}">{shown or "∅"}</bdi>'


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _sign(value: float | None) -> str:
    return "" if not value else "plus" if value > 0 else "minus"
