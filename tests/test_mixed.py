"""Several losses in one batch: each part equals itself alone, in every mode and split, beside any garbage."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import steps
from rlloss import CELossConfig, DistillLossConfig, GRPOLossConfig, MixedLossConfig, Totals, ValueLossConfig
from rlloss.errors import BatchError, ConfigError
from steps import IGNORED

VOCABULARY, WIDTH, TOPK = 5, 3, 2
PARTS: dict[str, Any] = {
    "rl": GRPOLossConfig(use_kl_loss=True, kl_loss_coef=0.3, loss_reduction="sample"),
    "sft": CELossConfig(),
    "teacher": DistillLossConfig(loss_reduction="sequence_sum"),
}
FILL = {"advantages": 0.5, "old_logprobs": -1.0, "ref_logprobs": -1.2, "teacher_topk_logprobs": -1.5}
READS = {
    "rl": ("advantages", "old_logprobs", "ref_logprobs"),
    "sft": (),
    "teacher": ("teacher_topk_ids", "teacher_topk_logprobs"),
}


def sequence(seed: int, length: int, part: int) -> dict[str, Any]:
    """One sequence of a part; what the part does not read is NaN, or a word that does not exist."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    labels = torch.randint(0, VOCABULARY, (length,), generator=make)
    labels[0] = labels[0] if length == 1 else IGNORED
    found = {
        "hidden": normal(length, WIDTH),
        "shifted_labels": labels,
        "advantages": normal(1).expand(length),
        "old_logprobs": normal(length) * 0.3 - 1.5,
        "ref_logprobs": normal(length) * 0.3 - 1.5,
        "teacher_topk_ids": torch.stack([torch.randperm(VOCABULARY, generator=make)[:TOPK] for _ in range(length)]),
        "teacher_topk_logprobs": -normal(length, TOPK).abs() - 0.3,
        "part": part,
    }
    for name in ("advantages", "old_logprobs", "ref_logprobs", "teacher_topk_logprobs"):
        if part >= 0 and name not in READS[list(PARTS)[part]]:
            found[name] = torch.full_like(found[name], math.nan)
    if part != 2:
        found["teacher_topk_ids"] = torch.full_like(found["teacher_topk_ids"], -7)
    return found


def batch_of(sequences: list[dict[str, Any]], keys: tuple[str, ...] | None = None) -> tuple[dict[str, Any], Tensor]:
    names = keys if keys is not None else (*FILL, "teacher_topk_ids")
    batch = {name: torch.cat([s[name] for s in sequences])[None] for name in ("shifted_labels", *names)}
    batch["num_tokens"] = [len(s["hidden"]) for s in sequences]
    if keys is None:
        batch["part_ids"] = torch.tensor([s["part"] for s in sequences])
    return batch, torch.cat([s["hidden"] for s in sequences])[None]


def weight() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def run(
    config: Any, groups: list[list[dict[str, Any]]], keys: tuple[str, ...] | None = None, **more: Any
) -> steps.Step:
    laid = [batch_of(group, keys) for group in groups]
    return steps.run_step(config, [batch for batch, _ in laid], [hidden for _, hidden in laid], weight(), **more)


SEQUENCES = [
    sequence(seed, length, part) for seed, (length, part) in enumerate([(3, 0), (4, 1), (2, 2), (3, 0), (1, 2), (3, 1)])
]


@steps.eager_and_chunk
def test_a_mixed_loss_is_the_sum_of_its_parts_alone(head: dict[str, Any]) -> None:
    config = MixedLossConfig(parts=PARTS, coefs={"sft": 0.25}, **head)
    found = run(config, [SEQUENCES])
    expected, grads = 0.0, torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    for index, (name, part) in enumerate(PARTS.items()):
        alone = run(part, [[s for s in SEQUENCES if s["part"] == index]], READS[name])
        factor = 0.25 if name == "sft" else 1.0
        expected, grads = expected + factor * alone.loss, grads + factor * alone.weight_grad
        assert found.extra[f"{name}/loss"] == pytest.approx(factor * alone.loss, abs=1e-9)
        for metric, value in alone.extra.items():
            if metric != "loss":
                assert found.extra[f"{name}/{metric}"] == pytest.approx(value, abs=1e-9), metric
    assert found.loss == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(found.weight_grad, grads, rtol=0, atol=1e-9)


def test_sequences_of_no_part_are_not_projected() -> None:
    config = MixedLossConfig(parts=PARTS, mode="chunk")
    idle = sequence(99, 5, -1)
    idle["hidden"] = torch.full_like(idle["hidden"], math.nan)
    found, clean = run(config, [[*SEQUENCES, idle]]), run(config, [SEQUENCES])
    assert found.loss == clean.loss
    assert not any(any(line) for line in found.rows[-5:])
    assert found.extra["tokens"] == clean.extra["tokens"]


def test_liger_mode_takes_parts_that_it_can() -> None:
    parts = {name: PARTS[name] for name in ("rl", "sft")}
    sequences = [s for s in SEQUENCES if s["part"] < 2]
    eager = run(MixedLossConfig(parts=parts), [sequences])
    assert run(MixedLossConfig(parts=parts, mode="liger"), [sequences]).loss == pytest.approx(eager.loss, abs=1e-6)
    with pytest.raises(ConfigError, match="kind='topk'"):
        MixedLossConfig(parts=PARTS, mode="liger")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 2)), min_size=2, max_size=6), st.data())
def test_no_split_changes_a_mixed_step(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    sequences = [sequence(seed, length, part) for seed, (length, part) in enumerate(shapes)]
    cut = data.draw(st.integers(1, len(sequences) - 1))
    mode = data.draw(st.sampled_from(["eager", "chunk"]))
    config = MixedLossConfig(parts=PARTS, mode=mode, chunk_size=2)
    whole = run(MixedLossConfig(parts=PARTS), [sequences])
    steps.assert_same(run(config, [sequences[:cut], sequences[cut:]]), whole, 1e-8)


def test_a_sequence_level_part_and_an_entropy_bonus() -> None:
    parts = {"gspo": GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, entropy_coef=0.1), "sft": CELossConfig()}
    sequences = [s for s in SEQUENCES if s["part"] < 2]
    found = run(MixedLossConfig(parts=parts, mode="chunk", chunk_size=2), [sequences])
    steps.assert_same(found, run(MixedLossConfig(parts=parts), [sequences]), 1e-9)
    alone = run(parts["gspo"], [[s for s in sequences if s["part"] == 0]], READS["rl"])
    assert found.extra["gspo/loss"] == pytest.approx(alone.loss, abs=1e-9)


def test_contexts_survive_copies_and_cat() -> None:
    config = MixedLossConfig(parts=PARTS)
    contexts = [config.build(batch_of([s])[0]) for s in SEQUENCES]
    config.loss_ctx_cls.build_batches(contexts)
    hidden = torch.cat([s["hidden"] for s in SEQUENCES])[None]
    total = sum(float(c.forward(s["hidden"][None], weight()).loss) for c, s in zip(contexts, SEQUENCES, strict=True))
    for joined in (type(contexts[0]).cat(contexts), copy.deepcopy(type(contexts[0]).cat(contexts))):
        assert float(pickle.loads(pickle.dumps(joined)).forward(hidden, weight()).loss) == pytest.approx(total)


def test_totals_belong_to_parts() -> None:
    config = MixedLossConfig(parts={"sft": CELossConfig()})
    sequences = [s | {"part": 0} for s in SEQUENCES if s["part"] == 1]
    plain = run(config, [sequences])
    doubled = run(config, [sequences], totals={"sft": Totals(tokens=2 * plain.extra["tokens"])})
    assert doubled.loss == pytest.approx(plain.loss / 2)
    with pytest.raises(BatchError, match="belong to its parts"):
        run(config, [sequences], totals=Totals(tokens=3))


def test_the_config_round_trips_and_shares_its_head() -> None:
    config = MixedLossConfig(parts=PARTS, mode="chunk", chunk_size=7, temperature=0.7, coefs={"rl": 2.0})
    assert {(part.mode, part.chunk_size, part.temperature) for part in config.parts.values()} == {("chunk", 7, 0.7)}
    for copied in (
        MixedLossConfig(**config.model_dump()),
        MixedLossConfig.model_validate_json(config.model_dump_json()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert copied == config
        assert [type(part) for part in copied.parts.values()] == [type(part) for part in config.parts.values()]
    assert PARTS["sft"].mode == "eager"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": {}}, "at least 1"),
        ({"parts": {"sft": CELossConfig()}, "coefs": {"stf": 1.0}}, "stf"),
        ({"parts": {"sft": CELossConfig(temperature=0.5)}}, "one head for all parts"),
        ({"parts": {"sft": {"loss": "CELosConfig"}}}, "Did you mean 'CELossConfig'"),
        ({"parts": {"value": ValueLossConfig()}}, "does not read log-probs"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixedLossConfig(**fields)


def test_batches_that_do_not_fit_are_refused() -> None:
    config = MixedLossConfig(parts=PARTS)
    batch, hidden = batch_of(SEQUENCES)
    with pytest.raises(BatchError, match="part_ids"):
        config.build({name: value for name, value in batch.items() if name != "part_ids"})
    with pytest.raises(BatchError, match="between -1 and 2"):
        config.build(batch | {"part_ids": batch["part_ids"] + 1})
    without = {name: value for name, value in batch.items() if name != "teacher_topk_ids"}
    with pytest.raises(BatchError, match="needs teacher_topk_ids"):
        config.loss_ctx_cls.build_batches([config.build(without)])
    wrong = batch["teacher_topk_ids"].clone()
    wrong[0, 8] = VOCABULARY
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch | {"teacher_topk_ids": wrong})])
    with pytest.raises(BatchError, match="share a vocabulary"):
        context.forward(hidden, weight())


@steps.eager_and_chunk
def test_a_token_that_a_part_drops_leaves_that_part_only(head: dict[str, Any]) -> None:
    """An infinite old log-prob drops a token of the policy part; beside an SFT token it is garbage."""
    parts = {"rl": GRPOLossConfig(), "sft": CELossConfig()}
    sequences = [copy.copy(s) for s in SEQUENCES if s["part"] < 2]
    for s in sequences:
        s["old_logprobs"] = s["old_logprobs"].clone()
        s["old_logprobs"][-1] = -math.inf
    found = run(MixedLossConfig(parts=parts, **head), [sequences])
    alone = [
        run(part, [[s for s in sequences if s["part"] == index]], READS[name])
        for index, (name, part) in enumerate(parts.items())
    ]
    assert found.loss == pytest.approx(sum(step.loss for step in alone), abs=1e-9)
    torch.testing.assert_close(found.weight_grad, alone[0].weight_grad + alone[1].weight_grad, rtol=0, atol=1e-9)
    assert (found.extra["rl/dropped_tokens"], found.extra["sft/dropped_tokens"]) == (2.0, 0.0)
    assert found.extra["tokens"] == alone[0].extra["tokens"] + alone[1].extra["tokens"]


def test_part_ids_set_after_build_cut_the_parts_anew() -> None:
    config = MixedLossConfig(parts={"rl": GRPOLossConfig(on_policy=True), "sft": CELossConfig()})
    batch, hidden = batch_of([s for s in SEQUENCES if s["part"] == 0], ("advantages",))
    batch["part_ids"] = torch.tensor([0, 1])
    other = torch.tensor([1, 0])
    (fresh,) = config.loss_ctx_cls.build_batches([config.build(batch | {"part_ids": other})])
    (late,) = [config.build(batch)]
    late.loss_kwargs.part_ids = other
    config.loss_ctx_cls.build_batches([late])
    assert float(late.forward(hidden, weight()).loss) == float(fresh.forward(hidden, weight()).loss)
    assert float(late.parts["sft"].loss_kwargs.global_grad_tokens) == 2.0
    late.loss_kwargs.part_ids = batch["part_ids"]
    with pytest.raises(BatchError, match="Call build_batches after setting them"):
        late.forward(hidden, weight())
    late.loss_kwargs.part_ids = torch.tensor([0, 2])
    with pytest.raises(BatchError, match="between -1 and 1"):
        config.loss_ctx_cls.build_batches([late])
    late.loss_kwargs.part_ids = torch.tensor([0, 1, 1])
    with pytest.raises(BatchError, match="part_ids has shape"):
        config.loss_ctx_cls.build_batches([late])


def test_a_mixed_batch_is_checked_as_any_other() -> None:
    config = MixedLossConfig(parts=PARTS)
    batch, hidden = batch_of(SEQUENCES)
    lengths = batch.pop("num_tokens")
    batch["part_ids"] = torch.tensor([s["part"] for s in SEQUENCES]).repeat_interleave(torch.tensor(lengths))[None]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)], cu_seq_lens_list=[offsets])
    assert float(context.forward(hidden, weight()).loss) == pytest.approx(run(config, [SEQUENCES]).loss, abs=1e-12)
    with pytest.raises(BatchError, match="2 entries for 1 contexts"):
        config.loss_ctx_cls.build_batches([context], cu_seq_lens_list=[offsets, offsets])
    other = MixedLossConfig(parts=PARTS, coefs={"rl": 2.0})
    with pytest.raises(BatchError, match="different loss configs"):
        config.loss_ctx_cls.build_batches([context, other.build(batch)])


def test_the_ranks_of_totals_hold_for_all_parts() -> None:
    config = MixedLossConfig(parts={"a": CELossConfig(), "b": CELossConfig()}, reduce_loss=False)
    sequences = [s | {"part": index % 2} for index, s in enumerate(SEQUENCES)]
    plain = run(config, [sequences])
    for totals in ({"a": Totals(world=2)}, {"b": Totals(world=2)}):
        assert run(config, [sequences], totals=totals).loss == pytest.approx(2 * plain.loss)
    with pytest.raises(BatchError, match="differ in world"):
        run(config, [sequences], totals={"a": Totals(world=2), "b": Totals(world=3)})
