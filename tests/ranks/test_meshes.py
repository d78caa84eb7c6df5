"""A step cut over a mesh of ranks gives the loss, gradients and metrics of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from batches import assert_same, run_step
from ranks.losses import LOSSES, make, step_of_all
from ranks.mesh_step import MESHES, Case, join, run_parts
from ranks.pool import Ranks

STEP = step_of_all()
Way = tuple[str, str, int]
WAYS: list[Way] = list(itertools.product(("eager", "chunk"), ("padded", "packed"), (1, 2, 3)))
"""Mode, layout, micro-batches."""
LATE = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "selection_logprobs")
STEP_SECONDS = 0.1
"""What a step of one rank may take; three times what it took on two busy cores."""
quiet = pytest.mark.filterwarnings("ignore:a row .1, T. without cu_seq_lens")


def case_of(name: str, mesh: tuple[int, int, int] = (1, 1, 1), way: Way = ("eager", "padded", 1)) -> Case:
    """A loss on a mesh; in some ways log-probs are set after build, as this rank's part."""
    loss, (mode, layout, parts) = LOSSES[name], way
    config = make(name, mode=mode, chunk_size=5)
    settable = config._loss_kwargs_cls.model_fields if (parts + (mode == "chunk")) % 2 == 0 else ()
    late = tuple(key for key in LATE if key in loss.keys and key in settable)
    return Case(config, STEP, mesh, parts, layout, loss.keys, late, loss.per_sequence, loss.constants)


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    """Every loss on one process: one padded batch, eager."""
    cases = [case_of(name) for name in LOSSES]
    (parts,) = ranks.run(run_parts, cases, world=1)
    return {name: join(case, [part]) for name, case, part in zip(LOSSES, cases, parts, strict=True)}


@pytest.mark.parametrize("name", ["vanilla-sample-kl", "gspo", "ce-square"])
def test_the_reference_needs_no_ranks(name: str, reference: dict[str, Any]) -> None:
    assert_same(run_step(make(name), STEP, keys=LOSSES[name].keys), reference[name], 1e-14, 1e-14)


def check(cases: dict[str, Case], ranks: Ranks, reference: dict[str, Any], bound: float = 1e-12) -> None:
    """Runs steps that share a mesh, and compares each with one process."""
    listed = list(cases.values())
    world = listed[0].world
    parts = ranks.run(run_parts, listed, world=world, limit=60 + STEP_SECONDS * len(listed) * world)
    for number, (name, case) in enumerate(cases.items()):
        found = join(case, [part[number] for part in parts])
        try:
            assert_same(found, reference[name.split("/")[0]], bound, bound)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def cases_of(mesh: tuple[int, int, int], ways: int) -> dict[str, Case]:
    """Every loss on a mesh in some of the ways, starting from another one for each loss and mesh."""
    cases = {}
    for number, name in enumerate(LOSSES, start=MESHES.index(mesh) if mesh in MESHES else 0):
        for turn in range(ways):
            way = WAYS[(5 * number + turn) % len(WAYS)]
            cases[f"{name}/{way}"] = case_of(name, mesh, way)
    return cases


@quiet
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_loss(mesh: tuple[int, int, int], ranks: Ranks, reference: dict[str, Any]) -> None:
    check(cases_of(mesh, 1 if mesh.count(2) > 1 else 2), ranks, reference)


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, (2, 2, 2)], ids=str)
def test_every_loss_in_every_way(mesh: tuple[int, int, int], ranks: Ranks, reference: dict[str, Any]) -> None:
    check(cases_of(mesh, len(WAYS)), ranks, reference)
