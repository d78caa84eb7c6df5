"""TRL's GRPOConfig as a loss config of rlloss; it reads attributes and does not import TRL."""

from collections.abc import Callable
from typing import Any

from rlloss.compat.names import TRL_LOSS_TYPES, TRL_RATIOS, trl_policy_loss
from rlloss.errors import ConfigError
from rlloss.losses.grpo import GRPOLossConfig

TRL_OPTIONS: dict[str, str] = {
    "loss_type": "policy_loss_cfg.loss_type and loss_reduction",
    "importance_sampling_level": "policy_loss_cfg.ratio",
    "epsilon": "policy_loss_cfg.cliprange_low",
    "epsilon_high": "policy_loss_cfg.cliprange_high",
    "delta": "policy_loss_cfg.delta",
    "sapo_temperature_pos": "policy_loss_cfg.tau_pos",
    "sapo_temperature_neg": "policy_loss_cfg.tau_neg",
    "vespo_k_pos": "policy_loss_cfg.k_pos",
    "vespo_lambda_pos": "policy_loss_cfg.lambda_pos",
    "vespo_k_neg": "policy_loss_cfg.k_neg",
    "vespo_lambda_neg": "policy_loss_cfg.lambda_neg",
    "max_completion_length": "loss_length",
    "beta": "kl_loss_coef",
    "use_bias_correction_kl": "kl_importance",
    "off_policy_mask_threshold": "off_policy_limit",
    "top_entropy_quantile": "top_entropy_quantile",
    "temperature": "temperature",
}
"""TRL's option -> our field, as `trl_loss_config` fills it. cispo's epsilon_high is `policy_loss_cfg.ratio_cap`."""

TRL_METRICS: dict[str, Callable[[dict[str, float]], float]] = {
    "kl": lambda ours: ours["kl"],
    "entropy": lambda ours: ours["entropy"],
    "clip_ratio/low_mean": lambda ours: ours["clip_frac_low"],
    "clip_ratio/high_mean": lambda ours: ours["clip_frac_high"],
    "clip_ratio/region_mean": lambda ours: ours["clip_frac_low"] + ours["clip_frac_high"],
}
"""TRL's name -> that number out of our reduced metrics; a KeyError where the loss has none."""


def trl_loss_config(args: Any, **fields: Any) -> GRPOLossConfig:
    """Translates TRL's GRPOConfig into a loss config.

    Args:
        args: TRL's GRPOConfig, or any object with its attributes.
        fields: Fields of `GRPOLossConfig` that TRL has no option for (`mode`, `chunk_size`, ...), or that replace one.

    Returns:
        A config whose loss, with the counts of `trl_totals`, equals TRL's; without them it is calibrated over the whole
        optimiser step. The log-ratio is bounded to +-20 nats, which TRL's is not.

    Raises:
        UnknownNameError: The loss type or level.
        ConfigError: The entropy bonus is on: TRL divides it by the tokens of a micro-batch, whatever the loss type.
    """
    if getattr(args, "entropy_coef", 0.0) or getattr(args, "use_adaptive_entropy", False):
        raise ConfigError(
            "entropy_coef and use_adaptive_entropy of TRL's GRPOConfig are not translated. Leave them out there, and "
            "give the trainer loss_cfg=trl_loss_config(args, entropy_coef=..., entropy_reduction='token'); an "
            "adaptive coefficient is rlloss.AdaptiveEntropyCoef."
        )
    policy = trl_policy_loss({name: getattr(args, name, None) for name in _POLICY_OPTIONS})
    reduction = TRL_LOSS_TYPES[args.loss_type].reduction
    level = TRL_RATIOS[args.importance_sampling_level]
    found: dict[str, Any] = {
        "policy_loss_cfg": policy,
        "loss_reduction": reduction,
        "loss_length": float(args.max_completion_length) if reduction == "constant" else None,
        "temperature": args.temperature,
        "off_policy_limit": args.off_policy_mask_threshold,
        "top_entropy_quantile": args.top_entropy_quantile,
        "on_policy": True,
    }
    if args.beta:
        correction = level if args.use_bias_correction_kl else None
        found |= {"use_kl_loss": True, "kl_loss_coef": args.beta, "kl_value_cap": None, "kl_importance": correction}
    return GRPOLossConfig(**found | fields)


_POLICY_OPTIONS = [name for name, ours in TRL_OPTIONS.items() if ours.startswith("policy_loss_cfg")]
