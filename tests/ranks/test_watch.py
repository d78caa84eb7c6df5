"""A rank that dies, stops or never comes ends the others, by a sentence that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import watched
from ranks.pool import fork_server


@pytest.mark.parametrize(
    ("fault", "status", "sentence"),
    [
        ("SIGKILL", 2, r"rank 0 lost another rank: rank 1 has given no sign of life for \d+ s and was last seen in "),
        ("SIGSTOP", 1, r"rank 0 gives up: rank 1 has given no sign of life for \d+ s and was last seen in "),
        ("judge", 2, r"rank 0 lost another rank: rank 1 is alive, in judge \(watched\.py:\d+\)"),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path: Path, fault: str, status: int, sentence: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    context = fork_server()
    said = [tmp_path / f"rank{rank}" for rank in range(2)]
    processes = [
        context.Process(target=watched.work, args=(rank, store.port, fault, str(said[rank])), daemon=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        processes[0].join(40)
        assert processes[0].exitcode == status, f"rank 0 waited, or said: {said[0].read_text()}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert re.search(sentence, said[0].read_text())
    assert "--resume" in said[0].read_text()
