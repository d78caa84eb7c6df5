"""What ranks tell each other before they count: errors, micro-batches, shards. Nobody waits for a rank that failed.

The first collective of `build_batches` has one shape on every rank, whatever went wrong on it, so that an error travels
with the counts and is raised everywhere.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import Group, all_gather_text, differences, members, rank, world_size
from rlloss.errors import BatchError, as_number
from rlloss.layout import Shard
from rlloss.losses.totals import Totals

FACTS = 11
"""Numbers of a rank before its counts: errors; micro-batches, prompts and the mark of its config with their squares;
and four about shards."""


def facts_of(
    contexts: Sequence[Any], problem: Exception | None, loss: Mapping[str, object], device: torch.device
) -> Tensor:
    """Returns what this rank tells the others, `[FACTS]` float64; sums over ranks are what `check_facts` looks at."""
    shard = contexts[0].loss_kwargs.shard if contexts else None
    count, shape, weight = len(contexts), 0, 0
    if shard is not None and problem is None:
        # Sequences of each micro-batch, which the ranks of one sequence-parallel group must agree on.
        shape = _mark([context.layout.segments.count for context in contexts])
        weight = shard.ranks - 1 if shard.number == 0 else -1
    prompts, mark = (0, 0) if problem else (num_prompts_of(contexts), _mark(dict(loss)))
    facts = [problem is not None, count, count**2, prompts, prompts**2, mark, mark**2, shard is not None]
    facts += [shape * weight, shape**2 * weight, count * weight]
    return torch.tensor(facts, device=device, dtype=torch.float64)


def check_facts(facts: Tensor, problem: Exception | None, loss: Mapping[str, object], group: Group) -> None:
    """Raises on every rank what went wrong on any.

    Args:
        facts: The sums over ranks.
        problem: What went wrong on this one.
        loss: What `loss_of` says on this one.
        group: The ranks.

    Raises:
        BatchError: A rank failed, or the ranks do not fit together.
    """
    ranks = world_size(group)
    if ranks == 1:
        if problem is not None:
            raise problem
        return
    errors, micro_batches, squares, prompts, prompt_squares, marks, mark_squares, sharded, *of_shards = facts.tolist()
    if errors:
        _raise_everywhere(problem, group)
    if marks**2 != mark_squares * ranks:
        found = differences(loss, group)
        raise BatchError(
            f"the {ranks} ranks have different loss configs or totals: {'; '.join(found)}. Make them alike on every "
            f"rank; a coefficient that is adapted, and Totals, must come from numbers of the whole step."
        )
    if sharded not in (0.0, float(ranks)):
        raise BatchError(
            f"{int(sharded)} of {ranks} ranks split their rows over a sequence-parallel mesh, the others do not. Give "
            f"build the same kind of sp_mesh on every rank."
        )
    if any(of_shards):
        raise BatchError(
            "the ranks of a sequence-parallel group hold different batches: the number of micro-batches or of their "
            "sequences differs. Give build the same whole batch on each of them."
        )
    if loss["reduce_loss"] and micro_batches**2 != squares * ranks:
        raise BatchError(
            f"the {ranks} ranks have unequal numbers of micro-batches ({int(micro_batches)} in all), so forward's "
            f"collective would hang. Set reduce_loss=False in the loss config, or give every rank the same number "
            f"(loss_cfg.empty(like=batch) makes one without tokens)."
        )
    if prompts**2 != prompt_squares * ranks:
        raise BatchError(
            f"num_prompts differs between the {ranks} ranks. It counts the whole step, on every rank alike."
        )


def num_prompts_of(contexts: Sequence[Any]) -> int:
    """Returns the number of prompts of the step, 0 where none is given.

    Raises:
        BatchError: The micro-batches disagree.
    """
    found = [context.loss_kwargs.num_prompts for context in contexts if context.loss_kwargs.num_prompts is not None]
    for count in found:
        number = as_number(count)
        if number < 1 or not number.is_integer():
            raise BatchError(f"num_prompts is {count!r}, expected the number of prompts of the whole step.")
    given = {int(count) for count in found}
    if len(given) > 1:
        raise BatchError(f"num_prompts differs between micro-batches: {sorted(given)}. It counts the whole step.")
    return given.pop() if given else 0


def loss_of(contexts: Sequence[Any], problem: Exception | None, totals: Totals) -> dict[str, object]:
    """Returns by name what this rank counts and divides by; ranks that differ in it would each have another loss.

    Nothing is known of the loss where something has gone wrong.
    """
    if problem is not None:
        return {}
    config = contexts[0].loss_cfg
    terms = config.terms()
    names = ("level", "reduction", "loss_length")
    told = {f"{name} of term {term.name}": getattr(term, name) for term in terms for name in names}
    coefs = {f"coef of term {term.name}": float(term.coef) for term in terms}
    given = {f"Totals.{name}": value if value is None else float(value) for name, value in asdict(totals).items()}
    flags = {"reduce_loss": config.reduce_loss, "grad_reduction": config.grad_reduction}
    return {"the loss config": type(config).__name__, **told, **coefs, **flags, **given}


def _mark(said: Any) -> int:
    """Returns a number below 2^20, so that its square is exact, that differs where what is said differs."""
    return zlib.crc32(repr(said).encode()) & 0xFFFFF


def check_group(shard: Shard | None, group: Group) -> None:
    """Checks that the ranks that are counted over hold whole rows.

    Raises:
        BatchError: Some rank of the sequence-parallel group is missing among them.
    """
    if shard is None:
        return
    missing = members(shard.group) - members(group)
    if missing:
        raise BatchError(
            f"build_batches counts over a group that lacks the ranks {sorted(missing)} of this rank's "
            f"sequence-parallel group, and would miss their tokens. Give the group of all data and sequence ranks."
        )


def _raise_everywhere(problem: Exception | None, group: Group) -> None:
    own = "" if problem is None else f"rank {rank()}: {problem}"
    sentences = [sentence for sentence in all_gather_text(own, group) if sentence]
    if problem is not None and not isinstance(problem, BatchError):
        raise problem
    raise BatchError("; ".join(sentences)) from problem
