"""The only place where a loss's denominators are computed: global token weights of one optimiser step.

Every term gets one weight for each token, `coef / denominator`, so that forward is a plain sum. With N tokens, S
sequences that have any, P prompts, n_i tokens of sequence i and n_p of prompt p, counted over micro-batches and ranks:

    token 1/N    sample 1/(S n_i)    square n_i^-1/2 / sum_j n_j^1/2    sequence_sum 1/S
    constant 1/(S L)    prompt 1/(P n_p)    sum 1
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group, all_reduce_sum
from rlloss.errors import BatchError
from rlloss.layout import TokenLayout, exchange_sizes
from rlloss.losses.agreement import FACTS, check_facts, facts_of, loss_of, num_prompts_of
from rlloss.losses.step_check import MAX_TERMS, check_list, check_step, prompts_of
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

    @property
    def counted_sizes(self) -> Tensor:
        """The sizes, or 0 where another rank of a sequence-parallel group counts them."""
        return self.sizes if self.layout.segments.counts_sequences else torch.zeros_like(self.sizes)


def calibrate(
    contexts: list[C],
    cu_seq_lens_list: Sequence[Tensor] | None,
    sp_mesh: DeviceMesh | None,
    group: Group,
    totals: Totals | None,
    problem: Exception | None = None,
) -> list[C]:
    """Counts over micro-batches and ranks, and assigns the token weights; see `build_batches`.

    A problem is raised on every rank, like one that is found here.
    """
    if not isinstance(totals, Totals):
        expected = f"totals is a {type(totals).__name__}, expected rlloss.Totals(tokens=...) or None."
        problem = problem if problem or totals is None else BatchError(expected)
        totals = Totals()
    try:
        check_list("build_batches", contexts)
    except BatchError as error:
        problem, contexts = problem or error, []
    terms: Sequence[Term] = ()
    parts: list[list[_Part]] = []
    try:
        terms = () if problem else check_step(contexts, cu_seq_lens_list, sp_mesh, group)
        for term in terms:
            totals.check(term)
    except Exception as error:  # whatever it is: the other ranks must not wait for this one
        problem = error
    if _several_collectives(contexts):
        _agree(contexts, problem, group, totals)
    try:
        parts = [] if problem else _parts(contexts, terms, group)
    except Exception as error:
        problem = error
    counts, tokens = _count(contexts, terms, parts, problem, group, totals)
    for index, term in enumerate(terms):
        for context, part in zip(contexts, parts, strict=True):
            shared = term.weight_name in {earlier.weight_name for earlier in terms[:index]}
            _assign_weights(context, term, part[index], counts[index], add=shared)
    for context in contexts:
        context._batch_size, context._group, context._world = len(contexts), group, totals.world
        context.loss_kwargs.global_grad_tokens = tokens
    return contexts


def _several_collectives(contexts: list[Any]) -> bool:
    """Whether something is exchanged before the counts; the same on every rank that has a context."""
    return bool(contexts) and (bool(contexts[0].selects_step) or contexts[0].loss_kwargs.shard is not None)


def _agree(contexts: list[Any], problem: Exception | None, group: Group, totals: Totals) -> None:
    """Raises what went wrong on any rank; a rank without a context takes part with the vector of `_count`."""
    # Where no rank sums losses each may divide by counts of its own, as TRL's bnpo does; what is counted together is
    # compared once it is.
    alone = problem is not None or not contexts[0].loss_cfg.reduce_loss
    loss = loss_of(contexts, problem, Totals() if alone else totals)
    facts = facts_of(contexts, problem, loss, _device_of(contexts))
    vector = torch.cat([facts, facts.new_zeros(1 + 3 * MAX_TERMS)])
    check_facts(all_reduce_sum(vector, group)[:FACTS], problem, loss, group)


def _device_of(contexts: list[Any]) -> torch.device:
    # The labels come first; what was set in their place may have been refused for being no tensor.
    tensors = contexts[0].loss_kwargs.tensors().values() if contexts else ()
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _prepare(context: Any) -> None:
    """Finds the tokens that leave the step, from the original inputs every time."""
    kwargs = context.loss_kwargs
    kwargs.set_computed("keep_mask", None)
    leaves = context.prepare()
    context._dropped = None
    if leaves is not None:
        counted = kwargs.shifted_labels != context.loss_cfg.ignore_idx
        context._dropped = (leaves & counted).sum().double()
        # One read of the host; with nothing dropped the labels alone say what counts.
        kwargs.set_computed("keep_mask", ~leaves if bool(context._dropped) else None)


def _parts(contexts: list[Any], terms: Sequence[Term], group: Group) -> list[list[_Part]]:
    """Finds the tokens that count: the parts of each context, term by term."""
    for context in contexts:
        _prepare(context)
    if contexts[0].selects_step:
        contexts[0].select_step(contexts, group)
    masks = [[_mask(context, term) for term in terms] for context in contexts]
    pairs = [(context.layout.segments, given) for context, given in zip(contexts, masks, strict=True)]
    parts = []
    for context, given, (segments, sizes) in zip(contexts, masks, exchange_sizes(pairs), strict=True):
        layout = context.know_segments(segments)
        prompts = [prompts_of(context, term.name) if term.reduction == "prompt" else None for term in terms]
        parts.append([_Part(layout, *columns) for columns in zip(given, sizes, prompts, strict=True)])
    return parts


def _mask(context: Any, term: Term) -> Tensor:
    layout: TokenLayout = context.layout
    if term.mask is None:
        return torch.ones_like(layout.segments.ids, dtype=torch.bool)
    return term.mask(context.loss_kwargs.take(layout))


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
    problem: Exception | None,
    group: Group,
    totals: Totals,
) -> tuple[list[_Counts], Tensor | None]:
    """Sums one vector over ranks: what `facts_of` says, all tokens, and three counts for each of `MAX_TERMS` terms.

    Nothing is summed where all that the terms divide by is given and forward runs no collective either. Prompt
    reductions sum the tokens of each prompt in a second collective, once no rank has an error.

    Returns:
        The counts of each term, and all tokens of the step that count, whichever terms they are in; None where nobody
        knows them.
    """
    loss = loss_of(contexts, problem, totals)
    head = facts_of(contexts, problem, loss, _device_of(contexts))
    own = 0 if problem else sum(context.layout.num_tokens for context in contexts)
    local = [sum((_counts_of(part[index]) for part in parts), head.new_zeros(3)) for index in range(len(terms))]
    vector = torch.cat([head, head.new_tensor([own]), *local, head.new_zeros(3 * (MAX_TERMS - len(local)))])
    shared = _shared(contexts, terms, totals)
    if shared:
        vector = all_reduce_sum(vector, group)
        check_facts(vector[:FACTS], problem, loss, group)
    elif problem is not None:
        raise problem
    by_prompt = [index for index, term in enumerate(terms) if term.reduction == "prompt"]
    of_prompts = _prompt_tokens(parts, by_prompt, num_prompts_of(contexts), group) if by_prompt else {}
    counts = [
        _with_totals(vector[FACTS + 1 + 3 * index :][:3], of_prompts.get(index), totals) for index in range(len(terms))
    ]
    if totals.tokens is not None:
        return counts, vector.new_tensor(float(totals.tokens))
    return counts, vector[FACTS] if shared else None


def _shared(contexts: Sequence[Any], terms: Sequence[Term], totals: Totals) -> bool:
    """Whether the vector is summed; a rank that failed must say the same as the others.

    It is where something has to be counted, and where forward sums the loss: first errors, and unequal numbers of
    micro-batches, must be known everywhere.
    """
    if contexts and contexts[0].loss_cfg.reduce_loss and totals.world != 1:
        return True
    if not terms and contexts:
        with contextlib.suppress(Exception):
            terms = contexts[0].loss_cfg.terms()
    if not terms:
        return totals.gives_nothing
    return any(totals.counts(term.reduction) for term in terms)


def _counts_of(part: _Part) -> Tensor:
    sizes = part.counted_sizes
    return torch.stack([part.mask.sum().double(), (sizes > 0).double().sum(), sizes.sqrt().sum()])


def _prompt_tokens(parts: list[list[_Part]], terms: list[int], count: int, group: Group) -> dict[int, Tensor]:
    """Tokens of each prompt over the whole step, `[P]`, of some terms by their index; one collective."""
    local = parts[0][0].sizes.new_zeros(len(terms), count)
    for part in parts:
        for line, index in zip(local, terms, strict=True):
            prompts = part[index].prompts
            assert prompts is not None
            line.index_add_(0, prompts, part[index].counted_sizes)
    return dict(zip(terms, all_reduce_sum(local, group).unbind(), strict=True))


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
