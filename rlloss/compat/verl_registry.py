"""Policy losses of rlloss in verl's own registry, so that verl's actor finds them by `loss_mode`.

from rlloss.compat.verl_registry import register_in_verl
register_in_verl(settings={"topr": {"positive_weight": 1.0}})     # then: actor.policy_loss.loss_mode=rlloss_topr
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlloss.compat.verl.counts import length_of, reduction_of, rows_of, totals_of
from rlloss.compat.verl.losses import policy_metrics
from rlloss.compat.verl.policy import policy_loss_cfg, setting
from rlloss.errors import BackendUnavailableError, ConfigError, nearest
from rlloss.losses import GRPOLossConfig, GRPOLossContext, get_policy_loss, policy_loss_names

VerlPolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
Register = Callable[[str], Callable[[VerlPolicyLoss], VerlPolicyLoss]]

_NOT_GIVEN = {"entropy", "ref_log_prob", "rollout_log_prob"}


def register_in_verl(
    prefix: str = "rlloss_",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    register: Register | None = None,
) -> list[str]:
    """Registers every policy loss of rlloss, those of one's own too, in verl's registry.

    Losses that need entropies, reference or rollout log-probs are left out: verl does not hand them to a policy loss.
    All of them take the `loss_agg_mode`, which verl's own sapo and geo_mean ignore: theirs is seq-mean-token-mean.

    Args:
        prefix: Stands before our names. "" replaces verl's losses of the same names.
        settings: Fields of the `policy_loss_cfg` of a loss, by its name. Without them the fields that verl has options
            for are read from the actor's config (`rlloss.compat.names.VERL_LOSS_MODES`), others keep their defaults.
        register: verl's `register_policy_loss`; None imports it.

    Returns:
        The names that were registered.

    Raises:
        BackendUnavailableError: verl cannot be imported.
        ConfigError: `settings` names a loss that is not registered.
    """
    settings = settings or {}
    usable = [name for name in policy_loss_names() if not get_policy_loss(name).needs & _NOT_GIVEN]
    for name in settings:
        if name not in usable:
            raise ConfigError(f"settings for {name!r}.{nearest(name, usable)} Registered: {', '.join(usable)}.")
    register = register or _verls_register()
    for name in usable:
        register(prefix + name)(_in_verls_form(name, settings.get(name)))
    return [prefix + name for name in usable]


def _verls_register() -> Register:
    try:
        from verl.trainer.ppo.core_algos import register_policy_loss
    except ImportError as error:
        raise BackendUnavailableError(
            f"verl cannot be imported: {error}. Install it with `pip install verl`."
        ) from error
    return register_policy_loss  # type: ignore[no-any-return]


def _in_verls_form(name: str, settings: Mapping[str, Any] | None) -> VerlPolicyLoss:
    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}
        counts |= setting(config, "global_batch_info", {}) if config is not None else {}
        loss_cfg = GRPOLossConfig(
            policy_loss_cfg=policy_loss_cfg(name, config) if settings is None else {"loss_type": name, **settings},
            loss_reduction=reduction_of(loss_agg_mode),
            loss_length=length_of(loss_agg_mode, log_prob.shape[1], counts),
            reduce_loss=False,
        )
        batch = rows_of(response_mask != 0) | {
            "old_logprobs": old_log_prob,
            "selection_logprobs": log_prob.detach(),
            "advantages": advantages,
            "rollout_is_weights": rollout_is_weights,
        }
        totals = totals_of(loss_agg_mode, counts)
        (context,) = GRPOLossContext.build_batches([loss_cfg.build(batch)], totals=totals)
        loss, (_, extra) = context.forward_log_probs(log_prob)
        return loss, {theirs: metric.aggregate() for theirs, metric in policy_metrics(extra).items()}

    policy_loss.__name__ = policy_loss.__qualname__ = f"rlloss_{name}"
    return policy_loss
