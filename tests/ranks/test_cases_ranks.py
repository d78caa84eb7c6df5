"""Public cases of kind A, K and L on real processes, with the values that the reports give; names are the case ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batches import distance
from ranks import cases
from ranks.cases import nlls
from ranks.pool import Ranks
from rlloss import CELossConfig, GRPOLossConfig, RolloutImportanceSampling
from steps import HEADS

CLIP = {"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.2}
POLICIES: tuple[dict[str, Any], ...] = ({"policy_loss_cfg": CLIP}, {"policy_loss_cfg": {"loss_type": "gspo"}})


def supervised(**fields: Any) -> list[CELossConfig]:
    """Cross-entropy in every mode."""
    return [CELossConfig(**head, **fields) for head in HEADS.values()]


def policies(**fields: Any) -> list[GRPOLossConfig]:
    """A loss on tokens and one on sequences, in every mode."""
    return [GRPOLossConfig(**{**policy, **head, **fields}) for policy in POLICIES for head in HEADS.values()]


def policy_part(count: int, counted: bool = True, **rows: Any) -> cases.Part:
    """A sequence with log-prob -1 at each token, ratio 1 and advantage 1 unless told otherwise."""
    fixed = {"log_probs": [-1.0] * count, "mask": [counted] * count}
    return {**fixed, "old_logprobs": [-1.0] * count, "advantages": [1.0] * count, **rows}


def by_config(ranks: Ranks, *args: Any, world: int = 2) -> list[list[dict[str, Any]]]:
    """What each rank gave, config by config."""
    return [list(of_ranks) for of_ranks in zip(*ranks.run(cases.steps, *args, world=world, limit=30), strict=True)]


def each_rank(*args: Any) -> Iterator[dict[str, Any]]:
    """What each rank gave, one config after the other."""
    return itertools.chain.from_iterable(by_config(*args))


def test_a02_ranks_with_few_tokens_weigh_no_more(ranks: Ranks) -> None:
    parts = [[nlls(1.0, 1.0, 1.0, 1.0, 1.0)], [nlls(4.0)]]
    for local in by_config(ranks, supervised(reduce_loss=False), parts):
        assert [rank["loss"] for rank in local] == pytest.approx([5 * 2 / 6, 4 * 2 / 6], abs=1e-6)
    for rank in each_rank(ranks, supervised(), parts):
        assert rank["loss"] == pytest.approx(1.5, abs=1e-6)
        assert rank["metrics"]["loss"] == pytest.approx(1.5, abs=1e-6)
        assert rank["metrics"]["nll"] == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(("world", "tokens"), [(2, 4), pytest.param(8, 800, marks=pytest.mark.slow)])
def test_a04_a_row_over_ranks_is_not_divided_by_them(world: int, tokens: int, ranks: Ranks) -> None:
    parts = [[{**nlls(*[1.0] * tokens), "num_tokens": [tokens]}]]
    for local in by_config(ranks, supervised(reduce_loss=False), parts, world, world=world):
        assert sum(rank["loss"] for rank in local) / world == pytest.approx(1.0, abs=1e-6)
    configs = supervised()
    whole = by_config(ranks, configs, parts, 1, world=1)
    over_ranks = by_config(ranks, configs, parts, world, world=world)
    for config, (alone,), cut in zip(configs, whole, over_ranks, strict=True):
        gradient = sum(rank["weight_grad"] for rank in cut) / world
        # Liger adds up in float32 whatever comes in: 800 equal tokens are 2e-6 off on one process as well.
        bound = 1e-5 if config.mode == "liger" else 1e-12
        assert distance(gradient, alone["weight_grad"]) <= bound
        for rank in cut:
            assert rank["loss"] == pytest.approx(1.0, abs=1e-6)
            assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_a11_the_kl_term_has_the_denominator_of_the_step(parts: int, ranks: Ranks) -> None:
    """KL of 0.1 at each token of two ranks with one or two micro-batches, nothing else: 0.1."""
    part = policy_part(1, advantages=[0.0], ref_logprobs=[-1.1])
    configs = policies(use_kl_loss=True, kl_loss_type="abs", kl_loss_coef=1.0)
    for rank in each_rank(ranks, configs, [[part] * parts] * 2):
        assert rank["loss"] == pytest.approx(0.1, abs=1e-6)
        assert rank["metrics"]["kl_loss"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"loss_reduction": "token"}, 1.25),
        ({"loss_reduction": "sample"}, 1.5),
        ({"loss_reduction": "sequence_sum"}, 2.5),
        ({"loss_reduction": "constant", "loss_length": 4.0}, 0.625),
    ],
    ids=str,
)
def test_a12_each_reduction_over_two_ranks(fields: dict[str, Any], right: float, ranks: Ranks) -> None:
    """Sequences of 1 and 3 tokens with losses 2 and 1, on a rank each."""
    parts = [[policy_part(1, advantages=[-2.0])], [policy_part(3, advantages=[-1.0] * 3)]]
    configs = [GRPOLossConfig(policy_loss_cfg=CLIP, **head, **fields) for head in HEADS.values()]
    for rank in each_rank(ranks, configs, parts):
        assert rank["loss"] == pytest.approx(right, abs=1e-6)


SPLITS = [
    [[nlls(2.0, 1.0)], [nlls(1.0, 1.0)]],
    [[nlls(2.0)], [nlls(1.0, 1.0, 1.0)]],
    [[nlls(2.0), nlls(1.0)], [nlls(1.0), nlls(1.0)]],
    [[nlls(2.0, 1.0), nlls(1.0, 1.0)], []],
]


@pytest.mark.parametrize("parts", SPLITS, ids=["2 + 2", "1 + 3", "1, 1 + 1, 1", "all on one rank"])
def test_k03_the_logged_loss_is_that_of_the_step(parts: Any, ranks: Ranks) -> None:
    """The last split has unequal numbers of micro-batches: `reduce_loss=False` logs the same."""
    configs = supervised(reduce_loss=False) + (supervised() if len(parts[1]) == len(parts[0]) else [])
    for rank in each_rank(ranks, configs, parts):
        for name in ("loss", "ce_loss", "nll"):
            assert rank["metrics"][name] == pytest.approx(1.25, abs=1e-6)
        assert rank["metrics"]["tokens"] == rank["metrics"]["sequences"] == 4


@pytest.mark.parametrize("sequence_ranks", [1, 2])
def test_k03_tokens_and_sequences_have_counts_of_their_own(sequence_ranks: int, ranks: Ranks) -> None:
    """Sequences of 1 and 3 tokens, which differ from the sampling engine by 0.4 and 0.1 nats a token."""
    one = policy_part(1, rollout_logprobs=[-1.4])
    three = policy_part(3, rollout_logprobs=[-1.1] * 3)
    both = {name: [*one[name], *three[name]] for name in one} | {"num_tokens": [1, 3]}
    rules = RolloutImportanceSampling(
        rollout_is_level="sequence", rollout_is_mode="mask", rollout_is_mask_threshold=(0.0, 1.4)
    )
    parts = [[both]] if sequence_ranks == 2 else [[one], [three]]
    for rank in each_rank(ranks, policies(rollout_is=rules), parts, sequence_ranks):
        found = rank["metrics"]
        assert found["mismatch_k1"] == pytest.approx(-(0.4 + 3 * 0.1) / 4, abs=1e-6)
        assert found["log_ppl_diff"] == pytest.approx(-(0.4 + 0.1) / 2, abs=1e-6)
        assert found["rollout_rejected_tokens"] == pytest.approx(1 / 4), "exp(0.4) and exp(0.3): the first leaves"
        assert found["rollout_rejected_sequences"] == pytest.approx(1 / 2)
        assert (found["tokens"], found["sequences"], found["dropped_tokens"]) == (3, 1, 1)


CLIPPED, FREE = policy_part(1, old_logprobs=[-2.0]), policy_part(1)


@pytest.mark.parametrize(
    "parts", [[[CLIPPED], [FREE]], [[CLIPPED, FREE], []], [[FREE], [CLIPPED]]], ids=["ranks", "one empty", "other way"]
)
def test_k04_ranks_chunks_and_micro_batches_are_averaged(parts: Any, ranks: Ranks) -> None:
    """Ratios e and 1: half of the tokens are clipped; a rank without tokens counts for nothing."""
    configs = [GRPOLossConfig(policy_loss_cfg=CLIP, reduce_loss=False, **head) for head in HEADS.values()]
    for rank in each_rank(ranks, configs, parts):
        assert rank["metrics"]["clip_frac_high"] == pytest.approx(0.5)
        assert rank["metrics"]["ratio_mean"] == pytest.approx((1 + torch.e) / 2)
        assert rank["metrics"]["ratio_min"] == pytest.approx(1.0)
        assert rank["metrics"]["ratio_max"] == pytest.approx(torch.e)


@pytest.mark.parametrize("sequence_ranks", [1, 2])
def test_k05_metrics_hold_no_graph(sequence_ranks: int, ranks: Ranks) -> None:
    part = policy_part(3, ref_logprobs=[-1.1, -1.0, -0.9])
    configs = policies(use_kl_loss=True, loss_reduction="sample")
    for rank in each_rank(ranks, configs, [[part]] * (2 // sequence_ranks), sequence_ranks):
        assert rank["graph_free"]
        assert all(type(value) is float for value in rank["metrics"].values())


@pytest.mark.parametrize("sequence_ranks", [1, 2])
def test_l01_a_rank_with_nothing_to_train(sequence_ranks: int, ranks: Ranks) -> None:
    """All labels of rank 1 are ignored, in a micro-batch of its own or in its part of the row."""
    full, none = policy_part(2), policy_part(2, counted=False)
    row = {name: [*full[name], *none[name]] for name in full}
    parts = [[row]] if sequence_ranks == 2 else [[full], [none]]
    for first, second in by_config(ranks, policies(loss_reduction="sample"), parts, sequence_ranks):
        assert first["losses"] == second["losses"] == [pytest.approx(-1.0)]
        assert first["collectives"] == second["collectives"]
        assert not second["weight_grad"].any()
        assert all(torch.count_nonzero(gradient) == 0 for gradient in second["hidden_grads"])
        assert first["metrics"] == second["metrics"]
        assert first["metrics"]["tokens"] == 2
        assert max(first["seconds"], second["seconds"]) < 10


def test_l01_a_rank_with_nothing_at_all(ranks: Ranks) -> None:
    for first, second in by_config(ranks, policies() + supervised(), [[policy_part(2)], []]):
        assert first["losses"] == second["losses"]
        assert first["collectives"] == second["collectives"]
        assert not second["weight_grad"].any()
        assert first["metrics"] == second["metrics"]


@pytest.mark.parametrize("sequence_ranks", [1, 2])
def test_l02_a_step_without_tokens_says_so(sequence_ranks: int, ranks: Ranks) -> None:
    """Before forward in `global_grad_tokens`, and after it in the metrics."""
    parts = [[policy_part(2, counted=False)]] * (2 // sequence_ranks)
    for rank in each_rank(ranks, policies() + supervised(), parts, sequence_ranks):
        assert rank["losses"] == [0.0]
        assert rank["tokens"] == rank["metrics"]["tokens"] == 0
        assert not rank["weight_grad"].any()
        assert all(value == value for value in rank["metrics"].values())
