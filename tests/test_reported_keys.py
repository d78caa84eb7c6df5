"""Keys of a batch that a user believes to be read: each is read, or named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import rlloss
from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig, OrealLossConfig, ValueLossConfig
from rlloss.compat import xtuner
from rlloss.errors import BatchError
from steps import labels, row, run_step, tok

BATCH: dict[str, Any] = {
    "shifted_labels": labels(1, 1, 1),
    "num_tokens": [1, 2],
    "advantages": row(1.0, 1.0, -1.0),
    "old_logprobs": row(-1.0, -1.0, -1.0),
}


def loss(**more: Any) -> float:
    return run_step(GRPOLossConfig(), [BATCH | more], [tok(-1.0, -1.1, -0.9)]).loss


def test_importance_weights_are_read_under_either_name() -> None:
    weights = row(0.5, 2.0, 0.25)
    assert loss(is_weights=weights) == loss(rollout_is_weights=weights) != loss()
    with pytest.raises(BatchError, match="two names of one field"):
        loss(is_weights=weights, rollout_is_weights=weights)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GRPOLossConfig(), "keep_mask"),
        (GRPOLossConfig(), "policy_loss_weight"),
        (GRPOLossConfig(), "selected"),
        (GRPOLossConfig(), "policy_mask"),
        (GRPOLossConfig(), "global_grad_tokens"),
        (OrealLossConfig(), "sft_loss_weight"),
        (CELossConfig(), "loss_weight"),
        (LogProbConfig(), "keep_mask"),
        (ValueLossConfig(), "value_loss_weight"),
    ],
)
def test_what_is_computed_cannot_be_given(config: Any, key: str) -> None:
    with pytest.raises(BatchError, match=f"'{key}', which build_batches computes"):
        config.build(BATCH | {key: row(1.0, 1.0, 0.0)})
    config.build(BATCH | {key: None})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("temperatures", "temperature"),
        ("cu_seqlens", "cu_seq_lens"),
        ("rollout_log_probs", "rollout_logprobs"),
        ("ref_log_prob", "ref_logprobs"),
        ("sampling_per_token_logps", "rollout_logprobs"),
        ("importance_sampling_ratio", "rollout_is_weights"),
        ("rollout_is_weight", "rollout_is_weights"),
        ("selection_logprob", "selection_logprobs"),
        ("group_id", "group_ids"),
    ],
)
def test_a_key_that_is_not_read_but_looks_like_one_is_named(given: str, meant: str) -> None:
    for build in (GRPOLossConfig().build, xtuner.GRPOLossConfig().build):
        with pytest.raises(BatchError, match=f"'{given}'.*Did you mean '{meant}'"):
            build(BATCH | {given: row(1.0, 1.0, 1.0)})


def test_keys_of_a_model_or_of_another_loss_pass() -> None:
    names = ("input_ids", "attention_mask", "position_ids", "labels", "values", "returns", "teacher_logprobs", "shard")
    more = dict.fromkeys(names, torch.zeros(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss(**more) == loss()
        assert loss(old_log_probs=row(0.0, 0.0, 0.0)) == loss(), "old_logprobs are there"
        CELossConfig().build({"shifted_labels": labels(1), "old_log_probs": row(0.0), **more})


@pytest.mark.parametrize("key", ["response_mask", "completion_mask", "loss_mask"])
def test_a_mask_of_a_peer_is_said_to_be_passed_over(key: str) -> None:
    with pytest.warns(UserWarning, match=f"'{key}', which no loss reads"):
        assert loss(**{key: row(1.0, 0.0, 1.0)}) == loss()


def test_lengths_are_integers_and_agree_with_offsets() -> None:
    for given in ([1.5, 1.5], torch.tensor([1.0, 2.0]), torch.tensor([True, True])):
        with pytest.raises(BatchError, match="num_tokens has dtype"):
            CELossConfig().build({"shifted_labels": labels(1, 1, 1), "num_tokens": given})
    with pytest.raises(BatchError, match="num_tokens is a str"):
        CELossConfig().build({"shifted_labels": labels(1, 1, 1), "num_tokens": "3"})
    with pytest.raises(BatchError, match=r"num_tokens says .3, 0., but cu_seq_lens .0, 1, 3."):
        CELossConfig().build({"shifted_labels": labels(1, 1, 1), "num_tokens": [3, 0], "cu_seq_lens": [0, 1, 3]})
    CELossConfig().build({"shifted_labels": labels(1, 1, 1), "num_tokens": [1, 2], "cu_seq_lens": [0, 1, 3]})


def test_every_weight_of_a_term_is_marked_as_computed() -> None:
    for name in rlloss.__all__:
        cls = getattr(rlloss, name)
        if isinstance(cls, type) and issubclass(cls, rlloss.BaseLossKwargs):
            weights = [field for field in cls.model_fields if field.endswith("loss_weight")]
            assert all(cls.is_computed(field) for field in weights)
