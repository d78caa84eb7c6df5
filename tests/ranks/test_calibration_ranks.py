"""Calibration over data-parallel ranks: counts, factors, empty ranks, and errors that reach everybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks import rank_cases
from ranks.pool import Failure, Ranks, RanksFailed

ONE_LONG_ONE_SHORT = [[[1.0] * 5], [[4.0]]]


def test_ranks_with_few_tokens_weigh_no_more(ranks: Ranks) -> None:
    """Case A02."""
    local = ranks.run(rank_cases.nll_step, ONE_LONG_ONE_SHORT, {"reduce_loss": False})
    assert [part["losses"][0] for part in local] == pytest.approx([5 * 2 / 6, 4 * 2 / 6])
    whole = ranks.run(rank_cases.nll_step, ONE_LONG_ONE_SHORT, {})
    assert [part["losses"][0] for part in whole] == pytest.approx([1.5, 1.5])
    assert torch.equal(whole[0]["weight_grad"], local[0]["weight_grad"])
    assert [part["metrics"] for part in whole] == [whole[0]["metrics"]] * 2
    assert whole[0]["metrics"]["loss"] == pytest.approx(1.5)
    assert whole[0]["metrics"]["tokens"] == whole[0]["metrics"]["sequences"] == 6


def test_a_wrapper_that_adds_gets_no_factor(ranks: Ranks) -> None:
    averaged = ranks.run(rank_cases.nll_step, ONE_LONG_ONE_SHORT, {})
    added = ranks.run(rank_cases.nll_step, ONE_LONG_ONE_SHORT, {"grad_reduction": "sum"})
    for mine, theirs in zip(added, averaged, strict=True):
        assert torch.allclose(2 * mine["weight_grad"], theirs["weight_grad"], rtol=1e-14)
        assert mine["losses"] == theirs["losses"]


def test_a_row_over_two_ranks_is_not_halved(ranks: Ranks) -> None:
    """Case A04: the mean over ranks of the rank losses is the loss."""
    losses = ranks.run(rank_cases.nll_over_shards, [1.0, 1.0, 1.0, 1.0])
    assert sum(losses) / 2 == pytest.approx(1.0)
    uneven = ranks.run(rank_cases.nll_over_shards, [1.0, 2.0, None, None, 6.0])
    assert sum(uneven) / 2 == pytest.approx(3.0)


@pytest.mark.parametrize("empty", [[[None] * 3], [[None]]])
def test_a_rank_without_tokens(ranks: Ranks, empty: Any) -> None:
    """Case L01: nobody waits, and its gradients are zeros with a graph."""
    full, none = ranks.run(rank_cases.nll_step, [[[2.0, 1.0]], empty], {}, limit=20)
    assert full["losses"] == none["losses"] == [pytest.approx(1.5)]
    assert not none["weight_grad"].any()
    assert not any(grad.any() for grad in none["hidden_grads"])
    assert full["build_batches"] == none["build_batches"]
    assert full["forward"] == none["forward"]
    assert full["metrics"] == none["metrics"]
    assert full["metrics"]["nll"] == pytest.approx(1.5)
    assert full["metrics"]["sequences"] == 2


def test_a_step_without_tokens_says_so(ranks: Ranks) -> None:
    """Case L02."""
    for part in ranks.run(rank_cases.nll_step, [[[None]], [[None, None]]], {}):
        assert part["losses"] == [0.0]
        assert part["metrics"]["tokens"] == 0
        assert not part["weight_grad"].any()


def test_unequal_numbers_of_micro_batches(ranks: Ranks) -> None:
    """Without a collective in forward they are exact."""
    parts = [[[2.0], [1.0, 1.0], [None]], [[1.0, 3.0]]]
    first, second = ranks.run(rank_cases.nll_step, parts, {"reduce_loss": False})
    assert (sum(first["losses"]) + sum(second["losses"])) / 2 == pytest.approx(8 / 5)
    failures = ranks.outcomes(rank_cases.nll_step, parts, {}, limit=20)
    assert all("reduce_loss=False" in failure.message for failure in failures)


def test_world_size_of_totals(ranks: Ranks) -> None:
    """All that is needed is given: no collective runs, and the factor is the given one."""
    totals = {"tokens": 8, "world": 4}
    parts = ranks.run(rank_cases.nll_step, ONE_LONG_ONE_SHORT, {"reduce_loss": False}, totals)
    assert [part["losses"][0] for part in parts] == pytest.approx([5 * 4 / 8, 4 * 4 / 8])
    assert all(part["build_batches"] == part["forward"] == [] for part in parts)


def test_number_of_collectives(ranks: Ranks) -> None:
    (part, _) = ranks.run(rank_cases.nll_step, [[[1.0], [2.0]], [[3.0], [4.0]]], {})
    assert part["build_batches"] == ["all_reduce"]
    assert part["forward"] == ["all_reduce", "all_reduce"], "one for each micro-batch, none in backward"
    (part, _) = ranks.run(rank_cases.nll_step, [[[1.0], [2.0]], [[3.0], [4.0]]], {"reduce_loss": False})
    assert part["forward"] == []


BROKEN = {
    "no old_logprobs": "rank 1: GRPOLossConfig needs old_logprobs",
    "no context": "rank 1: build_batches got an empty list",
    "no context, selection": "rank 1: build_batches got an empty list",
    "no context, world": "rank 1: build_batches got an empty list",
    "mixed, part_ids": "rank 1: part_ids must lie between -1 and 1",
    "no old_logprobs, totals": "rank 1: GRPOLossConfig needs old_logprobs",
    "wrong length": "rank 1: old_logprobs has shape (1, 2)",
    "more micro-batches": "unequal numbers of micro-batches (3 in all)",
    "sp, no old_logprobs": "rank 1: GRPOLossConfig needs old_logprobs",
    "sp, other sequences": "hold different batches",
    "sp, one rank whole": "split their rows over a sequence-parallel mesh, the others do not",
    "sp, more micro-batches": "hold different batches",
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_error_of_one_rank_is_raised_on_all(how: str, ranks: Ranks) -> None:
    failures = ranks.outcomes(rank_cases.broken, how, limit=20)
    assert [failure.kind for failure in failures] == ["BatchError", "BatchError"]
    assert all(BROKEN[how] in failure.message for failure in failures), failures


def test_an_error_of_another_kind_is_raised_on_all(ranks: Ranks) -> None:
    first, second = ranks.outcomes(rank_cases.broken, "not a batch error", limit=20)
    assert first.kind == "BatchError"
    assert "rank 1" in first.message
    assert second.kind not in ("BatchError", "died")


@pytest.mark.parametrize(
    ("kind", "message"), [("sequence", "lacks the ranks"), ("vocabulary", "share one vocabulary and see the same")]
)
def test_groups_that_do_not_fit(kind: str, message: str, ranks: Ranks) -> None:
    for failure in ranks.outcomes(rank_cases.too_few_counted, kind, limit=20):
        assert isinstance(failure, Failure)
        assert message in failure.message


def test_a_pickled_context_needs_its_mesh_again(ranks: Ranks) -> None:
    assert all("sp_mesh" in failure.message for failure in ranks.outcomes(rank_cases.pickled, False, limit=20))
    assert ranks.run(rank_cases.pickled, True) == [pytest.approx(-1.0)] * 2


def test_fields_set_after_build(ranks: Ranks) -> None:
    assert ranks.run(rank_cases.late_fields, 3) == [[-1.0, -2.0], [-3.0, 0.0]]
    assert ranks.run(rank_cases.late_fields, 2) == [[-1.0, -2.0], [-3.0, 0.0]]
    for failure in ranks.outcomes(rank_cases.late_fields, 1, limit=20):
        assert "T=3 (whole rows)" in failure.message


def test_a_hang_names_the_rank_that_waited(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"after 2 s(.|\n)*rank 1 waited in:(.|\n)*all_reduce"):
        ranks.run(rank_cases.waits_forever, limit=2)


def test_metrics_in_verls_form_count_over_their_group(ranks: Ranks) -> None:
    """Counted over all ranks they would be half of that, and a rank outside of the group would be waited for."""
    assert ranks.run(rank_cases.verl_metrics) == [[1.0, 3.0], [1.0, 3.0]]
