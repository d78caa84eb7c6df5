"""Losses as configs and contexts: `build` -> `build_batches` -> `forward`."""

from rlloss.losses.calibration import Totals
from rlloss.losses.ce import CELossConfig, CELossContext, CELossKwargs
from rlloss.losses.config import BaseLossConfig, StrictModel
from rlloss.losses.context import BaseLossContext
from rlloss.losses.grpo import GRPOLossConfig, GRPOLossContext, GRPOLossKwargs
from rlloss.losses.kwargs import BaseLossKwargs, PerSequence, PerToken
from rlloss.losses.logprob import LogProbConfig, LogProbContext, LogProbKwargs
from rlloss.losses.output import LossOutput
from rlloss.losses.policy_losses import ClipConfig, VanillaConfig
from rlloss.losses.policy_registry import (
    PolicyLossConfig,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.losses.ppo import (
    ActorCriticLossConfig,
    ActorCriticLossContext,
    ActorCriticLossKwargs,
    PPOLossConfig,
    PPOLossContext,
    PPOLossKwargs,
)
from rlloss.losses.rl import BaseRLLossConfig, BaseRLLossContext, BaseRLLossKwargs
from rlloss.losses.rollout_is import RolloutImportanceSampling
from rlloss.losses.terms import Term
from rlloss.losses.value import ValueLossConfig, ValueLossContext, ValueLossKwargs

__all__ = [
    "ActorCriticLossConfig",
    "ActorCriticLossContext",
    "ActorCriticLossKwargs",
    "BaseLossConfig",
    "BaseLossContext",
    "BaseLossKwargs",
    "BaseRLLossConfig",
    "BaseRLLossContext",
    "BaseRLLossKwargs",
    "CELossConfig",
    "CELossContext",
    "CELossKwargs",
    "ClipConfig",
    "GRPOLossConfig",
    "GRPOLossContext",
    "GRPOLossKwargs",
    "LogProbConfig",
    "LogProbContext",
    "LogProbKwargs",
    "LossOutput",
    "PPOLossConfig",
    "PPOLossContext",
    "PPOLossKwargs",
    "PerSequence",
    "PerToken",
    "PolicyLossConfig",
    "RolloutImportanceSampling",
    "StrictModel",
    "Term",
    "Totals",
    "ValueLossConfig",
    "ValueLossContext",
    "ValueLossKwargs",
    "VanillaConfig",
    "get_policy_loss",
    "policy_loss_names",
    "register_policy_loss",
    "unregister_policy_loss",
]
