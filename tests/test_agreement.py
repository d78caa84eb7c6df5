"""What ranks tell each other before they count: whatever does not fit together is found from sums alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlloss import CELossConfig, GRPOLossConfig, Totals
from rlloss.errors import BatchError
from rlloss.layout import Shard
from rlloss.losses import agreement

CPU = torch.device("cpu")
ALIKE = CELossConfig()


def rank_of(
    sequences: list[int] | None = None,
    config: Any = ALIKE,
    prompts: int | None = None,
    part: tuple[int, int] | None = None,
    problem: Exception | None = None,
    tokens: float | None = None,
) -> torch.Tensor:
    """What a rank says whose micro-batches have so many sequences; `part` is its number and ranks in its sp group."""
    shard = None if part is None else Shard(None, part[0], part[1], 8)
    contexts = [
        SimpleNamespace(
            loss_kwargs=SimpleNamespace(shard=shard, num_prompts=prompts),
            layout=SimpleNamespace(segments=SimpleNamespace(count=count)),
            loss_cfg=config,
        )
        for count in (sequences or ([] if problem else [2]))
    ]
    loss = agreement.loss_of(contexts, problem, Totals(tokens=tokens))
    return agreement.facts_of(contexts, problem, loss, CPU)


def check(monkeypatch: pytest.MonkeyPatch, *ranks: torch.Tensor, reduce_loss: bool = True) -> None:
    monkeypatch.setattr(agreement, "world_size", lambda group: len(ranks))
    monkeypatch.setattr(agreement, "all_gather_text", lambda own, group: [own, "rank 1: x"])
    agreement.check_facts(torch.stack(ranks).sum(dim=0), None, {"reduce_loss": reduce_loss}, None)


def test_ranks_that_fit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, rank_of([3]), rank_of([5]))
    check(monkeypatch, rank_of([3], tokens=8), rank_of([5], tokens=8.0))
    check(monkeypatch, rank_of([1, 2], prompts=4), rank_of([2, 2], prompts=4))
    check(monkeypatch, *[rank_of([3, 2], part=(number, 2)) for number in (0, 1)])
    halves = [rank_of(counts, part=(number, 2)) for counts in ([3, 2], [7, 1]) for number in (0, 1)]
    check(monkeypatch, *halves)
    check(monkeypatch, rank_of([1]), rank_of([1, 1]), reduce_loss=False)
    check(monkeypatch, *[rank_of([4], part=(number, 3)) for number in (0, 1, 2)])


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (({"problem": BatchError("x")}, {}), "rank 1: x"),
        (({}, {"config": GRPOLossConfig()}), "different loss configs"),
        (({}, {"config": CELossConfig(loss_reduction="sample")}), "different loss configs"),
        (({"tokens": 5}, {"tokens": 6}), "or totals"),
        (({"tokens": 5}, {}), "or totals"),
        (({"part": (0, 2)}, {}), "1 of 2 ranks split"),
        (({"part": (0, 2), "sequences": [2]}, {"part": (1, 2), "sequences": [3]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [3]}, {"part": (1, 2), "sequences": [2]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [2, 3]}, {"part": (1, 2), "sequences": [3, 2]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [2, 3]}, {"part": (1, 2), "sequences": [2, 4]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [3, 1]}, {"part": (1, 2), "sequences": [1, 2]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [5]}, {"part": (1, 2), "sequences": [1, 1]}), "hold different batches"),
        (({"part": (0, 2), "sequences": [1, 1]}, {"part": (1, 2), "sequences": [5]}), "hold different batches"),
        (({"sequences": [1]}, {"sequences": [1, 1]}), r"unequal numbers of micro-batches \(3 in all\)"),
        (({"sequences": [1, 1]}, {"sequences": [1]}), r"unequal numbers of micro-batches \(3 in all\)"),
        (({"prompts": 3}, {"prompts": 4}), "num_prompts differs"),
        (({"prompts": 4}, {}), "num_prompts differs"),
    ],
)
def test_ranks_that_do_not_fit_are_told(ranks: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match=message):
        check(monkeypatch, *[rank_of(**fields) for fields in ranks])


def test_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, rank_of([1]))
    problem = BatchError("here")
    with pytest.raises(BatchError) as caught:
        agreement.check_facts(rank_of(problem=problem), problem, {}, None)
    assert caught.value is problem


def test_marks_are_small_and_their_squares_tell_what_sums_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {agreement._mark(number) for number in range(50)}
    assert len(marks) == 50
    assert all(0 <= mark < 2**20 for mark in marks)
    monkeypatch.setattr(agreement, "_mark", lambda said: said[0] if isinstance(said, list) else 7)
    with pytest.raises(BatchError, match="hold different batches"):
        check(monkeypatch, *[rank_of([count], part=(number, 3)) for number, count in enumerate((3, 2, 4))])
