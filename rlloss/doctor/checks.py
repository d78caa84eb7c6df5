"""What has to hold of a loss: that it runs and repeats, its level, its modes, its splits, its weights."""

import math

from rlloss.doctor.behaviour import direction, extremes, gradient, ignored
from rlloss.doctor.diagnosis import explain
from rlloss.doctor.sequences import Sequence
from rlloss.doctor.step import How, Outcome, step
from rlloss.doctor.verdict import EXACT, Check, Verdict, distance_line, listed, same
from rlloss.doctor.writes import written
from rlloss.errors import ConfigError
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext


def runs(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Ordinary numbers must give a finite loss with a finite gradient."""
    replay = f"outcome = step(loss_cfg, {listed(sequences)})"
    try:
        outcome = step(config, sequences)
    except Exception as error:
        kind, detail = explain(error)
        return Verdict(False, detail, kind, replay)
    replay += "; assert outcome.finite, outcome"
    if outcome.finite:
        return Verdict(True, "forward and backward run")
    where = "loss" if not bool(outcome.loss.isfinite()) else "gradient"
    return Verdict(False, f"ordinary numbers give a {where} of inf or NaN", f"not finite: {where}", replay)


def repeats(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """The same input must give the same bits."""
    first, *others = (step(config, sequences) for _ in range(4))
    if all(same(first, other) for other in others):
        return Verdict(True, "the same input gives the same bits")
    return Verdict(
        False,
        "the same input gives another loss each time: the loss is random, or keeps something from call to call. A "
        "choice at random must depend on the tokens alone; what a step needs comes in the batch.",
        replay=f"assert step(loss_cfg, {listed(sequences)}).distance(step(loss_cfg, {listed(sequences)})) == 0",
    )


def writes(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """A loss must not write into its arguments."""
    found = written(config, sequences)
    if not found:
        return Verdict(True, "nothing that came in is written to")
    return Verdict(
        False,
        f"the loss writes into {', '.join(found)} (an operation that ends in _, +=, out=, or x[...] = ...): other "
        "terms, metrics and the next chunk read what it left there. Make a new tensor instead.",
        kind=str(found),
        replay=f"assert not written(loss_cfg, {listed(sequences)})",
    )


def level(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """A token-level loss must be the sum of what it gives for each token alone."""
    declared = config.loss_ctx_cls.level or config.level()
    if declared == "sequence":
        return Verdict(None, "declared level 'sequence': evaluated on whole sequences")
    gap = step(config, sequences, mode="chunk", chunk_size=1).distance(step(config, sequences))
    if gap <= EXACT:
        return Verdict(True, f"{declared}-level: the sum over single tokens is the loss of the batch")
    replay = distance_line(f"{listed(sequences)}, mode='chunk', chunk_size=1", listed(sequences))
    seen = "is NaN" if gap == math.inf else f"differs by {gap:.1e}"
    detail = (
        f"declared level {declared!r}, but token by token the result {seen}: the loss looks across tokens. Declare "
        "level='sequence' (or ask for `segments`); a mean or spread over the batch must go."
    )
    return Verdict(False, detail, replay=replay)


def chunks(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Chunk mode must equal eager mode for every chunk size."""
    eager = step(config, sequences)
    gaps = {size: step(config, sequences, mode="chunk", chunk_size=size).distance(eager) for size in (1, 3, 7, 100)}
    worst = max(gaps, key=lambda size: gaps[size])
    return Verdict(
        gaps[worst] <= EXACT,
        f"largest difference from eager {gaps[worst]:.1e} (chunk_size={worst})",
        replay=distance_line(f"{listed(sequences)}, mode='chunk', chunk_size={worst}", listed(sequences)),
    )


def liger(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Liger mode must equal eager mode to float32 rounding, where the loss can run in it."""
    try:
        gap = step(config, sequences, mode="liger").distance(step(config, sequences))
    except (ConfigError, ImportError) as error:
        return Verdict(None, f"not offered: {error}")
    replay = distance_line(f"{listed(sequences)}, mode='liger'", listed(sequences), "1e-5")
    return Verdict(gap <= 1e-5, f"largest difference from eager {gap:.1e} (float32)", replay=replay)


def splits(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Any cut into micro-batches, padded or packed, must add up to the same step."""
    whole, worst, where, replay = step(config, sequences), 0.0, "", ""
    for count in (number for number in (2, 1, 3, 5) if number <= len(sequences)):
        bounds = [round(index * len(sequences) / count) for index in range(count + 1)]
        parts = [slice(bounds[index], bounds[index + 1]) for index in range(count)]
        for packed in (True, False):
            if count == 1 and packed:
                continue
            gap = step(config, *(sequences[part] for part in parts), how=How(packed=packed)).distance(whole)
            if not gap <= max(worst, EXACT):
                layout = "packed" if packed else "padded"
                worst, where = gap, f"{count} micro-batches, {layout}," if count > 1 else f"a {layout} batch"
                cut = ", ".join(listed(sequences, part) for part in parts)
                replay = distance_line(cut + ("" if packed else ", how=How(packed=False)"), listed(sequences))
    if not where:
        return Verdict(True, "1, 2, 3 and 5 micro-batches, padded and packed, agree")
    if where.startswith("a "):
        cause = "tokens of different sequences, or padding, take part in each other's loss."
        return Verdict(False, f"{where} differs from a packed one by {worst:.1e}: {cause}", "layout", replay)
    cause = "a denominator is counted inside a micro-batch, or tokens of different sequences are mixed."
    return Verdict(False, f"{where} differ from one batch by {worst:.1e}: {cause}", "split", replay)


def weights(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Half the token weights must give half the loss."""
    if not config.terms() or config.loss_ctx_cls.build_batches is not BaseLossContext.build_batches:
        return Verdict(None, "the loss computes weights of its own")
    whole, half = step(config, sequences), step(config, sequences, how=How(scale=0.5))
    gap = Outcome(2 * half.loss, 2 * half.grad_hidden, 2 * half.grad_weight).distance(whole)
    if gap <= EXACT:
        return Verdict(True, "half the token weights give half the loss")
    return Verdict(
        False,
        f"with half of every token weight the loss is {float(half.loss):.3g} and not half of {float(whole.loss):.3g}: "
        "it ignores the weights, so that loss_reduction does nothing and micro-batches have no common denominator. "
        "Return one number for each token, or a scalar that is a sum of numbers times loss_weights.",
        replay=f"half = step(loss_cfg, {listed(sequences)}, how=How(scale=0.5)); "
        f"assert torch.allclose(2 * half.grad_hidden, step(loss_cfg, {listed(sequences)}).grad_hidden)",
    )


CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {
    "runs": (runs, ()),
    "repeatable": (repeats, ("runs",)),
    "arguments": (writes, ("runs", "repeatable")),
    "level": (level, ("runs", "repeatable")),
    "chunk mode": (chunks, ("runs", "repeatable", "level")),
    "liger mode": (liger, ("runs", "repeatable", "level")),
    "splits": (splits, ("runs", "repeatable")),
    "weights": (weights, ("runs", "repeatable", "splits")),
    "gradient": (gradient, ("runs", "repeatable")),
    "ignored positions": (ignored, ("runs", "repeatable")),
    "extreme ratios": (extremes, ("runs", "repeatable")),
    "direction": (direction, ("runs", "repeatable")),
}
"""Each check, and the ones whose failure would explain its own."""
