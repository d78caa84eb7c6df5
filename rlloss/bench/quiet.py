"""How busy everyone else was: a neighbour on the machine shifts a ratio of two times, so its pairs are thrown away."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

NEIGHBOUR = "i = 0\nwhile True: i += 1"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Clocks at one moment, seconds.

    Attributes:
        wall: Elapsed.
        own: Processor time of this process.
        everyone: Processor time of all processes, or None where the system does not tell.
        excused: Processor time of a neighbour that the user asked for.
    """

    wall: float
    own: float
    everyone: float | None
    excused: float

    def others_until(self, later: "Usage") -> float | None:
        """Returns the share of all processors that other processes used until `later`."""
        if self.everyone is None or later.everyone is None:
            return None
        own = later.own - self.own + later.excused - self.excused
        available = max((later.wall - self.wall) * (os.cpu_count() or 1), 1e-9)
        return max(later.everyone - self.everyone - own, 0.0) / available


def usage(neighbour: int | None = None) -> Usage:
    """Reads the clocks.

    Args:
        neighbour: Process id of a neighbour that does not count as one.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    excused = 0.0 if neighbour is None else _process_time(neighbour)
    return Usage(time.perf_counter(), used.ru_utime + used.ru_stime, _machine_time(), excused)


def _machine_time() -> float | None:
    try:
        numbers = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    idle, iowait = numbers[3], numbers[4]
    # The last two are counted in the first two already; stolen time was somebody else's.
    return (sum(numbers[:8]) - idle - iowait) / TICKS


def _process_time(pid: int) -> float:
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / TICKS
