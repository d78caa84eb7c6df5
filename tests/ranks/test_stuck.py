"""Each way in which ranks could wait for each other ends in an error on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ranks import stuck
from ranks.pool import Failure, Ranks, RanksFailed

WAITED_IN = {
    "build": "_count",
    "value": "over_ranks",
    "sequence, eager": "differentiable_sum",
    "sequence, chunk": "differentiable_sum",
    "vocabulary, eager": "log_probs_of",
    "vocabulary, chunk": "combine",
    "metrics": "_check_alike",
}


@pytest.mark.parametrize("where", WAITED_IN)
def test_the_end_of_a_rank_ends_those_that_wait_for_it(where: str, ranks: Ranks) -> None:
    """Errors of build and forward stay on their rank: when it goes, the others end where they waited."""
    waited, failed = ranks.outcomes(stuck.rank_fails, where, limit=20)
    assert isinstance(failed, Failure)
    assert failed.kind == ("OSError" if where == "metrics" else "BatchError"), failed.trace
    assert isinstance(waited, Failure)
    assert waited.rank == 0
    assert waited.kind in ("RuntimeError", "DistBackendError", "DistNetworkError"), waited.trace
    assert WAITED_IN[where] in waited.trace
    assert "rlloss/distributed.py" in waited.trace


def test_pipeline_stages(ranks: Ranks) -> None:
    """The ranks of the last stage are named; counted over all ranks, each stage waits for the other."""
    first, last = ranks.run(stuck.pipeline, True)
    assert first == last > 0
    with pytest.raises(RanksFailed) as caught:
        ranks.run(stuck.pipeline, False, limit=3)
    assert re.search(r"rank 0 waited in:(.|\n)*recv(.|\n)*rank 1 waited in:(.|\n)*calibrate", str(caught.value))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("none", "rank 0 of the group: .*ratio_mean.*rank 1 of the group: \\[\\]"),
        ("more", "mine: Sum"),
        ("another kind", "tokens: Max"),
    ],
)
def test_metrics_that_differ_between_ranks(how: str, message: str, ranks: Ranks) -> None:
    for failure in ranks.outcomes(stuck.odd_metrics, how, limit=20):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError"
        assert re.search(message, failure.message), failure.message


def test_nan_on_one_rank_is_nan_on_all(ranks: Ranks) -> None:
    for found in ranks.run(stuck.nan_metrics):
        assert {name: str(value) for name, value in found.items()} == {
            "high": "nan",
            "low": "nan",
            "sum": "nan",
            "one": "1.0",
        }


@pytest.mark.parametrize("what", stuck.OTHER_CONFIGS)
def test_ranks_with_different_configs(what: str, ranks: Ranks) -> None:
    for failure in ranks.outcomes(stuck.other_configs, what, limit=20):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError"
        assert "different loss configs" in failure.message
        assert re.search(r" is .* on rank 0, .* on rank 1", failure.message), failure.message


@pytest.mark.parametrize("what", stuck.OTHER_TOTALS)
def test_ranks_with_different_totals(what: str, ranks: Ranks) -> None:
    """Each would divide by its own: all would train on, and on something else."""
    for failure in ranks.outcomes(stuck.other_totals, what, limit=20):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError"
        name = "tokens" if what == "none" else what
        assert re.search(rf"Totals\.{name} is \S+ on rank 0, \S+ on rank 1", failure.message), failure.message


def test_counts_of_ones_own(ranks: Ranks) -> None:
    """Where forward sums nothing a choice over the ranks does not ask for equal counts; where it sums, it does."""
    first, second = ranks.run(stuck.own_totals, False, limit=20)
    assert first == 2 * second > 0
    for failure in ranks.outcomes(stuck.own_totals, True, limit=20):
        assert isinstance(failure, Failure)
        assert re.search(r"Totals\.tokens is 3\.0 on rank 0, 6\.0 on rank 1", failure.message), failure.message


def test_totals_on_some_ranks_where_the_others_say_nothing(ranks: Ranks) -> None:
    """With `reduce_loss=False` a rank whose counts are given talks to nobody: the other waits as long as its group."""
    waited, went_on = ranks.outcomes(stuck.silent_totals, 4.0, 1.0, limit=20)
    assert went_on is None
    assert waited.kind in ("RuntimeError", "DistBackendError"), waited.trace
    assert "imed out" in waited.message
    assert "_count" in waited.trace


def test_an_empty_list_where_all_counts_are_given(ranks: Ranks) -> None:
    """The rank itself fails at once; the others end with it if they sum the value, and wait for nothing if not."""
    waited, failed = ranks.outcomes(stuck.nothing_and_totals, True, limit=20)
    assert failed.kind == "BatchError" and "empty list" in failed.message
    assert waited.kind in ("RuntimeError", "DistBackendError") and "_count" in waited.trace
    fine, failed = ranks.outcomes(stuck.nothing_and_totals, False, limit=20)
    assert failed.kind == "BatchError" and "empty list" in failed.message
    assert fine is None


def test_an_error_of_build_can_be_told_in_build_batches(ranks: Ranks) -> None:
    """docs/ranks.md: a rank that catches it passes an empty list, which is an error everywhere."""
    other, own = ranks.outcomes(stuck.build_in_vain, True, limit=20)
    assert other.kind == own.kind == "BatchError"
    assert "rank 1: build_batches got an empty list" in other.message
    assert "shifted_labels" in own.message


@pytest.mark.parametrize("how", ["mixed", "mixed, empty list", "rollout", "rollout, totals", "selection, totals"])
def test_an_error_before_several_exchanges(how: str, ranks: Ranks) -> None:
    for failure in ranks.outcomes(stuck.left_out, how, limit=20):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError", failure.trace
        assert "rank 1: " in failure.message
        assert ("empty list" if "empty" in how else "old_logprobs") in failure.message


@pytest.mark.parametrize(
    ("reduction", "totals"), [("sum", None), ("token", {"tokens": 9}), ("sample", {"sequences": 3})]
)
def test_unequal_micro_batches_where_nothing_is_counted(reduction: str, totals: Any, ranks: Ranks) -> None:
    """Forward would wait: it is an error in build_batches, and exact without a collective."""
    for failure in ranks.outcomes(stuck.more_micro_batches, reduction, totals, True, limit=20):
        assert isinstance(failure, Failure)
        assert "unequal numbers of micro-batches (3 in all)" in failure.message
    first, second = ranks.run(stuck.more_micro_batches, reduction, totals, False)
    assert second == pytest.approx(2 * first)
    assert (first + second) / 2 == pytest.approx(-9.0 if reduction == "sum" else -1.0)


@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_backward_waits_for_nobody(mode: str, ranks: Ranks) -> None:
    gradient, _ = ranks.run(stuck.backward_on_one_rank, mode, limit=20)
    assert gradient > 0
