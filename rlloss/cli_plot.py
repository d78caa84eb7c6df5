"""`rlloss plot`: loss and gradient of policy losses over the ratio, as a picture."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.layout import Segments
from rlloss.losses.policy_registry import PolicyLoss, get_policy_loss, policy_loss_names
from rlloss.training.extras import require

OLD_LOG_PROB = -1.0
HIGHEST_RATIO = 2.5
EXAMPLES: dict[str, dict[str, Any]] = {"dro": {"beta": 0.5}}
"""Fields of losses that have no default for them."""
COLUMNS = 5
SIGNS = (("A = +1", 1.0, "#6fb1e4", "#0b3c6f"), ("A = -1", -1.0, "#f2948f", "#8c1c2a"))
"""Label, advantage, colours of loss and gradient; the gradient lies on the loss where both are `-A r`."""


def add_plot_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rlloss plot`."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="policy losses (default: all)")
    parser.add_argument("--out", metavar="FILE", default="policy_losses.png", help="the picture, a PNG")


def run_plot(options: argparse.Namespace) -> int:
    """`rlloss plot NAME... [--out FILE]`: draws the losses and says where."""
    draw_policy_losses(options.names or policy_loss_names(), Path(options.out))
    sys.stdout.write(f"{options.out}\n")
    return 0


def draw_policy_losses(names: Sequence[str], out: Path) -> None:
    """Draws one panel for each policy loss: its value, and its slope in the log-prob, over the ratio of one token.

    Args:
        names: Registered names, aliases or dotted paths.
        out: The PNG file.

    Raises:
        UnknownNameError: A name is not registered.
        ConfigError: A loss cannot be drawn, because it returns a scalar or has fields without defaults; or the file
            cannot be written.
        BackendUnavailableError: matplotlib is missing.
    """
    losses = [get_policy_loss(name) for name in names]
    columns = min(COLUMNS, len(losses))
    rows = -(-len(losses) // columns)
    figure = require("matplotlib.figure").Figure(figsize=(3.3 * columns + 0.6, 2.75 * rows + 1.1), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, loss in zip(axes, losses, strict=False):
        _draw(panel, loss)
    for panel in axes[len(losses) :]:
        panel.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=13)
    figure.supxlabel("ratio  π / π_old  (the old log-prob is -1)", fontsize=13)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:  # a ValueError names the formats that there are
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--out: {out} cannot be written: {reason}. Give another file, such as losses.png."
        ) from error


def curves(loss: PolicyLoss, advantage: float, selected: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluates a policy loss on sequences of one token each.

    Args:
        loss: The loss; its defaults are used, and those of `EXAMPLES`.
        advantage: The same for all tokens.
        selected: What a choice over the step says of every token.

    Returns:
        Ratios `[N]`, the loss of each token `[N]`, and its derivative in the log-prob `[N]`.

    Raises:
        ConfigError: The loss returns a scalar.
    """
    ratio = torch.linspace(0.02, HIGHEST_RATIO, 800, dtype=torch.float64)
    log_prob = (ratio.log() + OLD_LOG_PROB).requires_grad_()
    old = torch.full_like(ratio, OLD_LOG_PROB)
    ones = torch.ones_like(ratio)
    available = {
        "log_prob": log_prob,
        "old_log_prob": old,
        "ref_log_prob": old,
        "rollout_log_prob": old,
        "advantages": advantage * ones,
        "loss_weights": ones,
        "is_weights": None,
        "mask": ones != 0,
        "entropy": ones,
        "segments": Segments(torch.arange(ratio.shape[0]), ratio.shape[0]),
        "selected": (ones != 0) if selected else (ones == 0),
        "policy_loss_cfg": loss.configure({"loss_type": loss.name, **EXAMPLES.get(loss.name, {})}),
    }
    result = loss.fn(**{name: available[name] for name in loss.needs})
    values = result[0] if isinstance(result, tuple) else result
    if values.shape != ratio.shape:
        raise ConfigError(f"policy loss {loss.name!r} returns a scalar, so there is no number of one token to draw.")
    (slope,) = torch.autograd.grad(values.sum(), log_prob)
    return ratio, values.detach(), slope


def _draw(panel: Any, loss: PolicyLoss) -> None:
    for label, advantage, colour, dark in SIGNS:
        ratio, values, slope = curves(loss, advantage)
        panel.plot(ratio, values, color=colour, linewidth=3.0, label=f"loss, {label}")
        panel.plot(ratio, slope, color=dark, linewidth=1.6, linestyle=(0, (4, 2)), label=f"gradient, {label}")
        if loss.selection is not None:
            ratio, values, slope = curves(loss, advantage, selected=True)
            panel.plot(ratio, values, color=colour, linewidth=1.3)
            panel.plot(ratio, slope, color=dark, linewidth=0.9, linestyle=(0, (1, 1)))
    panel.set_title(loss.name + (" (thin: chosen)" if loss.selection is not None else ""), fontsize=14)
    panel.axvline(1.0, color="0.75", linewidth=0.8, zorder=0)
    panel.axhline(0.0, color="0.75", linewidth=0.8, zorder=0)
    panel.set_xlim(0.0, HIGHEST_RATIO)
    panel.set_ylim(-3.2, 3.2)
    panel.tick_params(labelsize=11)
