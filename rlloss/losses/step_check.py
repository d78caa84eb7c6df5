"""Everything that can go wrong with the batches of one rank, found before the ranks talk to each other."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import BatchError, ConfigError
from rlloss.losses.agreement import check_group, num_prompts_of
from rlloss.losses.batch import check_fields
from rlloss.losses.sharding import split_over_ranks
from rlloss.losses.terms import Term

MAX_TERMS = 8
"""Terms of a loss; the vector that ranks exchange has room for so many, whatever the loss of a rank is."""


def check_step(
    contexts: list[Any], cu_seq_lens_list: Sequence[Tensor] | None, sp_mesh: DeviceMesh | None, group: Group
) -> Sequence[Term]:
    """Everything that can go wrong on one rank alone, before any collective; returns the terms."""
    check_list("build_batches", contexts)
    if not contexts:
        raise BatchError(
            "build_batches got an empty list of contexts. A rank without data passes one context of ignored labels: "
            "loss_cfg.empty(like=batch)."
        )
    config = contexts[0].loss_cfg
    if any(context.loss_cfg is not config and context.loss_cfg != config for context in contexts):
        raise BatchError(
            "the contexts of one step have different loss configs, but share their denominators. Build them all from "
            "one config; several losses in one batch are a MixedLossConfig."
        )
    terms: Sequence[Term] = config.terms()
    if len(terms) > MAX_TERMS:
        raise ConfigError(f"the loss has {len(terms)} terms, at most {MAX_TERMS} can be counted.")
    _assign_offsets(contexts, cu_seq_lens_list)
    num_prompts_of(contexts)
    computed = {"keep_mask", *(term.weight_name for term in terms)}
    for context in contexts:
        context.loss_kwargs.refuse_assigned()
        check_fields(context.loss_kwargs, computed)
        _use_shard(context, sp_mesh, group)
        context.check()
        context.check_labels()
        for term in terms:
            if term.reduction == "prompt":
                prompts_of(context, term.name)
    _warn_unpacked(contexts, terms)
    return terms


def is_list(contexts: Any) -> bool:
    """Whether contexts are a list of contexts, which may be empty."""
    return isinstance(contexts, (list, tuple)) and all(hasattr(each, "loss_kwargs") for each in contexts)


def check_list(caller: str, contexts: Any) -> None:
    """Checks that contexts are a list of contexts.

    Raises:
        BatchError: They are something else.
    """
    if not is_list(contexts):
        held = f" of {type(contexts[0]).__name__}" if isinstance(contexts, (list, tuple)) else ""
        raise BatchError(
            f"{caller} got a {type(contexts).__name__}{held}, expected a list of contexts, which loss_cfg.build(batch) "
            f"returns."
        )


def check_joinable(name: str, contexts: Sequence[Any]) -> None:
    """Checks that contexts can become one; `name` is their class's.

    Raises:
        BatchError: There is none, or their losses differ.
    """
    check_list(f"{name}.cat", contexts)
    if not contexts:
        raise BatchError(f"{name}.cat got an empty list; expected at least one context.")
    if any(context.loss_cfg != contexts[0].loss_cfg for context in contexts):
        raise BatchError(
            f"{name}.cat got contexts of different configs, but one context has one loss. Build them all from one "
            f"config."
        )


def prompts_of(context: Any, term: str) -> Tensor:
    """Checks and returns the prompt of each sequence, `[S]`; one read of the host."""
    ids, count = context.loss_kwargs.group_ids, context.loss_kwargs.num_prompts
    if ids is None or count is None:
        raise BatchError(
            f"term {term!r}: the reduction 'prompt' needs group_ids [S], the prompt of each sequence, and num_prompts, "
            f"their number over the whole step; got group_ids={'None' if ids is None else tuple(ids.shape)} and "
            f"num_prompts={count}."
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BatchError(f"group_ids has dtype {ids.dtype}, expected an integer type.")
    if ids.numel() and not bool(((ids >= 0) & (ids < count)).all()):
        raise BatchError(
            f"group_ids run from {int(ids.min())} to {int(ids.max())}, expected numbers from 0 to num_prompts - 1 = "
            f"{count - 1}, dense over the whole step."
        )
    return ids.long()  # type: ignore[no-any-return]


def _assign_offsets(contexts: list[Any], cu_seq_lens_list: Sequence[Tensor] | None) -> None:
    if cu_seq_lens_list is None:
        return
    if not isinstance(cu_seq_lens_list, (Sequence, Tensor)):
        raise BatchError(
            f"cu_seq_lens_list is a {type(cu_seq_lens_list).__name__}, expected a list of offsets for each context."
        )
    if len(cu_seq_lens_list) != len(contexts):
        raise BatchError(
            f"cu_seq_lens_list has {len(cu_seq_lens_list)} entries for {len(contexts)} contexts; expected one for each."
        )
    for context, offsets in zip(contexts, cu_seq_lens_list, strict=True):
        context.loss_kwargs.cu_seq_lens = offsets


def _use_shard(context: Any, sp_mesh: DeviceMesh | None, group: Group) -> None:
    """Checks the mesh, and splits tensors of whole rows that were set after `build`."""
    kwargs, shard = context.loss_kwargs, context.loss_kwargs.shard
    ranks = 1 if sp_mesh is None else sp_mesh.size()
    if sp_mesh is not None and ranks != (1 if shard is None else shard.ranks):
        raise BatchError(
            f"build_batches got a sequence-parallel mesh of {ranks} ranks, but the contexts were built for "
            f"{1 if shard is None else shard.ranks}. Give the same sp_mesh to build."
        )
    if shard is None:
        return
    if shard.group is None and sp_mesh is not None:
        kwargs.shard = replace(shard, group=sp_mesh.get_group())
    check_group(kwargs.shard, group)
    if shard.length == shard.local_length:  # rows of one column: what is set after build is this rank's part
        return
    split = split_over_ranks(kwargs, context.loss_cfg.ignore_idx)
    for name, value in split.tensors().items():
        if value is not getattr(kwargs, name):
            setattr(kwargs, name, value)


def _warn_unpacked(contexts: list[Any], terms: Sequence[Term]) -> None:
    if not any(term.needs_sequences for term in terms):
        return
    for context in contexts:
        kwargs = context.loss_kwargs
        if kwargs.shifted_labels.shape[0] == 1 and kwargs.cu_seq_lens is None:
            warnings.warn(
                "a row [1, T] without cu_seq_lens or num_tokens is taken as one sequence, and the loss depends on "
                "where sequences begin. Give num_tokens if several sequences are packed in it.",
                stacklevel=5,
            )
            return
