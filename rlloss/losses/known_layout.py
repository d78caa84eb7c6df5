"""Where the tokens of a batch stand, read from its labels by the host once and kept until a tensor is another."""

from dataclasses import dataclass

from torch import Tensor

from rlloss.errors import BatchError
from rlloss.layout import TokenLayout, token_layout
from rlloss.losses.batch import LabelFacts, read_labels
from rlloss.losses.kwargs import BaseLossKwargs


@dataclass(frozen=True)
class KnownLayout:
    """Facts about the tensors they were read from; outdated as soon as one of these is another.

    Attributes:
        labels: The labels.
        keep_mask: The tokens that calibration kept, or None.
        offsets: The offsets of packed sequences, or None.
        version: Version of the labels.
        facts: Range and number of the labels.
        layout: Where the tokens that count stand.
    """

    labels: Tensor
    keep_mask: Tensor | None
    offsets: Tensor | None
    version: int
    facts: LabelFacts
    layout: TokenLayout


def read_layout(loss_kwargs: BaseLossKwargs, ignore_idx: int, known: KnownLayout | None) -> KnownLayout:
    """Returns what is known where it is still true, else reads it: one host synchronisation, two with a keep mask."""
    labels, keep, offsets = loss_kwargs.shifted_labels, loss_kwargs.keep_mask, loss_kwargs.cu_seq_lens
    version = 0 if labels.is_inference() else labels._version
    same_labels = known is not None and known.labels is labels and known.version == version
    if known is not None and same_labels and known.keep_mask is keep and known.offsets is offsets:
        return known
    if loss_kwargs.shard is not None and loss_kwargs.shard.group is None:
        raise BatchError(
            "this context was pickled and has lost its sequence-parallel group. Call build_batches with sp_mesh=... in "
            "the process that uses it."
        )
    facts = known.facts if known is not None and same_labels and known.offsets is offsets else None
    facts = facts or read_labels(labels, ignore_idx, offsets, loss_kwargs.shard)
    mask = labels != ignore_idx
    count = facts.count
    if keep is not None:
        mask = mask & keep
        count = int(mask.sum())
    return KnownLayout(labels, keep, offsets, version, facts, token_layout(mask, offsets, count, loss_kwargs.shard))
