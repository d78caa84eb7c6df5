"""rlloss: the loss layer of reinforcement-learning post-training for language models."""

from rlloss import errors, metrics
from rlloss.functional.kl import kl_penalty
from rlloss.heads import TokenStats, gather_logprobs
from rlloss.losses import (
    BaseLossConfig,
    BaseLossContext,
    BaseLossKwargs,
    BaseRLLossConfig,
    BaseRLLossContext,
    BaseRLLossKwargs,
    CELossConfig,
    CELossContext,
    CELossKwargs,
    GRPOLossConfig,
    GRPOLossContext,
    GRPOLossKwargs,
    LogProbConfig,
    LogProbContext,
    LogProbKwargs,
    LossOutput,
    PerSequence,
    PerToken,
    PolicyLossConfig,
    RolloutImportanceSampling,
    Term,
    Totals,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)

__version__ = "0.1.0"

__all__ = [
    # losses
    "CELossConfig",
    "CELossContext",
    "CELossKwargs",
    "GRPOLossConfig",
    "GRPOLossContext",
    "GRPOLossKwargs",
    "LogProbConfig",
    "LogProbContext",
    "LogProbKwargs",
    "LossOutput",
    "RolloutImportanceSampling",
    "Totals",
    # to extend
    "BaseLossConfig",
    "BaseLossContext",
    "BaseLossKwargs",
    "BaseRLLossConfig",
    "BaseRLLossContext",
    "BaseRLLossKwargs",
    "PerSequence",
    "PerToken",
    "PolicyLossConfig",
    "Term",
    "TokenStats",
    "get_policy_loss",
    "policy_loss_names",
    "register_policy_loss",
    "unregister_policy_loss",
    # functions
    "gather_logprobs",
    "kl_penalty",
    # modules
    "errors",
    "metrics",
]
