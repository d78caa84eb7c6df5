"""Losses that are broken on purpose, one fault each, and what `rlloss check` has to say about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlloss import CELossConfig, CELossContext, GRPOLossConfig, GRPOLossContext, register_policy_loss


@dataclass(frozen=True)
class Broken:
    """A fault: a policy loss or a context, the checks that fail, and words of the first one's diagnosis."""

    name: str
    fails: tuple[str, ...]
    words: str
    fn: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], Any] | None = None
    tokens: int = 1

    def config(self) -> Any:
        if self.make is not None:
            return self.make()
        register_policy_loss("broken", **self.options)(self.fn)
        return GRPOLossConfig(policy_loss_cfg={"loss_type": "broken"})


def ratio_of(log_prob, old_log_prob):
    return (log_prob - old_log_prob).clamp(-20, 20).exp()


def plain_mean(log_prob, old_log_prob, advantages):
    return -(advantages * ratio_of(log_prob, old_log_prob)).mean()


def batch_mean(log_prob, old_log_prob, advantages, loss_weights):
    return -(advantages * ratio_of(log_prob, old_log_prob)).mean()


def unweighted_sum(log_prob, old_log_prob, advantages, loss_weights):
    return -(advantages * ratio_of(log_prob, old_log_prob)).sum()


def whitened(log_prob, old_log_prob, advantages):
    return -(advantages - advantages.mean()) / (advantages.std() + 1e-6) * ratio_of(log_prob, old_log_prob)


def detached_ratio(log_prob, old_log_prob, advantages):
    return -advantages * ratio_of(log_prob, old_log_prob).detach() * log_prob


def flipped(log_prob, old_log_prob, advantages):
    return advantages * ratio_of(log_prob, old_log_prob)


def flipped_for_negative(log_prob, old_log_prob, advantages):
    return -advantages.abs() * ratio_of(log_prob, old_log_prob)


def unclamped(log_prob, old_log_prob, advantages):
    return -advantages * (log_prob - old_log_prob).exp()


def selected_after_exp(log_prob, old_log_prob, advantages):
    log_ratio = log_prob - old_log_prob
    return -advantages * torch.where(log_ratio > 10, 1.0, log_ratio.exp())


def unclamped_kl(log_prob, ref_log_prob, advantages):
    return -advantages * log_prob + (ref_log_prob - log_prob).exp() + log_prob - ref_log_prob


def normalised_in_sequence(log_prob, old_log_prob, advantages, segments):
    ratio = ratio_of(log_prob, old_log_prob)
    return -advantages * ratio / segments.broadcast(segments.mean(ratio))


def scales_advantages(log_prob, old_log_prob, advantages):
    advantages.mul_(0.5)
    return -advantages * ratio_of(log_prob, old_log_prob)


def clips_log_prob(log_prob, old_log_prob, advantages):
    return -advantages * log_prob.sub_(old_log_prob).clamp_(-20, 20).exp()


def fills_old(log_prob, old_log_prob, advantages):
    old_log_prob[advantages > 0] = 0.0
    return -advantages * ratio_of(log_prob, old_log_prob)


def column(log_prob, old_log_prob, advantages):
    return (-advantages * ratio_of(log_prob, old_log_prob))[:, None]


def outer_product(log_prob, old_log_prob, advantages):
    return -advantages[:, None] * ratio_of(log_prob, old_log_prob)


def python_number(log_prob, old_log_prob, advantages):
    return float(-(advantages * ratio_of(log_prob, old_log_prob)).sum())


def nothing(log_prob, old_log_prob, advantages):
    _ = -advantages * ratio_of(log_prob, old_log_prob)


def three_results(log_prob, old_log_prob, advantages):
    ratio = ratio_of(log_prob, old_log_prob)
    return -advantages * ratio, ratio, {}


def without_graph(log_prob, old_log_prob, advantages):
    return -advantages * (log_prob.detach() - old_log_prob).exp()


def rounded(log_prob, old_log_prob, advantages):
    return -advantages * ratio_of(log_prob, old_log_prob).round()


def noisy(log_prob, old_log_prob, advantages):
    return -advantages * ratio_of(log_prob, old_log_prob) * torch.rand_like(log_prob)


def python_random(log_prob, old_log_prob, advantages):
    return -advantages * ratio_of(log_prob, old_log_prob) * random.random()


def raises(log_prob, policy_loss_cfg):
    return log_prob * policy_loss_cfg["beta"]


def context(base: Any, config: Any, method: str, fn: Callable[..., Any], **fields: Any) -> Callable[[], Any]:
    """A config whose context has one method replaced."""
    own = type("BrokenContext", (base,), {method: fn})
    kind = type("BrokenConfig", (config,), {"loss_ctx_cls": property(lambda self: own)})
    return lambda: kind(**fields)


def local_mean(self, stats, loss_kwargs):
    return -stats.log_prob.mean(), {}


def log_prob_of(hidden_states, head_weight, loss_kwargs):
    logits = hidden_states @ head_weight.T
    labels = loss_kwargs.shifted_labels.clamp(min=0)
    return logits, logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def multiplies_by_the_mask(self, hidden_states, head_weight, head_bias, loss_kwargs):
    logits, log_prob = log_prob_of(hidden_states, head_weight, loss_kwargs)
    return -(log_prob * loss_kwargs.loss_weight).sum(), (logits, {})


def pulls_masked_positions(self, hidden_states, head_weight, head_bias, loss_kwargs):
    logits, log_prob = log_prob_of(hidden_states, head_weight, loss_kwargs)
    weight = loss_kwargs.loss_weight
    return -(log_prob * weight).sum() - 0.1 * (log_prob * weight.max()).sum(), (logits, {})


def selects_too_late(self, hidden_states, head_weight, head_bias, loss_kwargs):
    logits, log_prob = log_prob_of(hidden_states, head_weight, loss_kwargs)
    ratio = (log_prob - loss_kwargs.old_logprobs).exp()
    weight = loss_kwargs.policy_loss_weight
    kept = torch.where(weight != 0, -loss_kwargs.advantages * ratio, 0.0)
    return (kept * weight).sum(), (logits, {})


def mean_of_each_row(self, hidden_states, head_weight, head_bias, loss_kwargs):
    counted = loss_kwargs.shifted_labels != self.loss_cfg.ignore_idx
    clean = torch.where(counted[..., None], hidden_states, 0.0)
    logits, log_prob = log_prob_of(clean, head_weight, loss_kwargs)
    weight = loss_kwargs.loss_weight
    rows = (torch.where(counted, log_prob, 0.0) * weight).sum() / counted.sum() * counted.sum()
    return -rows, (logits, {})


BROKEN = [
    Broken("mean over the batch", ("level", "splits"), "looks across tokens", batch_mean, tokens=2),
    Broken("advantages whitened in the batch", ("level", "splits"), "looks across tokens", whitened, tokens=3),
    Broken(
        "mean over the batch, declared as sequence level", ("splits",), "inside a micro-batch", batch_mean,
        {"level": "sequence"}, tokens=2,
    ),
    Broken("sum without weights", ("weights",), "ignores the weights", unweighted_sum),
    Broken("mean that never saw the weights", ("runs",), "never saw the weights of the tokens", plain_mean),
    Broken("detached ratio", ("gradient",), "surrogate=True", detached_ratio),
    Broken("wrong sign", ("direction",), "against the advantage", flipped),
    Broken("wrong sign for bad tokens", ("direction",), "against the advantage", flipped_for_negative),
    Broken("ratio without clamp", ("extreme ratios",), "+100 to old_logprobs gives a loss", unclamped),
    Broken("where after exp", ("extreme ratios",), "+100 to old_logprobs gives a gradient", selected_after_exp),
    Broken("KL without clamp", ("extreme ratios",), "-100 to ref_logprobs", unclamped_kl),
    Broken(
        "normalised in the sequence, declared as token level", ("level",), "Declare level='sequence'",
        normalised_in_sequence, {"level": "token"}, tokens=2,
    ),
    Broken("writes into advantages", ("arguments",), "writes into advantages", scales_advantages),
    Broken("writes into log_prob", ("arguments",), "writes into log_prob", clips_log_prob),
    Broken("writes into old_log_prob", ("arguments",), "writes into old_logprobs", fills_old),
    Broken("a column", ("runs",), "returned shape (1, 1)", column),
    Broken("an outer product", ("runs",), "returned shape (1, 1)", outer_product),
    Broken("a float", ("runs",), "returned a float", python_number),
    Broken("None", ("runs",), "returned a NoneType", nothing),
    Broken("three results", ("runs",), "returned 3 things", three_results),
    Broken("no graph", ("runs",), "not differentiable", without_graph),
    Broken("round", ("gradient",), "exactly 0 for every token", rounded),
    Broken("random", ("repeatable",), "the loss is random", noisy),
    Broken("random number of Python", ("repeatable",), "the loss is random", python_random),
    Broken("raises", ("runs",), "the loss raised KeyError: 'beta'", raises),
    Broken(
        "mean in token_loss", ("level", "splits"), "looks across tokens",
        make=context(CELossContext, CELossConfig, "token_loss", local_mean), tokens=2,
    ),
    Broken(
        "masked positions times 0", ("ignored positions",), "NaN at ignored positions reaches the loss",
        make=context(CELossContext, CELossConfig, "loss_fn", multiplies_by_the_mask), tokens=2,
    ),
    Broken(
        "masked positions take part", ("ignored positions",), "get a gradient",
        make=context(CELossContext, CELossConfig, "loss_fn", pulls_masked_positions), tokens=2,
    ),
    Broken(
        "masked positions selected too late", ("ignored positions", "extreme ratios"), "reaches the gradient",
        make=context(GRPOLossContext, GRPOLossConfig, "loss_fn", selects_too_late), tokens=2,
    ),
    Broken(
        "0 / 0 in a micro-batch without tokens", ("ignored positions",), "whose tokens are all ignored",
        make=context(CELossContext, CELossConfig, "loss_fn", mean_of_each_row),
    ),
]  # fmt: skip
"""Every fault."""
