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
from rlloss.errors import BatchError
from rlloss.layout import TokenLayout
from rlloss.losses.terms import Term
from rlloss.losses.totals import Totals

C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class _Part:
    """One term on one micro-batch: its tokens `[N]` bool; tokens, and the prompt, of each of its sequences `[S]`."""

    layout: TokenLayout
    mask: Tensor
    sizes: Tensor
    prompts: Tensor | None


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
            shared = term.weight_name in {earlier.weight_name for earlier in terms[:index]}
            _assign_weights(context, term, part, counts[index], add=shared)
    for context in contexts:
        context._batch_size, context._group, context._world = len(contexts), group, totals.world
        counted = terms and (totals.tokens is not None or totals.counts(terms[0].reduction))
        context.loss_kwargs.global_grad_tokens = counts[0].tokens if counted else None
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
    prompts = _prompts(context, term.name) if term.reduction == "prompt" else None
    return _Part(layout, mask, layout.segments.sum(mask.double()), prompts)


def _prompts(context: Any, term: str) -> Tensor:
    """Checks and returns the prompt of each sequence, `[S]`; one read of the host."""
    ids, count = context.loss_kwargs.group_ids, context.loss_kwargs.num_prompts
    if ids is None or count is None:
        raise BatchError(
            f"term {term!r}: the reduction 'prompt' needs group_ids [S], the prompt of each sequence, and num_prompts, "
            f"their number over the whole step; got group_ids={'None' if ids is None else tuple(ids.shape)} and "
            f"num_prompts={count}."
        )
    if ids.numel() and not bool(((ids >= 0) & (ids < count)).all()):
        raise BatchError(
            f"group_ids run from {int(ids.min())} to {int(ids.max())}, expected numbers from 0 to num_prompts - 1 = "
            f"{count - 1}, dense over the whole step."
        )
    return ids.long()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Counts:
    """Counts of one term over the whole step, 0-dim float64; prompt_tokens is `[P]`, or None."""

    tokens: Tensor
    sequences: Tensor
    weight: Tensor
    prompts: Tensor
    prompt_tokens: Tensor | None


def _count(
    contexts: list[Any],
    terms: Sequence[Term],
    parts: list[list[_Part]],
    problem: BatchError | None,
    group: Group,
    totals: Totals,
) -> list[_Counts]:
    """Sums one vector over ranks: errors, micro-batches and prompts with their squares, three counts for each term.

    Where all that the terms divide by is given, nothing is summed. A prompt reduction sums its tokens of each prompt
    in a second collective, once no rank has an error.
    """
    device = contexts[0].loss_kwargs.shifted_labels.device
    prompts = 0 if problem else _num_prompts(contexts)
    facts = [problem is not None, len(contexts), len(contexts) ** 2, prompts, prompts**2]
    head = torch.tensor(facts, device=device, dtype=torch.float64)
    local = [sum((_counts_of(part) for part in term_parts), head.new_zeros(3)) for term_parts in parts]
    vector = torch.cat([head, *(local if problem is None else [head.new_zeros(3)] * len(terms))])
    shared = any(totals.counts(term.reduction) for term in terms)
    vector = all_reduce_sum(vector, group) if shared else vector
    _check_ranks(vector[:5], problem, contexts[0].loss_cfg.reduce_loss, world_size(group) if shared else 1)
    counts = []
    for index, term in enumerate(terms):
        by_prompt = _prompt_tokens(parts[index], prompts, group) if term.reduction == "prompt" else None
        counts.append(_with_totals(vector[5 + 3 * index : 8 + 3 * index], by_prompt, totals))
    return counts


def _num_prompts(contexts: list[Any]) -> int:
    given = {context.loss_kwargs.num_prompts for context in contexts} - {None}
    if len(given) > 1:
        raise BatchError(f"num_prompts differs between micro-batches: {sorted(given)}. It counts the whole step.")
    return int(given.pop()) if given else 0


def _counts_of(part: _Part) -> Tensor:
    return torch.stack([part.mask.sum().double(), (part.sizes > 0).double().sum(), part.sizes.sqrt().sum()])


def _prompt_tokens(parts: list[_Part], count: int, group: Group) -> Tensor:
    """Tokens of each prompt over the whole step, `[P]`."""
    local = parts[0].sizes.new_zeros(count)
    for part in parts:
        assert part.prompts is not None
        local = local.index_add(0, part.prompts, part.sizes)
    return all_reduce_sum(local, group)


def _with_totals(counts: Tensor, prompt_tokens: Tensor | None, totals: Totals) -> _Counts:
    def known(value: float | None, counted: Tensor) -> Tensor:
        return counted if value is None else counted.new_tensor(float(value))

    prompts = counts.new_zeros(()) if prompt_tokens is None else (prompt_tokens > 0).sum().double()
    return _Counts(
        known(totals.tokens, counts[0]),
        known(totals.sequences, counts[1]),
        counts[2],
        known(totals.prompts, prompts),
        prompt_tokens,
    )


def _check_ranks(head: Tensor, problem: BatchError | None, reduce_loss: bool, ranks: int) -> None:
    if problem is not None:
        raise problem
    if ranks == 1:
        return
    errors, micro_batches, squares, prompts, prompt_squares = head.tolist()
    if errors:
        raise BatchError(f"{int(errors)} of {ranks} ranks could not calibrate their batches; their own error says why.")
    if reduce_loss and micro_batches**2 != squares * ranks:
        raise BatchError(
            f"the {ranks} ranks have unequal numbers of micro-batches ({int(micro_batches)} in all), so forward's "
            f"collective would hang. Set reduce_loss=False in the loss config, or give every rank the same number "
            f"(loss_cfg.empty(like=batch) makes one without tokens)."
        )
    if prompts**2 != prompt_squares * ranks:
        raise BatchError(
            f"num_prompts differs between the {ranks} ranks. It counts the whole step, on every rank alike."
        )


def _assign_weights(context: Any, term: Term, part: _Part, counts: _Counts, add: bool) -> None:
    """Assigns the weights of a term; `add`: to those of an earlier term that has the same field for other tokens."""
    kwargs = context.loss_kwargs
    weights = term.coef * _inverse_denominator(term, part, counts)
    weights = torch.where(part.mask, weights, 0.0)
    if term.factor_field is not None and getattr(kwargs, term.factor_field) is not None:
        weights = weights * part.layout.take(getattr(kwargs, term.factor_field)).double()
    floating = [tensor.dtype for tensor in kwargs.tensors().values() if tensor.is_floating_point()]
    dtype = torch.float64 if torch.float64 in floating else torch.float32
    placed = part.layout.put(weights.to(dtype))
    setattr(kwargs, term.weight_name, getattr(kwargs, term.weight_name) + placed if add else placed)


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
        case "prompt":
            assert part.prompts is not None
            assert counts.prompt_tokens is not None
            tokens = segments.broadcast(counts.prompt_tokens.clamp(min=1)[part.prompts])
            return _inverse(counts.prompts) / tokens
        case "sum":
            return one


def _inverse(count: Tensor) -> Tensor:
    return torch.where(count > 0, 1.0 / count.clamp(min=1e-300), 0.0)
