"""Reported: tensors that are set after `build` were read with less care than those of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from rlloss import (
    ActorCriticLossConfig,
    BaseLossContext,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    GRPOLossContext,
    LogProbConfig,
    MixedLossConfig,
    RolloutImportanceSampling,
    ValueLossConfig,
)
from rlloss.errors import BatchError

GENERATOR = torch.Generator().manual_seed(5)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


HIDDEN, WEIGHT = numbers(2, 6, 4), numbers(9, 4)
LABELS = torch.randint(0, 9, (2, 6), generator=GENERATOR)
BATCH = {
    "shifted_labels": LABELS,
    **{
        name: numbers(2, 6)
        for name in ("advantages", "old_logprobs", "ref_logprobs", "teacher_logprobs", "returns", "values")
    },
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
CONFIGS = {
    "grpo": GRPOLossConfig(**KL),
    "value": ValueLossConfig(),
    "actor_critic": ActorCriticLossConfig(**KL),
    "distill": DistillLossConfig(kind="k3"),
}
FIELDS = [
    (config, field)
    for config, fields in {
        "grpo": "advantages old_logprobs ref_logprobs rollout_logprobs selection_logprobs selection_entropy is_weights "
        "temperature",
        "value": "returns values",
        "actor_critic": "returns values advantages",
        "distill": "teacher_logprobs temperature",
    }.items()
    for field in fields.split()
]
LAYOUTS = {"padded": {}, "packed": {"num_tokens": [6, 6]}}


def context_of(config: str, layout: str = "padded") -> BaseLossContext:
    batch = BATCH if layout == "padded" else {name: value.reshape(1, 12) for name, value in BATCH.items()}
    return CONFIGS[config].build({**batch, **LAYOUTS[layout]})


def calibrated(context: BaseLossContext, **options: object) -> BaseLossContext:
    return type(context).build_batches([context], **options)[0]


def log_probs(hidden: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ WEIGHT.T, -1).gather(-1, LABELS[..., None]).squeeze(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("config", "field"), FIELDS)
def test_a_last_dimension_of_one_is_refused(config: str, field: str, layout: str) -> None:
    context = context_of(config, layout)
    setattr(context.loss_kwargs, field, torch.ones(*context.loss_kwargs.shifted_labels.shape, 1))
    with pytest.raises(BatchError, match=rf"{field} has shape"):
        calibrated(context)


@pytest.mark.parametrize(("config", "field"), FIELDS)
@pytest.mark.parametrize("value", [[[0.5] * 6] * 2, torch.ones(2, 6).numpy(), 0.5], ids=["list", "ndarray", "float"])
def test_what_is_no_tensor_is_refused(config: str, field: str, value: object) -> None:
    context = context_of(config)
    setattr(context.loss_kwargs, field, value)
    with pytest.raises(BatchError, match=rf"{field} is a .*expected a tensor"):
        calibrated(context)


@pytest.mark.parametrize("value", [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), [0, 1]])
def test_group_ids_are_one_for_each_sequence(value: object) -> None:
    context = context_of("grpo")
    context.loss_kwargs.group_ids = value
    with pytest.raises(BatchError, match="group_ids"):
        calibrated(context)


def test_a_required_field_cannot_be_removed() -> None:
    context = context_of("grpo")
    context.loss_kwargs.advantages = None
    with pytest.raises(BatchError, match="advantages is None"):
        calibrated(context)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_number_for_each_sequence_is_spread_as_build_spreads_it(layout: str) -> None:
    late, early = context_of("grpo", layout), context_of("grpo", layout)
    late.loss_kwargs.advantages = torch.tensor([1, -2])
    rows = torch.tensor([1.0, -2.0])[:, None].expand(2, 6)
    early.loss_kwargs.advantages = rows.reshape(early.loss_kwargs.shifted_labels.shape)
    hidden = HIDDEN.reshape(*early.loss_kwargs.shifted_labels.shape, 4)
    assert calibrated(late).forward(hidden, WEIGHT).loss == calibrated(early).forward(hidden, WEIGHT).loss


def test_a_fitting_tensor_stays_itself() -> None:
    context, own = context_of("grpo"), numbers(2, 6)
    context.loss_kwargs.old_logprobs = own
    assert calibrated(context).loss_kwargs.old_logprobs is own


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("loss_type", ["vanilla", "gmpo", "gspo", "clip_cov", "kl_cov", "cispo"])
def test_no_gradient_flows_through_late_tensors(loss_type: str, mode: str, when: str) -> None:
    config = GRPOLossConfig(mode=mode, policy_loss_cfg={"loss_type": loss_type}, loss_reduction="token", **KL)
    gradients = []
    for graph in (False, True):
        hidden = HIDDEN.clone().requires_grad_()
        context = config.build(BATCH)
        if when == "after":
            calibrated(context)
        own = log_probs(hidden)
        for name in ("old_logprobs", "ref_logprobs", "advantages", "is_weights"):
            value = own if name == "old_logprobs" else own * 0.9
            setattr(context.loss_kwargs, name, value if graph else value.detach())
        if when == "before":
            calibrated(context)
        context.forward(hidden, WEIGHT).loss.backward()
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("offsets", [torch.tensor([0, 3, 6]), [0, 3, 6], torch.tensor([[0, 3, 6]])])
@pytest.mark.parametrize("through", ["list", "field"])
def test_offsets_on_padded_rows_are_refused(offsets: object, through: str) -> None:
    context = context_of("grpo")
    if through == "field":
        context.loss_kwargs.cu_seq_lens = offsets
    with pytest.raises(BatchError, match="one packed row"):
        calibrated(context, **({"cu_seq_lens_list": [offsets]} if through == "list" else {}))


@pytest.mark.parametrize("given", [[0, 4, 12], torch.tensor([[0, 4, 12]]), torch.tensor([0, 4, 12]).numpy()])
@pytest.mark.parametrize("through", ["list", "field"])
def test_offsets_in_any_form_are_those_of_build(given: object, through: str) -> None:
    packed = {name: BATCH[name].reshape(1, 12) for name in ("shifted_labels", "advantages", "old_logprobs")}
    config = GRPOLossConfig(loss_reduction="sample")
    hidden = HIDDEN.reshape(1, 12, 4)
    expected = calibrated(config.build({**packed, "num_tokens": [4, 8]})).forward(hidden, WEIGHT).loss
    context = config.build(packed)
    if through == "field":
        context.loss_kwargs.cu_seq_lens = given
    calibrated(context, **({"cu_seq_lens_list": [given]} if through == "list" else {}))
    assert context.forward(hidden, WEIGHT).loss == expected


@pytest.mark.parametrize("given", ["0 6", [0.0, 6.0], [0], [[0, 3], [6]], object()])
def test_what_is_no_offsets_is_refused(given: object) -> None:
    context = context_of("grpo", "packed")
    context.loss_kwargs.cu_seq_lens = given
    with pytest.raises(BatchError, match="cu_seq_lens"):
        calibrated(context)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
def test_labels_of_a_narrow_type_are_all_words(dtype: torch.dtype, late: bool) -> None:
    weight, labels = numbers(200, 4), torch.full((2, 6), 156)
    expected = calibrated(CELossConfig().build({"shifted_labels": labels})).forward(HIDDEN, weight).loss
    context = CELossConfig().build({"shifted_labels": labels if late else labels.to(dtype)})
    if late:
        context.loss_kwargs.shifted_labels = labels.to(dtype)
    assert calibrated(context).forward(HIDDEN, weight).loss == expected


@pytest.mark.parametrize("value", [LABELS[..., None], LABELS.double(), LABELS.tolist()])
def test_late_labels_are_checked(value: object) -> None:
    context = context_of("grpo")
    context.loss_kwargs.shifted_labels = value
    with pytest.raises(BatchError, match="shifted_labels"):
        calibrated(context)


def test_labels_of_inference_mode_are_read_again_when_they_changed() -> None:
    with torch.inference_mode():
        labels = LABELS.clone()
        context = calibrated(CELossConfig().build({"shifted_labels": labels}))
        first = context.layout
        assert context.layout is first
        labels[0, :4] = -100
        assert context.layout.num_tokens == 8
        expected = calibrated(CELossConfig().build({"shifted_labels": labels.clone()})).forward(HIDDEN, WEIGHT).loss
        assert calibrated(context).forward(HIDDEN, WEIGHT).loss == expected


def test_offsets_changed_in_place_are_read_again() -> None:
    context = calibrated(context_of("grpo", "packed"))
    context.loss_kwargs.cu_seq_lens[1] = 2
    assert torch.bincount(context.layout.segments.ids).tolist() == [2, 10]


@pytest.mark.parametrize("shape", [(2, 6, 1), (6,), (1, 12)])
def test_values_of_an_engine_have_the_shape_of_the_labels(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="values"):
        calibrated(context_of("value")).forward_values(torch.ones(shape))
    with pytest.raises(BatchError, match="values"):
        calibrated(context_of("actor_critic")).forward_log_probs(log_probs(HIDDEN), values=torch.ones(shape))


@pytest.mark.parametrize("value", [0.0, -0.5, float("inf")])
def test_a_temperature_that_cannot_divide_is_refused_whenever_it_is_set(value: float) -> None:
    labels = torch.tensor([[1, 2, -100]])
    good, bad = torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[1.0, value, 1.0]])
    hidden, weight = torch.ones(1, 3, 2), torch.ones(4, 2)
    for config in (CELossConfig(), LogProbConfig()):
        with pytest.raises(BatchError, match="temperature is not a finite number above 0 at 1 tokens"):
            config.build({"shifted_labels": labels, "temperature": bad})
        (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels, "temperature": good})])
        context.forward(hidden, weight)
        context.loss_kwargs.temperature = bad
        with pytest.raises(BatchError, match="temperature"):
            config.loss_ctx_cls.build_batches([context])
        with pytest.raises(BatchError, match="temperature"):
            context.forward(hidden, weight)
        context.loss_kwargs.temperature = torch.ones(1, 2)
        with pytest.raises(BatchError, match="temperature has shape"):
            context.forward(hidden, weight)


def test_a_late_temperature_of_each_row_is_spread() -> None:
    labels = torch.tensor([[1, 2], [0, 3]])
    hidden, weight = torch.randn(2, 2, 3).double(), torch.randn(4, 3).double()
    context = LogProbConfig().build({"shifted_labels": labels})
    context.loss_kwargs.temperature = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = context.forward(hidden, weight).loss
    logits = (hidden @ weight.T) / torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
def test_tensors_of_inference_mode_of_which_all_tokens_count(mode: str) -> None:
    hidden, weight = torch.randn(1, 3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with torch.inference_mode():
        batch = {"shifted_labels": torch.tensor([[1, 2, 0]]), "advantages": torch.ones(1, 3)}
        batch["old_logprobs"] = -torch.ones(1, 3)
    config = GRPOLossConfig(mode=mode)
    losses = []
    for data in (batch, {name: value.clone() for name, value in batch.items()}):
        (context,) = config.loss_ctx_cls.build_batches([config.build(data)])
        loss = context.forward(hidden, weight).loss
        losses.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)


def test_a_rollout_outcome_sees_changes_in_inference_tensors() -> None:
    with torch.inference_mode():
        rollout = torch.full((1, 2), -1.0)
    batch = {"shifted_labels": torch.tensor([[0, 0]]), "advantages": torch.ones(1, 2), "num_tokens": [2]}
    batch |= {"old_logprobs": torch.full((1, 2), -1.0), "rollout_logprobs": rollout}
    config = GRPOLossConfig(rollout_is=RolloutImportanceSampling.tis(10.0))
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
    assert context.loss_kwargs.is_weights.tolist() == [[1.0, 1.0]]
    with torch.inference_mode():
        rollout.sub_(1.0)
    config.loss_ctx_cls.build_batches([context])
    assert context.loss_kwargs.is_weights.tolist() == [[pytest.approx(2.718281828, rel=1e-6)] * 2]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (GRPOLossConfig(), "keep_mask"),
        (CELossConfig(), "keep_mask"),
        (GRPOLossConfig(), "selected"),
        (GRPOLossConfig(), "policy_mask"),
        (MixedLossConfig(parts={"rl": GRPOLossConfig()}), "keep_mask"),
    ],
)
def test_a_mask_that_build_batches_computes_is_refused_not_replaced(config: GRPOLossConfig, field: str) -> None:
    context = config.build({**BATCH, "part_ids": torch.zeros(2, dtype=torch.int64)})
    for _ in range(2):
        calibrated(context)
    setattr(context.loss_kwargs, field, torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(BatchError, match=rf"loss_kwargs.{field} was assigned, but build_batches computes it"):
        calibrated(context)
    setattr(context.loss_kwargs, field, None)
    calibrated(context)


def test_a_mask_that_was_computed_stays_computed_in_copies() -> None:
    """One packed row loses a token, the other none; joined or copied they are calibrated again."""
    config = GRPOLossConfig()
    batches = [{name: value[i : i + 1].clone() for name, value in BATCH.items()} | {"num_tokens": [6]} for i in (0, 1)]
    batches[1]["old_logprobs"][0, 2] = -torch.inf
    contexts = type(config.build(batches[0])).build_batches([config.build(batch) for batch in batches])
    for copied in (GRPOLossContext.cat(contexts), GRPOLossContext.cat(contexts[::-1]), copy.deepcopy(contexts[1])):
        assert copied.loss_kwargs.keep_mask is not None
        assert int((~copied.loss_kwargs.keep_mask).sum()) == 1
        hidden = HIDDEN.reshape(1, 12, 4)[:, : copied.loss_kwargs.shifted_labels.shape[1]]
        assert float(calibrated(copied).forward(hidden, WEIGHT).extra["dropped_tokens"]) == 1.0
    contexts[0].loss_kwargs.keep_mask = torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(BatchError, match="keep_mask was assigned"):
        calibrated(GRPOLossContext.cat(contexts))
