"""A rank that dies, stops, fails or never comes ends the others, by a sentence that names it and those that waited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import watched
from ranks.pool import fork_server
from rlloss.training.watch import Watch

WAITED = r"; rank 0 and rank 2 waited, in work \(watched\.py:\d+\)"
SILENT = r"rank 1 has given no sign of life for \d+ s and was last seen in "


@pytest.mark.parametrize(
    ("fault", "status", "sentence"),
    [
        ("SIGKILL", 2, rf"rank \d lost another rank: {SILENT}.*{WAITED} \(.*--resume"),
        ("SIGSTOP", 1, rf"rank \d gives up: {SILENT}.*--resume"),
        ("judge", 2, rf"rank \d lost another rank: rank 1 is alive and works, in judge \(watched\.py:\d+\){WAITED} \("),
        ("score", 2, rf"rank \d lost another rank: rank 1 failed with ValueError: no score for this answer{WAITED} \("),
        ("late", 2, r"rank 1 did not start within 3 s; rank \d waited\..*rank_timeout"),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path: Path, fault: str, status: int, sentence: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    context = fork_server()
    said = [tmp_path / f"rank{rank}" for rank in range(watched.RANKS)]
    processes = [
        context.Process(target=watched.work, args=(rank, store.port, fault, str(said[rank])), daemon=True)
        for rank in range(watched.RANKS)
    ]
    try:
        for process in processes:
            process.start()
        for rank in (0, 2):
            processes[rank].join(40)
            assert processes[rank].exitcode == status, f"rank {rank} waited, or said: {said[rank].read_text()}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank in (0, 2):
        assert re.search(sentence.replace(r"rank \d ", f"rank {rank} "), said[rank].read_text()), said[rank].read_text()


def test_a_rank_that_has_ended_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank saves the policy when the others have left: their silence means nothing."""
    monkeypatch.setattr("rlloss.training.watch.BEAT", 0.05)
    monkeypatch.setattr("rlloss.training.watch.GIVE_UP", 0.2)
    said: list[str] = []
    monkeypatch.setattr(Watch, "_end", lambda self, reason: said.append(reason))
    store = dist.HashStore()
    first, second = (Watch(store, rank, 2, 5.0) for rank in range(2))
    second._say()
    with first:
        with second:
            pass
        assert not first._over.wait(0.6)
    assert said == []
