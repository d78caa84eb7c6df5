"""verl's policy losses by name, and its registry with verl's argument order."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from rlloss.compat.names import VERL_LOSS_MODES, verl_policy_loss
from rlloss.losses.policy_registry import get_policy_loss
from rlloss.registry import Registry

VerlPolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""`(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)` -> loss, metrics."""

F = TypeVar("F", bound=VerlPolicyLoss)

_OWN: Registry[VerlPolicyLoss] = Registry("verl policy loss")
_OPTIONS = {"clip_ratio", *(theirs for _, fields in VERL_LOSS_MODES.values() for theirs in fields)}
_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_c": 3.0}
"""verl's own, for a config without these fields."""


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


def policy_loss_cfg(mode: str, config: Any) -> dict[str, Any]:
    """Translates an actor config into rlloss's `policy_loss_cfg`; fields are read from its `policy_loss` first.

    Args:
        mode: verl's name of a loss, or ours. One that verl does not have takes verl's clip bounds, where it has them.
        config: The actor config.
    """
    inner = setting(config, "policy_loss", {})
    options = {name: setting(inner, name, setting(config, name, _DEFAULTS.get(name))) for name in _OPTIONS}
    if mode in VERL_LOSS_MODES:
        return verl_policy_loss(mode, options)
    entry = get_policy_loss(mode)
    theirs = next((name for name, (ours, _) in VERL_LOSS_MODES.items() if ours == entry.name), "vanilla")
    fields = {**verl_policy_loss(theirs, options), "loss_type": entry.name}
    return {name: value for name, value in fields.items() if entry.config is None or name in entry.config.model_fields}
