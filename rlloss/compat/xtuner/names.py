"""XTuner's names and ours, one row each; what is left out, and why."""

NAMES: dict[str, tuple[str, ...]] = {
    "xtuner.v1.loss": (
        "BaseLossConfig",
        "BaseLossContext",
        "BaseLossKwargs",
        "CELossConfig",
        "CELossContext",
        "ChunkLoss",
        "LMHeadLossContext",
        "LogProbConfig",
        "LogProbContext",
    ),
    "xtuner.v1.loss.ce_loss": ("CELossKwargs",),
    "xtuner.v1.loss.rl_loss": ("LogProbKwargs",),
    "xtuner.v1.loss.utils": ("sp_gather", "sp_split"),
    "xtuner.v1.rl.loss": (
        "BaseRLLossConfig",
        "BaseRLLossContext",
        "BaseRLLossKwargs",
        "GRPOLossConfig",
        "GRPOLossContext",
        "GRPOLossKwargs",
        "OrealLossConfig",
        "OrealLossContext",
        "OrealLossKwargs",
        "check_config",
        "compute_kl_loss_weight",
        "finalize_train_policy_metrics",
        "get_policy_loss_fn",
        "kl_penalty",
        "pg_loss_fn",
        "register_policy_loss",
        "sft_loss_fn",
    ),
    "xtuner.v1.rl.rollout_is": ("RolloutImportanceSampling", "merge_rollout_is_metrics"),
    "xtuner.v1.rl.utils": ("gather_logprobs",),
    "xtuner.v1.rl.advantage": (
        "AdvantageEstimator",
        "BaseAdvantageConfig",
        "DrGRPOAdvantageConfig",
        "DrGRPOEstimator",
        "GRPOAdvantageConfig",
        "GRPOEstimator",
        "OPOAdvantageConfig",
        "OPOEstimator",
        "PassKAdvantageConfig",
        "PassKEstimator",
        "RLOOAdvantageConfig",
        "RLOOEstimator",
    ),
}
"""XTuner's module -> its names, each of which stands in `rlloss.compat.xtuner`."""

_MOE = "a loss on router logits: keep XTuner's, it is added to the loss of the head"
_COUNTS = "build_batches counts, by `loss_reduction`"
_RULES = "RolloutImportanceSampling.compute_rollout_importance_weights_and_metrics returns all of it"

ABSENT: dict[str, str] = {
    "xtuner.v1.loss.AuxLossConfig": _MOE,
    "xtuner.v1.loss.AuxLossContext": _MOE,
    "xtuner.v1.loss.BalancingLossConfig": _MOE,
    "xtuner.v1.loss.BalancingLossContext": _MOE,
    "xtuner.v1.loss.BalancingLossKwargs": _MOE,
    "xtuner.v1.loss.ZLossConfig": _MOE,
    "xtuner.v1.loss.ZLossContext": _MOE,
    "xtuner.v1.loss.ZLossKwargs": _MOE,
    "xtuner.v1.loss.MTPLossContext": "multi-token prediction: one LMHeadLossContext for each depth, labels shifted",
    "xtuner.v1.loss.LigerFusedLinearCrossEntropyLossWithWeights": "CELossConfig(mode='liger') weighs tokens itself",
    "xtuner.v1.loss.utils.len2weight": _COUNTS,
    "xtuner.v1.loss.utils.cal_global_grad_tokens": _COUNTS,
    "xtuner.v1.loss.utils.cal_global_sum_loss_weight": _COUNTS,
    "xtuner.v1.rl.loss.loss_fn.POLICY_LOSS_REGISTRY": "rlloss.policy_loss_names and rlloss.unregister_policy_loss",
    "xtuner.v1.rl.rollout_is.compute_rollout_importance_weights": _RULES,
    "xtuner.v1.rl.rollout_is.compute_is_metrics": _RULES,
    "xtuner.v1.rl.rollout_is.compute_mismatch_metrics": _RULES,
}
"""XTuner's names without a counterpart, and what takes their place."""
