"""Policy losses by name: a function whose signature declares what it needs, and a typed config for it.

    @register_policy_loss("mine", config=MyConfig)
    def my_loss(log_prob, old_log_prob, advantages, policy_loss_cfg): ...

Arguments are passed by name, so their order does not matter and two of them cannot be swapped by mistake.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field
from torch import Tensor

from rlloss.errors import ConfigError, UnknownNameError, nearest
from rlloss.losses.config import StrictModel
from rlloss.losses.selection import StepTokens
from rlloss.losses.terms import Level, Reduction
from rlloss.metrics import Metric, require_metrics
from rlloss.registry import Registry

PolicyResult = Tensor | tuple[Tensor, dict[str, Metric]]
PolicyFn = Callable[..., PolicyResult]
F = TypeVar("F", bound=PolicyFn)

ARGUMENTS = (
    "log_prob",
    "old_log_prob",
    "ref_log_prob",
    "rollout_log_prob",
    "advantages",
    "loss_weights",
    "is_weights",
    "mask",
    "entropy",
    "segments",
    "selected",
    "policy_loss_cfg",
)
"""Everything that a policy loss may ask for; all tensors are `[N]`, the tokens that count. `selected` is what the
loss's own `selection` chose over the whole step."""


_DEFAULT_LOSS = "vanilla"


class PolicyLossConfig(StrictModel):
    """Base of the typed configs of policy losses; also answers `cfg["field"]` and `cfg.get("field")`."""

    loss_type: str = Field(default=_DEFAULT_LOSS, frozen=True)
    """Registered name, alias, or dotted import path of the policy loss."""

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or `default` when there is none of that name."""
        return getattr(self, name) if name in type(self).model_fields else default

    def keys(self) -> Iterator[str]:
        """Returns the field names."""
        return iter(type(self).model_fields)


LevelOf = Level | Callable[[Any], Level]
Selection = Callable[[StepTokens, Any], Tensor]
"""A choice over a whole step: its tokens and the loss's config -> `[N]` bool."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss.

    Attributes:
        name: Canonical name.
        fn: The function; it returns `[N]`, which is weighted for it, or a scalar that used `loss_weights`.
        config: Its config model, or None: it gets the plain dict.
        needs: Names of its arguments.
        level_of: Level, or config -> level.
        reduction: Reduction that its paper uses, where that is not `token`.
        surrogate: Whether its gradient is meant not to be the slope of its value (a stop-gradient in the formula).
        selection: Its choice over the whole step, or None.
    """

    name: str
    fn: PolicyFn
    config: type[PolicyLossConfig] | None
    needs: frozenset[str]
    level_of: LevelOf
    reduction: Reduction | None = None
    surrogate: bool = False
    selection: Selection | None = None

    def level(self, policy_loss_cfg: Any) -> Level:
        """Returns the level under a given config."""
        return self.level_of(policy_loss_cfg) if callable(self.level_of) else self.level_of

    def configure(self, given: Any) -> Any:
        """Validates a dict or model into the loss's own config; without a model the dict stays as it is."""
        if self.config is None:
            return given.model_dump() if isinstance(given, StrictModel) else dict(given)
        if isinstance(given, self.config):
            named = get_policy_loss(given.loss_type).name == self.name
            return given if named else given.model_copy(update={"loss_type": self.name})
        # Of another loss's config only what was set: its defaults are not what the user asked for.
        fields = given.given_fields() if isinstance(given, StrictModel) else dict(given)
        return self.config(**{"loss_type": self.name, **fields})

    def read(self, result: Any, log_prob: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """Returns the numbers and metrics that the function returned.

        Raises:
            ConfigError: They are something else than `[N]` or a scalar, alone or with a dict; or they are a scalar, and
                the function does not know the weights of the tokens.
        """
        expected = f"[N]={tuple(log_prob.shape)} or a scalar that already used loss_weights"
        parts = result if isinstance(result, tuple) else (result, {})
        if len(parts) != 2 or not isinstance(parts[1], dict):
            raise ConfigError(
                f"policy loss {self.name!r} returned {len(parts)} things, expected numbers, or numbers and a dict of "
                f"metrics. Numbers are {expected}."
            )
        values, metrics = parts
        if not isinstance(values, Tensor):
            raise ConfigError(
                f"policy loss {self.name!r} returned a {type(values).__name__}, expected a tensor: {expected}."
            )
        if values.shape not in ((), log_prob.shape):
            raise ConfigError(f"policy loss {self.name!r} returned shape {tuple(values.shape)}, expected {expected}.")
        if values.shape == () and "loss_weights" not in self.needs:
            raise ConfigError(
                f"policy loss {self.name!r} returned a scalar, but never saw the weights of the tokens: the loss of a "
                f"step would depend on how it is cut into micro-batches. Return a number for each token, "
                f"{tuple(log_prob.shape)}, or take the argument loss_weights and return (loss_weights * numbers).sum()."
            )
        return values, require_metrics(f"policy loss {self.name!r}", metrics)


_REGISTRY: Registry[PolicyLoss] = Registry("policy loss")


def register_policy_loss(
    name: str,
    *,
    config: type[PolicyLossConfig] | None = None,
    aliases: tuple[str, ...] = (),
    level: LevelOf | None = None,
    reduction: Reduction | None = None,
    surrogate: bool = False,
    selection: Selection | None = None,
) -> Callable[[F], F]:
    """Registers a policy loss under a name.

    Args:
        name: The name for `loss_type`.
        config: Typed config of the loss; without it the function gets the plain dict.
        aliases: Other names.
        level: "token", "sequence" or "step", or a function of the config. By default a function that asks for
            `segments` is sequence-level, any other token-level.
        reduction: Reduction that the loss's paper uses, for `rlloss list`.
        surrogate: The formula has a stop-gradient, so that its gradient is not the slope of its value.
        selection: Chooses tokens over the whole step in `build_batches`; the function gets them as `selected`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ConfigError: The name is taken, or the function has an argument that rlloss does not know.
    """

    def decorate(fn: F) -> F:
        needs = _arguments(name, fn)
        entry = PolicyLoss(name, fn, config, needs, level or _default_level(needs), reduction, surrogate, selection)
        _REGISTRY.add(name, entry, aliases)
        return fn

    return decorate


def unregister_policy_loss(name: str) -> None:
    """Removes a registered policy loss, so that the name can be used again."""
    _REGISTRY.remove(name)


def policy_loss_names() -> list[str]:
    """Returns the names of all registered policy losses."""
    return list(_REGISTRY)


def policy_loss_aliases(name: str) -> tuple[str, ...]:
    """Returns the other names of a registered policy loss."""
    return _REGISTRY.aliases_of(name)


def get_policy_loss(name: str) -> PolicyLoss:
    """Finds a policy loss by name, alias or dotted path `package.module.function`.

    Raises:
        UnknownNameError: There is none; the message names the nearest one.
    """
    if not isinstance(name, str) or name in _REGISTRY or "." not in name:
        return _REGISTRY.get(name)
    module_name, _, attribute = name.rpartition(".")
    try:
        fn = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownNameError(
            f"policy loss {name!r} could not be imported: {error}. Give package.module.function."
        ) from error
    registered = next((_REGISTRY.get(known) for known in _REGISTRY if _REGISTRY.get(known).fn is fn), None)
    if registered is not None:
        return registered
    needs = _arguments(name, fn)
    return PolicyLoss(name, fn, None, needs, _default_level(needs))


def policy_loss_of(given: Any) -> PolicyLoss:
    """Finds the loss that a dict or a typed config stands for: by its `loss_type`, else by the config's class.

    Raises:
        ConfigError: A typed config without a `loss_type` is that of no loss, or of several.
        UnknownNameError: There is no loss of that name.
    """
    kind = type(given)
    bare = isinstance(given, PolicyLossConfig) and kind is not PolicyLossConfig
    if not bare or "loss_type" in given.model_fields_set or given.loss_type != _DEFAULT_LOSS:
        return get_policy_loss(given.get("loss_type") or _DEFAULT_LOSS)
    own = [_REGISTRY.get(name) for name in _REGISTRY if _REGISTRY.get(name).config is kind]
    if len(own) == 1:
        return own[0]
    known = f"the config of {', '.join(loss.name for loss in own)}" if own else "not the config of a registered loss"
    raise ConfigError(f"{kind.__name__} is {known}: give it the loss_type that is meant.")


def _default_level(needs: frozenset[str]) -> Level:
    return "sequence" if "segments" in needs else "token"


def _arguments(name: str, fn: PolicyFn) -> frozenset[str]:
    if not callable(fn):
        raise ConfigError(f"policy loss {name!r} is a {type(fn).__name__}, expected a function.")
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError as error:
        raise ConfigError(
            f"policy loss {name!r}: {error}. Wrap it in a function whose arguments have names."
        ) from error
    asked = []
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"policy loss {name!r}: argument {parameter.name!r} cannot be passed by name. "
                f"Arguments are: {', '.join(ARGUMENTS)}."
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.name in ARGUMENTS:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"policy loss {name!r} asks for {parameter.name!r}, which rlloss does not know."
                f"{nearest(parameter.name, ARGUMENTS)} Arguments are: {', '.join(ARGUMENTS)}."
            )
    return frozenset(asked)
