"""One optimiser step of a loss on written-down sequences."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.doctor.sequences import Sequence, batch_of, head_of
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of one step.

    Attributes:
        loss: Sum over the micro-batches.
        grad_hidden: `[L, H]`, the rows of all sequences in their order; without a critic, H is the words.
        grad_weight: `[V, H]`.
    """

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are free of inf and NaN."""
        return all(bool(part.isfinite().all()) for part in (self.loss, self.grad_hidden, self.grad_weight))

    def distance(self, other: "Outcome") -> float:
        """Largest difference, relative to the largest entry of each tensor; inf where there is a NaN.

        Where one step has more sequences, its last rows are left out.
        """
        rows = min(len(self.grad_hidden), len(other.grad_hidden))
        pairs = (
            (self.loss, other.loss),
            (self.grad_hidden[:rows], other.grad_hidden[:rows]),
            (self.grad_weight, other.grad_weight),
        )
        return max(_relative(mine, theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class How:
    """How a step is made.

    Attributes:
        packed: All sequences of a micro-batch in one row, or one row for each.
        garbage: What stands at ignored positions.
        dtype: Of all numbers.
        moved: Added to the head's weight.
        scale: Factor on every token weight after calibration.
    """

    packed: bool = True
    garbage: float = 0.0
    dtype: torch.dtype = torch.float64
    moved: Tensor | None = None
    scale: float = 1.0


def step(config: BaseLossConfig, *micro_batches: list[Sequence], how: How | None = None, **fields: Any) -> Outcome:
    """Calibrates micro-batches together, and runs each forward and backward.

    Args:
        config: The loss; the mode is eager unless `fields` says otherwise.
        *micro_batches: Lists of sequences, each written by `sequence`.
        how: Layout, garbage, dtype.
        **fields: Fields of the config that take other values.

    Returns:
        Loss and gradients.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _step(with_fields(config, fields), micro_batches, how or How())


def with_fields(config: BaseLossConfig, fields: dict[str, Any]) -> BaseLossConfig:
    """Returns the config in eager mode, with other values of some fields, validated."""
    plain = config.model_copy(update={"mode": "eager"})
    return type(config)(**{**dict(plain), **fields}) if fields else plain


def contexts_of(
    config: BaseLossConfig, micro_batches: tuple[list[Sequence], ...], how: How
) -> list[tuple[BaseLossContext, Tensor]]:
    """Returns calibrated contexts and their hidden states."""
    groups = {int(columns["group_ids"][0]) for part in micro_batches for columns in part if "group_ids" in columns}
    prompts = {group: place for place, group in enumerate(sorted(groups))}
    laid = [batch_of(config, part, how.packed, how.garbage, prompts) for part in micro_batches]
    laid = [({name: _cast(value, how) for name, value in batch.items()}, _cast(hidden, how)) for batch, hidden in laid]
    contexts = [config.build(batch) for batch, _ in laid]
    contexts = type(contexts[0]).build_batches(contexts)
    return [(context, hidden) for context, (_, hidden) in zip(contexts, laid, strict=True)]


def _step(config: BaseLossConfig, micro_batches: tuple[list[Sequence], ...], how: How) -> Outcome:
    weight, more = head_of(config, micro_batches[0][0]["logits"].shape[1])
    head = (weight if how.moved is None else weight + how.moved).to(how.dtype).clone().requires_grad_()
    more = {name: _cast(value, how) for name, value in more.items()}
    total, gradients = head.new_zeros(()), []
    for (context, states), part in zip(contexts_of(config, micro_batches, how), micro_batches, strict=True):
        if how.scale != 1.0:
            _scale_weights(context, how.scale)
        hidden = states.clone().requires_grad_()
        loss = context.forward(hidden, head, **more).loss
        torch.autograd.backward(loss)
        total = total + loss.detach()
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        lengths = [len(columns["labels"]) for columns in part]
        rows = torch.split(gradient[0], lengths) if how.packed else gradient.unbind()
        gradients += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return Outcome(total, torch.cat(gradients), torch.zeros_like(head) if head.grad is None else head.grad)


def _scale_weights(context: BaseLossContext, factor: float) -> None:
    for name in {term.weight_name for term in context.loss_cfg.terms()}:
        setattr(context.loss_kwargs, name, factor * getattr(context.loss_kwargs, name))


def _cast(value: Any, how: How) -> Any:
    return value.to(how.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _relative(mine: Tensor, theirs: Tensor) -> float:
    gap = (mine - theirs).abs()
    if bool(gap.isnan().any()):
        return float("inf")
    # A gradient that is 0 but for rounding has no scale of its own.
    return float(gap.max()) / max(float(theirs.abs().max()), 1e-3)
