"""Large buffers on a CPU are taken again, never while anybody holds a part of them, and given back on request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rlloss
from rlloss import CELossConfig
from rlloss.heads import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="buffers are kept on Linux only")

LIKE = torch.empty(1)


@pytest.fixture(autouse=True)
def every_buffer_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "SMALLEST", 1)
    monkeypatch.setattr(memory, "_POOL", memory._Pool())
    yield


def take(*shape: int) -> Tensor:
    return memory.large_empty(LIKE, shape, torch.float32)


def test_a_buffer_is_taken_again_when_its_last_view_is_gone() -> None:
    first = take(100, 10)
    place, view = first.data_ptr(), first[7:].view(-1)
    del first
    second = take(100, 10)
    assert second.data_ptr() != place
    del view
    assert take(90, 10).data_ptr() == place


@pytest.mark.parametrize("other", [1, 79 * 10, 101 * 10])
def test_a_buffer_that_does_not_fit_makes_room(other: int) -> None:
    take(100, 10)
    kept = take(other)
    assert rlloss.release_buffers() == 0
    assert kept.numel() == other


def test_small_buffers_make_room_before_large_ones() -> None:
    large, small = take(1000), take(10)
    del large, small
    held = take(4)
    assert rlloss.release_buffers() == 4000
    del held
    assert rlloss.release_buffers() == 16
    large, small = take(1000), take(10)
    del large, small
    held = take(30)
    assert rlloss.release_buffers() == 0
    assert held.numel() == 30


def test_few_unused_buffers_are_kept() -> None:
    several = [take(100) for _ in range(memory.MOST_IDLE + 3)]
    del several
    again = take(100)
    assert rlloss.release_buffers() == memory.MOST_IDLE * 400
    assert rlloss.release_buffers() == 0
    del again
    assert rlloss.release_buffers() == 400


def test_what_is_in_use_is_not_released() -> None:
    held = take(100).fill_(3.0)
    assert rlloss.release_buffers() == 0
    assert take(100).fill_(4.0).sum() == 400.0
    assert held.sum() == 300.0
    numbers = held.numpy()
    del held
    take(100).fill_(5.0)
    assert numbers.sum() == 300.0


def test_small_buffers_and_other_devices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.large_empty(torch.empty(1, device="meta"), (100,), torch.float32)
    monkeypatch.setattr(memory, "SMALLEST", 401)
    take(100)
    assert rlloss.release_buffers() == 0


def test_threads_get_buffers_of_their_own() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = take(64).fill_(number)
            if mine.sum() != 64 * number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def gradients(seed: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, 50, 8, generator=make).requires_grad_()
    weight = torch.randn(40, 8, generator=make).requires_grad_()
    config = CELossConfig(mode="chunk", chunk_size=16)
    batch = {"shifted_labels": torch.randint(0, 40, (1, 50), generator=make)}
    config.loss_ctx_cls.build_batches([config.build(batch)])[0].forward(hidden, weight).loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def test_gradients_that_are_kept_stay_as_they_are() -> None:
    """Also where what a buffer held before was NaN."""
    alone = [tuple(part.clone() for part in gradients(seed)) for seed in range(4)]
    for size in (40 * 8, 16 * 40):
        take(size).fill_(torch.nan)
    together = [gradients(seed) for seed in range(4)]
    for (hidden, weight), (same_hidden, same_weight) in zip(alone, together, strict=True):
        torch.testing.assert_close(hidden, same_hidden, rtol=0.0, atol=0.0)
        torch.testing.assert_close(weight, same_weight, rtol=0.0, atol=0.0)


def test_a_step_holds_a_chunk_and_the_gradients() -> None:
    found = gradients(0)
    # The chunk and what its rows were multiplied in are idle, the gradients are lent.
    rows = 2 * 16 * 8 * 4
    assert 16 * 40 * 4 < rlloss.release_buffers() <= 16 * 40 * 4 + rows
    del found
    assert rlloss.release_buffers() == (40 * 8 + 50 * 8) * 4
