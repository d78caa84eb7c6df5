"""The compiled part of chunk mode on a CPU (`csrc/`), where a C compiler was at hand when rlloss was installed.

Without it, and for tensors that it does not take, torch's operators do the same.
"""

import ctypes
import functools
import importlib.util

import torch
from torch import Tensor

_VERSION = 3


class Head(ctypes.Structure):
    """A head and one chunk, as `bf16.c` has them; places are those of numbers in memory."""

    _fields_ = [
        ("words", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("weight", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("chunk", ctypes.c_void_p),
        ("stride", ctypes.c_size_t),
        ("work", ctypes.c_void_p),
        ("threads", ctypes.c_int),
    ]


def compiled() -> bool:
    """Whether the compiled part is there."""
    return library() is not None


def takes(logits: Tensor, shift: Tensor) -> bool:
    """Whether the compiled part is there, and these are float32 memory, the logits in one block."""
    plain = all_plain(logits, shift) and logits.dtype == shift.dtype == torch.float32
    return plain and logits.is_contiguous() and compiled()


def all_plain(*tensors: Tensor | None) -> bool:
    """Whether all tensors are in the memory of the CPU, and none is of a subclass, which is to see what happens."""
    return all(part is None or (type(part) is Tensor and part.device.type == "cpu") for part in tensors)


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


def multiplies_bfloat16() -> bool:
    """Whether the compiled part is there, and this processor multiplies pairs of bfloat16 numbers."""
    found = library()
    return found is not None and bool(found.rlloss_bf16_available())


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
    number, size, place, head = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(Head)
    found.rlloss_exp_sums.argtypes = [place, size, size, place, place, place, size, number, number]
    found.rlloss_exp_sums.restype = None
    if found.rlloss_bf16_available():
        found.rlloss_bf16_workspace.argtypes, found.rlloss_bf16_workspace.restype = [head], size
        found.rlloss_bf16_project.argtypes = [head, place, number]
        found.rlloss_bf16_add_weight.argtypes = [head, place, place, number]
        found.rlloss_bf16_add_hidden.argtypes = [head, place, place, number, number]
        for function in (found.rlloss_bf16_project, found.rlloss_bf16_add_weight, found.rlloss_bf16_add_hidden):
            function.restype = None
    return found
