"""Large buffers on a CPU: in huge pages, and taken again once nobody uses them, as torch's own caches on devices do."""

import contextlib
import mmap
import sys
import threading
import weakref
from math import prod

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Below this many bytes ordinary memory costs nothing worth saving."""

MOST_IDLE = 5
"""Unused buffers that are kept: a chunk of logits, the gradients of a head and of hidden states, two of its rows."""


def large_empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns uninitialised memory on the device of `like`.

    The first touch of new memory costs as much as some percent of a step's products, so that large buffers on a CPU are
    kept for the next call (`release_buffers` lets go of them).
    """
    size = prod(shape) * dtype.itemsize
    if size < SMALLEST or type(like) is not Tensor or like.device.type != "cpu" or sys.platform != "linux":
        return like.new_empty(shape, dtype=dtype)
    return torch.frombuffer(_POOL.take(size), dtype=dtype, count=prod(shape)).view(shape)


def release_buffers() -> int:
    """Gives the memory of all unused buffers on the CPU back to the system.

    Returns:
        How much that was, bytes.
    """
    return _POOL.release()


class _Pool:
    """Blocks of memory, each lent as a view: a block is free again once its view, which the tensors hold, is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def take(self, size: int) -> memoryview:
        """Lends the smallest free block that fits and is not much larger; else free ones make room for a new one."""
        with self._lock:
            fitting = [block for block in self._idle() if size <= len(block) <= size + size // 4]
            if fitting:
                block = min(fitting, key=len)
                self._blocks = [pair for pair in self._blocks if pair[0] is not block]
                idle = self._idle()
                self._drop(idle[: max(len(idle) - MOST_IDLE, 0)])
            else:
                self._make_room(size)
                block = _map(size)
            view = memoryview(block)
            self._blocks.append((block, weakref.ref(view)))
            return view

    def release(self) -> int:
        """Drops all free blocks; returns their bytes."""
        with self._lock:
            return self._drop(self._idle())

    def _idle(self) -> list[mmap.mmap]:
        return [block for block, lent in self._blocks if lent() is None]

    def _make_room(self, size: int) -> None:
        """Drops free blocks, the smallest first, until as many bytes are back; the caller holds the lock."""
        freed = 0
        for block in sorted(self._idle(), key=len):
            if freed >= size:
                return
            freed += self._drop([block])

    def _drop(self, blocks: list[mmap.mmap]) -> int:
        """Drops some free blocks; returns their bytes. The caller holds the lock."""
        self._blocks = [pair for pair in self._blocks if not any(pair[0] is block for block in blocks)]
        return sum(len(block) for block in blocks)


def _map(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Advice only: a kernel without huge pages refuses it, and nothing changes.
    with contextlib.suppress(AttributeError, OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_POOL = _Pool()
