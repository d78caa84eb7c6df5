"""The passes that turn a tile of logits `[words, C]` into exponentials and their sums.

For float32 on a CPU that is one compiled pass (`native.c`) where it is there; torch's operators read a tile several
times.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlloss.heads import native
from rlloss.heads.logits import LOG_FLOOR

STRIP_WORDS = 256
"""Words whose sum is formed apart: sums over words are then the same however the words are cut into tiles."""

PIECE_ELEMENTS = 1 << 22
"""Numbers that torch's operators take at once on a CPU: 16 MiB, which stay in cache from one to the next."""

PIECE_WORDS = 16384
"""Words that passes with temporaries take at once elsewhere, so that these are no second chunk."""


def exponentiate(logits: Tensor, shift: Tensor, keep: bool) -> Tensor:
    """Replaces logits by `E = exp(z - shift)`.

    Args:
        logits: `[words, C]`, a block of memory; unspecified afterwards unless they are kept.
        shift: `[C]`, nats.
        keep: Whether the exponentials are wanted.

    Returns:
        Sums of `E` over each strip of words, `[strips, C]`.
    """
    if not native.takes(logits, shift):
        pieces = _pieces(logits) if logits.device.type == "cpu" else (logits,)
        return torch.cat([_strip_sums(_shifted(piece, shift).exp_()) for piece in pieces])
    sums = logits.new_empty(_strips(logits), logits.shape[1])
    native.exp_sums(logits, shift, sums, None, STRIP_WORDS, keep)
    return sums


def exponentiate_with_entropy(logits: Tensor, shift: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Replaces logits by `E = exp(q)`, q = z - shift, like `exponentiate`.

    Returns:
        Sums of `E` and of `E q` over each strip of words, `[strips, C]` each.
    """
    if not native.takes(logits, shift):
        pairs = [_entropy_sums(_shifted(piece, shift).clamp_(min=LOG_FLOOR)) for piece in _pieces(logits)]
        return torch.cat([sums for sums, _ in pairs]), torch.cat([weighted for _, weighted in pairs])
    sums = logits.new_empty(2, _strips(logits), logits.shape[1])
    native.exp_sums(logits, shift, sums[0], sums[1], STRIP_WORDS, keep)
    return sums[0], sums[1]


def _pieces(logits: Tensor) -> Sequence[Tensor]:
    words = PIECE_WORDS
    if logits.device.type == "cpu":
        words = max(PIECE_ELEMENTS // (STRIP_WORDS * max(logits.shape[1], 1)), 1) * STRIP_WORDS
    return torch.split(logits, words)


def _shifted(logits: Tensor, shift: Tensor) -> Tensor:
    # Reading a number on a CPU costs less than a pass.
    return logits.sub_(shift) if logits.device.type != "cpu" or bool(shift.any()) else logits


def _entropy_sums(q: Tensor) -> tuple[Tensor, Tensor]:
    exponentials = q.exp()
    weighted = _strip_sums(q.mul_(exponentials))
    return _strip_sums(q.copy_(exponentials)), weighted


def _strip_sums(numbers: Tensor) -> Tensor:
    if numbers.device.type != "cpu":
        return numbers.sum(dim=0, keepdim=True)
    words, rows = numbers.shape
    whole = words // STRIP_WORDS * STRIP_WORDS
    sums = numbers[:whole].view(whole // STRIP_WORDS, STRIP_WORDS, rows).sum(dim=1)
    return sums if whole == words else torch.cat([sums, numbers[whole:].sum(dim=0, keepdim=True)])


def _strips(logits: Tensor) -> int:
    return -(-logits.shape[0] // STRIP_WORDS)
