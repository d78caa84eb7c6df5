"""verl's functions on model outputs, with verl's signatures, in dicts or TensorDicts.

    from rlloss.compat.verl import ppo_loss
    loss, metrics = ppo_loss(actor_config, model_output, data, dp_group)

Each builds a context, hands verl's counts to it as `Totals`, and evaluates it on the log-probs or values that the
engine has; there is no second loss code and no collective in here.
"""

from rlloss.compat.verl.losses import agg_loss, kl_penalty, ppo_loss, sft_loss, value_loss
from rlloss.compat.verl.metric import AggregationType, Metric, reduce_metrics
from rlloss.compat.verl.padding import (
    left_right_2_no_padding,
    no_padding_2_padding,
    response_from_nested,
    slice_response_from_unpad_output,
)
from rlloss.compat.verl.policy import get_policy_loss_fn, register_policy_loss

_slice_response_from_unpad_output = slice_response_from_unpad_output

__all__ = [
    "AggregationType",
    "Metric",
    "agg_loss",
    "get_policy_loss_fn",
    "kl_penalty",
    "left_right_2_no_padding",
    "no_padding_2_padding",
    "ppo_loss",
    "reduce_metrics",
    "register_policy_loss",
    "response_from_nested",
    "sft_loss",
    "slice_response_from_unpad_output",
    "value_loss",
]
