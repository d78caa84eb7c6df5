"""Configs that XTuner's own trainers accept: ours, and of XTuner's class at once.

    from rlloss.compat.xtuner.inside import GRPOLossConfig
    worker = WorkerConfig(loss_cfg=GRPOLossConfig(mode="chunk", ...), ...)

XTuner's WorkerConfig and model configs refuse a loss config that is not an instance of XTuner's classes. Everything
else, contexts included, is that of `rlloss.compat.xtuner`.
"""

from typing import Any

from rlloss.compat import xtuner as ours
from rlloss.errors import BackendUnavailableError

try:
    from xtuner.v1.loss import CELossConfig as _CELossConfig
    from xtuner.v1.rl.loss import BaseRLLossConfig as _BaseRLLossConfig
except ImportError as error:
    raise BackendUnavailableError(
        f"rlloss.compat.xtuner.inside needs XTuner: {error}. Without it use rlloss.compat.xtuner."
    ) from error


class BaseRLLossConfig(ours.BaseRLLossConfig, _BaseRLLossConfig):  # type: ignore[misc]
    """Base of configs of one's own on a policy."""

    def model_post_init(self, context: Any) -> None:
        """Leaves out XTuner's refusal of what its liger mode cannot do; ours can, or says so itself."""


class CELossConfig(ours.CELossConfig, _CELossConfig):  # type: ignore[misc]
    """Cross-entropy."""

    def model_post_init(self, context: Any) -> None:
        """Leaves out XTuner's refusal of what its liger mode cannot do; ours can, or says so itself."""


class GRPOLossConfig(ours.GRPOLossConfig, BaseRLLossConfig):
    """GRPO."""


class OrealLossConfig(ours.OrealLossConfig, BaseRLLossConfig):
    """OREAL."""
