"""XTuner's public names for losses, advantages and rollout correction: its users change one import.

    from rlloss.compat.xtuner import GRPOLossConfig, OrealLossConfig, RolloutImportanceSampling

Configs return None from `build` where a required key is missing and move the batch to the accelerator; `extra` holds
tensors under XTuner's names, and rlloss's metrics in `extra.metrics`. What has no counterpart stands in
`rlloss.compat.xtuner.names.ABSENT`. For XTuner's own trainers take the configs from `rlloss.compat.xtuner.inside`.
"""

from rlloss.compat.xtuner.advantage import (
    AdvantageEstimator,
    BaseAdvantageConfig,
    DrGRPOAdvantageConfig,
    DrGRPOEstimator,
    GRPOAdvantageConfig,
    GRPOEstimator,
    OPOAdvantageConfig,
    OPOEstimator,
    PassKAdvantageConfig,
    PassKEstimator,
    RLOOAdvantageConfig,
    RLOOEstimator,
)
from rlloss.compat.xtuner.contexts import (
    BaseLossConfig,
    BaseLossContext,
    BaseRLLossConfig,
    BaseRLLossContext,
    CELossConfig,
    CELossContext,
    GRPOLossConfig,
    GRPOLossContext,
    LMHeadLossContext,
    LogProbConfig,
    LogProbContext,
    OrealLossConfig,
    OrealLossContext,
)
from rlloss.compat.xtuner.functions import (
    check_config,
    compute_kl_loss_weight,
    get_policy_loss_fn,
    kl_penalty,
    pg_loss_fn,
    register_policy_loss,
    sft_loss_fn,
)
from rlloss.compat.xtuner.metrics import ExtraInfo, finalize_train_policy_metrics
from rlloss.compat.xtuner.rollout_is import RolloutImportanceSampling, merge_rollout_is_metrics
from rlloss.compat.xtuner.utils import ChunkLoss, sp_gather, sp_split
from rlloss.heads import gather_logprobs
from rlloss.losses import (
    BaseLossKwargs,
    BaseRLLossKwargs,
    CELossKwargs,
    GRPOLossKwargs,
    LogProbKwargs,
    OrealLossKwargs,
)

__all__ = [
    "AdvantageEstimator",
    "BaseAdvantageConfig",
    "BaseLossConfig",
    "BaseLossContext",
    "BaseLossKwargs",
    "BaseRLLossConfig",
    "BaseRLLossContext",
    "BaseRLLossKwargs",
    "CELossConfig",
    "CELossContext",
    "CELossKwargs",
    "ChunkLoss",
    "DrGRPOAdvantageConfig",
    "DrGRPOEstimator",
    "ExtraInfo",
    "GRPOAdvantageConfig",
    "GRPOEstimator",
    "GRPOLossConfig",
    "GRPOLossContext",
    "GRPOLossKwargs",
    "LMHeadLossContext",
    "LogProbConfig",
    "LogProbContext",
    "LogProbKwargs",
    "OPOAdvantageConfig",
    "OPOEstimator",
    "OrealLossConfig",
    "OrealLossContext",
    "OrealLossKwargs",
    "PassKAdvantageConfig",
    "PassKEstimator",
    "RLOOAdvantageConfig",
    "RLOOEstimator",
    "RolloutImportanceSampling",
    "check_config",
    "compute_kl_loss_weight",
    "finalize_train_policy_metrics",
    "gather_logprobs",
    "get_policy_loss_fn",
    "kl_penalty",
    "merge_rollout_is_metrics",
    "pg_loss_fn",
    "register_policy_loss",
    "sft_loss_fn",
    "sp_gather",
    "sp_split",
]
