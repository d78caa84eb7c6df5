"""verl's log-probs, entropies, fused linear head and distillation losses, through configs and contexts."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from rlloss import (
    BaseLossConfig,
    BaseLossContext,
    BaseLossKwargs,
    DistillLossConfig,
    DistillLossContext,
    GRPOLossConfig,
    GRPOLossContext,
    LogProbConfig,
    PerToken,
    Term,
    Totals,
    gather_logprobs,
)

MODES = ("eager", "chunk")


class LinearKwargs(BaseLossKwargs):
    g_log_prob: Annotated[Tensor, PerToken()]
    g_entropy: Annotated[Tensor, PerToken()]


class LinearConfig(BaseLossConfig):
    """`sum g log_prob + sum e H`, whose gradients are those of log-probs and entropies."""

    @property
    def loss_ctx_cls(self) -> type[BaseLossContext]:
        return BaseLossContext

    @property
    def _loss_kwargs_cls(self) -> type[LinearKwargs]:
        return LinearKwargs

    def terms(self) -> tuple[Term, ...]:
        def linear(stats: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
            return kwargs.g_log_prob * stats.log_prob + kwargs.g_entropy * stats.entropy, {}

        return (Term("linear", linear, reduction="sum", needs_entropy=True, weight_field="loss_weight"),)


@family(r"experimental\.FusedLinearForPPO.*", MODES)
def fused_linear(case: Case, mode: str) -> None:
    """Log-probs, entropies and both gradients of verl's fused head, float32."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    assert params["dtype"] == "float32"
    hidden = tensor(inputs["hidden_states"], torch.float32).requires_grad_()
    weight = tensor(inputs["vocab_weights"], torch.float32).requires_grad_()
    labels = torch.tensor(inputs["labels"])
    head = {"mode": mode, "chunk_size": 2, "temperature": params["temperature"]}
    context = LogProbConfig(entropy_metric=True, **head).build({"shifted_labels": labels})
    log_probs, (_, extra) = context.forward(hidden, weight)
    assert_close(log_probs, outputs["log_probs"], 1e-5, "log_probs")
    assert_close(extra["entropy"], outputs["entropy"], 1e-5, "entropy")
    g = tensor(inputs["g_logprob"], torch.float32)
    e = tensor(inputs["g_entropy"], torch.float32)
    only = case.name.split("/")[2]
    batch = {
        "shifted_labels": labels,
        "g_log_prob": torch.zeros_like(g) if only == "entropy_only" else g,
        "g_entropy": torch.zeros_like(e) if only == "logprob_only" else e,
    }
    (step,) = BaseLossContext.build_batches([LinearConfig(**head).build(batch)])
    step.forward(hidden, weight).loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert_close(hidden.grad, outputs["grad_hidden"], 1e-5, "grad_hidden")
    assert_close(weight.grad, outputs["grad_weight"], 1e-5, "grad_weight")


@family(r"torch_functional logprobs_from_logits.*", MODES)
def logits(case: Case, mode: str) -> None:
    """Log-probs and entropies of given logits: those of an identity head."""
    inputs, outputs = case.data["inputs"], case.data["outputs"]
    values, labels = tensor(inputs["logits"]), torch.tensor(inputs["labels"])
    assert_close(gather_logprobs(values, labels), outputs["log_probs"], 1e-12, "gather_logprobs")
    context = LogProbConfig(entropy_metric=True, mode=mode).build({"shifted_labels": labels[None]})
    log_probs, (_, extra) = context.forward(values[None], torch.eye(values.shape[1], dtype=torch.float64))
    assert_close(log_probs[0], outputs["log_probs"], 1e-12, "log_probs")
    assert_close(extra["entropy"][0], outputs["entropy"], 1e-12, "entropy")


@family(r"distillation\.fsdp\.losses\.compute_forward_kl_topk", MODES)
def forward_kl_topk(case: Case, mode: str) -> None:
    """One token is one sequence here; the loss of each, and the gradient of their sum in the logits."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    student = tensor(inputs["student_logits"], torch.float32)
    ids, teacher = torch.tensor(inputs["teacher_topk_ids"]), tensor(inputs["teacher_topk_log_probs"], torch.float32)
    config = DistillLossConfig(
        log_prob_min=params["log_prob_min_clamp"], loss_reduction="sum", clamp_negative=False, mode=mode
    )
    head = torch.eye(student.shape[1])
    for row in range(student.shape[0]):
        batch = {
            "shifted_labels": torch.zeros(1, 1, dtype=torch.int64),
            "num_tokens": [1],
            "teacher_topk_ids": ids[None, row : row + 1],
            "teacher_topk_logprobs": teacher[None, row : row + 1],
        }
        (context,) = DistillLossContext.build_batches([config.build(batch)])
        hidden = student[None, row : row + 1].clone().requires_grad_()
        loss, (_, extra) = context.forward(hidden, head)
        loss.backward()
        assert_close(loss, outputs["distillation_losses"][row], 1e-5, "loss")
        assert hidden.grad is not None
        assert_close(hidden.grad[0, 0], outputs["grad_student_logits_of_sum"][row], 1e-5, "grad")
        assert_close(extra["student_mass"].compute(), outputs["student_mass"][row], 1e-5, "student_mass")
        assert_close(extra["teacher_mass"].compute(), outputs["teacher_mass"][row], 1e-5, "teacher_mass")


def dense(rows: list[list[float]], width: int, fill: float = 0.0) -> Tensor:
    return tensor([row + [fill] * (width - len(row)) for row in rows])


@family(r"distillation\.losses\.distillation_ppo_loss")
def distillation_ppo(case: Case, _: Any) -> None:
    """With a task reward the distance is a KL term whose reference is the teacher, alone it is `DistillLossConfig`."""
    params, inputs, outputs = case.data["params"], case.data["inputs"], case.data["outputs"]
    assert (params["loss_agg_mode"], params["use_policy_gradient"]) == ("token-mean", False)
    prompts, responses = inputs["prompt_lens"], inputs["response_lens"]
    width = max(responses)
    mask = dense(inputs["response_mask"], width) != 0

    def response(name: str) -> Tensor:
        cut = [row[p - 1 : p - 1 + r] for row, p, r in zip(inputs[name], prompts, responses, strict=True)]
        return dense(cut, width)

    kind = params["loss_mode"]
    leaf = response("log_probs_full").requires_grad_()
    batch = {"shifted_labels": torch.where(mask, 0, -100)}
    totals = Totals(tokens=params["batch_num_tokens"], sequences=params["global_batch_size"], world=params["dp_size"])
    if params["use_task_rewards"]:
        config: Any = GRPOLossConfig(use_kl_loss=True, kl_loss_coef=params["distillation_loss_coef"], kl_loss_type=kind)
        batch |= {
            "advantages": dense(inputs["advantages"], width),
            "old_logprobs": dense(inputs["old_log_probs"], width),
        }
        batch["ref_logprobs"] = response("teacher_logprobs_full")
        (context,) = GRPOLossContext.build_batches([config.build(batch)], totals=totals)
    else:
        config = DistillLossConfig(kind=kind, distance_cap=params["loss_max_clamp"])
        batch["teacher_logprobs"] = response("teacher_logprobs_full")
        (context,) = DistillLossContext.build_batches([config.build(batch)], totals=totals)
    loss = context.forward_log_probs(leaf).loss
    loss.backward()
    assert_close(loss, outputs["loss"], 1e-7, "loss")
    assert leaf.grad is not None
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        expected = outputs["grad_log_probs_full"][row][p - 1 : p - 1 + r]
        assert_close(leaf.grad[row, :r], expected, 1e-7, "grad")


@family(r"trl\.trainer\.utils\.selective_log_softmax.*", MODES)
def selective_log_softmax(case: Case, mode: str) -> None:
    """Log-probs with and without a temperature, and entropies of the plain logits."""
    inputs, outputs = case.data["inputs"], case.data["outputs"]
    values, labels = tensor(inputs["logits"]), torch.tensor(inputs["index"])
    head = torch.eye(values.shape[-1], dtype=torch.float64)
    names = {1.0: "logps_t1", case.data["params"]["temperature"]: "logps"}
    for temperature, name in names.items():
        assert_close(gather_logprobs(values, labels, temperature), outputs[name], 1e-12, name)
        config = LogProbConfig(mode=mode, temperature=temperature, entropy_metric=True)
        log_probs, (_, extra) = config.build({"shifted_labels": labels}).forward(values, head)
        assert_close(log_probs, outputs[name], 1e-12, name)
        if temperature == 1.0:
            assert_close(extra["entropy"], outputs["entropy"], 1e-12, "entropy")
