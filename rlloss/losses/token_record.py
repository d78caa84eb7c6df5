"""Per-token numbers of a loss, for whoever wants to look inside: `forward(..., return_tokens=True)`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.heads import HeadInputs, Objective, TokenStats, token_stats

PER_TOKEN = "per_token"
"""Key of the record in `extra`; it is no metric, and `rlloss.metrics.merge` leaves it out."""


@dataclass(frozen=True)
class TokenRecord:
    """What a loss saw of each token and made of it; tensors without a graph, None where the loss has no such number.

    All are `[B, T]` and aligned with the labels: a packed or jagged batch is one row `[1, T]`, and under sequence
    parallelism it is this rank's part. A position that does not count holds 0 (False), whatever stood there.

    Attributes:
        mask: Bool, the tokens that count: not ignored, and kept by calibration.
        log_prob: Log-prob of the label under the current policy, nats.
        entropy: Entropy of the predicted distribution, nats, where the loss or `entropy_metric` asks for it.
        old_log_prob: Log-prob that the ratio is taken against, nats.
        ref_log_prob: Log-prob of the reference policy, nats.
        rollout_log_prob: Log-prob of the sampling engine, nats.
        log_ratio: `log_prob - old_log_prob`, nats; 0 without old log-probs. Of the token itself, also where the loss
            takes the ratio of a sequence.
        ratio: `exp(log_ratio)`, the log-ratio bounded to +-20.
        advantage: Advantage.
        kl: Estimate of the KL divergence from the reference policy (`kl_loss_type`), or the distance from the teacher.
        clipped: Bool, the policy term has no gradient in this log-prob though advantage and weight are not 0: a clip
            binds, or a trust region, a selection or a bound of the log-ratio leaves the token out.
        value: The critic's value.
        weight: Weight of the main term (policy, cross-entropy, value), coefficient and importance weight included.
        loss: The token's contribution. They add up to `extra["loss"]`, this micro-batch's share of the step on this
            rank; a loss of a sequence stands at its tokens as the terms weigh it.
        shares: The contribution of each term by its name; they add up to `loss`.
    """

    mask: Tensor
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    old_log_prob: Tensor | None = None
    ref_log_prob: Tensor | None = None
    rollout_log_prob: Tensor | None = None
    log_ratio: Tensor | None = None
    ratio: Tensor | None = None
    advantage: Tensor | None = None
    kl: Tensor | None = None
    clipped: Tensor | None = None
    value: Tensor | None = None
    weight: Tensor | None = None
    loss: Tensor | None = None
    shares: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the numbers that there are by name, without `shares`."""
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenRecord":
        """Returns a record with every tensor changed."""
        shares = {name: change(share) for name, share in self.shares.items()}
        return TokenRecord(**{name: change(value) for name, value in self.tensors().items()}, shares=shares)


class Watch:
    """An objective that keeps the numbers of the model that it is evaluated on, where they are asked for.

    Args:
        objective: The loss.
        wanted: Whether they are asked for.
    """

    def __init__(self, objective: Objective, wanted: bool) -> None:
        self._inner, self._wanted = objective, wanted
        self._seen: list[TokenStats] = []
        self.objective = replace(objective, fn=self._evaluate) if wanted else objective

    def _evaluate(self, stats: TokenStats, rows: slice) -> Any:
        self._seen.append(_detached(stats))
        return self._inner.fn(stats, rows)

    def stats(self, context: Any, inputs: HeadInputs) -> TokenStats | None:
        """Returns the numbers of all tokens that count, where they were asked for."""
        if not self._wanted:
            return None
        if not self._seen:  # one kernel gave the sum alone
            with torch.no_grad():
                cfg = context.loss_cfg
                self._seen.append(_detached(token_stats(cfg.mode, inputs, cfg.head_options())[0]))
        columns = [torch.cat(part) if isinstance(part[0], Tensor) else None for part in zip(*self._seen, strict=True)]
        return TokenStats(*columns)._replace(segments=context.layout.segments)  # type: ignore[arg-type]


def exported(context: Any, stats: Any, record_of: Callable[[Any], TokenRecord] | None = None) -> dict[str, TokenRecord]:
    """Returns the entry of `extra` for the numbers of the model.

    Args:
        context: A calibrated context.
        stats: `TokenStats`, of a critic `ValueStats`, of the tokens that count; None gives no entry.
        record_of: From these to the record; None is the context's `token_record`.
    """
    if stats is None:
        return {}
    record = (record_of or context.token_record)(_detached(stats))
    with torch.no_grad():
        return {PER_TOKEN: record.map(context.layout.put)}


def flat_record(context: Any, stats: Any, loss_of: Callable[[Any, Any], Tensor]) -> TokenRecord:
    """Collects the numbers `[N]` of the tokens that count.

    Contributions are `w dL/dw` for each token weight w: a loss is linear in its weights (that is what calibration
    relies on), so they are exact for every loss, also for one that returns a scalar.

    Args:
        context: A calibrated context.
        stats: Numbers of the model.
        loss_of: From stats and flat kwargs to the loss of this micro-batch.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(stats[0].device.type, enabled=False):
        flat = context.loss_kwargs.take(context.layout)
        numbers = context.token_numbers(stats, flat)
        names = [name for name in flat.tensors() if name.endswith("loss_weight") and flat.tensors()[name].ndim == 1]
        weights = {name: getattr(flat, name).detach().requires_grad_() for name in names}
        leaf = stats[0].detach().requires_grad_()
        loss = loss_of(stats._replace(**{stats._fields[0]: leaf}), flat.with_tensors(weights))
        slopes = _gradients(loss, list(weights.values()))
        shares = {name: weight * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        if "advantage" in numbers and "policy_loss_weight" in shares:
            (push,) = _gradients(shares["policy_loss_weight"].sum(), [leaf])
            numbers["clipped"] = (push == 0) & (numbers["advantage"] != 0) & (weights["policy_loss_weight"] != 0)
    if shares:
        numbers["weight"] = weights[_main(context, names)]
        numbers["loss"] = sum(shares.values(), torch.zeros_like(stats[0]))
    own = {_term_name(context, name): share.detach() for name, share in shares.items()}
    mask = torch.ones_like(stats[0], dtype=torch.bool)
    return TokenRecord(mask, **{name: value.detach() for name, value in numbers.items()}, shares=own)


def joined(records: Sequence[tuple[str, Tensor, TokenRecord, float]], like: Tensor) -> TokenRecord:
    """Joins the records of the parts of a mixed loss.

    Args:
        records: Name of a part, its rows among all tokens, its record, its coefficient.
        like: `[N]`, a number of every token.
    """
    columns: dict[str, Tensor] = {}
    shares: dict[str, Tensor] = {}
    for part, rows, record, coef in records:
        for name, value in record.tensors().items():
            into = columns.get(name, like.new_zeros(like.shape, dtype=value.dtype))
            columns[name] = into.index_copy(0, rows, (coef * value if name in ("weight", "loss") else value).to(into))
        for name, share in record.shares.items():
            shares[f"{part}/{name}"] = like.new_zeros(like.shape).index_copy(0, rows, (coef * share).to(like))
    columns.setdefault("mask", torch.zeros_like(like, dtype=torch.bool))
    return TokenRecord(**columns, shares=shares)


def refuse_tokens(context: Any, wanted: bool) -> None:
    """Refuses per-token numbers of a loss on logits, of which only the sum is known.

    Raises:
        ConfigError: They are asked for.
    """
    if wanted:
        raise ConfigError(
            f"{type(context).__name__} overrides loss_fn, which gives a sum and no numbers of tokens: "
            f"return_tokens=True needs a loss on log-probs. Override token_loss, or put your own numbers into extra."
        )


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Derivatives with a graph; 0 where there is none."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if leaves and value.requires_grad:
        found = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    ]


def _detached(stats: Any) -> Any:
    parts = {name: part for name, part in stats._asdict().items() if isinstance(part, Tensor)}
    # A tensor of inference mode cannot be differentiated, a copy of it can.
    with torch.inference_mode(False):
        return stats._replace(
            **{name: part.clone() if part.is_inference() else part.detach() for name, part in parts.items()}
        )


def _main(context: Any, names: list[str]) -> str:
    terms = context.loss_cfg.terms()
    first = terms[0].weight_name if terms else names[0]
    return first if first in names else names[0]


def _term_name(context: Any, weight: str) -> str:
    """The term that a weight field belongs to; one that several terms share lends its own name."""
    own = [term.name for term in context.loss_cfg.terms() if term.weight_name == weight]
    return own[0] if len(own) == 1 else weight.removesuffix("loss_weight").rstrip("_") or "loss"
