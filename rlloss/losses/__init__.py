"""Losses as configs and contexts: `build` -> `build_batches` -> `forward`."""

from rlloss.losses.ce import CELossConfig, CELossContext, CELossKwargs
from rlloss.losses.config import BaseLossConfig, StrictModel
from rlloss.losses.context import BaseLossContext
from rlloss.losses.distill import DistillLossConfig, DistillLossContext, DistillLossKwargs
from rlloss.losses.entropy import AdaptiveEntropyCoef
from rlloss.losses.grpo import GRPOLossConfig, GRPOLossContext, GRPOLossKwargs
from rlloss.losses.kwargs import BaseLossKwargs, PerSequence, PerToken
from rlloss.losses.lm_head import LMHead
from rlloss.losses.logprob import LogProbConfig, LogProbContext, LogProbKwargs
from rlloss.losses.mixed import MixedLossConfig, MixedLossContext
from rlloss.losses.mixed_parts import MixedLossKwargs
from rlloss.losses.oreal import OrealLossConfig, OrealLossContext, OrealLossKwargs
from rlloss.losses.output import LossOutput
from rlloss.losses.policy_covariance import ClipCovConfig, KLCovConfig
from rlloss.losses.policy_losses import ClipConfig, GMPOConfig, GSPOConfig, RatioConfig, SAPOConfig, VanillaConfig
from rlloss.losses.policy_quadratic import DROConfig, OPMDConfig
from rlloss.losses.policy_registry import (
    PolicyLossConfig,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.losses.policy_scores import CISPOConfig, DPPOConfig, ReinforceConfig, TOPRConfig, VESPOConfig
from rlloss.losses.ppo import (
    ActorCriticLossConfig,
    ActorCriticLossContext,
    ActorCriticLossKwargs,
    PPOLossConfig,
    PPOLossContext,
    PPOLossKwargs,
)
from rlloss.losses.rl import BaseRLLossConfig, BaseRLLossContext
from rlloss.losses.rl_kwargs import BaseRLLossKwargs
from rlloss.losses.rollout_is import RolloutImportanceSampling
from rlloss.losses.selection import StepTokens
from rlloss.losses.terms import Term
from rlloss.losses.token_record import TokenRecord
from rlloss.losses.totals import Totals
from rlloss.losses.value import ValueLossConfig, ValueLossContext, ValueLossKwargs

__all__ = [
    "ActorCriticLossConfig",
    "ActorCriticLossContext",
    "ActorCriticLossKwargs",
    "AdaptiveEntropyCoef",
    "BaseLossConfig",
    "BaseLossContext",
    "BaseLossKwargs",
    "BaseRLLossConfig",
    "BaseRLLossContext",
    "BaseRLLossKwargs",
    "CELossConfig",
    "CELossContext",
    "CELossKwargs",
    "CISPOConfig",
    "ClipConfig",
    "ClipCovConfig",
    "DPPOConfig",
    "DROConfig",
    "DistillLossConfig",
    "DistillLossContext",
    "DistillLossKwargs",
    "GMPOConfig",
    "GRPOLossConfig",
    "GRPOLossContext",
    "GRPOLossKwargs",
    "GSPOConfig",
    "KLCovConfig",
    "LMHead",
    "LogProbConfig",
    "LogProbContext",
    "LogProbKwargs",
    "LossOutput",
    "MixedLossConfig",
    "MixedLossContext",
    "MixedLossKwargs",
    "OPMDConfig",
    "OrealLossConfig",
    "OrealLossContext",
    "OrealLossKwargs",
    "PPOLossConfig",
    "PPOLossContext",
    "PPOLossKwargs",
    "PerSequence",
    "PerToken",
    "PolicyLossConfig",
    "RatioConfig",
    "ReinforceConfig",
    "RolloutImportanceSampling",
    "SAPOConfig",
    "StepTokens",
    "StrictModel",
    "TOPRConfig",
    "Term",
    "TokenRecord",
    "Totals",
    "VESPOConfig",
    "ValueLossConfig",
    "ValueLossContext",
    "ValueLossKwargs",
    "VanillaConfig",
    "get_policy_loss",
    "policy_loss_names",
    "register_policy_loss",
    "unregister_policy_loss",
]
