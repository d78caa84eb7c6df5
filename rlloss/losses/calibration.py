"""The only place where a loss's denominators are computed: global token weights of one optimiser step.

Every term gets one weight for each token, `coef / denominator`, so that forward is a plain sum. With N tokens, S
sequences that have any, P prompts, n_i tokens of sequence i and n_p of prompt p, counted over micro-batches and ranks:

    token 1/N    sample 1/(S n_i)    square n_i^-1/2 / sum_j n_j^1/2    sequence_sum 1/S
    constant 1/(S L)    prompt 1/(P n_p)    sum 1
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group, all_reduce_sum, world_size
from rlloss.errors import BatchError, ConfigError
from rlloss.layout import TokenLayout
from rlloss.losses.terms import Term

C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class Totals:
    """Counts of the whole step that are known; a given one is not counted.

    Attributes:
        tokens: Tokens that count (verl's batch_num_tokens, TRL's num_items_in_batch).
        sequences: Sequences (verl's global_batch_size: a constant, which fully masked rows do not shrink).
        prompts: Prompts.
        world: Ranks whose gradients are combined (verl's dp_size).
    """

    tokens: float | None = None
    sequences: float | None = None
    prompts: float | None = None
    world: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "prompts", "world"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Totals({name}={value}): expected a number above 0, or None to count.")


@dataclass(frozen=True)
class _Part:
    """One term on one micro-batch: its tokens `[N]` bool and the tokens of each of its sequences `[S]`."""

    layout: TokenLayout
    mask: Tensor
    sizes: Tensor


def calibrate(
    contexts: list[C],
    cu_seq_lens_list: Sequence[Tensor] | None,
    sp_mesh: DeviceMesh | None,
    group: Group,
    totals: Totals | None,
) -> list[C]:
    """Counts over micro-batches and ranks, and assigns the token weights; see `build_batches`."""
    if not contexts:
        raise BatchError(
            "build_batches got an empty list of contexts. A rank without data passes one context of ignored labels: "
            "loss_cfg.empty(like=batch)."
        )
    totals = totals or Totals()
    problem: BatchError | None = None
    parts: list[list[_Part]] = []
    terms = contexts[0].loss_cfg.terms()
    try:
        _assign_offsets(contexts, cu_seq_lens_list)
        for context in contexts:
            _prepare(context)
        _warn_unpacked(contexts, terms)
    except BatchError as error:
        problem = error
    # Its collectives run on every rank, also where a batch failed: the error travels with the counts.
    contexts[0].select_step([] if problem else contexts, group)
    try:
        parts = [] if problem else [[_part(context, term) for context in contexts] for term in terms]
    except BatchError as error:
        problem = error
    counts = _count(contexts, terms, parts, problem, group, totals)
    for index, term in enumerate(terms):
        for context, part in zip(contexts, parts[index], strict=True):
            _assign_weights(context, term, part, counts[index], parts[index])
    for context in contexts:
        context._batch_size, context._group, context._world = len(contexts), group, totals.world
        if terms:
            context.loss_kwargs.global_grad_tokens = counts[0].tokens
    return contexts


def _assign_offsets(contexts: list[Any], cu_seq_lens_list: Sequence[Tensor] | None) -> None:
    if cu_seq_lens_list is None:
        return
    if len(cu_seq_lens_list) != len(contexts):
        raise BatchError(
            f"cu_seq_lens_list has {len(cu_seq_lens_list)} entries for {len(contexts)} contexts; expected one for each."
        )
    for context, offsets in zip(contexts, cu_seq_lens_list, strict=True):
        context.loss_kwargs.cu_seq_lens = offsets.to(context.loss_kwargs.shifted_labels.device)


def _prepare(context: Any) -> None:
    """Finds the tokens that leave the step, from the original inputs every time."""
    kwargs = context.loss_kwargs
    kwargs.keep_mask = None
    leaves = context.prepare()
    context._dropped = None
    if leaves is not None:
        counted = kwargs.shifted_labels != context.loss_cfg.ignore_idx
        context._dropped = (leaves & counted).sum().double()
        # One read of the host; with nothing dropped the labels alone say what counts.
        kwargs.keep_mask = ~leaves if bool(context._dropped) else None


def _warn_unpacked(contexts: list[Any], terms: Sequence[Term]) -> None:
    if not any(term.needs_sequences for term in terms):
        return
    for context in contexts:
        kwargs = context.loss_kwargs
        if kwargs.shifted_labels.shape[0] == 1 and kwargs.cu_seq_lens is None:
            warnings.warn(
                "a row [1, T] without cu_seq_lens or num_tokens is taken as one sequence, and the "
                "loss depends on where "
                "sequences begin. Give num_tokens if several sequences are packed in it.",
                stacklevel=4,
            )
            return


def _part(context: Any, term: Term) -> _Part:
    layout: TokenLayout = context.layout
    flat = context.loss_kwargs.take(layout)
    mask = torch.ones_like(layout.segments.ids, dtype=torch.bool) if term.mask is None else term.mask(flat)
    return _Part(layout, mask, layout.segments.sum(mask.double()))


@dataclass(frozen=True)
class _Counts:
    """Counts of one term over the whole step, 0-dim float64; prompt_tokens is `[P]`."""

    tokens: Tensor
    sequences: Tensor
    weight: Tensor
    prompts: Tensor


def _count(
    contexts: list[Any],
    terms: Sequence[Term],
    parts: list[list[_Part]],
    problem: BatchError | None,
    group: Group,
    totals: Totals,
) -> list[_Counts]:
    """Sums one vector over ranks: errors, micro-batches, their square, then four counts for each term."""
    device = contexts[0].loss_kwargs.shifted_labels.device
    head = torch.tensor([problem is not None, len(contexts), len(contexts) ** 2], device=device, dtype=torch.float64)
    local = [sum((_counts_of(part) for part in term_parts), head.new_zeros(4)) for term_parts in parts]
    vector = torch.cat([head, *(local if problem is None else [head.new_zeros(4)] * len(terms))])
    if not (totals.world is not None and totals.tokens is not None and totals.sequences is not None):
        vector = all_reduce_sum(vector, group)
    _check_ranks(vector[:3], problem, contexts[0].loss_cfg.reduce_loss, group)
    return [_with_totals(vector[3 + 4 * index : 7 + 4 * index], totals) for index in range(len(terms))]


def _counts_of(part: _Part) -> Tensor:
    present = (part.sizes > 0).double()
    return torch.stack([part.mask.sum().double(), present.sum(), part.sizes.sqrt().sum(), present.new_zeros(())])


def _with_totals(counts: Tensor, totals: Totals) -> _Counts:
    def known(value: float | None, counted: Tensor) -> Tensor:
        return counted if value is None else counted.new_tensor(float(value))

    return _Counts(
        known(totals.tokens, counts[0]), known(totals.sequences, counts[1]), counts[2], known(totals.prompts, counts[3])
    )


def _check_ranks(head: Tensor, problem: BatchError | None, reduce_loss: bool, group: Group) -> None:
    if problem is not None:
        raise problem
    ranks = world_size(group)
    if ranks == 1:
        return
    errors, micro_batches, squares = head.tolist()
    if errors:
        raise BatchError(f"{int(errors)} of {ranks} ranks could not calibrate their batches; their own error says why.")
    if reduce_loss and micro_batches**2 != squares * ranks:
        raise BatchError(
            f"the {ranks} ranks have unequal numbers of micro-batches ({int(micro_batches)} in all), so forward's "
            f"collective would hang. Set reduce_loss=False in the loss config, or give every rank the same number "
            f"(loss_cfg.empty(like=batch) makes one without tokens)."
        )


def _assign_weights(context: Any, term: Term, part: _Part, counts: _Counts, all_parts: list[_Part]) -> None:
    kwargs = context.loss_kwargs
    weights = term.coef * _inverse_denominator(term, part, counts)
    weights = torch.where(part.mask, weights, 0.0)
    if term.factor_field is not None and getattr(kwargs, term.factor_field) is not None:
        weights = weights * part.layout.take(getattr(kwargs, term.factor_field)).double()
    floating = [tensor.dtype for tensor in kwargs.tensors().values() if tensor.is_floating_point()]
    dtype = torch.float64 if torch.float64 in floating else torch.float32
    setattr(kwargs, term.weight_name, part.layout.put(weights.to(dtype)))


def _inverse_denominator(term: Term, part: _Part, counts: _Counts) -> Tensor:
    """`1 / denominator` of each token, `[N]` float64; 0 where nothing is counted."""
    segments = part.layout.segments
    sizes = segments.broadcast(part.sizes).clamp(min=1)
    one = torch.ones_like(sizes)
    match term.reduction:
        case "token":
            return one * _inverse(counts.tokens)
        case "sample":
            return _inverse(counts.sequences) / sizes
        case "square":
            return _inverse(counts.weight) / sizes.sqrt()
        case "sequence_sum":
            return one * _inverse(counts.sequences)
        case "constant":
            return one * _inverse(counts.sequences) / float(term.loss_length or 0)
        case "sum":
            return one
        case _:
            raise ConfigError(f"term {term.name!r}: reduction {term.reduction!r} is not available.")


def _inverse(count: Tensor) -> Tensor:
    return torch.where(count > 0, 1.0 / count.clamp(min=1e-300), 0.0)
