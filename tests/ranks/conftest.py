"""The ranks: one pool of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(8)
    yield pool
    pool.stop()
