"""A pool of processes that play the ranks: started once, used by every test, each call with a time limit.

A worker waits for `(function, arguments, world, ...)`, makes a gloo group on loopback, calls the function, and sends
back what it returned or raised. A call that takes too long ends with an error that names each rank that waited, and
where.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    rank: int
    kind: str
    message: str
    trace: str


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not come back."""


class Ranks:
    """Worker processes; `run` calls a function on the first `world` of them.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._calls = itertools.count()
        self._folder = tempfile.TemporaryDirectory()

    def run(self, function: Callable[..., Any], *args: Any, world: int = 2, limit: float = TIME_LIMIT) -> list[Any]:
        """Calls `function(*args)` on every rank and returns what each rank returned.

        Raises:
            RanksFailed: A rank raised, died, or did not come back within `limit` seconds.
        """
        outcomes = self.outcomes(function, *args, world=world, limit=limit)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            raise RanksFailed("\n".join(f"rank {f.rank}: {f.kind}: {f.message}\n{f.trace}" for f in failures))
        return outcomes

    def outcomes(
        self, function: Callable[..., Any], *args: Any, world: int = 2, limit: float = TIME_LIMIT
    ) -> list[Any]:
        """The same, with a `Failure` in the place of what a rank raised."""
        self._start(world)
        store = Path(self._folder.name) / f"store{next(self._calls)}"
        for rank, worker in enumerate(self._workers[:world]):
            worker.pipe.send((function, args, rank, world, str(store), limit))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(results) < world:
            waiting = {w.pipe: r for r, w in enumerate(self._workers[:world]) if r not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                report = self._where(sorted(waiting.values()))
                report += "".join(f"\nrank {r} raised {f}" for r, f in results.items() if isinstance(f, Failure))
                self.stop()
                raise RanksFailed(f"after {limit:.0f} s {report}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = Failure(rank, "died", f"exit code {self._workers[rank].exit_code()}", "")
        if any(isinstance(r, Failure) and r.kind == "died" for r in results.values()):
            self.stop()
        return [results[rank] for rank in range(world)]

    def stop(self) -> None:
        """Ends the processes; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers = []

    def _start(self, world: int) -> None:
        assert world <= self.size, f"a pool of {self.size} cannot play {world} ranks"
        context = fork_server()
        while len(self._workers) < world:
            self._workers.append(_Worker.start(context))

    def _where(self, ranks: Sequence[int]) -> str:
        for rank in ranks:
            self._workers[rank].probe.send("where")
        lines = []
        for rank in ranks:
            probe = self._workers[rank].probe
            stack = probe.recv() if probe.poll(5) else "no answer"
            lines.append(f"rank {rank} waited in:\n{stack}")
        return "\n".join(lines)


def fork_server() -> Any:
    """Returns the context of processes that are children of one which has imported everything."""
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    names = ["mesh_step", "rank_cases", "vocabulary", "stuck", "cases", "training_runs"]
    context.set_forkserver_preload(["torch", "rlloss", *(f"ranks.{name}" for name in names)])
    return context


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    probe: Connection

    @staticmethod
    def start(context: Any) -> _Worker:
        pipe, theirs = context.Pipe()
        probe, their_probe = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, their_probe), daemon=True)
        process.start()
        theirs.close()
        their_probe.close()
        return _Worker(process, pipe, probe)

    def exit_code(self) -> int | None:
        self.process.join(5)
        return self.process.exitcode


def _serve(pipe: Connection, probe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main = threading.get_ident()
    threading.Thread(target=_answer, args=(probe, main), daemon=True).start()
    while True:
        try:
            function, args, rank, world, store, limit = pipe.recv()
        except EOFError:
            return
        try:
            with process_group(rank, world, store, limit):
                result = function(*args)
        except BaseException as error:
            result = Failure(rank, type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)


@contextmanager
def process_group(rank: int, world: int, store: str, limit: float) -> Iterator[None]:
    """A gloo group whose collectives give up a little after the caller's time limit."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit + 10),
    )
    try:
        dist.barrier()  # or a rank that fails at once is gone before the others are connected
        yield
    finally:
        dist.destroy_process_group()


def _answer(probe: Connection, main: int) -> None:
    while True:
        try:
            probe.recv()
        except EOFError:
            return
        frame = sys._current_frames().get(main)
        probe.send("".join(traceback.format_stack(frame)[-6:]) if frame else "gone")
