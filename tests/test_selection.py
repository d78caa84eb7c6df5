"""Choices over the whole step: the formula's tokens, and the same ones however the step is cut."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import oracles_policy as policy
from oracles_policy import Tokens
from rlloss import GRPOLossConfig, GRPOLossContext
from rlloss.losses import selection
from rlloss.losses.policy_covariance import covariances
from rlloss.losses.selection import StepTokens

LENGTHS = [5, 3, 7, 1, 6, 4]
SPLITS = [[0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 2, 1], [0, 1, 2, 3, 4, 5], [3, 0, 1, 1, 0, 2]]
CLIP_COV = {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
KL_COV = {"loss_type": "kl_cov", "kl_cov_ratio": 0.2}


def sequences(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n in LENGTHS:
        log_prob = -torch.rand(n, generator=generator, dtype=torch.float64) * 3 - 0.1
        made.append(
            {
                "shifted_labels": torch.randint(0, 50, (n,), generator=generator),
                "selection_logprobs": log_prob,
                "old_logprobs": log_prob + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64),
                "advantages": torch.randn(n, generator=generator, dtype=torch.float64),
                "selection_entropy": torch.rand(n, generator=generator, dtype=torch.float64),
            }
        )
    return made


def chosen(
    config: GRPOLossConfig, split: list[int], seed: int, *, packed: bool = False, field: str = "selected"
) -> list[list[bool]]:
    """What is chosen in each sequence when the sequences are dealt out to micro-batches; rows are padded."""
    made = sequences(seed)
    contexts, places = [], {}
    for part in sorted(set(split)):
        members = [i for i, p in enumerate(split) if p == part]
        width = max(LENGTHS[i] for i in members) + part
        batch: dict[str, Any] = {}
        for name in made[0]:
            fill = -100 if name == "shifted_labels" else float("nan")
            if packed:
                batch[name] = torch.cat([made[i][name] for i in members])[None]
            else:
                rows = [pad(made[i][name], (part, width - part - LENGTHS[i]), value=fill) for i in members]
                batch[name] = torch.stack(rows)
        if packed:
            batch["num_tokens"] = [LENGTHS[i] for i in members]
        for row, i in enumerate(members):
            start = sum(LENGTHS[j] for j in members[:row])
            places[i] = (len(contexts), 0 if packed else row, start if packed else part)
        contexts.append(config.build(batch))
    GRPOLossContext.build_batches(contexts)
    result = []
    for i, n in enumerate(LENGTHS):
        context, row, start = places[i]
        mask = getattr(contexts[context].loss_kwargs, field)
        result.append(mask[row, start : start + n].tolist())
    return result


def joined(parts: list[list[bool]]) -> list[bool]:
    return list(chain.from_iterable(parts))


def flat(seed: int) -> Tokens:
    made = sequences(seed)
    columns = [
        torch.cat([s[name] for s in made]).tolist() for name in ("selection_logprobs", "old_logprobs", "advantages")
    ]
    return Tokens(*columns, [1.0] * len(columns[0]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("policy_loss", [CLIP_COV, KL_COV], ids=lambda p: p["loss_type"])
def test_no_split_changes_a_choice(policy_loss: dict[str, Any], split: list[int], packed: bool) -> None:
    config = GRPOLossConfig(policy_loss_cfg=policy_loss, top_entropy_quantile=0.3)
    for field in ("selected", "policy_mask"):
        assert chosen(config, split, 4, packed=packed, field=field) == chosen(config, SPLITS[0], 4, field=field)


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_takes_the_largest_covariances(seed: int) -> None:
    found = joined(chosen(GRPOLossConfig(policy_loss_cfg=KL_COV), SPLITS[1], seed))
    covariances = policy.covariances(flat(seed))
    largest = sorted(range(len(found)), key=lambda t: -covariances[t])[: int(0.2 * len(found))]
    assert [t for t, taken in enumerate(found) if taken] == sorted(largest)


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_takes_candidates_only_and_as_many_as_it_should(seed: int) -> None:
    found = joined(chosen(GRPOLossConfig(policy_loss_cfg=CLIP_COV), SPLITS[1], seed))
    candidates = policy.clip_cov_candidates(flat(seed), (0.05, 5.0), 0.2, 0.2)
    taken = {t for t, one in enumerate(found) if one}
    assert taken <= candidates
    assert len(taken) == min(int(0.2 * len(found)), len(candidates))


def test_the_seed_changes_the_choice_of_clip_cov() -> None:
    choices = [chosen(GRPOLossConfig(policy_loss_cfg=CLIP_COV | {"seed": seed}), SPLITS[0], 4) for seed in range(6)]
    assert len({str(choice) for choice in choices}) > 1


def test_the_hash_is_spread_over_candidates() -> None:
    """Over many seeds every candidate is taken about as often as any other."""
    counts = torch.zeros(sum(LENGTHS))
    for seed in range(200):
        found = chosen(GRPOLossConfig(policy_loss_cfg=CLIP_COV | {"seed": seed}), SPLITS[0], 4)
        counts += torch.tensor(joined(found)).float()
    taken = counts[counts > 0]
    expected = counts.sum() / len(taken)
    assert len(taken) == len(policy.clip_cov_candidates(flat(4), (0.05, 5.0), 0.2, 0.2))
    assert float((taken - expected).abs().max()) < 5 * float(expected) ** 0.5


def test_top_entropy_is_the_quantile() -> None:
    found = joined(chosen(GRPOLossConfig(top_entropy_quantile=0.3), SPLITS[1], 2, field="policy_mask"))
    entropy = torch.cat([s["selection_entropy"] for s in sequences(2)]).float()
    assert found == (entropy >= torch.quantile(entropy, 0.7)).tolist()


def test_a_choice_is_made_again_when_its_numbers_change() -> None:
    config = GRPOLossConfig(policy_loss_cfg=KL_COV)
    made = sequences(1)[2]
    context = config.build({name: value[None] for name, value in made.items()} | {"num_tokens": [7]})
    GRPOLossContext.build_batches([context])
    first = context.loss_kwargs.selected
    context.loss_kwargs.advantages = -context.loss_kwargs.advantages
    GRPOLossContext.build_batches([context])
    assert not torch.equal(first, context.loss_kwargs.selected)


class Rank:
    """A rank of a group of threads; what it gives to a collective meets what the others give."""

    def __init__(self, number: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.number, self.slots, self.barrier = number, slots, barrier

    def exchange(self, values: Tensor) -> list[Tensor]:
        self.slots[self.number] = values
        self.barrier.wait(timeout=30)
        everyone = list(self.slots)
        self.barrier.wait(timeout=30)
        return everyone


@pytest.mark.parametrize("empty", [False, True])
def test_ranks_choose_together(empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks choose what one would; a rank without contexts only takes part."""
    monkeypatch.setattr(selection, "all_reduce_sum", lambda values, rank: torch.stack(rank.exchange(values)).sum(0))
    monkeypatch.setattr(selection, "all_gather", lambda values, rank: torch.cat(rank.exchange(values)))
    config = GRPOLossConfig(policy_loss_cfg=KL_COV, top_entropy_quantile=0.3)
    made = sequences(3)
    contexts = [
        config.build({name: value[None] for name, value in row.items()} | {"num_tokens": [n]})
        for row, n in zip(made, LENGTHS, strict=True)
    ]
    shares = [contexts, []] if empty else [contexts[:2], contexts[2:]]
    slots: list[Any] = [None, None]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [Rank(number, slots, barrier) for number in range(2)]
        waits = [pool.submit(contexts[0].select_step, share, rank) for share, rank in zip(shares, ranks, strict=True)]
        for wait in waits:
            wait.result(timeout=60)
    monkeypatch.undo()
    for field in ("selected", "policy_mask"):
        found = [getattr(context.loss_kwargs, field)[0].tolist() for context in contexts]
        assert found == chosen(config, SPLITS[0], 3, field=field)


def test_small_steps() -> None:
    """One token has covariance 0, and a share of less than one token is one token."""
    one = torch.tensor([2.0], dtype=torch.float64)
    nothing, key = torch.empty(0), torch.zeros(1, dtype=torch.long)
    assert covariances(StepTokens(one, one, one, nothing, key))[0].item() == 0.0
    few = GRPOLossConfig(policy_loss_cfg=CLIP_COV | {"clip_cov_ratio": 0.01})
    assert sum(joined(chosen(few, SPLITS[1], 4))) == 1
    few = GRPOLossConfig(policy_loss_cfg=KL_COV | {"kl_cov_ratio": 0.01})
    assert sum(joined(chosen(few, SPLITS[1], 4))) == 1
