"""`rlloss list`: what can be named in a config, and what each mode supports."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import get_args

from rlloss.functional.advantage_registry import advantage_names, get_advantage
from rlloss.functional.kl import KL_KINDS
from rlloss.losses.policy_registry import get_policy_loss, policy_loss_aliases, policy_loss_names
from rlloss.losses.terms import Reduction

REDUCTIONS = {
    "token": "1/N: every token weighs the same",
    "sample": "1/(S n_i): every sequence weighs the same",
    "square": "n_i^-1/2 / sum_j n_j^1/2: in between",
    "sequence_sum": "1/S: long sequences weigh more",
    "constant": "1/(S L), L = loss_length (Dr.GRPO)",
    "prompt": "1/(P n_p): every prompt weighs the same",
    "sum": "1: no denominator",
}

MODES = {
    "eager": "whole logits, plain autograd, returned; everything is supported",
    "chunk": "one chunk of logits at a time, gradients in forward; everything but double backward",
    "liger": "liger_kernel's tiles; no entropy, soft cap, logit scale or temperature for each token",
}


def run_list(options: argparse.Namespace) -> int:
    """`rlloss list`: prints losses, reductions, KL kinds, advantage estimators and modes."""
    sys.stdout.write("\n".join(lines()) + "\n")
    return 0


def lines() -> list[str]:
    """Returns the lines that `rlloss list` prints."""
    return [
        "policy losses (policy_loss_cfg.loss_type)",
        *_table(_policy_rows()),
        "",
        "reductions (loss_reduction)",
        *_table((name, REDUCTIONS[name]) for name in get_args(Reduction)),
        "",
        "KL kinds (kl_loss_type; a trailing + takes the gradient of k2)",
        *_table(_kl_rows()),
        "",
        "advantage estimators (compute_advantages)",
        *_table((name, _summary(get_advantage(name))) for name in sorted(advantage_names())),
        "",
        "modes (mode)",
        *_table(MODES.items()),
    ]


def _policy_rows() -> Iterable[tuple[str, str]]:
    for name in sorted(policy_loss_names()):
        loss = get_policy_loss(name)
        config = loss.config() if loss.config is not None and not _required(loss.config) else None
        level = loss.level(config) if config is not None or not callable(loss.level_of) else "by config"
        aliases = policy_loss_aliases(name)
        summary = _summary(loss.fn)
        also = f" (also {', '.join(aliases)})" if aliases else ""
        yield name, f"{level:<9} {summary}{also}"


def _required(config: type) -> bool:
    return any(field.is_required() for field in getattr(config, "model_fields", {}).values())


def _kl_rows() -> Iterable[tuple[str, str]]:
    for kind in dict.fromkeys(KL_KINDS.values()):
        also = [name for name, target in KL_KINDS.items() if target == kind and name != kind]
        yield kind, f"also {', '.join(also)}" if also else ""


def _summary(fn: Callable[..., object]) -> str:
    return (fn.__doc__ or "").strip().split("\n")[0]


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs) + 2
    return [f"  {name:<{width}}{text}".rstrip() for name, text in pairs]
