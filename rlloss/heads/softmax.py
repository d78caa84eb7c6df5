"""The passes over one tile of logits, in place: forward to `E = exp(q)`, and from `E` to gradients.

With `q = z - max z` (bounded below) and y the label: the target column of `E` is 0 before anything is summed, so that
`r = sum E` keeps its digits when the policy is nearly certain, where `1 - p_y` would have none.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlloss.heads.logits import LOG_FLOOR


@dataclass(frozen=True)
class RowStats:
    """Numbers of each row of a chunk, all `[C]`.

    Attributes:
        log_prob: Log-prob of the label, nats.
        peak: Largest logit, the shift of q.
        q_label: q of the label.
        rest: Sum of `E` over the other words, r.
        total: `s = r + exp(q_y)`.
        log_total: `log s`, exact when the label is the largest logit.
        entropy: Entropy of the row, nats, or `None`.
        q_extra: `[C, K]`, q of K more words, or `None`.
    """

    log_prob: Tensor
    peak: Tensor
    q_label: Tensor
    rest: Tensor
    total: Tensor
    log_total: Tensor
    entropy: Tensor | None
    q_extra: Tensor | None = None

    @property
    def extra_log_prob(self) -> Tensor | None:
        """Log-probs of the K more words, `[C, K]`, nats."""
        return None if self.q_extra is None else self.q_extra - self.log_total[:, None]

    def pick(self, rows: Tensor) -> "RowStats":
        """Returns the numbers of some of the rows."""
        return RowStats(*(None if part is None else part.index_select(0, rows) for part in self._parts()))  # type: ignore[arg-type]

    @staticmethod
    def cat(parts: "list[RowStats]") -> "RowStats":
        """Joins the numbers of consecutive tiles."""
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

    def pick(self, rows: Tensor) -> "RowGradients":
        """Returns the derivatives of some of the rows."""
        return RowGradients(*(None if part is None else part[rows] for part in self._parts()))  # type: ignore[arg-type]

    def nonzero(self) -> Tensor:
        """Returns which rows have a derivative that is not exactly zero, `[C]` bool; NaN counts as one."""
        found = self.log_prob != 0
        if self.entropy is not None:
            found = found | (self.entropy != 0)
        return found if self.extra is None else found | (self.extra != 0).any(dim=-1)

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
    """From a raw product `h W^T` to logits: `z = softcap(scale * (product + bias)) / temperature`.

    Attributes:
        bias: `[V]` or `None`.
        scale: Logit scale.
        softcap: Final soft cap or `None`.
    """

    bias: Tensor | None
    scale: float
    softcap: float | None

    def apply_(self, product: Tensor, temperature: float | Tensor) -> Tensor:
        """Turns a raw product into logits, in place."""
        if self.bias is not None:
            product.add_(self.bias)
        if self.softcap is not None:
            product.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            product.mul_(self.scale)
        if isinstance(temperature, Tensor):
            return product.div_(temperature[:, None])
        return product if temperature == 1.0 else product.div_(temperature)

    def slope(self, q: Tensor, peak: Tensor, temperature: float | Tensor) -> Tensor | float:
        """Derivative of the logits by the raw product at `q`: a number for each row, or for each element with a cap."""
        column = temperature[:, None] if isinstance(temperature, Tensor) and q.ndim == 2 else temperature
        factor = self.scale / column
        if self.softcap is None:
            return factor
        capped = (q + (peak[:, None] if q.ndim == 2 else peak)) * column / self.softcap
        return factor * (1.0 - capped.square())


def exponentiate_(logits: Tensor, labels: Tensor, with_entropy: bool, extra_ids: Tensor | None = None) -> RowStats:
    """Replaces a tile of logits by `E` with the target column at 0, and returns its row numbers.

    Args:
        logits: `[C, V]`, overwritten.
        labels: `[C]` int64.
        with_entropy: Whether entropies are wanted.
        extra_ids: `[C, K]` int64, more words whose log-probs are wanted, or `None`.
    """
    column = labels[:, None]
    peak = logits.amax(dim=-1)
    q = logits.sub_(peak[:, None])
    if with_entropy:
        q.clamp_(min=LOG_FLOOR)
    q_label = q.gather(1, column).squeeze(1).clamp(min=LOG_FLOOR)
    q_extra = None if extra_ids is None else q.gather(1, extra_ids).clamp(min=LOG_FLOOR)
    exponentials = q.exp_()
    exponentials.scatter_(1, column, 0.0)
    rest = exponentials.sum(dim=-1)
    label_part = q_label.exp()
    total = rest + label_part
    log_total = torch.where(q_label == 0, torch.log1p(rest), torch.log(total))
    entropy = None
    if with_entropy:
        weighted = torch.special.xlogy(exponentials, exponentials).sum(dim=-1)
        entropy = log_total - (weighted + label_part * q_label) / total
    return RowStats(q_label - log_total, peak, q_label, rest, total, log_total, entropy, q_extra)


def label_gradient(stats: RowStats, grads: RowGradients) -> Tensor:
    """Derivative of the loss by the label's logit z_y, `[C]`: `g r / s - e p_y (log p_y + H) - p_y sum_k g_k`."""
    gradient = grads.log_prob * (stats.rest / stats.total)
    if grads.entropy is not None and stats.entropy is not None:
        gradient = gradient - grads.entropy * stats.log_prob.exp() * (stats.log_prob + stats.entropy)
    if grads.extra is not None:
        gradient = gradient - grads.extra.sum(dim=-1) * stats.log_prob.exp()
    return gradient


def off_label_gradient_(exponentials: Tensor, stats: RowStats, grads: RowGradients) -> Tensor:
    """Replaces `E` by the negative derivative of the loss by the other words' logits, in place.

    `D = (E / s) (g + sum_k g_k + e (q - log s + H))`, with q read back from `E`; what `g_k` adds at its own word comes
    later.
    """
    whole = grads.log_prob if grads.extra is None else grads.log_prob + grads.extra.sum(dim=-1)
    row = (whole / stats.total)[:, None]
    if grads.entropy is None or stats.entropy is None:
        return exponentials.mul_(row)
    shift = ((grads.entropy / stats.total) * (stats.entropy - stats.log_total))[:, None]
    curved = torch.special.xlogy(exponentials, exponentials).mul_((grads.entropy / stats.total)[:, None])
    return exponentials.mul_(row + shift).add_(curved)
