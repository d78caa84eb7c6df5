"""verl's policy losses by name, and its registry with verl's argument order."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from rlloss.losses.policy_registry import get_policy_loss
from rlloss.registry import Registry

VerlPolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""`(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)` -> loss, metrics."""

F = TypeVar("F", bound=VerlPolicyLoss)

_OWN: Registry[VerlPolicyLoss] = Registry("verl policy loss")
_RENAMED = {"geo_mean": "gmpo", "gpg": "reinforce"}


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Registers a function in verl's form, which `ppo_loss` then calls for `loss_mode=name`.

    Args:
        name: The name; a taken one is an error, verl overwrites silently.

    Returns:
        A decorator that returns the function unchanged. The function gets `[B, R]` tensors and aggregates by itself,
        with `agg_loss(..., **config.global_batch_info)`.
    """

    def register(fn: F) -> F:
        _OWN.add(name, fn)
        return fn

    return register


def get_policy_loss_fn(name: str) -> VerlPolicyLoss:
    """Returns a function that was registered in verl's form."""
    return _OWN.get(name)


def own_policy_loss(mode: str) -> VerlPolicyLoss | None:
    """Returns the function registered for a mode, or None: a built-in one."""
    return _OWN.get(mode) if mode in _OWN else None


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Reads a field of a dataclass, object or mapping; `default` where it is absent or None."""
    value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
    return default if value is None else value


def loss_mode(config: Any) -> str:
    """Returns the name of the policy loss of an actor config."""
    return str(setting(setting(config, "policy_loss", {}), "loss_mode", "vanilla"))


def policy_loss_cfg(config: Any) -> dict[str, Any]:
    """Translates an actor config into rlloss's `policy_loss_cfg`."""
    mode = loss_mode(config)
    entry = get_policy_loss(_RENAMED.get(mode, mode))
    bound = setting(config, "clip_ratio", 0.2)
    given = {
        "cliprange_low": setting(config, "clip_ratio_low", bound),
        "cliprange_high": setting(config, "clip_ratio_high", bound),
        "clip_ratio_c": setting(config, "clip_ratio_c", 3.0),
    }
    for place in (config, setting(config, "policy_loss", {})):
        for name in ("tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"):
            value = setting(place, name)
            given |= {} if value is None else {name: value}
    known = entry.config.model_fields if entry.config is not None else given
    return {"loss_type": entry.name, **{name: value for name, value in given.items() if name in known}}
