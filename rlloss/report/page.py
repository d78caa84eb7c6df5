"""The page as a whole: header, tiles with the final numbers, and the sections."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rlloss.report.charts import section_html
from rlloss.report.data import RunData
from rlloss.report.files import finite
from rlloss.report.heatmap import bound, distributions_html
from rlloss.report.panels import SECTIONS
from rlloss.report.samples import samples_html
from rlloss.report.text import duration, escaped, number, percent

PHASES = {"supervised": "warm start", "grpo": "GRPO", "ppo": "PPO"}


def page(run: RunData) -> str:
    """Returns the HTML of a run: one file, nothing outside of it."""
    style = files("rlloss.report").joinpath("style.css").read_text(encoding="utf-8")
    script = files("rlloss.report").joinpath("script.js").read_text(encoding="utf-8")
    sections = [section_html(SECTIONS[0], run), section_html(SECTIONS[1], run), distributions_html(run)]
    sections += [section_html(SECTIONS[2], run), samples_html(run), _config_html(run.config)]
    body = "".join(sections) if run.lines else '<p class="empty">No step is done yet.</p>' + _config_html(run.config)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{escaped(run.name)} · rlloss</title><style>{style}</style></head>'
        f"<body><main>{_header(run)}{body}</main>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _header(run: RunData) -> str:
    facts = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in _summary(run.config) if value
    )
    tiles = "".join(
        f'<div class="tile"><span class="name">{escaped(name)}</span><b>{escaped(value)}</b>'
        f'<span class="sub">{escaped(sub)}</span></div>'
        for name, value, sub in _tiles(run)
    )
    kind, text = _status(run)
    return (
        f'<header><div class="head"><h1>{escaped(run.name)}</h1><span class="status {kind}">{text}</span>'
        f'<button id="theme" type="button" aria-label="light or dark">◐</button></div>'
        f'<dl class="facts">{facts}</dl><div class="tiles">{tiles}</div></header>'
    )


def _status(run: RunData) -> tuple[str, str]:
    if run.finished:
        return "good", "finished"
    if run.finished is False:
        return "warn", f"stopped after step {run.steps:,}"
    return ("live", f"running, step {run.steps:,}") if run.recent else ("warn", f"unfinished, step {run.steps:,}")


def _summary(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person asks first about a run."""
    task, model = _part(config, "task"), _part(config, "model")
    phase = "ppo" if _part(config, "ppo").get("steps") else "grpo"
    own = _part(config, phase)
    loss, rollout, optimizer = _part(own, "loss"), _part(own, "rollout"), _part(own, "optimizer")
    policy = _part(loss, "policy_loss_cfg")
    sizes = f"Qwen3, {model.get('layers')} layers × {model.get('hidden')}"
    steps = {name: _part(config, name).get("steps") for name in PHASES}
    found = [
        ("Task", str(task.get("name", ""))),
        ("Model", str(model.get("folder") or sizes) if model else ""),
        ("Steps", ", ".join(f"{PHASES[name]} {count:,}" for name, count in steps.items() if count)),
        ("Seed", str(config.get("seed", ""))),
    ]
    if not own.get("steps"):
        return found
    low, high = bound(policy, "cliprange_low"), bound(policy, "cliprange_high")
    bounds = f" {1 - low:g}…{1 + high:g}" if low is not None and high is not None else ""
    kl = (
        f"{loss.get('kl_loss_type') or 'k3'} × {number(finite(loss.get('kl_loss_coef')))}"
        if loss.get("use_kl_loss")
        else ""
    )
    if phase == "ppo":
        kl = f"in the rewards, × {number(finite(_part(own, 'kl').get('coef')))} at first"
    return [
        *found,
        ("Loss", f"{policy.get('loss_type', '')}{bounds}, {loss.get('loss_reduction', '')}"),
        ("KL", kl or "none"),
        (
            "Rollout",
            f"{rollout.get('prompts')} prompts × {rollout.get('group_size')}, T = {rollout.get('temperature')}",
        ),
        ("Learning rate", number(finite(optimizer.get("lr"))) if optimizer.get("lr") else ""),
        ("Mode", str(loss.get("mode", ""))),
    ]


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    exact = [value for _, value in run.series("heldout_exact") if value is not None]
    found = []
    if exact:
        found.append(("Held-out exact match", percent(exact[-1]), f"from {percent(exact[0])}"))
    rewards = [value for _, value in run.series("reward_mean") if value is not None]
    if rewards:
        found.append(("Reward", number(rewards[-1]), f"from {number(rewards[0])}"))
    elif run.last("loss") is not None:
        found.append(("Loss", number(run.last("loss")), "nats per token"))
    for name, title, sub, write in (
        ("approx_kl_k3", "KL from the old policy", "nats per token, last step", number),
        ("kl", "KL from the reference", "nats per token, last step", number),
        ("objective/kl", "KL from the reference", "nats per response", number),
        ("entropy", "Entropy", "nats per token", number),
    ):
        if run.last(name) is not None:
            found.append((title, write(run.last(name)), sub))
    clipped = [run.last(f"clip_frac_{kind}") for kind in ("low", "high", "dual")]
    if any(value is not None for value in clipped):
        found.append(("Clipped", percent(sum(value or 0.0 for value in clipped)), "of the tokens, last step"))
    done = f"{run.steps:,}"
    took = duration(sum(finite(value) or 0.0 for value in run.seconds.values())) if run.seconds else ""
    return [*found, ("Steps", done, took)]


def _config_html(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    text = escaped(json.dumps(config, indent=2, ensure_ascii=False))
    return f'<section><details class="config"><summary>Whole config</summary><pre>{text}</pre></details></section>'
