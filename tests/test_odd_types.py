"""What is of another kind than expected is named in one line, never answered by an attribute that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import rlloss
from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    GRPOLossConfig,
    GRPOLossContext,
    GRPOLossKwargs,
    LogProbConfig,
    MixedLossConfig,
    RolloutImportanceSampling,
    Totals,
    ValueLossConfig,
    metrics,
)
from rlloss.errors import RLLossError
from steps import eye, labels, row, tok

BATCH: dict[str, Any] = {
    "shifted_labels": labels(1, 1),
    "num_tokens": [1, 1],
    "advantages": row(1.0, -1.0),
    "old_logprobs": row(-1.0, -1.0),
    "returns": row(0.1, 0.2),
    "values": row(0.1, 0.2),
    "group_ids": torch.tensor([0, 1]),
    "num_prompts": 2,
    "part_ids": torch.tensor([0, 0]),
}
MIXED = MixedLossConfig(parts={"rl": GRPOLossConfig()})


def ready(config: Any, **options: Any) -> Any:
    return config.loss_ctx_cls.build_batches([config.build(BATCH)], **options)[0]


def steps_of(**changed: Any) -> Any:
    config = GRPOLossConfig(loss_reduction="prompt")
    return GRPOLossContext.build_batches([config.build({**BATCH, **changed})])


def late(name: str, value: Any) -> Any:
    config = GRPOLossConfig(loss_reduction="prompt")
    context = config.build(BATCH)
    setattr(context.loss_kwargs, name, value)
    return type(context).build_batches([context])


HIDDEN = tok(-1.0, -1.2)
COMPLEX = row(1.0, 1.0).to(torch.complex64)
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "batch, a list": (lambda: GRPOLossConfig().build([1, 2]), "the batch is a list, expected a mapping"),
    "batch, nothing": (lambda: GRPOLossConfig().empty(None), "the batch is a NoneType"),
    "batch without labels": (lambda: GRPOLossConfig().empty({}), "the batch lacks 'shifted_labels'"),
    "labels, a list": (
        lambda: GRPOLossConfig().empty({"shifted_labels": [1], "advantages": 1}),
        "shifted_labels is list",
    ),
    "complex numbers": (lambda: steps_of(old_logprobs=COMPLEX), "old_logprobs has dtype torch.complex64"),
    "half a prompt": (lambda: steps_of(num_prompts=2.5), "GRPOLossKwargs: num_prompts: "),
    "prompts below 0": (lambda: steps_of(num_prompts=-1), "num_prompts is -1"),
    "prompts in words": (lambda: late("num_prompts", "2"), "num_prompts is '2'"),
    "prompts that are fractions": (
        lambda: steps_of(group_ids=torch.tensor([0.0, 1.5])),
        "group_ids has dtype torch.float32",
    ),
    "prompts that are bool": (
        lambda: steps_of(group_ids=torch.tensor([True, False])),
        "group_ids has dtype torch.bool",
    ),
    "field that is misspelt": (
        lambda: late("old_logprob", row(0.0, 0.0)),
        "no field 'old_logprob'. Did you mean 'old_logprobs'?",
    ),
    "kwargs without advantages": (lambda: GRPOLossKwargs(shifted_labels=labels(1)), "GRPOLossKwargs: advantages: "),
    "contexts, one": (
        lambda: GRPOLossContext.build_batches(GRPOLossConfig().build(BATCH)),
        "got a GRPOLossContext, expected a list",
    ),
    "contexts, none": (lambda: GRPOLossContext.build_batches(None), "got a NoneType, expected a list"),
    "contexts, batches": (lambda: GRPOLossContext.build_batches([BATCH]), "got a list of dict"),
    "contexts, a generator": (lambda: CELossConfig().loss_ctx_cls.build_batches(x for x in ()), "got a generator"),
    "contexts of log-probs, one": (
        lambda: LogProbConfig().loss_ctx_cls.build_batches(LogProbConfig().build(BATCH)),
        "got a LogProbContext",
    ),
    "contexts of parts, one": (lambda: MIXED.loss_ctx_cls.build_batches(MIXED.build(BATCH)), "got a MixedLossContext"),
    "joined batches": (lambda: GRPOLossContext.cat([BATCH]), "got a list of dict"),
    "offsets, a number": (lambda: ready(GRPOLossConfig(), cu_seq_lens_list=3), "cu_seq_lens_list is a int"),
    "totals, a number": (lambda: ready(GRPOLossConfig(), totals=3), "totals is a int, expected rlloss.Totals"),
    "totals, a dict": (lambda: ready(GRPOLossConfig(), totals={"tokens": 3}), "totals is a dict"),
    "totals of parts, a number": (lambda: ready(MIXED, totals={"rl": 3}), "give {part name: Totals(...)}"),
    "totals of parts, one": (lambda: ready(MIXED, totals=Totals(tokens=3)), "give {part name: Totals(...)}"),
    "hidden states, a list": (lambda: ready(GRPOLossConfig()).forward([1.0], eye()), "hidden_states is a list"),
    "hidden states, integers": (
        lambda: ready(GRPOLossConfig()).forward(HIDDEN.long(), eye()),
        "hidden_states has dtype torch.int64",
    ),
    "weight, a module": (
        lambda: ready(GRPOLossConfig()).forward(HIDDEN, torch.nn.Linear(2, 2)),
        "head_weight is a Linear",
    ),
    "bias, a number": (lambda: ready(GRPOLossConfig()).forward(HIDDEN, eye(), 1.0), "head_bias is a float"),
    "log-probs, a list": (lambda: ready(GRPOLossConfig()).forward_log_probs([1.0]), "log_probs is a list"),
    "entropies, a list": (
        lambda: ready(GRPOLossConfig()).forward_log_probs(row(-1.0, -1.0), [1.0]),
        "entropy is a list",
    ),
    "values, a list": (lambda: ready(ValueLossConfig()).forward_values([1.0]), "values is a list"),
    "values, none": (lambda: ready(ActorCriticLossConfig()).forward_log_probs(row(-1.0, -1.0)), "values is a NoneType"),
    "value head, a list": (lambda: ready(ValueLossConfig()).forward(HIDDEN, [1.0]), "value_weight is a list"),
    "value bias, a number": (
        lambda: ready(ValueLossConfig()).forward(HIDDEN, torch.ones(2).double(), 1.0),
        "value_bias is a float",
    ),
    "name of a loss": (lambda: GRPOLossConfig(policy_loss_cfg={"loss_type": 3}), "unknown policy loss 3"),
    "name of an estimator": (lambda: rlloss.compute_advantages(3), "unknown advantage estimator 3"),
    "kind of KL": (lambda: rlloss.kl_penalty(row(0.0), row(0.0), None), "unknown KL kind None"),
    "function without a signature": (lambda: rlloss.register_policy_loss("odd type")(max), "Wrap it in a function"),
    "TRL's mode": (lambda: RolloutImportanceSampling.trl(None), "expected token_truncate"),
    "verl's options": (
        lambda: RolloutImportanceSampling.verl(rollout_rs=3, rollout_rs_threshold=1),
        "rollout_rs=3: expected",
    ),
    "rewards, a list": (lambda: rlloss.compute_advantages("grpo", rewards=[1.0], group_ids=[0]), "rewards is a list"),
    "metrics of one micro-batch": (lambda: metrics.merge({"a": 1}), "expected a list of mappings"),
    "metrics that are not merged": (lambda: metrics.reduce([{}]), "expected one mapping"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_in_one_line(case: str) -> None:
    call, words = CASES[case]
    with pytest.raises(RLLossError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [np.int64(2), 2.0, torch.tensor(2)])
def test_any_whole_number_counts_prompts(count: Any) -> None:
    (expected,), (found,) = late("num_prompts", 2), late("num_prompts", count)
    assert torch.equal(expected.loss_kwargs.policy_loss_weight, found.loss_kwargs.policy_loss_weight)
