"""A step cut over a mesh of ranks gives the loss, gradients and metrics of one process."""

from __future__ import annotations

from typing import Any

import pytest

from batches import assert_same, random_step, run_step
from ranks.losses import LOSSES, make
from ranks.mesh_step import MESHES, Case, join, run_part
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


@quiet
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_loss(mesh: tuple[int, int, int], mode: str, layout: str, ranks: Ranks, reference: Any) -> None:
    for number, name in enumerate(LOSSES):
        config = make(name, mode=mode, chunk_size=5)
        case = Case(config, STEP, mesh, 1 + number % 3, layout, LOSSES[name].keys)
        found = join(case, ranks.run(run_part, case, world=case.world))
        try:
            assert_same(found, reference(name), 1e-12, 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
