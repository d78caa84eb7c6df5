"""The critic: a value head on hidden states, calibrated like every other loss."""

from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import BatchError, ConfigError
from rlloss.functional.value import value_loss
from rlloss.heads.vocab_parallel import refuse_vocabulary
from rlloss.layout import Segments, TokenLayout, require_tensor
from rlloss.losses.batch import refuse_nan
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs, TokenTensor, WeightTensor
from rlloss.losses.output import LossOutput
from rlloss.losses.terms import Reduction, Term, evaluate
from rlloss.losses.token_record import TokenRecord, exported, flat_record
from rlloss.metrics import Metric


class ValueStats(NamedTuple):
    """What a value term sees of the model: numbers for the N tokens that count.

    Attributes:
        value: `[N]`, value of the state before each token.
        segments: Which sequence each token belongs to.
    """

    value: Tensor
    segments: Segments


class ValueLossConfig(BaseLossConfig):
    """`loss = sum_t w_t max(L(V - R), L(clip(V, V_old +- cliprange_value) - R))`, weights by `loss_reduction`.

    `mode` changes nothing here: a value head has one row, so there are no logits to avoid.
    """

    cliprange_value: float | None = Field(default=0.2, gt=0.0)
    """How far a value may move from the old one before the clip binds; None leaves the clip out (no old values)."""
    huber_delta: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Huber's loss, linear beyond this error; None is half the squared error."""
    loss_reduction: Reduction = "token"
    """Denominator; see `rlloss.losses.calibration`."""
    loss_length: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Constant length L for loss_reduction="constant"."""

    _no_logits: ClassVar[tuple[str, ...]] = (
        "temperature",
        "logit_scale",
        "logit_softcap",
        "logits_dtype",
        "entropy_metric",
    )

    @model_validator(mode="after")
    def _check_value(self) -> "ValueLossConfig":
        for name in self._no_logits:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"ValueLossConfig: {name}={getattr(self, name)!r} is about logits, which a critic does not have. "
                    f"Leave it at its default."
                )
        return self

    @property
    def loss_ctx_cls(self) -> type["ValueLossContext"]:
        """`ValueLossContext`."""
        return ValueLossContext

    @property
    def _loss_kwargs_cls(self) -> type["ValueLossKwargs"]:
        return ValueLossKwargs

    def terms(self) -> tuple[Term, ...]:
        """The value term alone."""
        return (value_term(self),)


def value_term(config: Any, coef: float = 1.0) -> Term:
    """The value term of a config that has the fields of `ValueLossConfig`."""

    def value_of(stats: Any, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        old = loss_kwargs.values
        return value_loss(stats.value, loss_kwargs.returns, old, config.cliprange_value, config.huber_delta)

    return Term("value", value_of, reduction=config.loss_reduction, coef=coef, loss_length=config.loss_length)


class ValueLossKwargs(BaseLossKwargs):
    """Tensors of a value loss, all `[B, T]` and aligned with the labels.

    Attributes:
        returns: What the critic should have said.
        values: What it said when the returns were made.
        value_loss_weight: Token weights, the coefficient included.
    """

    returns: TokenTensor = None
    values: TokenTensor = None
    value_loss_weight: WeightTensor = None


def check_value_fields(loss_cfg: Any, loss_kwargs: Any) -> None:
    """Checks returns and old values, which may have been set after `build`.

    Raises:
        BatchError: One is missing, or is NaN while `check_finite` is on.
    """
    needed = ("returns",) if loss_cfg.cliprange_value is None else ("returns", "values")
    missing = [name for name in needed if getattr(loss_kwargs, name) is None]
    if missing:
        way_out = ", or set cliprange_value=None" if missing == ["values"] else ""
        raise BatchError(
            f"{type(loss_cfg).__name__} needs {', '.join(missing)}. Put it into the batch, or set it on "
            f"ctx.loss_kwargs before build_batches{way_out}."
        )
    if loss_cfg.check_finite:
        refuse_nan(loss_kwargs, needed, loss_cfg.ignore_idx)


def predict_values(
    hidden_states: Tensor, value_weight: Tensor, value_bias: Tensor | None, layout: TokenLayout
) -> Tensor:
    """Evaluates a value head on the tokens that count: `[B, T, H]` -> `[N]`, float32 or float64, with a graph.

    Args:
        hidden_states: `[B, T, H]`; entry t is the state before the token `shifted_labels[:, t]`.
        value_weight: `[1, H]` or `[H]`.
        value_bias: `[1]`, 0-dim or None.
        layout: Where the tokens that count stand.

    Raises:
        BatchError: A shape does not fit.
    """
    require_tensor("hidden_states", hidden_states, "[B, T, H]")
    require_tensor("value_weight", value_weight, "[1, H]")
    if value_bias is not None:
        require_tensor("value_bias", value_bias, "[1]")
    width = hidden_states.shape[-1]
    if hidden_states.ndim != 3 or tuple(hidden_states.shape[:2]) != layout.shape:
        raise BatchError(
            f"hidden_states has shape {tuple(hidden_states.shape)}, expected ({layout.shape[0]}, {layout.shape[1]}, H)."
        )
    if tuple(value_weight.shape) not in ((1, width), (width,)):
        raise BatchError(f"value_weight has shape {tuple(value_weight.shape)}, expected (1, {width}).")
    if value_bias is not None and value_bias.numel() != 1:
        raise BatchError(f"value_bias has shape {tuple(value_bias.shape)}, expected (1,).")
    with torch.autocast(hidden_states.device.type, enabled=False):
        rows = layout.take(hidden_states)
        # A value is one product: unlike logits it costs nothing to keep all its digits.
        dtype = torch.promote_types(torch.promote_types(rows.dtype, value_weight.dtype), torch.float32)
        values = rows.to(dtype) @ value_weight.reshape(-1).to(dtype)
        return values if value_bias is None else values + value_bias.reshape(()).to(dtype)


class ValueLossContext(BaseLossContext):
    """The critic's loss on one micro-batch."""

    loss_cfg: ValueLossConfig
    loss_kwargs: ValueLossKwargs

    def check(self) -> None:
        """Checks returns and old values."""
        check_value_fields(self.loss_cfg, self.loss_kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None = None,
        *,
        vocab_group: Group = None,
        vocab_mesh: DeviceMesh | None = None,
        return_tokens: bool = False,
    ) -> LossOutput:
        """Computes the loss of this micro-batch from hidden states.

        Args:
            hidden_states: `[B, T, H]`.
            head_weight: Value head `[1, H]` or `[H]`.
            head_bias: `[1]` or None.
            vocab_group: Must be None: a value head has no words.
            vocab_mesh: Must be None.
            return_tokens: Add `per_token` to the output; see `BaseLossContext.forward`.

        Returns:
            The loss and metrics; see `BaseLossContext.forward`. There are no logits.
        """
        refuse_vocabulary(type(self).__name__, (vocab_group, vocab_mesh))
        return self._finish_values(predict_values(hidden_states, head_weight, head_bias, self.layout), return_tokens)

    __call__ = forward

    def forward_values(self, values: Tensor, *, return_tokens: bool = False) -> LossOutput:
        """Computes the loss from values `[B, T]` that an engine already has."""
        require_tensor("values", values, "[B, T]")
        expected = tuple(self.loss_kwargs.shifted_labels.shape)
        if tuple(values.shape) != expected:
            raise BatchError(f"values has shape {tuple(values.shape)}, expected {expected}, that of shifted_labels.")
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return self._finish_values(self.layout.take(wide), return_tokens)

    def _finish_values(self, values: Tensor, return_tokens: bool) -> LossOutput:
        stats = ValueStats(values, self.layout.segments)
        loss, metrics = self._evaluate(stats, self.loss_kwargs.take(self.layout))
        return self._finish(loss, None, {**metrics, **exported(self, stats if return_tokens else None)})

    def _evaluate(self, stats: ValueStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        return evaluate(self.loss_cfg.terms(), stats, loss_kwargs)

    def token_numbers(self, stats: Any, loss_kwargs: Any) -> dict[str, Tensor]:
        """The values of the tokens that count."""
        return {"value": stats.value}

    def token_record(self, stats: Any) -> TokenRecord:
        """The record of the tokens that count."""
        return flat_record(self, stats, lambda *call: self._evaluate(*call)[0])
