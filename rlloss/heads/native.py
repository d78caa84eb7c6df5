"""The compiled part of chunk mode on a CPU (`native.c`), where a C compiler was at hand when rlloss was installed.

Without it, and for tensors that it does not take, torch's operators do the same.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

LEAST_PRODUCT = 1 << 24
"""Multiplications below which a product is torch's: its threads would cost more than tiles bring."""

TILE_WORDS = 512
"""Words of a tile of a product."""

_VERSION = 1


class _Product(ctypes.Structure):
    """The product of `native.c`: a matrix by rows is to BLAS its transpose by columns."""

    _fields_ = (
        ("trans_a", ctypes.c_char),
        *((name, ctypes.c_int) for name in ("m", "k", "words", "width", "lda", "ldb", "ldc")),
        ("beta", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
    )


def compiled() -> bool:
    """Whether the compiled part is there."""
    return library() is not None


def takes(*tensors: Tensor) -> bool:
    """Whether these are float32 matrices on a CPU, each row one run of memory, and no subclass is to see them."""
    return all(
        type(part) is Tensor
        and part.device.type == "cpu"
        and part.dtype == torch.float32
        and part.stride(1) == 1
        and part.stride(0) >= part.shape[1]
        for part in tensors
    )


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


def multiplies(left: Tensor, right: Tensor, out: Tensor, inner: int) -> bool:
    """Whether a product with `inner` summands is worth tiles, and its matrices can be cut into them."""
    parts = (left, right, out)
    return (
        out.numel() * inner >= LEAST_PRODUCT
        and torch.get_num_threads() > 1
        and takes(*parts)
        and max(max(*part.shape, part.stride(0)) for part in parts) < 1 << 31
        and sgemm() is not None
    )


def project(weight: Tensor, hidden: Tensor, out: Tensor) -> None:
    """Writes `weight hidden^T` to `out` `[words, C]`, some words at a time."""
    _multiply_by_words(b"T", hidden, weight, out, 0.0)


def add_weight(numbers: Tensor, hidden: Tensor, out: Tensor, first: bool) -> None:
    """Adds `numbers hidden` to `out` `[words, H]`, or writes it when it is the first, some words at a time."""
    _multiply_by_words(b"N", hidden, numbers, out, 0.0 if first else 1.0)


def _multiply_by_words(trans_a: bytes, rows: Tensor, words: Tensor, out: Tensor, beta: float) -> None:
    """Computes `out = words op(rows) + beta out`, some rows of `words` and `out` at a time."""
    found = library()
    assert found is not None
    sizes = (rows, words, out)
    product = _Product(
        trans_a,
        out.shape[1],
        words.shape[1],
        words.shape[0],
        TILE_WORDS,
        *(part.stride(0) for part in sizes),
        beta,
        *(part.data_ptr() for part in sizes),
    )
    found.rlloss_multiply(sgemm(), ctypes.byref(product), torch.get_num_threads())


@functools.cache
def sgemm() -> int | None:
    """Returns where the float32 product of the MKL within torch begins; `None` for a torch without it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if library() is None or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled part of this installation, or `None`."""
    spec = importlib.util.find_spec("rlloss.heads.csrc._native")
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
    found.rlloss_multiply.argtypes = [place, place, number]
    found.rlloss_exp_sums.restype = found.rlloss_multiply.restype = None
    return found
