"""Choices over all tokens of an optimiser step: the same ones however the step is cut into micro-batches and ranks.

They are made once, in `build_batches`, from per-token numbers of the policy at the start of the step; forward only
reads them. Two collectives for each choice: sums, and candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import Group, all_gather, all_reduce_sum
from rlloss.layout import TokenLayout, exchange_sizes

_LARGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a whole step that this rank holds, its micro-batches one after the other.

    Attributes:
        log_prob: `[N]`, the policy's log-probs at the start of the step, float64, nats.
        old_log_prob: `[N]`, float64, nats.
        advantages: `[N]`, float64.
        entropy: `[N]`, float32, nats; empty where the batches gave none.
        keys: `[N]` int64, label and place in its sequence of each token, mixed; see `hashes`.
        group: The ranks that hold the other tokens.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    entropy: Tensor
    keys: Tensor
    group: Group = None

    def sums(self, *values: Tensor) -> list[float]:
        """Returns the sum of each tensor over all tokens of the step, in one collective and one host read."""
        local = torch.stack([value.double().sum() for value in values])
        return [float(total) for total in all_reduce_sum(local, self.group).tolist()]

    def hashes(self, seed: int) -> Tensor:
        """Returns `[N]` int64 pseudo-random numbers of (seed, label, place in the sequence, old log-prob, advantage).

        Nothing in them depends on the split, so a "random" choice is the same for every split; two tokens equal in
        all of these share their number.
        """
        mixed = _mix(self.keys ^ _mix(torch.full_like(self.keys, seed)))
        for number in (self.old_log_prob, self.advantages):
            mixed = _mix(mixed ^ (number.double() + 0.0).view(torch.int64))
        return mixed

    def smallest(self, scores: Tensor, candidates: Tensor, count: int, seed: int = 0) -> Tensor:
        """Chooses the `count` candidates of smallest score over the whole step; equal scores go by their hash.

        Args:
            scores: `[N]`.
            candidates: `[N]` bool.
            count: How many; fewer where there are fewer candidates.
            seed: Of the hash.

        Returns:
            `[N]` bool. Tokens equal in score and hash are chosen together.
        """
        scores, hashes = scores.double() + 0.0, self.hashes(seed)
        mine = _sorted(scores[candidates], hashes[candidates])[:, :count]
        packed = torch.stack([_padded(mine[0], count), _padded(mine[1], count)], dim=1)
        everyone = all_gather(packed, self.group).T
        limit = _sorted(everyone[0].view(torch.float64), everyone[1])[:, count - 1]
        last, last_hash = limit[0].view(torch.float64), limit[1]
        return candidates & ((scores < last) | ((scores == last) & (hashes <= last_hash)) | last.isnan())

    def at_or_above_quantile(self, values: Tensor, quantile: float) -> Tensor:
        """Tokens whose number reaches a quantile of the whole step, linear interpolation between order statistics.

        Args:
            values: `[N]`.
            quantile: In [0, 1].

        Returns:
            `[N]` bool; all False without any token.
        """
        values = values.float()
        sizes = all_gather(torch.tensor([values.numel()], device=values.device), self.group).tolist()
        if not sum(sizes):
            return torch.zeros_like(values, dtype=torch.bool)
        place = quantile * (sum(sizes) - 1)
        below = int(place)
        above = sum(sizes) - below
        top = values.sort(descending=True).values[:above]
        padded = torch.cat([top, top.new_full((min(above, max(sizes)) - top.shape[0],), -torch.inf)])
        # The numbers from the place on, smallest first; those below it take no part.
        upper = all_gather(padded, self.group).sort(descending=True).values[:above].flip(0)
        threshold = torch.lerp(upper[0], upper[min(1, upper.shape[0] - 1)], place - below)
        return values >= threshold


def step_tokens(contexts: Sequence[Any], like: Tensor, group: Group) -> StepTokens:
    """Collects the tokens of a step from calibrating contexts; none of them where the list is empty.

    Args:
        contexts: The contexts, or none where this rank's batches failed and it only takes part in collectives.
        like: A tensor on the device.
        group: The ranks of the step.
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in ("log_prob", "old", "advantages", "entropy", "keys")}
    for context, place in zip(contexts, places([context.layout for context in contexts]), strict=True):
        kwargs, layout = context.loss_kwargs, context.layout
        given = (kwargs.selection_logprobs, context.loss_cfg.old_of(kwargs))
        # A choice by entropy alone needs no log-probs; each of the two stands in for the other.
        either = next((one for one in given if one is not None), torch.zeros_like(kwargs.advantages))
        for name, one in zip(("log_prob", "old"), given, strict=True):
            columns[name].append(layout.take(either if one is None else one).double())
        columns["advantages"].append(layout.take(kwargs.advantages).double())
        columns["keys"].append(_mix(layout.take(kwargs.shifted_labels).long()) ^ place)
        if kwargs.selection_entropy is not None:
            columns["entropy"].append(layout.take(kwargs.selection_entropy).float())
    joined = {
        name: torch.cat(parts) if parts else like.new_empty(0, dtype=torch.float64) for name, parts in columns.items()
    }
    return StepTokens(
        joined["log_prob"],
        joined["old"],
        joined["advantages"],
        joined["entropy"].float(),
        joined["keys"].long(),
        group,
    )


def spread(contexts: Sequence[Any], chosen: Tensor, field: str) -> None:
    """Writes a choice `[N]` over the tokens of all contexts into a kwargs field of each, False at ignored positions."""
    start = 0
    for context in contexts:
        layout = context.layout
        part = chosen[start : start + layout.num_tokens]
        context.loss_kwargs.set_computed(field, layout.put(part.to(torch.uint8)) != 0)
        start += layout.num_tokens


def places(layouts: Sequence[TokenLayout]) -> list[Tensor]:
    """Returns how many tokens that count stand before each token in its sequence, `[N]` int64 for each micro-batch.

    One collective where sequences are cut over ranks.
    """
    lower: Sequence[Tensor | None] = [None] * len(layouts)
    if layouts and layouts[0].segments.group is not None:
        lower = [segments.before for segments, _ in exchange_sizes([(layout.segments, []) for layout in layouts])]
    found = []
    for layout, before in zip(layouts, lower, strict=True):
        ids = layout.segments.ids
        sizes = torch.bincount(ids, minlength=layout.segments.count)
        starts = sizes.cumsum(0) - sizes
        own = torch.arange(ids.shape[0], device=ids.device) - starts[ids]
        found.append(own if before is None else own + before.long()[ids])
    return found


def _mix(values: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, wrapping; `>>` is arithmetic there, hence the masks."""
    values = values + -7046029254386353131
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return values ^ ((values >> 31) & 0x1FFFFFFFF)


def _sorted(scores: Tensor, hashes: Tensor) -> Tensor:
    """Sorts by score, then hash: `[2, n]` int64, the scores as their bits."""
    order = torch.argsort(hashes, stable=True)
    order = order[torch.argsort(scores[order], stable=True)]
    return torch.stack([scores[order].view(torch.int64), hashes[order]])


def _padded(values: Tensor, count: int) -> Tensor:
    """Fills up to `count` entries: +NaN as a score, the largest number as a hash, so that padding sorts last."""
    return torch.cat([values, values.new_full((count - values.shape[0],), _LARGEST)])
