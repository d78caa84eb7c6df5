"""Case E18 and its kind: no field of any config, and no tensor of a batch, is silently ignored in any mode.

For each field some value that the config takes has to change the result of a step, or the field is refused by a
sentence with its name (and with the name of the mode, where another mode takes it).
"""

from __future__ import annotations

import math
import types
import typing
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import POLICY_LOSSES
from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    LogProbConfig,
    MixedLossConfig,
    OrealLossConfig,
    PPOLossConfig,
    RolloutImportanceSampling,
    ValueLossConfig,
    metrics,
)
from rlloss.errors import RLLossError
from rlloss.functional.kl import KL_KINDS
from rlloss.functional.rollout import RolloutRule
from rlloss.losses.policy_registry import get_policy_loss
from rlloss.metrics import Metric

MODES = ("eager", "chunk", "liger")
NO_NUMBER = {"mode", "chunk_size", "skip_zero_rows", "reduce_loss", "grad_reduction"}
"""Fields about time, memory, or other ranks, each with tests of its own."""
FLOATS = (0.0, 0.01, 0.05, 0.3, 0.7, 1.5, 3.0, 8.0, -0.1, -3.0)
BY_NAME: dict[str, tuple[Any, ...]] = {
    "ignore_idx": (1,),
    "kl_loss_type": tuple(KL_KINDS),
    "kind": (*KL_KINDS, "topk"),
    "parts": ({"sft": CELossConfig(loss_reduction="sum"), "rl": GRPOLossConfig()},),
    "coefs": ({"rl": 3.0},),
    "policy_loss_cfg": ({"cliprange_high": 0.01}, {"loss_type": "sapo"}),
    "rollout_is": (RolloutImportanceSampling(rollout_is_threshold=(0.99, 1.01)),),
    "rules": ((RolloutRule("token", "ratio", "mask", 0.9, 1.1),),),
    "seed": tuple(range(1, 6)),
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
CONSTANT = {"loss_reduction": "constant", "loss_length": 5.0}
RL_BASE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "kl_value_cap", "kl_importance"), KL),
    "entropy_reduction": {"entropy_coef": 0.3},
    "loss_length": CONSTANT,
}
# A config class, what it needs to be made, and what some of its fields need to act.
CONFIGS: dict[str, tuple[Any, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "GRPO": (GRPOLossConfig, {}, RL_BASE),
    "PPO": (PPOLossConfig, {}, RL_BASE),
    "OREAL": (OrealLossConfig, {}, RL_BASE),
    "actor and critic": (ActorCriticLossConfig, {}, RL_BASE),
    "value": (ValueLossConfig, {}, {"loss_length": CONSTANT}),
    "CE": (CELossConfig, {}, {}),
    "log-probs": (LogProbConfig, {}, {}),
    "distill": (DistillLossConfig, {}, {}),
    "distill k3": (DistillLossConfig, {"kind": "k3"}, {}),
    "mixed": (MixedLossConfig, {"parts": {"sft": CELossConfig(), "rl": GRPOLossConfig()}}, {}),
}
ELSEWHERE = {
    # What is about logits is refused by name in every mode.
    "value": {"temperature", "logit_scale", "logit_softcap", "logits_dtype", "entropy_metric"},
    # These read no number that could be NaN.
    "CE": {"check_finite"},
    "log-probs": {"check_finite"},
    # Options of the teacher's words alone, and of k3 alone.
    "distill": {"kl_value_cap"},
    "distill k3": {"log_prob_min", "clamp_negative"},
}
SEQUENCES = [3, 1, 4]
SPOILED = ("old_logprobs", "returns", "teacher_logprobs", "teacher_topk_logprobs")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def batch(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Every tensor that any loss reads, ratios near 1 and far from it; hidden states and head."""
    n, words, width = sum(SEQUENCES), 6, 4
    hidden, weight = draw(1, n, width, seed=0).to(dtype), draw(words, width, seed=1).to(dtype)
    labels = torch.tensor([[0, 1, 2, 0, 1, 3, 5, 4]])
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    log_prob = exact.gather(-1, labels[..., None]).squeeze(-1)
    gap = torch.tensor([[0.3, -0.2, 1.5, -0.6, 0.05, 4.0, -0.4, 0.6]], dtype=torch.float64)
    data = {
        "shifted_labels": labels,
        "num_tokens": SEQUENCES,
        "old_logprobs": log_prob - gap,
        "ref_logprobs": log_prob - 1.5 * draw(1, n, seed=3),
        "rollout_logprobs": log_prob - gap - 0.8 * draw(1, n, seed=4),
        "selection_logprobs": log_prob + 0.05 * draw(1, n, seed=5),
        "selection_entropy": draw(1, n, seed=6).abs(),
        "advantages": torch.tensor([[1.0, 1.0, 1.0, -1.0, 2.0, 2.0, -0.5, -2.0]], dtype=torch.float64),
        "group_ids": torch.tensor([0, 1, 1]),
        "num_prompts": 2,
        "values": draw(1, n, seed=7),
        "returns": draw(1, n, seed=8),
        "teacher_logprobs": log_prob + 1.5 * draw(1, n, seed=9),
        "teacher_topk_ids": torch.arange(3).expand(1, n, 3),
        "teacher_topk_logprobs": draw(1, n, 3, seed=10).log_softmax(-1) - 2.5,
        "part_ids": torch.tensor([0, 1, 1]),
    }
    return data, hidden, weight


def outcome(config: Any, data: dict[str, Any], hidden: Tensor, weight: Tensor) -> dict[str, Any]:
    """Loss, head gradient and metrics of one step."""
    (context,) = config.loss_ctx_cls.build_batches([config.build(data)])
    value = draw(1, hidden.shape[-1], seed=11).to(hidden.dtype)
    more = {"value_weight": value} if isinstance(config, ActorCriticLossConfig) else {}
    head = (value if isinstance(config, ValueLossConfig) else weight).clone().requires_grad_()
    output = context.forward(hidden, head, **more)
    output.loss.sum().backward()
    assert head.grad is not None
    numbers = {name: value for name, value in output.extra.items() if isinstance(value, Metric)}
    tensors = {name: value for name, value in output.extra.items() if isinstance(value, Tensor)}
    return {"loss": output.loss.detach(), "grad": head.grad, **tensors, **metrics.reduce(numbers)}


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return True
    pairs = [(torch.as_tensor(one[name]).double(), torch.as_tensor(other[name]).double()) for name in one]
    return any(a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs)


def candidates(name: str, annotation: Any) -> Iterator[Any]:
    """Values of a field that might be taken."""
    if name in BY_NAME:
        yield from BY_NAME[name]
        return
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield from inside
    elif origin in (typing.Union, types.UnionType):
        for part in inside:
            yield from candidates("", part)
    elif annotation is bool:
        yield from (True, False)
    elif annotation is type(None):
        yield None
    elif annotation in (int, float):
        yield from FLOATS
    elif origin is tuple:
        yield from ((0.9, 1.1), (0.5, 1.5))


def acts(make: Any, name: str, annotation: Any, mode: str, *, dtype: torch.dtype = torch.float64) -> str:
    """Tells how a field shows in a mode: "changes", "refused", or "ignored".

    `make(mode, fields)` makes a config; an empty `fields` is that with the default.
    """
    data, hidden, weight = batch(dtype)
    if name == "check_finite":
        data = data | {key: data[key].clone() for key in SPOILED}
        for key in SPOILED:
            data[key][0, 5] = math.nan
    if name == "on_policy":
        data = {key: value for key, value in data.items() if key != "old_logprobs"}
    refused = False
    before = attempt(make, mode, {}, data, hidden, weight)
    for value in candidates(name, annotation):
        after = attempt(make, mode, {name: value}, data, hidden, weight)
        if isinstance(after, str):
            if name == "check_finite" and isinstance(before, dict):
                return "changes"
            # A value that no mode takes says nothing; one that another mode takes is refused by name.
            if isinstance(attempt(make, "eager", {name: value}, data, hidden, weight), dict):
                assert f"'{mode}'" in after, after
                refused = True
        elif isinstance(before, str) or differ(before, after):
            return "changes"
    return "refused" if refused else "ignored"


def attempt(make: Any, mode: str, fields: dict[str, Any], data: Any, hidden: Tensor, weight: Tensor) -> Any:
    """The outcome, or the sentence of a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return outcome(make(mode, fields), data, hidden, weight)
        except RLLossError as error:
            return str(error)


def fields_of(config: Any) -> dict[str, Any]:
    return {name: field.annotation for name, field in config.model_fields.items() if name not in NO_NUMBER}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_e18_no_field_of_a_config_is_ignored(kind: str, mode: str) -> None:
    config, needs, base = CONFIGS[kind]
    seen = {}
    for name, annotation in fields_of(config).items():
        given = needs | base.get(name, {})
        dtype = torch.bfloat16 if name == "logits_dtype" else torch.float64
        make = lambda m, more, g=given: config(**g | {"mode": m} | more)  # noqa: E731
        seen[name] = acts(make, name, annotation, mode, dtype=dtype)
    if kind == "distill" and mode == "liger":
        assert {name for name, what in seen.items() if what != "refused"} == {"kind"}
        return
    assert {name for name, what in seen.items() if what == "ignored"} == ELSEWHERE.get(kind, set())
    refused = {name for name, what in seen.items() if what == "refused"}
    assert refused <= ({"entropy_metric", "logit_scale", "logit_softcap", "entropy_coef", "entropy_reduction"})
    assert mode == "liger" or not refused


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [name for name in POLICY_LOSSES if name != "reinforce"])
def test_e18_no_parameter_of_a_policy_loss_is_ignored(loss: str, mode: str) -> None:
    model = get_policy_loss(loss).config
    assert model is not None
    for name, field in model.model_fields.items():
        if name == "loss_type":
            continue
        fields = POLICY_LOSSES[loss]
        make = lambda m, more, f=fields: GRPOLossConfig(mode=m, policy_loss_cfg=f | more, loss_reduction="sample")  # noqa: E731
        assert acts(make, name, field.annotation, mode) == "changes", name


WEIGHTS = {"rollout_is_threshold": (0.6, 1.4)}
ROLLOUT_BASE: dict[str, dict[str, Any]] = {
    "rollout_is_mask_threshold": WEIGHTS | {"rollout_is_mode": "both"},
    "denominator": WEIGHTS | {"rollout_is_mode": "mask"},
    "rollout_is_threshold": {},
    "rules": {},
}


@pytest.mark.parametrize("mode", MODES)
def test_e18_no_field_of_a_correction_is_ignored(mode: str) -> None:
    for name, annotation in fields_of(RolloutImportanceSampling).items():
        base = ROLLOUT_BASE.get(name, WEIGHTS)
        make = lambda m, more, b=base: GRPOLossConfig(mode=m, rollout_is=RolloutImportanceSampling(**b | more))  # noqa: E731
        assert acts(make, name, annotation, mode) == "changes", name


# A tensor of the batch, and a config that reads it.
READ: dict[str, Any] = {
    "advantages": (GRPOLossConfig, {}),
    "old_logprobs": (GRPOLossConfig, {}),
    "ref_logprobs": (GRPOLossConfig, KL),
    "rollout_logprobs": (GRPOLossConfig, {"rollout_is": RolloutImportanceSampling(**WEIGHTS)}),
    "rollout_is_weights": (GRPOLossConfig, {}),
    "selection_logprobs": (GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "kl_cov", "kl_cov_ratio": 0.3}}),
    "selection_entropy": (GRPOLossConfig, {"top_entropy_quantile": 0.4}),
    "temperature": (GRPOLossConfig, {}),
    "num_tokens": (GRPOLossConfig, {"loss_reduction": "sample"}),
    "group_ids": (GRPOLossConfig, {"loss_reduction": "prompt"}),
    "num_prompts": (GRPOLossConfig, {"loss_reduction": "prompt"}),
    "values": (ValueLossConfig, {}),
    "returns": (ValueLossConfig, {}),
    "teacher_logprobs": (DistillLossConfig, {"kind": "k3"}),
    "teacher_topk_logprobs": (DistillLossConfig, {}),
    "teacher_topk_ids": (DistillLossConfig, {}),
    "part_ids": (MixedLossConfig, {"parts": {"sft": CELossConfig(), "rl": GRPOLossConfig()}}),
}
OTHER_NUMBERS: dict[str, Any] = {
    "rollout_is_weights": torch.full((1, 8), 0.5),
    "temperature": torch.linspace(0.5, 1.5, 8)[None],
    "num_tokens": [1, 3, 4],
    "group_ids": torch.tensor([0, 0, 1]),
    "num_prompts": 1,
    "part_ids": torch.tensor([1, 0, 1]),
    "teacher_topk_ids": torch.arange(1, 4).expand(1, 8, 3),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", READ)
def test_e18_no_tensor_of_a_batch_is_ignored(name: str, mode: str) -> None:
    config, fields = READ[name]
    data, hidden, weight = batch()
    other = OTHER_NUMBERS[name] if name in OTHER_NUMBERS else data[name].flip(1) * 1.3
    make = lambda m, more: config(mode=m, **fields)  # noqa: E731
    before = attempt(make, mode, {}, data, hidden, weight)
    after = attempt(make, mode, {}, data | {name: other}, hidden, weight)
    if mode == "liger" and name in ("temperature", "teacher_topk_logprobs", "teacher_topk_ids"):
        assert isinstance(after, str)
        assert "'liger'" in after
    elif name == "num_prompts":
        assert isinstance(after, str)
    else:
        assert differ(before, after)
