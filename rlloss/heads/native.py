"""The compiled part of chunk mode on a CPU (`native.c`), where a C compiler was at hand when rlloss was installed.

Without it, and for tensors that it does not take, torch's operators do the same.
"""

import ctypes
import functools
import importlib.util

import torch
from torch import Tensor

_VERSION = 1


def compiled() -> bool:
    """Whether the compiled part is there."""
    return library() is not None


def takes(logits: Tensor) -> bool:
    """Whether the compiled part is there, and this is a block of float32 memory that no subclass is to see."""
    plain = type(logits) is Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32
    return plain and logits.is_contiguous() and compiled()


def exp_sums(logits: Tensor, shift: Tensor, sums: Tensor, weighted: Tensor | None, strip: int, keep: bool) -> None:
    """Writes sums over strips of words to `sums` (of `E = exp(z - shift)`) and `weighted` (of `E (z - shift)`).

    Args:
        logits: `[words, C]`, contiguous; becomes `E` if that is to be kept.
        shift: `[C]`.
        sums: `[strips, C]`.
        weighted: `[strips, C]`, or `None`.
        strip: Words of a strip.
        keep: Whether `E` is wanted.
    """
    found = library()
    assert found is not None
    shift = shift.contiguous()
    places = [None if part is None else part.data_ptr() for part in (shift, sums, weighted)]
    found.rlloss_exp_sums(logits.data_ptr(), *logits.shape, *places, strip, int(keep), torch.get_num_threads())


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled part of this installation, or `None`."""
    try:
        spec = importlib.util.find_spec("rlloss.heads.csrc._native")
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else load(spec.origin)


def load(path: str) -> ctypes.CDLL | None:
    """Loads a compiled part; `None` where the system cannot, or where it was built from another source."""
    try:
        found = ctypes.CDLL(path)
        if found.rlloss_native_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    number, size, place = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    found.rlloss_exp_sums.argtypes = [place, size, size, place, place, place, size, number, number]
    found.rlloss_exp_sums.restype = None
    return found
