"""Folders of runs that never were, for the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlloss.training.trace import EDGES

NASTY = [
    "<script>alert(1)</script>",
    "\u202egnirts\u202c",
    "\x1b[31m",
    "&lt;",
    "\"'",
    "\n",
    "\ud83d",
    "שלום",
    "</article>",
    "",
]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def counts(name: str, step: int) -> list[int]:
    bins = len(EDGES[name]) + 1
    return [int(1000 * math.exp(-((k - bins / 2) ** 2) / (2 + step))) for k in range(bins)]


def rl_line(step: int, phase: str) -> dict[str, Any]:
    wave = math.sin(step / 5)
    line = {"step": step, "phase": phase, "loss": None if step == 12 else 0.01 * wave, "reward_mean": 0.5 + wave / 9}
    line |= {"approx_kl_k3": 0.01 + 1e-3 * wave, "clip_frac_low": 0.01, "clip_frac_high": 0.02 + wave / 99}
    line |= {"entropy": 1.2 - step / 99, "grad_norm": 1.0, "lr": 1e-3, "rollout_logprob_gap": 1e-6 * (step % 3)}
    line |= {"rollout_logprob_gap_mean": 2e-7, "kl": 0.1, "response_tokens": 5.0}
    times = {"time/ppo/rollout": 0.2} if phase == "ppo" else {"seconds_rollout": 0.2, "seconds_update": 0.4}
    return {**line, **times, **({"heldout_exact": step / 60} if step % 10 == 0 else {})}


def make_run(
    folder: Path, supervised: int = 20, rl: int = 30, phase: str = "grpo", finished: bool | None = True
) -> Path:
    """A run of some steps; with `finished=None` one that is still going."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"step": 0, "phase": "start", "heldout_exact": 0.0, "heldout_score": 0.0}]
    lines += [
        {"step": k, "phase": "supervised", "loss": 3 / k, "grad_norm": 1.0, "lr": 1e-3}
        for k in range(1, supervised + 1)
    ]
    steps = range(supervised + 1, supervised + rl + 1)
    write_lines(folder / "metrics.jsonl", [*lines, *(rl_line(step, phase) for step in steps)])
    policy = {"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": 3.0}
    own = {"steps": rl, "loss": {"policy_loss_cfg": policy, "mode": "chunk"}, "rollout": {}, "optimizer": {"lr": 1e-3}}
    config = {"seed": 0, "task": {"name": "<b>sum</b>"}, "model": {}, "supervised": {"steps": supervised}, phase: own}
    (folder / "config.json").write_text(json.dumps(config))
    if rl:
        head = {"step": 0, "edges": EDGES}
        write_lines(
            folder / "histograms.jsonl",
            [head, *({"step": k, "phase": phase, **{n: counts(n, k) for n in EDGES}} for k in steps)],
        )
        sample = {"phase": phase, "prompt": "".join(NASTY), "tokens": NASTY, "length": 99, "reward": 1.0}
        numbers = {"log_ratio": [0.5, -0.3, 0.0, None, 2.0, -2.0, 0.01, 0.1, -0.1, 0.2], "advantage": [1.25] * 10}
        write_lines(folder / "samples.jsonl", [{"step": k, **sample, **numbers} for k in (steps[0], steps[-1])])
    if finished is not None:
        report = {"finished": finished, "step": supervised + rl, "seconds": {phase: 70.0}}
        (folder / "report.json").write_text(json.dumps(report))
    return folder
