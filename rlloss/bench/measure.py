"""Interleaved pairs of a subject and its bare products, peak memory, and gradient error."""

import gc
import mmap
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloss.bench.problem import ROTATION, Shape
from rlloss.bench.quiet import NEIGHBOUR, usage
from rlloss.bench.subjects import Subject
from rlloss.heads import release_buffers

OTHERS_ALLOWED = 0.1


@dataclass
class Line:
    """What was measured of one subject.

    Attributes:
        name: The subject.
        ratios: Its time over the bare products' time, of each quiet pair.
        seconds: Its time in each quiet pair.
        noisy: Pairs that were thrown away.
        peak_mib: Peak memory of one run above what stood there before, MiB. The gradients of the run before it stood
            there, so that gradients of the usual size do not count.
        hidden_error: Error of the hidden gradient against float64, relative to its norm.
        weight_error: The same of the head's.
    """

    name: str
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    noisy: int = 0
    peak_mib: float | None = None
    hidden_error: float | None = None
    weight_error: float | None = None

    @property
    def ratio(self) -> float | None:
        """Median ratio."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """First and third quartile of the ratio."""
        if len(self.ratios) < 2:
            return None
        quartiles = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return quartiles[0], quartiles[2]

    def summary(self) -> dict[str, Any]:
        """Returns everything as plain numbers."""
        median = statistics.median(self.seconds) if self.seconds else None
        return {**asdict(self), "ratio": self.ratio, "spread": self.spread, "median_seconds": median}


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
        pairs: Quiet pairs that are wanted of each subject.
        most: Pairs after which to give up.
        others_allowed: Share of the processors that other processes may use during a quiet pair.
    """

    pairs: int = 9
    most: int = 60
    others_allowed: float = OTHERS_ALLOWED


def measure_times(
    subject: Subject, line: Line, shape: Shape, plan: Plan, neighbour: int | None, tick: Callable[[], None]
) -> None:
    """Measures pairs until enough of them were quiet; the order within a pair alternates."""
    subject.baseline(0)
    subject.run(0)
    for number in range(plan.most):
        if len(line.ratios) >= plan.pairs:
            return
        turn = number % ROTATION
        before = usage(neighbour)
        runs: list[Callable[[int], object]] = [subject.baseline, subject.run]
        times = {run: _timed(run, turn, shape) for run in (runs if number % 2 else reversed(runs))}
        others = before.others_until(usage(neighbour))
        if others is not None and others > plan.others_allowed:
            line.noisy += 1
        else:
            line.seconds.append(times[subject.run])
            line.ratios.append(times[subject.run] / times[subject.baseline])
        tick()


def _timed(run: Callable[[int], object], turn: int, shape: Shape) -> float:
    _wait(shape)
    start = time.perf_counter()
    run(turn)
    _wait(shape)
    return time.perf_counter() - start


def _wait(shape: Shape) -> None:
    if shape.device != "cpu":
        torch.cuda.synchronize()


def measure_peak(subject: Subject, shape: Shape) -> float | None:
    """Returns the peak memory of one run above what stood there before, MiB; None where the system does not tell."""
    # The gradients of the input that is measured stand there, too.
    for number in (0, 1):
        subject.run(number)
    gc.collect()
    if shape.device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        subject.run(0)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Buffers that wait for the next call would hide what a call needs.
    release_buffers()
    with _RssSampler() as sampler:
        subject.run(0)
    return None if sampler.peak is None else (sampler.peak - sampler.first) / 2**20


class _RssSampler(threading.Thread):
    """Reads the resident memory of this process every millisecond; not every kernel keeps a high-water mark."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first, self.peak = 0, _resident()
        self._done = threading.Event()

    def __enter__(self) -> "_RssSampler":
        self.first = self.peak or 0
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        """Samples until the block is left."""
        while self.peak is not None and not self._done.wait(0.001):
            self.peak = max(self.peak, _resident() or 0)


def _resident() -> int | None:
    """Resident memory, bytes; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def measure_errors(subject: Subject, line: Line, exact: tuple[Tensor, Tensor]) -> None:
    """Compares the gradients of the first input with float64."""
    errors = [
        None if found is None else float((found.double().reshape(true.shape) - true).norm() / true.norm())
        for found, true in zip(subject.run(0), exact, strict=True)
    ]
    line.hidden_error, line.weight_error = errors


@contextmanager
def busy_neighbour(wanted: bool) -> Iterator[int | None]:
    """Keeps one processor busy with another process; yields its id."""
    if not wanted:
        yield None
        return
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
