"""Processes that torchrun might have started, one of which dies, stops, fails, waits for ever or never starts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

RANKS = 3


def judge() -> None:
    """A reward that never comes."""
    time.sleep(60)


def score() -> None:
    """A reward that fails."""
    raise ValueError("no score\nfor this answer")


def work(rank: int, port: int, fault: str, said: str) -> None:
    """Adds numbers up with the others until rank 1 fails; what this rank says goes to a file."""
    from rlloss.distributed import all_reduce_sum
    from rlloss.errors import RLLossError
    from rlloss.training import ranks, watch

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    watch.BEAT, watch.SILENT = 0.25, 1.5
    limit, watch.GIVE_UP = (3.0, 60.0) if fault in ("judge", "late") else (60.0, 3.0)
    faults: dict[str, Any] = {"judge": judge, "score": score}
    if fault == "late" and rank == 1:
        return
    try:
        with ranks.ranks_of_torchrun("cpu", limit):
            for step in range(3):
                if rank == 1 and step == 2:
                    faults.get(fault, lambda: os.kill(os.getpid(), getattr(signal, fault)))()
                all_reduce_sum(torch.ones(3))
    except (RLLossError, ValueError) as error:
        os.write(2, str(error).encode())
        os._exit(2)
    os._exit(0)
