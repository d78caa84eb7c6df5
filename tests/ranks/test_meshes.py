"""A step cut over a mesh of ranks gives the loss, gradients and metrics of one process."""

from __future__ import annotations

from typing import Any

import pytest

from batches import assert_same, random_step, run_step
from ranks.losses import LOSSES, make
from ranks.mesh_step import MESHES, Case, join, run_parts
from ranks.pool import Ranks

STEP = random_step(3, [5, 9, 1, 7, 12, 3, 8, 6])
quiet = pytest.mark.filterwarnings("ignore:a row .1, T. without cu_seq_lens")


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same loss on one process, one padded batch, eager."""
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            cache[name] = run_step(make(name), STEP, keys=LOSSES[name].keys)
        return cache[name]

    return get


def check(cases: dict[str, Case], ranks: Ranks, reference: Any, bound: float = 1e-12) -> None:
    """Runs steps that share a mesh, and compares each with one process."""
    listed = list(cases.values())
    parts = ranks.run(run_parts, listed, world=listed[0].world)
    for number, (name, case) in enumerate(cases.items()):
        found = join(case, [part[number] for part in parts])
        try:
            assert_same(found, reference(name.split("/")[0]), bound, bound)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@quiet
@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_loss(mesh: tuple[int, int, int], mode: str, ranks: Ranks, reference: Any) -> None:
    cases = {}
    for number, (name, loss) in enumerate(LOSSES.items()):
        for layout in ("padded", "packed"):
            parts = 1 + (number + (layout == "packed")) % 3
            config = make(name, mode=mode, chunk_size=5)
            cases[f"{name}/{layout} in {parts}"] = Case(config, STEP, mesh, parts, layout, loss.keys)
    check(cases, ranks, reference)
