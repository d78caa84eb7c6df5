"""Every collective of a step: which one, with how many numbers, and no other. docs/ranks.md says the same in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batches import random_step
from ranks.losses import LOSSES, make, step_of_all
from ranks.mesh_step import Case, Part, run_parts
from ranks.pool import Ranks
from rlloss.losses.agreement import FACTS
from rlloss.losses.step_check import MAX_TERMS

STEP = step_of_all()
COUNT = f"sum {FACTS + 1 + 3 * MAX_TERMS}"
SEQUENCES = 4
"""Sequences of each micro-batch: the step has eight, cut into two micro-batches on one data rank."""
VALUE, OF_SEQUENCES, METRICS = "sum 1", f"sum {SEQUENCES}", ["max 2", r"sum \d+", r"max \d+"]


def sizes(terms: int) -> str:
    """Tokens of each sequence, all and by term, of both micro-batches."""
    return f"gather {2 * SEQUENCES * (1 + terms)}"


OVER_DATA: dict[str, list[str]] = {
    **{name: [COUNT] for name in LOSSES},
    "vanilla-prompt": [COUNT, "sum 6"],
    "gspo-prompt": [COUNT, "sum 12"],
    "ce-prompt": [COUNT, "sum 6"],
    "clip-cov": [COUNT, "sum 3", r"gather \d+", "gather 1", r"gather \d+", COUNT],
    "kl-cov": [COUNT, "sum 3", r"gather \d+", COUNT],
    "top-entropy": [COUNT, "gather 1", r"gather \d+", COUNT],
    "rollout-mean": [COUNT, "sum 2", COUNT],
    "mixed": [COUNT] * 3,
    "mixed-on-tokens": [*[COUNT] * 3, "sum 12"],
}
"""What build_batches runs over data ranks: errors, choices over the step, counts, tokens of each prompt."""

ROLLOUT = [f"gather {SEQUENCES}", *[OF_SEQUENCES] * 8] * 2
"""Of each micro-batch: tokens of a sequence, three rules, what they reject, and perplexities."""

OVER_SEQUENCE: dict[str, tuple[list[str], int]] = {
    "vanilla": ([COUNT, sizes(1), COUNT], 0),
    "vanilla-kl-entropy": ([COUNT, sizes(3), COUNT], 0),
    "vanilla-sample-kl": ([COUNT, sizes(2), COUNT], 0),
    "sequence": ([COUNT, sizes(1), COUNT], 2),
    "gspo": ([COUNT, sizes(1), COUNT], 1),
    "vespo": ([COUNT, sizes(1), COUNT], 1),
    "gmpo": ([COUNT, sizes(2), COUNT], 3),
    "off-policy": ([COUNT, sizes(2), COUNT], 3),
    "oreal": ([COUNT, sizes(4), COUNT], 0),
    "rollout": ([COUNT, *ROLLOUT, sizes(1), COUNT], 0),
    "rollout-mean": ([COUNT, *ROLLOUT, "sum 2", sizes(2), COUNT], 0),
    "clip-cov": (
        [COUNT, sizes(0), "sum 3", r"gather \d+", "gather 1", r"gather \d+", sizes(2), COUNT],
        0,
    ),
    "kl-cov": ([COUNT, sizes(0), "sum 3", r"gather \d+", sizes(1), COUNT], 0),
    "vanilla-sum": ([COUNT, sizes(2), COUNT], 0),
    "gspo-prompt": ([COUNT, sizes(2), COUNT, "sum 12"], 1),
    "mixed": ([COUNT, sizes(2), COUNT, *[COUNT, sizes(1), COUNT] * 2], 1),
    "actor-critic": ([COUNT, sizes(3), COUNT], 0),
    "value": ([COUNT, sizes(1), COUNT], 0),
    "ce-square": ([COUNT, sizes(1), COUNT], 0),
}
"""What build_batches runs over sequence ranks, and how many sums over sequences forward does. A quantity of a sequence
is one sum, and a second one where its gradient is needed: gspo's and vespo's ratios have none of their own."""


def counted(names: Any, mesh: tuple[int, int, int], ranks: Ranks, **fields: Any) -> dict[str, Part]:
    """What rank 0 counted of each loss, in two micro-batches."""
    cases = []
    for name in names:
        loss = LOSSES[name]
        config = make(name, **{"mode": "chunk", **fields})
        cases.append(Case(config, STEP, mesh, 2, "packed", loss.keys, (), loss.per_sequence, loss.constants))
    parts, other = ranks.run(run_parts, cases)
    assert all(mine.calls == theirs.calls for mine, theirs in zip(parts, other, strict=True))
    return dict(zip(names, parts, strict=True))


def check(found: list[str], expected: list[str], name: str) -> None:
    assert len(found) == len(expected), (name, found)
    assert all(re.fullmatch(one, mine) for one, mine in zip(expected, found, strict=True)), (name, found)


@pytest.mark.filterwarnings("ignore:a row .1, T. without cu_seq_lens")
def test_data_ranks(ranks: Ranks) -> None:
    for name, part in counted(LOSSES, (2, 1, 1), ranks).items():
        check(part.calls["build_batches"], OVER_DATA[name], name)
        check(part.calls["forward"], [VALUE], name)
        check(part.calls["backward"], [], name)
        check(part.calls["metrics"], METRICS, name)


def test_sequence_ranks(ranks: Ranks) -> None:
    for name, part in counted(OVER_SEQUENCE, (1, 2, 1), ranks).items():
        build_batches, sums = OVER_SEQUENCE[name]
        check(part.calls["build_batches"], build_batches, name)
        check(part.calls["forward"], [*[OF_SEQUENCES] * sums, VALUE], name)
        check(part.calls["backward"], [], name)
        check(part.calls["metrics"], METRICS, name)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_without_reduction_forward_talks_to_nobody(mesh: tuple[int, int, int], ranks: Ranks) -> None:
    """But for sums over sequences, where these are cut."""
    for name, part in counted(OVER_SEQUENCE, mesh, ranks, reduce_loss=False).items():
        sums = OVER_SEQUENCE[name][1] if mesh[1] > 1 else 0
        check(part.calls["forward"], [OF_SEQUENCES] * sums, name)
        check(part.calls["backward"], [], name)
        if mesh[1] == 1 and name == "vanilla-sum":
            check(part.calls["build_batches"], [], name)


EAGER, ENTROPY, WORDS = ["max 17", "sum 17", "sum 17"], ["sum 17"], ["sum 51"]
VOCABULARY: dict[str, tuple[list[str], list[str], list[str]]] = {
    "vanilla": (EAGER, [], ["max 16", "sum 32", "max 1", "sum 2"]),
    "vanilla-kl-entropy": ([*EAGER, *ENTROPY], ENTROPY, ["max 16", "sum 48", "max 1", "sum 3"]),
    "distill": ([*EAGER, *WORDS], [], ["max 16", "sum 80", "max 1", "sum 5"]),
    "gspo": (EAGER, [], ["max 16", "sum 32", "max 1", "sum 2"] * 2),
    "actor-critic": (EAGER, [], ["max 16", "sum 32", "max 1", "sum 2"]),
}
"""Forward and backward of eager mode on the 17 tokens of the last micro-batch, forward of chunk mode in chunks of 16:
a maximum, then sums of exp and the label's logit (of q exp for an entropy, of K words of a teacher)."""
HIDDEN = "sum 174"
"""The gradient of the hidden states, 29 places of width 6."""


def test_vocabulary_ranks(ranks: Ranks) -> None:
    eager = counted(VOCABULARY, (1, 1, 2), ranks, mode="eager")
    chunk = counted(VOCABULARY, (1, 1, 2), ranks, chunk_size=16)
    for name, (forward, backward, chunks) in VOCABULARY.items():
        check(eager[name].calls["forward"], ["gather 3", *forward], name)
        check(eager[name].calls["backward"], [*backward, HIDDEN], name)
        check(chunk[name].calls["forward"], ["gather 3", *chunks, HIDDEN], name)
        check(chunk[name].calls["backward"], [], name)
        for part in (eager[name], chunk[name]):
            check(part.calls["build_batches"] + part.calls["metrics"], [], name)


def test_the_number_of_chunks_comes_from_shapes(ranks: Ranks) -> None:
    """Also where tokens have no gradient: rows without one are projected by every rank of the vocabulary."""
    step = random_step(3, [40])
    for sequence in step.sequences:
        sequence["advantages"] = sequence["advantages"] * 0
    case = Case(make("gspo", mode="chunk", chunk_size=10), step, (1, 1, 2), 1, "packed", ("old_logprobs", "advantages"))
    (part,), _ = ranks.run(run_parts, [case])
    chunks = -(-int(part.metrics["tokens"]) // 10)
    assert len(part.calls["forward"]) == 2 + 2 * 2 * chunks
