"""XTuner's configs and contexts: rlloss's own, that build, move and report as XTuner's do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import rlloss
from rlloss.compat.xtuner.functions import PolicyLossFn, get_policy_loss_fn
from rlloss.compat.xtuner.metrics import extra_info, ratio_counts
from rlloss.compat.xtuner.rollout_is import metrics_of_context
from rlloss.heads import TokenStats
from rlloss.losses.batch_keys import batch_key, check_keys
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.output import LossDetails, LossOutput
from rlloss.losses.token_record import TokenRecord
from rlloss.metrics import Metric


def device_of_training() -> torch.device:
    """Returns the accelerator that XTuner trains on, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Weights are counted in float64, which MPS does not have.
    return torch.device("cpu") if found is None or found.type == "mps" else found


class _Builds:
    """`build` as in XTuner: None where a required key is missing, and on the accelerator."""

    def build(self, data: Mapping[str, Any], sp_mesh: DeviceMesh | None = None) -> Any:
        """Builds a context on the accelerator.

        Args:
            data: Batch; it is only read.
            sp_mesh: Sequence-parallel mesh.

        Returns:
            The context, or None where the batch lacks a key that the loss requires.

        Raises:
            BatchError: A tensor does not fit, or a key is no name of a field but looks like one.
        """
        kwargs_cls: type[BaseLossKwargs] = self._loss_kwargs_cls  # type: ignore[attr-defined]
        fields = kwargs_cls.model_fields
        present = {key: value for key, value in data.items() if value is not None}
        keys = {name: batch_key(kwargs_cls, name, present) for name in fields}
        if any(keys[name] not in present for name, field in fields.items() if field.is_required()):
            return None
        check_keys(kwargs_cls, present)
        device = device_of_training()
        taken = {key: present[key] for key in (*keys.values(), "num_tokens") if key in present}
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in taken.items()}
        return super().build(moved, sp_mesh)  # type: ignore[misc]


class _Reports:
    """`extra` as in XTuner: tensors under its names; rlloss's metrics are in `extra.metrics`."""

    def _finish(self, local: Tensor, logits: Tensor | None, extra: dict[str, Any]) -> LossOutput:
        output: LossOutput = super()._finish(local, logits, extra)  # type: ignore[misc]
        info = extra_info(output.extra)
        info.update({name: value for name, value in output.extra.items() if isinstance(value, TokenRecord)})
        return LossOutput(output.loss, LossDetails(output.logits, info))


class _ReportsRatios(_Reports):
    """The same for losses on a policy."""

    loss_cfg: Any
    loss_kwargs: Any

    @property
    def policy_loss_fn(self) -> PolicyLossFn:
        """The policy loss in XTuner's form, for a `loss_fn` of one's own."""
        return get_policy_loss_fn(self.loss_cfg.policy_loss_cfg.get("loss_type") or "vanilla")

    def token_loss(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """The sum of the terms, and counts of ratios outside of the clip bounds."""
        loss, metrics = super().token_loss(stats, loss_kwargs)  # type: ignore[misc]
        old = self.loss_cfg.old_of(loss_kwargs)
        old = stats.log_prob.detach() if old is None else old
        return loss, {**metrics, **ratio_counts(stats.log_prob, old, self.loss_cfg.policy_loss_cfg)}

    def compute_rollout_is(
        self, sp_mesh: DeviceMesh | None = None, num_tokens: Tensor | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Computes the rollout correction now.

        Labels are not written to, as XTuner does: what is rejected is left out by `build_batches`.

        Args:
            sp_mesh: Sequence-parallel mesh.
            num_tokens: `[S]`, lengths of packed sequences.

        Returns:
            Numbers under XTuner's names: the distance of the two policies, and weights and rejection.
        """
        super().compute_rollout_is(sp_mesh, num_tokens)  # type: ignore[misc]
        return metrics_of_context(self)


class BaseLossConfig(_Builds, rlloss.BaseLossConfig):
    """Base of configs of one's own."""


class BaseLossContext(_Reports, rlloss.BaseLossContext):
    """Base of contexts of one's own."""


class BaseRLLossConfig(_Builds, rlloss.BaseRLLossConfig):
    """Base of configs on a policy."""


class BaseRLLossContext(_ReportsRatios, rlloss.BaseRLLossContext):
    """Base of contexts on a policy."""


class CELossConfig(rlloss.CELossConfig, BaseLossConfig):
    """Cross-entropy."""

    @property
    def loss_ctx_cls(self) -> type["LMHeadLossContext"]:
        """`LMHeadLossContext`."""
        return LMHeadLossContext


class LMHeadLossContext(rlloss.CELossContext, BaseLossContext):
    """Cross-entropy on one micro-batch; `CELossContext` is its older name."""


CELossContext = LMHeadLossContext


class LogProbConfig(rlloss.LogProbConfig, BaseLossConfig):
    """Log-probs alone."""

    @property
    def loss_ctx_cls(self) -> type["LogProbContext"]:
        """`LogProbContext`."""
        return LogProbContext


class LogProbContext(rlloss.LogProbContext, BaseLossContext):
    """Log-probs of one micro-batch; 0 at ignored positions, where XTuner has the log-prob of word 0."""


class GRPOLossConfig(rlloss.GRPOLossConfig, BaseRLLossConfig):
    """GRPO. `kl_loss_type=None` is k3 here, and an error in XTuner's forward."""

    @property
    def loss_ctx_cls(self) -> type["GRPOLossContext"]:
        """`GRPOLossContext`."""
        return GRPOLossContext


class GRPOLossContext(rlloss.GRPOLossContext, BaseRLLossContext):
    """GRPO on one micro-batch."""


class OrealLossConfig(rlloss.OrealLossConfig, BaseRLLossConfig):
    """OREAL."""

    @property
    def loss_ctx_cls(self) -> type["OrealLossContext"]:
        """`OrealLossContext`."""
        return OrealLossContext


class OrealLossContext(rlloss.OrealLossContext, BaseRLLossContext):
    """OREAL on one micro-batch."""
