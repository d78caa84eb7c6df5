"""A head whose vocabulary is cut over ranks: every rank sees the same tokens and holds some rows of the weight.

Sums over words become sums over ranks: a maximum and one vector of sums for each chunk. The loss is evaluated on every
rank from the same numbers; the gradient of the hidden states is a sum over ranks, that of the weight stays where it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import (
    Group,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    members,
    rank,
    replicated_sum,
    shared_input,
    world_size,
)
from rlloss.errors import BatchError, ConfigError
from rlloss.heads.logits import LOG_FLOOR, floored

Vocabulary = tuple[Group, DeviceMesh | None]
"""Group and mesh of the ranks that a vocabulary is cut over, as a user gives them."""


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head weight that this rank holds.

    Attributes:
        group: The ranks that hold the other rows.
        start: First word of this rank.
        size: Words of this rank.
        total: Words of all ranks, V.
    """

    group: Group
    start: int
    size: int
    total: int

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of words, clamped into this shard, and which of them really lie in it."""
        rows = ids - self.start
        return rows.clamp(0, self.size - 1), (rows >= 0) & (rows < self.size)

    def combine(
        self, sums: tuple[Tensor, Tensor | None], shift: Tensor, words: list[Tensor]
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor, list[Tensor], Tensor]:
        """Brings the sums of every rank to one shift and adds them up; one maximum and one sum over ranks.

        Args:
            sums: `[C]` sums of `E`, and of `E q` or `None`, both of this rank's words.
            shift: `[C]`, what was taken from this rank's logits before `exp`.
            words: Logits of single words, `[C * K]`, 0 where another rank holds the word.

        Returns:
            The sums and the words of all ranks, the shift of both, and what this rank's `E` must be multiplied with.
        """
        rest, weighted = sums
        largest = all_reduce_max(shift, self.group)
        change = shift - largest
        factor = change.exp()
        parts = [rest * factor, *words]
        if weighted is not None:
            parts.append(factor * torch.where(factor == 0, 0.0, weighted + change * rest))
        joined = torch.split(all_reduce_sum(torch.cat(parts), self.group), [part.numel() for part in parts])
        whole = None if weighted is None else joined[-1]
        return (joined[0], whole), largest, list(joined[1 : 1 + len(words)]), factor

    def log_probs_of(
        self, logits: Tensor, labels: Tensor, with_entropy: bool, extra_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`rlloss.heads.logits.log_probs_of` on the logits `[N, size]` of this rank, with plain autograd."""
        whole = logits - all_reduce_max(logits.detach().amax(dim=-1), self.group)[:, None]
        shifted = whole.masked_fill(whole < LOG_FLOOR, LOG_FLOOR)
        log_sum = replicated_sum(shifted.exp().sum(dim=-1), self.group).log()
        log_prob = floored(self._pick(whole, labels[:, None]).squeeze(-1) - log_sum)
        extra = None if extra_ids is None else floored(self._pick(whole, extra_ids) - log_sum[:, None])
        if not with_entropy:
            return log_prob, None, extra
        # Every rank uses the whole sum for words of its own, so that its gradient is a sum over ranks.
        own = (shifted - shared_input(log_sum, self.group)[:, None]).exp() * shifted
        return log_prob, log_sum - replicated_sum(own.sum(dim=-1), self.group), extra

    def _pick(self, shifted: Tensor, ids: Tensor) -> Tensor:
        rows, mine = self.local(ids)
        return replicated_sum(torch.where(mine, shifted.gather(-1, rows), 0.0), self.group)


def shard_vocabulary(
    weight: Tensor, bias: Tensor | None, labels: Tensor, vocab: Vocabulary
) -> tuple[Tensor, Tensor | None, VocabShard | None]:
    """Finds out which words this rank holds; returns its plain rows of weight and bias.

    Args:
        weight: `[size, H]`, this rank's rows, or a `DTensor` `[V, H]` with them.
        bias: The same of `[V]`, or `None`.
        labels: `[N]` of the tokens that count.
        vocab: The ranks of the vocabulary, or their mesh, of one dimension.

    Returns:
        Weight, bias, and the shard; `None` in its place where the vocabulary is whole.

    Raises:
        BatchError: Group and mesh are given, a DTensor lies elsewhere, a rank has no word, or its tokens are others.
    """
    group, mesh = vocab
    if mesh is not None:
        if group is not None or mesh.ndim != 1:
            raise BatchError("give vocab_group, or a vocab_mesh with one dimension such as mesh['tp'], and not both.")
        group = mesh.get_group()
    if group is None:
        return weight, bias, None
    if hasattr(weight, "device_mesh"):
        _check_placement(weight, mesh, world_size(group))
    weight = _own_rows("head_weight", weight)
    bias = None if bias is None else _own_rows("head_bias", bias)
    size = int(weight.shape[0])
    if world_size(group) == 1:
        return weight, bias, None
    sizes = _exchange(size, labels, group)
    start, total = sum(sizes[: rank(group)]), sum(sizes)
    if bias is not None and tuple(bias.shape) != (size,):
        raise BatchError(f"head_bias has shape {tuple(bias.shape)}, expected ({size},), the words of this rank.")
    return weight, bias, VocabShard(group, start, size, total)


def check_counted(vocab: VocabShard | None, counted: Group) -> None:
    """Checks that the ranks of a sharded vocabulary were not counted as holding other tokens.

    Args:
        vocab: The shard, or `None`.
        counted: The group that `build_batches` counted over.

    Raises:
        BatchError: More than one rank of the vocabulary was counted.
    """
    twice = frozenset() if vocab is None else members(vocab.group) & members(counted)
    if len(twice) > 1:
        raise BatchError(
            f"the ranks {sorted(twice)} share one vocabulary and see the same tokens, but build_batches counted each "
            f"of them. Give build_batches the group of data and sequence ranks: group=mesh['dp'].get_group()."
        )


def refuse_vocabulary(name: str, vocab: Vocabulary) -> None:
    """Refuses a sharded vocabulary where all words are needed, or none.

    Raises:
        ConfigError: A group or mesh was given.
    """
    if vocab != (None, None):
        raise ConfigError(f"{name} does not take a head that is cut over ranks. Leave vocab_group and vocab_mesh out.")


def _exchange(size: int, labels: Tensor, group: Group) -> list[int]:
    """Returns the words of each rank; one collective, in which the ranks make sure that they see the same tokens."""
    ordered = (labels * torch.arange(1, labels.shape[0] + 1, device=labels.device)).sum()
    told = torch.stack([labels.new_tensor(size), labels.new_tensor(labels.shape[0]), ordered])
    sizes, counts, marks = zip(*all_gather(told[None], group).tolist(), strict=True)
    if len(set(zip(counts, marks, strict=True))) > 1:
        raise BatchError(
            f"the ranks of one vocabulary must see the same tokens, but count {list(counts)} of them"
            f"{', with other labels' if len(set(counts)) == 1 else ''}. Give each of them the same micro-batch; ranks "
            f"with data of their own belong to the data dimension of the mesh."
        )
    if 0 in sizes:
        raise BatchError(f"the ranks of one vocabulary hold {list(sizes)} words; expected at least one on each.")
    return list(sizes)


def _check_placement(weight: Any, mesh: DeviceMesh | None, ranks: int) -> None:
    placements = tuple(weight.placements)
    same = weight.device_mesh.size() == ranks and (mesh is None or weight.device_mesh == mesh)
    if not same or len(placements) != 1 or not placements[0].is_shard(0):
        raise BatchError(
            f"head_weight is a DTensor with placements {placements} on a mesh of {weight.device_mesh.size()} ranks; "
            f"expected Shard(0) on the vocabulary mesh of {ranks} ranks. Gather the other dimensions first (run the "
            f"loss inside the module with rlloss.LMHead)."
        )


def _own_rows(name: str, tensor: Any) -> Tensor:
    if not hasattr(tensor, "device_mesh"):
        return tensor  # type: ignore[no-any-return]
    if not all(placement.is_shard(0) for placement in tensor.placements):
        raise BatchError(f"{name} is a DTensor with placements {tensor.placements}, expected Shard(0).")
    return tensor.to_local()  # type: ignore[no-any-return]
