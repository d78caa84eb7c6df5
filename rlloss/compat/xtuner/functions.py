"""XTuner's loss functions: weighted sums over a packed row, with XTuner's argument order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError, UnknownNameError
from rlloss.functional.kl import KL_KINDS
from rlloss.functional.kl import kl_penalty as kl_of_tokens
from rlloss.heads import gather_logprobs
from rlloss.layout import Segments
from rlloss.losses.policy_registry import get_policy_loss, policy_loss_names, unregister_policy_loss
from rlloss.losses.policy_registry import register_policy_loss as register
from rlloss.losses.terms import weighted_sum

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""`(log_prob, old_log_prob, advantages, loss_weights, policy_loss_cfg)` by position -> scalar."""

ARGUMENTS = ("log_prob", "old_log_prob", "advantages", "loss_weights", "policy_loss_cfg")

_OWN: dict[str, PolicyLossFn] = {}


def check_config(keys_needed: Sequence[str], config: Any) -> None:
    """Refuses a `policy_loss_cfg` that lacks a key.

    Raises:
        ConfigError: It names the missing and the present keys.
    """
    missing = [key for key in keys_needed if key not in config]
    if missing:
        raise ConfigError(f"policy_loss_cfg lacks {', '.join(map(repr, missing))}; it has {list(config.keys())}.")


def pg_loss_fn(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, loss_weights: Tensor, policy_loss_cfg: Any
) -> Tensor:
    """PPO's clipped loss with dual clip, summed with weights; see `rlloss.losses.policy_losses.vanilla`.

    Args:
        log_prob: Any shape, nats.
        old_log_prob: The same shape.
        advantages: The same shape.
        loss_weights: The same shape; a token of weight 0 adds nothing, whatever it holds.
        policy_loss_cfg: `cliprange_low` and `cliprange_high`; optionally `clip_ratio_c`, `log_prob_diff_min`,
            `log_prob_diff_max`.

    Returns:
        0-dim.

    Raises:
        ConfigError: A bound is missing, or a field is unknown.
    """
    check_config(("cliprange_low", "cliprange_high"), policy_loss_cfg)
    return _token_loss("vanilla", (log_prob, old_log_prob, advantages, loss_weights), policy_loss_cfg)


def sft_loss_fn(logits: Tensor, shifted_labels: Tensor, loss_weights: Tensor, ignore_idx: int = -100) -> Tensor:
    """Cross-entropy summed with weights.

    Args:
        logits: `[..., V]`.
        shifted_labels: `[...]` integers.
        loss_weights: `[...]`.
        ignore_idx: Label of tokens that add nothing.

    Returns:
        0-dim.
    """
    counts = shifted_labels != ignore_idx
    log_prob = gather_logprobs(logits, torch.where(counts, shifted_labels, -1))
    return weighted_sum(-log_prob, torch.where(counts, _numbers(loss_weights, log_prob), 0.0))


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, loss_weights: Tensor, kl_penalty: str) -> Tensor:
    """Estimates the KL divergence from the reference, summed with weights; see `rlloss.kl_penalty`.

    Args:
        logprobs: Any shape, nats.
        ref_logprobs: The same shape; no gradient flows into it.
        loss_weights: The same shape; a mask may stand for it.
        kl_penalty: kl, k1, abs, mse, k2, low_var_kl or k3.

    Returns:
        0-dim.

    Raises:
        UnknownNameError: `kl_penalty` is no estimator, or None.
    """
    if kl_penalty is None:
        raise UnknownNameError(f"kl_penalty is None: say which estimator, one of {', '.join(KL_KINDS)}.")
    weights = _numbers(loss_weights, logprobs)
    new, reference = _counted(weights, (logprobs, ref_logprobs))
    return weighted_sum(kl_of_tokens(new, reference, kl_penalty), weights)


def compute_kl_loss_weight(
    shifted_labels: Tensor, global_grad_tokens: Tensor | float, kl_loss_coef: float, ignore_idx: int = -100
) -> Tensor:
    """Returns `kl_loss_coef / global_grad_tokens` at tokens that count and 0 elsewhere, in the shape of the labels."""
    weight = torch.as_tensor(kl_loss_coef, device=shifted_labels.device) / global_grad_tokens
    return torch.where(shifted_labels != ignore_idx, weight.float(), 0.0)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Registers a function in XTuner's form as a `loss_type`.

    It is called by position with tensors `[1, N]` of the tokens that count, so that it never sees ignored ones, and
    returns the weighted sum. A name that was registered here before is replaced, as in XTuner.

    Args:
        name: The name.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ConfigError: The name is one of rlloss's own losses.
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        if name in _OWN:
            unregister_policy_loss(name)

        @register(name)
        def by_position(
            log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, loss_weights: Tensor, policy_loss_cfg: Any
        ) -> Tensor:
            return fn(log_prob[None], old_log_prob[None], advantages[None], loss_weights[None], policy_loss_cfg)

        _OWN[name] = fn
        return fn

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Returns a policy loss in XTuner's form: one registered here, a dotted path, or one of rlloss's own.

    Raises:
        UnknownNameError: There is none.
        ConfigError: The loss looks at sequences, entropies or other tensors that XTuner's form has no argument for.
    """
    if name in _OWN:
        return _OWN[name]
    entry = get_policy_loss(name)
    if entry.name == "vanilla":
        return pg_loss_fn
    if entry.name not in policy_loss_names():
        return entry.fn  # type: ignore[return-value]
    missing = sorted(entry.needs - {*ARGUMENTS, "segments", "mask"})
    if missing or (entry.config is not None and entry.level(entry.config(loss_type=entry.name)) != "token"):
        raise ConfigError(
            f"policy loss {name!r} looks at {', '.join(missing) or 'whole sequences'}, which a function of XTuner's "
            f"form does not get. Give it as policy_loss_cfg['loss_type'] and call the context."
        )

    def weighted(*tensors_and_cfg: Any) -> Tensor:
        return _token_loss(entry.name, tensors_and_cfg[:4], tensors_and_cfg[4])

    return weighted


def _token_loss(name: str, tensors: Sequence[Tensor], policy_loss_cfg: Any) -> Tensor:
    """Evaluates a token-level loss on tensors of any shape, and sums it with weights."""
    *columns, weights = (tensor.reshape(-1) for tensor in tensors)
    entry = get_policy_loss(name)
    weights = _numbers(weights, columns[0])
    log_prob, old, advantages = _counted(weights, columns)
    available = {
        "log_prob": log_prob,
        "old_log_prob": old.detach(),
        "advantages": advantages.to(log_prob.dtype),
        "loss_weights": weights,
        "mask": weights != 0,
        "segments": Segments(torch.zeros_like(log_prob, dtype=torch.int64), 1),
        "policy_loss_cfg": entry.configure(policy_loss_cfg),
    }
    result = entry.fn(**{key: available[key] for key in entry.needs})
    values = result[0] if isinstance(result, tuple) else result
    return values if values.ndim == 0 else weighted_sum(values, weights)


def _counted(weights: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Puts 0 at tokens of weight 0: the derivative of what stood there, times 0, may be NaN."""
    return [torch.where(weights != 0, tensor, 0.0) for tensor in tensors]


def _numbers(weights: Tensor, like: Tensor) -> Tensor:
    return weights if weights.is_floating_point() else weights.to(like.dtype)
