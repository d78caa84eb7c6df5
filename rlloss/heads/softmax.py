"""The mathematics of a row: from logits to log-probs, and from `E = exp(q)` to gradients.

With `q = z - shift` and y the label: the label's `E` is 0 before anything is summed, so that `r = sum E`
keeps its digits when the policy is nearly certain, where `1 - p_y` would have none.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlloss.heads.logits import LOG_FLOOR

LARGEST_TOTAL = 1e20
"""Sums of exponentials beyond this belong to a label that is certain, whose other words have no gradient."""


@dataclass(frozen=True)
class RowStats:
    """Numbers of each row of a chunk, all `[C]`.

    Attributes:
        log_prob: Log-prob of the label, nats.
        shift: What q is the logit less of: the largest logit, or a number near it.
        q_label: q of the label.
        rest: Sum of `E` over the other words, r.
        total: `s = r + exp(q_y)`; inf for a label that is certain.
        log_total: `log s`, exact when the label is the largest logit, finite also where `s` is not.
        entropy: Entropy of the row, nats, or `None`.
        q_extra: `[C, K]`, q of K more words, or `None`.
    """

    log_prob: Tensor
    shift: Tensor
    q_label: Tensor
    rest: Tensor
    total: Tensor
    log_total: Tensor
    entropy: Tensor | None
    q_extra: Tensor | None = None

    @property
    def extra_log_prob(self) -> Tensor | None:
        """Log-probs of the K more words, `[C, K]`, nats."""
        return None if self.q_extra is None else (self.q_extra - self.log_total[:, None]).clamp(min=LOG_FLOOR)

    def pick(self, rows: Tensor) -> "RowStats":
        """Returns the numbers of some of the rows."""
        return RowStats(*(None if part is None else part.index_select(0, rows) for part in self._parts()))  # type: ignore[arg-type]

    @staticmethod
    def cat(parts: "list[RowStats]") -> "RowStats":
        """Joins the numbers of consecutive chunks."""
        columns = zip(*(part._parts() for part in parts), strict=True)
        return RowStats(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def _parts(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class RowGradients:
    """Derivatives of the loss by the outputs of each row of a chunk.

    Attributes:
        log_prob: `[C]`, g.
        entropy: `[C]`, e, or `None`.
        extra: `[C, K]`, by the log-probs of K more words, or `None`.
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    extra: Tensor | None = None

    def pick(self, rows: Tensor | slice) -> "RowGradients":
        """Returns the derivatives of some of the rows."""
        return RowGradients(*(None if part is None else part[rows] for part in self._parts()))  # type: ignore[arg-type]

    @staticmethod
    def cat(parts: "list[RowGradients]") -> "RowGradients":
        """Joins the derivatives of consecutive chunks."""
        columns = zip(*(part._parts() for part in parts), strict=True)
        return RowGradients(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def nonzero(self) -> Tensor:
        """Returns which rows have a derivative that is not exactly zero, `[C]` bool; NaN counts as one."""
        found = self.log_prob != 0
        if self.entropy is not None:
            found = found | (self.entropy != 0)
        return found if self.extra is None else found | (self.extra != 0).any(dim=-1)

    def unit(self, stats: RowStats) -> Tensor:
        """Returns for each row what its derivatives by the logits are numbers of order `E` times, `[C]`, positive."""
        largest = self.log_prob.abs()
        for part in (self.entropy, None if self.extra is None else self.extra.abs().sum(dim=-1)):
            largest = largest if part is None else torch.maximum(largest, part.abs())
        return torch.where(largest > 0, largest, 1.0) / stats.total.clamp(max=LARGEST_TOTAL)

    def over(self, factor: Tensor) -> "RowGradients":
        """Returns the derivatives divided by a number for each row."""
        extra = None if self.extra is None else self.extra / factor[:, None]
        return RowGradients(self.log_prob / factor, None if self.entropy is None else self.entropy / factor, extra)

    def split_extra(self, labels: Tensor, extra_ids: Tensor | None) -> "RowGradients":
        """Moves what belongs to the label itself, where it is among the more words, into `log_prob`."""
        if self.extra is None or extra_ids is None:
            return self
        same = extra_ids == labels[:, None]
        own = torch.where(same, self.extra, 0.0).sum(dim=-1)
        return RowGradients(self.log_prob + own, self.entropy, self.extra.masked_fill(same, 0.0))

    def _parts(self) -> list[Tensor | None]:
        return [self.log_prob, self.entropy, self.extra]


@dataclass(frozen=True)
class Transform:
    """From a product `u = h W^T + bias` to logits: `z = softcap(scale * u) / temperature`.

    Attributes:
        bias: `[V]` or `None`; the product contains it already.
        scale: Logit scale.
        softcap: Final soft cap or `None`.
    """

    bias: Tensor | None
    scale: float
    softcap: float | None

    def apply_(self, product: Tensor, temperature: float | Tensor) -> Tensor:
        """Turns a product `[words, C]` into logits, in place."""
        if self.softcap is not None:
            product.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif not isinstance(temperature, Tensor):
            gain = self.scale / temperature
            return product if gain == 1.0 else product.mul_(gain)
        elif self.scale != 1.0:
            product.mul_(self.scale)
        if isinstance(temperature, Tensor):
            return product.div_(temperature)
        return product if temperature == 1.0 else product.div_(temperature)

    def slope(self, q: Tensor, shift: Tensor, temperature: float | Tensor) -> Tensor | float:
        """Derivative of the logits by the product at q `[..., C]`: one for each row, or for each element with a cap."""
        factor = self.scale / temperature
        if self.softcap is None:
            return factor
        # In place: q may be as large as a piece of the chunk.
        capped = (q + shift).mul_(temperature).div_(self.softcap)
        return capped.square_().neg_().add_(1.0).mul_(factor)


def row_stats(
    rest: Tensor, weighted: Tensor | None, shift: Tensor, label_logit: Tensor, extra_logits: Tensor | None
) -> RowStats:
    """Finishes the numbers of each row from sums over the words other than the label.

    Args:
        rest: `[C]`, sum of `E`.
        weighted: `[C]`, sum of `E q`, or `None` when no entropies are wanted.
        shift: `[C]`, what was taken from the logits before `exp`.
        label_logit: `[C]`, logit of the label.
        extra_logits: `[C, K]`, logits of more words, or `None`.
    """
    distance = label_logit - shift
    q_label = distance.clamp(min=LOG_FLOOR)
    q_extra = None if extra_logits is None else extra_logits - shift[:, None]
    label_part = q_label.exp()
    total = rest + label_part
    # r / E_y is what an almost certain label leaves to the other words, also where E_y itself overflows.
    ratio = rest / label_part
    log_total = torch.where(q_label >= 0, q_label + torch.log1p(ratio), torch.log(total))
    # The shift may be any number near the maximum, so the floor belongs to the log-prob, not to q.
    # log p = -log(1 + r / E_y) has all its digits, from nearly certain labels to the rarest that E_y can hold.
    rare = label_part < torch.finfo(total.dtype).tiny
    log_prob = torch.where(rare, distance - log_total, -torch.log1p(ratio)).clamp(min=LOG_FLOOR)
    entropy = None
    if weighted is not None:
        certain = torch.log1p(ratio) + (q_label * ratio - weighted / label_part) / (1.0 + ratio)
        entropy = torch.where(q_label >= 0, certain, log_total - (weighted + label_part * q_label) / total)
    return RowStats(log_prob, shift, q_label, rest, total, log_total, entropy, q_extra)


def label_gradient(stats: RowStats, grads: RowGradients) -> Tensor:
    """Derivative of the loss by the label's logit z_y, `[C]`: `g r / s - e p_y (log p_y + H) - p_y sum_k g_k`."""
    gradient = grads.log_prob * (stats.rest / stats.total)
    if grads.entropy is not None and stats.entropy is not None:
        gradient = gradient - grads.entropy * stats.log_prob.exp() * (stats.log_prob + stats.entropy)
    if grads.extra is not None:
        gradient = gradient - grads.extra.sum(dim=-1) * stats.log_prob.exp()
    return gradient


def off_label_gradient_(exponentials: Tensor, stats: RowStats, grads: RowGradients) -> Tensor:
    """Replaces words of `E` `[words, C]`, labels aside, by the negative derivative of the loss by their logits.

    `D = (E / s) (g + sum_k g_k + e (q - log s + H))`, with q read back from `E`; what `g_k` adds at its own word comes
    later.
    """
    whole = grads.log_prob if grads.extra is None else grads.log_prob + grads.extra.sum(dim=-1)
    row = whole / stats.total
    if grads.entropy is None or stats.entropy is None:
        return exponentials.mul_(row)
    share = grads.entropy / stats.total
    row = row + share * (stats.entropy - stats.log_total)
    curved = torch.special.xlogy(exponentials, exponentials)
    return exponentials.mul_(row).addcmul_(curved, share)
