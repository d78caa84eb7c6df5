"""The passes that turn a tile of logits `[words, C]` into exponentials and their sums.

Compiled (`passes.c`) for float32 on a CPU, where a C compiler was at hand when rlloss was installed; else by torch's
operators, which read the tile several times.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from rlloss.heads.logits import LOG_FLOOR

STRIP_WORDS = 256
"""Words whose sum is formed apart: sums over words are then the same however the words are cut into tiles."""

PIECE_ELEMENTS = 1 << 22
"""Numbers that torch's operators take at once on a CPU: 16 MiB, which stay in cache from one to the next."""

PIECE_WORDS = 16384
"""Words that passes with temporaries take at once elsewhere, so that these are no second chunk."""

_VERSION = 1


def exponentiate(logits: Tensor, shift: Tensor, keep: bool) -> Tensor:
    """Replaces logits by `E = exp(z - shift)`.

    Args:
        logits: `[words, C]`, a block of memory; unspecified afterwards unless they are kept.
        shift: `[C]`, nats.
        keep: Whether the exponentials are wanted.

    Returns:
        Sums of `E` over each strip of words, `[strips, C]`.
    """
    library = _library_for(logits)
    if library is None:
        pieces = _pieces(logits) if logits.device.type == "cpu" else (logits,)
        return torch.cat([_strip_sums(_shifted(piece, shift).exp_()) for piece in pieces])
    sums = logits.new_empty(_strips(logits), logits.shape[1])
    _run(library, logits, shift, sums, None, keep)
    return sums


def exponentiate_with_entropy(logits: Tensor, shift: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Replaces logits by `E = exp(q)`, q = z - shift, like `exponentiate`.

    Returns:
        Sums of `E` and of `E q` over each strip of words, `[strips, C]` each.
    """
    library = _library_for(logits)
    if library is None:
        pairs = [_entropy_sums(_shifted(piece, shift).clamp_(min=LOG_FLOOR)) for piece in _pieces(logits)]
        return torch.cat([sums for sums, _ in pairs]), torch.cat([weighted for _, weighted in pairs])
    sums = logits.new_empty(2, _strips(logits), logits.shape[1])
    _run(library, logits, shift, sums[0], sums[1], keep)
    return sums[0], sums[1]


def compiled() -> bool:
    """Whether the compiled passes are there."""
    return _library() is not None


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


def _library_for(logits: Tensor) -> ctypes.CDLL | None:
    """Returns the compiled passes where they can read such a tensor."""
    plain = type(logits) is Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32
    return _library() if plain and logits.is_contiguous() else None


def _run(
    library: ctypes.CDLL, logits: Tensor, shift: Tensor, sums: Tensor, weighted: Tensor | None, keep: bool
) -> None:
    shift = shift.contiguous()
    places = [None if part is None else part.data_ptr() for part in (shift, sums, weighted)]
    library.rlloss_exp_sums(logits.data_ptr(), *logits.shape, *places, STRIP_WORDS, int(keep), torch.get_num_threads())


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("rlloss.heads._passes")
    return None if spec is None or spec.origin is None else load(spec.origin)


def load(path: str) -> ctypes.CDLL | None:
    """Loads compiled passes; `None` where the system cannot, or where they were built from another source."""
    try:
        library = ctypes.CDLL(path)
        if library.rlloss_passes_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    number, size, place = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    library.rlloss_exp_sums.argtypes = [place, size, size, place, place, place, size, number, number]
    library.rlloss_exp_sums.restype = None
    return library
