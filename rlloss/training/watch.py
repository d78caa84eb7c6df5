"""Signs of life: which rank died, which one the others wait for, and where it stands."""

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 4.0
"""Seconds after which a rank that gave none is said to be silent."""
GIVE_UP = 45.0
"""Seconds after which the others end because of it, where no collective has told them earlier."""

GO_ON = "Nothing is lost up to the last checkpoint: start the same command again with --resume, on any number of ranks."
_TORCH = str(Path(torch.__file__).parent)


class Watch:
    """A thread that says where this rank stands, and listens to the others.

    A connection that breaks ends a rank that waits at once, without a word on who broke it. A machine that goes down,
    a process that is stopped, and a backend that waits for ever break nothing: those are found here.

    Args:
        store: The store of the ranks; it must answer while the ranks compute.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._heard = dict.fromkeys(self._others, (b"", time.monotonic()))
        self._beats = 0

    def __enter__(self) -> "Watch":
        self._say()
        for other in self._others:
            self._store.wait([self._key(other)], timedelta(minutes=10))
        self._listen()
        self._thread = threading.Thread(target=self._keep_watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * BEAT)

    def explain(self) -> str:
        """Waits until a rank is silent, for a few seconds, and tells who it is, or where every other one stands."""
        deadline = time.monotonic() + SILENT + 3 * BEAT
        while not (silent := self._silent(SILENT)) and time.monotonic() < deadline:
            time.sleep(BEAT / 4)
        return "; ".join(self._describe(other) for other in silent or self._others)

    def _keep_watch(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._say()
                self._listen()
            except RuntimeError:  # the store is gone, and with it the process that started the ranks
                time.sleep(SILENT)
                self._end("the process that started the ranks does not answer")
                return
            silent = self._silent(GIVE_UP)
            if silent:
                self._end("; ".join(self._describe(other) for other in silent))

    def _end(self, reason: str) -> None:
        """Ends this rank, which may wait where no exception reaches it."""
        if self._over.is_set():
            return
        sys.stderr.write(f"rlloss: rank {self._rank} gives up: {reason}. {GO_ON}\n")
        sys.stderr.flush()
        os._exit(1)

    def _say(self) -> None:
        self._beats += 1
        self._store.set(self._key(self._rank), f"{self._beats} {self._place()}")

    def _listen(self) -> None:
        found = self._store.multi_get([self._key(other) for other in self._others])
        for other, text in zip(self._others, found, strict=True):
            if text != self._heard[other][0]:
                self._heard[other] = (text, time.monotonic())

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [other for other, (_, heard) in self._heard.items() if now - heard > seconds]

    def _describe(self, other: int) -> str:
        text, heard = self._heard[other]
        place = text.decode().partition(" ")[2]
        seconds = time.monotonic() - heard
        if seconds > SILENT:
            return f"rank {other} has given no sign of life for {seconds:.0f} s and was last seen in {place}"
        return f"rank {other} is alive, in {place}"

    def _place(self) -> str:
        """Returns the innermost line of the main thread that is neither torch's nor a collective of ours."""
        frame = sys._current_frames().get(self._main)
        while frame is not None and frame.f_back is not None:
            name = frame.f_code.co_filename
            if not name.startswith(_TORCH) and not name.endswith("rlloss/distributed.py"):
                break
            frame = frame.f_back
        if frame is None:
            return "no line"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

    @staticmethod
    def _key(rank: int) -> str:
        return f"rlloss/alive/{rank}"
