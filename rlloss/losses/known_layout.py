"""Where the tokens of a batch stand, read from its labels by the host once and kept until a tensor is another."""

from dataclasses import dataclass

import torch

from rlloss.errors import BatchError
from rlloss.layout import TokenLayout, token_layout
from rlloss.losses.batch import LabelFacts, check_field, check_rows, read_labels
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.seen import Seen


@dataclass(frozen=True)
class KnownLayout:
    """Facts about the tensors they were read from; outdated as soon as one of these is another, or changed in place.

    Attributes:
        labels: The labels.
        keep_mask: The tokens that calibration kept, or None.
        offsets: The offsets of packed sequences, or None.
        temperature: The temperature of each token, or None.
        facts: Range and number of the labels.
        layout: Where the tokens that count stand.
    """

    labels: Seen
    keep_mask: Seen
    offsets: Seen
    temperature: Seen
    facts: LabelFacts
    layout: TokenLayout


def read_layout(loss_kwargs: BaseLossKwargs, ignore_idx: int, known: KnownLayout | None) -> KnownLayout:
    """Returns what is known where it is still true, else reads it: one host synchronisation, two with a keep mask.

    Labels and offsets that are inference tensors cost one more each time: they are compared with what was read.
    """
    check_rows(loss_kwargs)
    check_field(loss_kwargs, "temperature")
    labels, keep, offsets = loss_kwargs.shifted_labels, loss_kwargs.keep_mask, loss_kwargs.cu_seq_lens
    temperature = loss_kwargs.temperature
    same_rows = known is not None and known.labels.is_still(labels) and known.offsets.is_still(offsets)
    same_rows = same_rows and known is not None and known.temperature.is_still(temperature)
    if known is not None and same_rows and known.keep_mask.is_still(keep):
        return known
    if loss_kwargs.shard is not None and loss_kwargs.shard.group is None:
        raise BatchError(
            "this context was pickled and has lost its sequence-parallel group. Call build_batches with sp_mesh=... in "
            "the process that uses it."
        )
    facts = known.facts if known is not None and same_rows else None
    facts = facts or read_labels(loss_kwargs, ignore_idx)
    mask = labels != ignore_idx
    count = facts.count
    if keep is not None:
        mask = mask & keep
        count = int(mask.sum())
    # Autograd keeps the index, also of a layout that was read in inference mode.
    with torch.inference_mode(False):
        layout = token_layout(mask, offsets, count, loss_kwargs.shard)
    return KnownLayout(Seen.of(labels), Seen.of(keep), Seen.of(offsets), Seen.of(temperature), facts, layout)
