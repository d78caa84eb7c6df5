"""Ctrl-C as a request: the step in progress ends, the run saves, and stops."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag; a second one stops at once.

    Args:
        announce: Called at the first signal.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.requested = False
        self._announce = announce
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        self._announce()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
