"""Training on several ranks of torchrun: who takes which rows, and what is put together again.

Every rank holds the whole model. Sampling and log-probs are shared out by rows, which are seeded one by one, and
gathered; micro-batches are shared out and their gradients averaged. A run on any number of ranks is the same run, to
rounding.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlloss.distributed import all_gather, all_reduce_max, is_initialized, rank, world_size
from rlloss.errors import RLLossError

TIME_LIMIT = 600.0
"""Seconds after which a rank that waits for another one gives up; a rank that dies is noticed at once."""

T = TypeVar("T")


@contextmanager
def ranks_of_torchrun(device: str) -> Iterator[None]:
    """Joins the ranks that torchrun started; does nothing on one process.

    Args:
        device: Where the model lies, as torch names it.

    Raises:
        RLLossError: Another rank died, or did not answer in time.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or is_initialized():
        yield
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIME_LIMIT))
    own = rank()
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise RLLossError(
            f"rank {own} lost another rank, which has died or does not answer ({str(error).splitlines()[0]}). Nothing "
            f"is lost up to the last checkpoint: start the same command again with --resume, on any number of ranks."
        ) from error
    finally:
        dist.destroy_process_group()


def is_main() -> bool:
    """Tells whether this rank writes files and talks to the user."""
    return rank() == 0


def own_rows(count: int) -> range:
    """Returns this rank's part of the numbers 0 to `count - 1`: consecutive, of nearly equal size, in rank order."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def share(items: Sequence[T]) -> Sequence[T]:
    """Returns this rank's part of a sequence; see `own_rows`."""
    rows = own_rows(len(items))
    return items[rows.start : rows.stop]


def gather_rows(rows: Tensor) -> Tensor:
    """Joins the rows `[n, ...]` of all ranks in their order; n may differ, everything behind it may not."""
    if world_size() == 1:
        return rows
    sizes = all_gather(torch.tensor([rows.shape[0]], device=rows.device)).tolist()
    longest = max(sizes)
    padded = torch.cat([rows, rows.new_zeros((longest - rows.shape[0], *rows.shape[1:]))])
    blocks = torch.split(all_gather(padded), longest)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def micro_batches(rows: Tensor, size: int) -> list[tuple[Tensor, bool]]:
    """Cuts this rank's share of rows into micro-batches, equally many on every rank.

    Args:
        rows: Row numbers `[n]`, at least one, the same on every rank.
        size: Rows of a micro-batch.

    Returns:
        Row numbers, and whether their tokens count: a rank with fewer rows fills up with some that do not.
    """
    largest = -(-len(rows) // world_size())
    own = rows.tensor_split(world_size())[rank()]
    blocks = [(block, True) for block in torch.split(own, size) if len(block)]
    return blocks + [(rows[:1], False)] * (-(-largest // size) - len(blocks))


def on_any_rank(flag: bool) -> bool:
    """Tells whether a flag is set on some rank."""
    return flag if world_size() == 1 else bool(all_reduce_max(torch.tensor([float(flag)])))


def _is_lost(error: RuntimeError) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
