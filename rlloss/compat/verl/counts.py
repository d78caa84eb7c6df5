"""verl's counts of a mini-batch as `Totals`, and its aggregation modes as reductions."""

from typing import Any

import torch
from torch import Tensor

from rlloss.compat.names import VERL_LOSS_AGG_MODES
from rlloss.compat.verl.metric import AggregationType
from rlloss.compat.verl.padding import read
from rlloss.errors import BatchError, UnknownNameError, nearest
from rlloss.losses.terms import Reduction
from rlloss.losses.totals import Totals

IGNORE = -100
REDUCTIONS: dict[str, Reduction] = {name: mode.reduction for name, mode in VERL_LOSS_AGG_MODES.items()}
"""verl's `loss_agg_mode` and rlloss's `loss_reduction`."""


def rows_of(mask: Tensor) -> dict[str, Any]:
    """Returns a batch of rows `[B, R]` whose labels say which tokens count; log-probs make them meaningless else."""
    batch: dict[str, Any] = {"shifted_labels": torch.where(mask, 0, IGNORE)}
    # One row is one response here, never several packed ones.
    return {**batch, "num_tokens": mask.shape[1:]} if mask.shape[0] == 1 else batch


def counts_of(data: Any) -> dict[str, Any]:
    """Reads the counts; an absent one is None."""
    return {
        "dp_size": int(read(data, "dp_size", 1)),
        "batch_num_tokens": read(data, "batch_num_tokens"),
        "global_batch_size": read(data, "global_batch_size"),
    }


def aggregation_of(counts: dict[str, Any]) -> AggregationType:
    """Returns how a loss of micro-batches adds up: a sum once it is divided by the counts of the whole."""
    known = any(value is not None for name, value in counts.items() if name != "dp_size")
    return AggregationType.SUM if counts["dp_size"] > 1 or known else AggregationType.MEAN


def reduction_of(mode: str) -> Reduction:
    """Returns the `loss_reduction` of a `loss_agg_mode`; an unknown one is an error."""
    if mode not in REDUCTIONS:
        raise UnknownNameError(f"unknown loss_agg_mode {mode!r}.{nearest(mode, REDUCTIONS)} Known: {list(REDUCTIONS)}.")
    return REDUCTIONS[mode]


def length_of(mode: str, width: int, counts: dict[str, Any]) -> float | None:
    """Returns the divisor of seq-mean-token-sum-norm; None for the other modes."""
    if REDUCTIONS[mode] != "constant":
        return None
    return float(counts["loss_scale_factor"] or max(width, 1))


def totals_of(mode: str, counts: dict[str, Any]) -> Totals:
    """The counts of a step; one that this mode does not divide by is filled in, so that no rank has to be asked."""
    # A step without tokens has a numerator of 0, whatever it is divided by.
    names = ("batch_num_tokens", "global_batch_size")
    tokens, sequences = (1.0 if counts[name] == 0 else counts[name] for name in names)
    world = counts["dp_size"]
    needed = {"token": "batch_num_tokens", "sum": None}.get(reduction_of(mode), "global_batch_size")
    if needed is not None and world > 1 and counts[needed] is None:
        raise BatchError(f"{mode!r} with dp_size={world} needs {needed}: a local count would differ between ranks.")
    if needed != "batch_num_tokens" and (needed is None or sequences is not None):
        tokens = tokens or 1.0
    if needed != "global_batch_size" and (needed is None or tokens is not None):
        sequences = sequences or 1.0
    return Totals(tokens=tokens, sequences=sequences, world=world)
