"""Signs of life: which rank died, failed or does not come, which ones waited for it, and where each of them stands."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Literal, NamedTuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from rlloss.errors import RLLossError

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 4.0
"""Seconds after which a rank that gave none is said to be silent."""
GIVE_UP = 45.0
"""Seconds after which the others end because of it, where no collective has told them earlier."""
LONGEST = 300
"""Characters of an error that a rank tells the others."""

GO_ON = "Nothing is lost up to the last checkpoint: start the same command again with --resume, on any number of ranks."
_TORCH = str(Path(torch.__file__).parent)
_STORING = f"{_TORCH}/distributed/checkpoint/"
_PYTHON = sysconfig.get_path("stdlib")

State = Literal["works", "waits", "gave up", "failed", "ended"]
Frames = Iterable[tuple[FrameType, int]]


class _Sign(NamedTuple):
    """What a rank said last, and when this one heard it."""

    text: bytes
    heard: float

    @property
    def state(self) -> State:
        return self.text.decode().split("|")[1]  # type: ignore[return-value]

    @property
    def place(self) -> str:
        """Where it stands, or its error."""
        return self.text.decode().split("|", 2)[2]

    def silent(self, seconds: float) -> bool:
        """Whether it has said nothing for so long without having said why."""
        return self.state in ("works", "waits") and time.monotonic() - self.heard > seconds


class Watch:
    """A thread that says where this rank stands, and listens to the others.

    A connection that breaks ends a rank that waits at once, without a word on who broke it. A machine that goes down,
    a process that is stopped, and a backend that waits for ever break nothing: those are found here.

    Args:
        store: The store of the ranks; it must answer while the ranks compute.
        rank: This rank.
        world: Number of ranks.
        limit: Seconds in which every rank must have started.
    """

    def __init__(self, store: Store, rank: int, world: int, limit: float) -> None:
        self._store = store
        self._rank = rank
        self._limit = limit
        self._others = [other for other in range(world) if other != rank]
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._heard = dict.fromkeys(self._others, _Sign(b"0|works|", time.monotonic()))
        self._beats = 0
        self._last: tuple[State, str] | None = None  # what this rank goes on saying, once it will not come back

    def __enter__(self) -> "Watch":
        self._say()
        for other in self._others:
            self._wait_for_start(other)
        self._listen()
        self._thread = threading.Thread(target=self._keep_watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * BEAT)
        if self._last is None:
            said = " ".join(str(error).split())[:LONGEST]
            self._last = ("ended", "") if error is None else ("failed", f"{type(error).__name__}: {said}")
        try:
            self._say()
        except RuntimeError:  # the store is gone, and nobody is left to be told
            return

    def explain(self, error: BaseException) -> str:
        """Finds out, in a few seconds, for whom this rank has waited in vain.

        Args:
            error: What a collective raised.
        """
        place = _place(reversed(list(walk_tb(error.__traceback__))))[1]
        self._last = ("gave up", place)
        absent = [other for other, sign in self._heard.items() if sign.state == "works"]
        deadline = time.monotonic() + SILENT + 3 * BEAT
        time.sleep(2 * BEAT)  # until the others have said how they fare
        while not (known := self._failed() or self._silent(SILENT)) and time.monotonic() < deadline:
            time.sleep(BEAT / 4)
        missing = known or absent
        waited = [other for other, sign in self._heard.items() if sign.state in ("waits", "gave up")]
        waited = sorted({self._rank, *waited} - set(missing))
        others = missing or [other for other in self._others if other not in waited] or self._others
        return f"{'; '.join(self._describe(other) for other in others)}; {_listed(waited)} waited, in {place}"

    def _wait_for_start(self, other: int) -> None:
        try:
            self._store.wait([_key(other)], timedelta(seconds=self._limit))
        except RuntimeError as error:
            missing = [rank for rank in self._others if not self._store.check([_key(rank)])]
            raise RLLossError(
                f"{_listed(missing or [other])} did not start within {self._limit:.0f} s; rank {self._rank} waited. "
                f"Start every rank of the job, or raise rank_timeout."
            ) from error

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
        state, place = self._last or self._state()
        self._store.set(_key(self._rank), f"{self._beats}|{state}|{place}")

    def _listen(self) -> None:
        found = self._store.multi_get([_key(other) for other in self._others])
        for other, text in zip(self._others, found, strict=True):
            if text != self._heard[other].text:
                self._heard[other] = _Sign(text, time.monotonic())

    def _silent(self, seconds: float) -> list[int]:
        return [other for other, sign in self._heard.items() if sign.silent(seconds)]

    def _failed(self) -> list[int]:
        return [other for other, sign in self._heard.items() if sign.state == "failed"]

    def _describe(self, other: int) -> str:
        sign = self._heard[other]
        if sign.silent(SILENT):
            seconds = time.monotonic() - sign.heard
            return f"rank {other} has given no sign of life for {seconds:.0f} s and was last seen in {sign.place}"
        match sign.state:
            case "failed":
                return f"rank {other} failed with {sign.place}"
            case "gave up":
                return f"rank {other} gave up in {sign.place}"
            case "ended":
                return f"rank {other} has ended"
            case state:
                return f"rank {other} is alive and {state}, in {sign.place}"

    def _state(self) -> tuple[State, str]:
        frame = sys._current_frames().get(self._main)
        waits, place = _place(walk_stack(frame) if frame is not None else ())
        return ("waits" if waits else "works"), place


def _place(frames: Frames) -> tuple[bool, str]:
    """Finds the innermost line that is neither torch's nor python's nor a collective of ours.

    Args:
        frames: Of one thread, the innermost first.

    Returns:
        Whether a collective is running below it, and the line.
    """
    waits = False
    for frame, line in frames:
        name = frame.f_code.co_filename
        if name.endswith("rlloss/distributed.py"):
            waits = True
        elif name.startswith(f"{_TORCH}/distributed/"):
            waits = waits or not name.startswith(_STORING)
        elif not name.startswith(_TORCH) and ("site-packages" in name or not name.startswith(_PYTHON)):
            return waits, f"{frame.f_code.co_name} ({Path(name).name}:{line})"
    return waits, "no line"


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _key(rank: int) -> str:
    return f"rlloss/alive/{rank}"
