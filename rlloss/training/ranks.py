"""Training on several ranks of torchrun: who takes which rows, and what is put together again.

Sampling and log-probs are shared out by rows, which are seeded one by one, and gathered; micro-batches are shared out,
equally many for each rank. A run on any number of ranks is the same run, to rounding.
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from rlloss.distributed import all_gather, all_reduce_max, differences, is_initialized, rank, world_size
from rlloss.errors import ConfigError, RLLossError
from rlloss.training.watch import GO_ON, Watch

PATIENCE = 20.0
"""Seconds that SIGTERM leaves a rank which is about to end; torchrun kills it after 30."""

NAMED_FACTS = 3
"""Differences between ranks that an error lists; it counts the others."""

T = TypeVar("T")


@contextmanager
def ranks_of_torchrun(device: str, time_limit: float) -> Iterator[None]:
    """Joins the ranks that torchrun started; does nothing on one process.

    Args:
        device: Where the model lies, as torch names it.
        time_limit: Seconds that a rank waits for one that lives; one that dies is noticed at once.

    Raises:
        RLLossError: Another rank died, failed, or did not come in time.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or is_initialized():
        yield
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    limit = timedelta(seconds=time_limit)
    store, own, world = next(rendezvous("env://", timeout=limit))
    before = signal.signal(signal.SIGTERM, _leave_soon)
    try:
        with Watch(store.clone(), own, world, time_limit) as watch:
            shared = dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=shared, rank=own, world_size=world, timeout=limit)
            try:
                yield
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise RLLossError(
                    f"rank {own} lost another rank: {watch.explain(error)} ({str(error).splitlines()[0]}). {GO_ON}"
                ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
        if is_initialized():
            dist.destroy_process_group()


def _leave_soon(number: int, frame: FrameType | None) -> None:
    """Ends this rank in a while: torchrun sends SIGTERM when another one died, and what to do next is still to say."""
    timer = threading.Timer(PATIENCE, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


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


def weight_sums(model: nn.Module) -> dict[str, int]:
    """Returns a number for each tensor of a model that differs where its bits do; nothing on one process.

    It is the sum of its bytes as integers, exact in any order, and costs one read of the weights.
    """
    if world_size() == 1:
        return {}
    state = model.state_dict()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [value.detach().contiguous().view(kinds[value.element_size()]).sum() for value in state.values()]
    return {
        f"sum of the weights {name}": number for name, number in zip(state, torch.stack(sums).tolist(), strict=True)
    }


def check_alike(facts: Mapping[str, object]) -> None:
    """Compares what the ranks start from, by one gather; does nothing on one process.

    Args:
        facts: By name: the config, the folder, sums of the weights.

    Raises:
        ConfigError: Something is not the same everywhere; raised on every rank, with the ranks and their values.
    """
    found = differences(facts) if world_size() > 1 else []
    if found:
        more = f"; and {len(found) - NAMED_FACTS} more" if len(found) > NAMED_FACTS else ""
        raise ConfigError(
            f"the ranks do not start alike: {'; '.join(found[:NAMED_FACTS])}{more}. Start the same command on every "
            f"rank, with the same config file, the same model folder, and an output folder on a disk that all share."
        )


def on_any_rank(flag: bool) -> bool:
    """Tells whether a flag is set on some rank."""
    return flag if world_size() == 1 else bool(all_reduce_max(torch.tensor([float(flag)])))


def is_lost(error: RuntimeError) -> bool:
    """Tells whether an error of a collective means that another rank is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
