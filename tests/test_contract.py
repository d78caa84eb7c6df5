"""What users rely on beyond the numbers: inputs untouched, garbage ignored, copies, epochs, names, errors."""

import copy
import hashlib
import json
import math
import pickle
import warnings

import pytest
import torch

from batches import LAYOUTS, PER_TOKEN, random_step, run_step
from rlloss import (
    BaseLossConfig,
    BaseLossContext,
    BaseLossKwargs,
    CELossConfig,
    GRPOLossConfig,
    GRPOLossContext,
    LogProbConfig,
    RolloutImportanceSampling,
    Totals,
    ValueLossConfig,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.errors import BatchError, ConfigError, NotCalibratedError, UnknownNameError
from rlloss.layout import Shard
from rlloss.metrics import Mean, Sum, merge, reduce

MODES = ["eager", "chunk", "liger"]
STEP = random_step(5, [6, 4, 9, 2])
KEYS = ("old_logprobs", "ref_logprobs", "advantages")


def config(mode: str = "eager", **fields) -> GRPOLossConfig:
    return GRPOLossConfig(mode=mode, chunk_size=5, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", **fields)


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_bit_identical_afterwards(mode, layout):
    batch, hidden = LAYOUTS[layout](STEP.cast(torch.float32).sequences, KEYS)
    weight, bias = STEP.weight.float(), STEP.bias.float()
    weight[0, 0] = 0.25
    batch["old_logprobs"][batch["shifted_labels"] == -100] = -torch.inf
    tensors = {**batch, "hidden": hidden, "weight": weight, "bias": bias}
    before = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    keys = list(batch)
    context = config(mode).build(batch)
    GRPOLossContext.build_batches([context])
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    context.forward(*leaves).loss.backward()
    assert {name: fingerprint(tensor) for name, tensor in tensors.items()} == before
    assert list(batch) == keys


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_garbage_at_ignored_positions_changes_no_bit(mode, layout, garbage):
    def run(fill: float):
        batch, hidden = LAYOUTS[layout](STEP.cast(torch.float32).sequences, KEYS)
        ignored = batch["shifted_labels"] == -100
        batch["rollout_logprobs"] = batch["old_logprobs"] + 0.01
        for name in (*KEYS, "rollout_logprobs"):
            batch[name] = batch[name].masked_fill(ignored, fill)
        hidden = hidden.masked_fill(ignored[..., None], fill).requires_grad_()
        weight, bias = STEP.weight.float().requires_grad_(), STEP.bias.float().requires_grad_()
        context = config(mode).build(batch)
        GRPOLossContext.build_batches([context])
        loss, (_, extra) = context.forward(hidden, weight, bias)
        loss.backward()
        assert bool((hidden.grad[ignored] == 0).all())
        return [loss.detach(), hidden.grad, weight.grad, bias.grad], reduce(extra)

    clean, clean_metrics = run(0.0)
    dirty, dirty_metrics = run(garbage)
    assert all(torch.equal(found, expected) for found, expected in zip(dirty, clean, strict=True))
    assert dirty_metrics == clean_metrics


@pytest.mark.parametrize("mode", MODES)
def test_nan_at_a_token_that_counts_stays_visible(mode):
    batch, hidden = LAYOUTS["packed"](STEP.cast(torch.float32).sequences, KEYS)
    place = tuple((batch["shifted_labels"] != -100).nonzero()[0])
    batch["old_logprobs"][place] = torch.nan
    context = config(mode).build(batch)
    GRPOLossContext.build_batches([context])
    assert context.forward(hidden, STEP.weight.float(), STEP.bias.float()).loss.isnan()
    with pytest.raises(BatchError, match="old_logprobs is NaN at 1 tokens"):
        GRPOLossContext.build_batches([config(mode, check_finite=True).build(batch)])


@pytest.mark.parametrize("mode", MODES)
def test_infinite_old_log_prob_drops_the_token_from_numerator_and_count(mode):
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    place = tuple((batch["shifted_labels"] != -100).nonzero()[2])
    without = {**batch, "shifted_labels": batch["shifted_labels"].clone()}
    without["shifted_labels"][place] = -100
    batch["old_logprobs"][place] = -torch.inf
    losses = []
    for data in (batch, without):
        context = config(mode).build(data)
        GRPOLossContext.build_batches([context])
        output = context.forward(hidden, STEP.weight, STEP.bias)
        losses.append((output.loss, float(output.extra["dropped_tokens"]), float(output.extra["tokens"])))
    assert losses[0][0] == losses[1][0]
    assert losses[0][2] == losses[1][2]
    assert (losses[0][1], losses[1][1]) == (1.0, 0.0)
    assert int((batch["shifted_labels"] != -100).sum()) == losses[0][2] + 1


def test_contexts_survive_pickle_and_deepcopy():
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    context = config("chunk", loss_reduction="sample").build(batch)
    GRPOLossContext.build_batches([context])
    expected = context.forward(hidden, STEP.weight, STEP.bias).loss
    for twin in (pickle.loads(pickle.dumps(context)), copy.deepcopy(context)):
        assert torch.equal(twin.forward(hidden, STEP.weight, STEP.bias).loss, expected)
        assert twin.loss_cfg == context.loss_cfg
    assert pickle.loads(pickle.dumps(context.loss_kwargs)).policy_loss_weight is not None


def test_configs_round_trip_through_json():
    given = config("chunk", policy_loss_cfg={"cliprange_high": 0.28, "clip_ratio_c": None}, loss_reduction="sample")
    for twin in (
        GRPOLossConfig(**given.model_dump()),
        GRPOLossConfig(**json.loads(given.model_dump_json())),
        GRPOLossConfig.model_validate_json(given.model_dump_json()),
        copy.deepcopy(given),
        pickle.loads(pickle.dumps(given)),
    ):
        assert twin == given
        assert twin.policy_loss_cfg["cliprange_high"] == 0.28


def test_calibration_is_idempotent_and_follows_other_groupings():
    batches = [LAYOUTS["packed"]([sequence], KEYS)[0] for sequence in STEP.sequences]
    contexts = [config(loss_reduction="sample").build(batch) for batch in batches]

    def weights(group):
        GRPOLossContext.build_batches(group)
        return [ctx.loss_kwargs.policy_loss_weight.clone() for ctx in group]

    first = weights(contexts)
    assert all(map(torch.equal, weights(contexts), first))
    pair = weights(contexts[:2])
    assert not torch.equal(pair[0], first[0])
    assert all(map(torch.equal, weights(contexts), first))
    assert all(map(torch.equal, weights(contexts[:2]), pair))
    assert contexts[0].batch_size == 2


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_is_minus_mean_advantage_with_the_gradient_of_old_equal_current(mode):
    batch, hidden = LAYOUTS["packed"](STEP.sequences, ("advantages",))
    plain = {"mode": mode, "chunk_size": 5}
    log_probs, _ = LogProbConfig(**plain).build(batch).forward(hidden, STEP.weight, STEP.bias)
    results = []
    for cfg, data in (
        (GRPOLossConfig(on_policy=True, **plain), batch),
        (GRPOLossConfig(**plain), {**batch, "old_logprobs": log_probs.detach()}),
    ):
        weight = STEP.weight.clone().requires_grad_()
        context = GRPOLossContext.build_batches([cfg.build(data)])[0]
        loss = context.forward(hidden, weight, STEP.bias).loss
        loss.backward()
        results.append((loss.item(), weight.grad))
    counted = batch["shifted_labels"] != -100
    assert results[0][0] == pytest.approx(-batch["advantages"][counted].mean().item(), rel=1e-6)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-6, atol=1e-9)
    with pytest.raises(BatchError, match=r"needs old_logprobs.*on_policy=True"):
        GRPOLossContext.build_batches([GRPOLossConfig(**plain).build(batch)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_log_probs_equals_forward(layout):
    batch, hidden = LAYOUTS[layout](STEP.sequences, KEYS)
    cfg = config("chunk", entropy_coef=0.1, loss_reduction="sample")
    context = GRPOLossContext.build_batches([cfg.build(batch)])[0]
    hidden_a, hidden_b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    direct = context.forward(hidden_a, STEP.weight, STEP.bias)
    direct.loss.backward()
    engine = LogProbConfig(mode="eager", entropy_metric=True).build(batch)
    logits = hidden_b @ STEP.weight.T + STEP.bias
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    log_probs, (_, extra) = engine.forward(hidden_b, STEP.weight, STEP.bias)
    counted = batch["shifted_labels"] != -100
    assert torch.allclose(extra["entropy"][counted], entropy[counted])
    through = context.forward_log_probs(log_probs, entropy)
    through.loss.backward()
    assert through.loss.item() == pytest.approx(direct.loss.item(), rel=1e-12)
    assert torch.allclose(hidden_b.grad[counted], hidden_a.grad[counted], rtol=1e-10, atol=1e-14)
    assert reduce(through.extra) == pytest.approx(reduce(direct.extra), rel=1e-9, abs=1e-9)


def test_forward_before_calibration_is_refused():
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    context = config().build(batch)
    with pytest.raises(NotCalibratedError, match="Call build_batches"):
        context.forward(hidden, STEP.weight, STEP.bias)
    context = GRPOLossContext.build_batches([context])[0]
    context.loss_kwargs.kl_loss_weight = None
    with pytest.raises(NotCalibratedError, match="kl_loss_weight"):
        context.forward(hidden, STEP.weight, STEP.bias)


def test_dotted_path_reaches_a_loss_that_nobody_registered():
    cfg = GRPOLossConfig(policy_loss_cfg={"loss_type": "custom_losses.clipped_above", "cap": 1.1})
    assert cfg.policy_loss_cfg == {"loss_type": "custom_losses.clipped_above", "cap": 1.1}
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    context = GRPOLossContext.build_batches([cfg.build(batch)])[0]
    loss = context.forward(hidden, STEP.weight, STEP.bias).loss
    counted = batch["shifted_labels"] != -100
    log_prob = (
        (hidden @ STEP.weight.T + STEP.bias).log_softmax(-1).gather(-1, batch["shifted_labels"].clamp(min=0)[..., None])
    )
    ratio = (log_prob.squeeze(-1) - batch["old_logprobs"]).exp().clamp(max=1.1)
    assert loss.item() == pytest.approx(-(batch["advantages"] * ratio)[counted].mean().item(), rel=1e-12)
    with pytest.raises(ConfigError, match="could not be imported"):
        GRPOLossConfig(policy_loss_cfg={"loss_type": "custom_losses.nothing"})


def test_registry_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match=r"'vanilla' is registered already"):
        register_policy_loss("vanilla")(lambda log_prob: log_prob)
    with pytest.raises(ConfigError, match=r"asks for 'old_logprob'.*Did you mean 'old_log_prob'"):
        register_policy_loss("typo")(lambda log_prob, old_logprob: log_prob)
    register_policy_loss("fleeting")(lambda log_prob, advantages: -log_prob * advantages)
    unregister_policy_loss("fleeting")
    with pytest.raises(UnknownNameError):
        unregister_policy_loss("fleeting")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "chunked"}, "mode"),
        ({"kl_los_coef": 0.1}, "unknown field 'kl_los_coef'. Did you mean 'kl_loss_coef'"),
        ({"policy_loss_cfg": {"clip_ratioc": 9}}, "unknown field 'clip_ratioc'. Did you mean 'clip_ratio_c'"),
        ({"policy_loss_cfg": {"loss_type": "vanila"}}, "Did you mean 'vanilla'"),
        ({"policy_loss_cfg": {"clip_ratio_c": 1.0}}, "clip_ratio_c"),
        ({"policy_loss_cfg": {"cliprange_low": -0.1}}, "cliprange_low"),
        ({"kl_loss_type": "k4"}, "unknown KL kind 'k4'"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"mode": "liger", "entropy_coef": 0.1}, "entropy_coef=0.1. Use mode='chunk'"),
        ({"mode": "liger", "logit_softcap": 30.0}, "logit_softcap=30.0. Use mode='chunk'"),
        ({"mode": "liger", "logit_scale": 2.0}, "logit_scale"),
        ({"mode": "liger", "entropy_metric": True}, "entropy_metric"),
        ({"loss_reduction": "constant"}, "loss_length"),
        ({"loss_length": 8.0}, "loss_length"),
    ],
)
def test_config_mistakes_name_the_field_and_the_way_out(fields, message):
    with pytest.raises(ConfigError) as caught:
        GRPOLossConfig(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_assignment_is_checked_like_a_construction():
    cfg = GRPOLossConfig()
    with pytest.raises(ConfigError, match="mode"):
        cfg.mode = "chunked"
    cfg.policy_loss_cfg = {"cliprange_high": 0.3}
    assert cfg.policy_loss_cfg["cliprange_high"] == 0.3


def test_k1_as_a_loss_warns():
    with pytest.warns(UserWarning, match="does not depend on the reference"):
        GRPOLossConfig(use_kl_loss=True, kl_loss_type="k1")
    with pytest.warns(UserWarning, match="dual clip"):
        GRPOLossConfig(policy_loss_cfg={"clip_ratio_c": 1.1})


LABELS = torch.tensor([[1, -100, 2, 0]])
GOOD = {"shifted_labels": LABELS, "advantages": torch.ones(1, 4), "old_logprobs": -torch.ones(1, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": None}, "lacks 'advantages'; it has 'shifted_labels', 'old_logprobs'"),
        ({"shifted_labels": LABELS.float()}, "dtype torch.float32"),
        ({"shifted_labels": LABELS[0]}, "expected an integer tensor [B, T]"),
        ({"shifted_labels": torch.tensor([[1, -1, 2, 0]])}, "negative label -1, but ignore_idx is -100"),
        ({"advantages": torch.ones(1, 5)}, "advantages has shape (1, 5)"),
        ({"advantages": torch.ones(2)}, "advantages has shape (2,)"),
        ({"old_logprobs": torch.ones(1)}, "old_logprobs has shape (1,), expected (1, 4)"),
        ({"old_logprobs": 3.0}, "old_logprobs is a float"),
        ({"cu_seq_lens": torch.tensor([0, 3, 2])}, "cu_seq_lens starts at 0, ends at 2"),
        ({"cu_seq_lens": torch.tensor([0, 2])}, "2 tokens that count lie beyond the end"),
        ({"num_tokens": torch.tensor([2, 3])}, "end at most at T=4"),
    ],
)
def test_batch_mistakes_name_the_tensor(change, message):
    with pytest.raises(BatchError) as caught:
        GRPOLossConfig().build({**GOOD, **change})
    assert message in str(caught.value)


def test_forward_mistakes_name_the_tensor():
    context = GRPOLossContext.build_batches([GRPOLossConfig().build(GOOD)])[0]
    hidden = torch.zeros(1, 4, 3)
    for tensors, message in [
        ((hidden, torch.zeros(2, 3)), "contains 2, but head_weight has 2 rows"),
        ((hidden, torch.zeros(0)), "head_weight has shape (0,)"),
        ((hidden, torch.zeros(5, 2)), "hidden_states has shape (1, 4, 3), expected (1, 4, 2)"),
        ((torch.zeros(1, 3, 3), torch.zeros(5, 3)), "hidden_states has shape (1, 3, 3)"),
        ((hidden, torch.zeros(5, 3), torch.zeros(4)), "head_bias has shape (4,), expected (5,)"),
    ]:
        with pytest.raises(BatchError) as caught:
            context.forward(*tensors)
        assert message in str(caught.value)
    with pytest.raises(BatchError, match="empty list"):
        GRPOLossContext.build_batches([])
    late = GRPOLossConfig().build(GOOD)
    late.loss_kwargs.old_logprobs = torch.zeros(1, 3)
    with pytest.raises(BatchError, match=r"old_logprobs has shape \(1, 3\)"):
        GRPOLossContext.build_batches([late])


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_is_zero_with_a_graph(mode):
    batch, hidden = LAYOUTS["padded"](STEP.cast(torch.float32).sequences, KEYS)
    context = GRPOLossContext.build_batches([config(mode).empty(batch)])[0]
    hidden, weight, bias = (
        hidden.requires_grad_(),
        STEP.weight.float().requires_grad_(),
        STEP.bias.float().requires_grad_(),
    )
    loss, (_, extra) = context.forward(hidden, weight, bias)
    loss.backward()
    assert loss.item() == 0.0
    assert float(extra["tokens"]) == 0.0
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None and not tensor.grad.any()
    assert all(value == 0.0 for value in reduce(extra).values())


def test_cat_keeps_weights_and_shifts_offsets():
    contexts = [config().build(LAYOUTS["packed"]([sequence], KEYS)[0]) for sequence in STEP.sequences]
    contexts = GRPOLossContext.build_batches(contexts)
    hidden = [sequence["hidden"][None] for sequence in STEP.sequences]
    apart = sum(ctx.forward(h, STEP.weight, STEP.bias).loss for ctx, h in zip(contexts, hidden, strict=True))
    joined = GRPOLossContext.cat(contexts)
    assert joined.loss_kwargs.cu_seq_lens.tolist() == [0, 6, 10, 19, 21]
    together = joined.forward(torch.cat(hidden, dim=1), STEP.weight, STEP.bias).loss
    assert together.item() == pytest.approx(apart.item(), rel=1e-12)


@pytest.mark.filterwarnings("ignore:a row .* without cu_seq_lens")
def test_cat_keeps_rows_without_offsets_apart():
    """A row without offsets is one sequence: joined with another it is still one of two, as its ratio says."""
    loss_cfg = config(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    contexts = [loss_cfg.build(LAYOUTS["padded"]([sequence], KEYS)[0]) for sequence in STEP.sequences]
    contexts = GRPOLossContext.build_batches(contexts)
    hidden = [sequence["hidden"][None] for sequence in STEP.sequences]
    apart = sum(ctx.forward(h, STEP.weight, STEP.bias).loss for ctx, h in zip(contexts, hidden, strict=True))
    joined = GRPOLossContext.cat(contexts).forward(torch.cat(hidden, dim=1), STEP.weight, STEP.bias)
    assert joined.loss.item() == pytest.approx(apart.item(), rel=1e-12)
    assert float(joined.extra["sequences"]) == sum(float(ctx._counted()["sequences"]) for ctx in contexts)


def test_cat_refuses_what_does_not_join():
    rows = [config().build(LAYOUTS["padded"](STEP.sequences[start : start + 2], KEYS)[0]) for start in (0, 2)]
    with pytest.raises(BatchError, match="have \\[2, 2\\] rows"):
        GRPOLossContext.cat(GRPOLossContext.build_batches(rows))
    batch = LAYOUTS["packed"](STEP.sequences, KEYS)[0]
    with pytest.raises(BatchError, match="different configs"):
        GRPOLossContext.cat([config().build(batch), config(temperature=2.0).build(batch)])


def test_cat_joins_the_prompts_of_sequences_in_their_order():
    """Calibrated anew, the joined row has the weights of its parts: prompts of unequal lengths, each with its own."""
    loss_cfg, prompts = config(loss_reduction="prompt"), [2, 0, 2, 1]
    contexts = []
    for start in (0, 2):
        batch = LAYOUTS["packed"](STEP.sequences[start : start + 2], KEYS)[0]
        batch |= {"group_ids": torch.tensor(prompts[start : start + 2]), "num_prompts": 3}
        contexts.append(loss_cfg.build(batch))
    contexts = GRPOLossContext.build_batches(contexts)
    apart = torch.cat([context.loss_kwargs.policy_loss_weight for context in contexts], dim=1)
    joined = GRPOLossContext.cat(contexts)
    assert joined.loss_kwargs.group_ids.tolist() == prompts
    assert torch.equal(GRPOLossContext.build_batches([joined])[0].loss_kwargs.policy_loss_weight, apart)
    assert apart[apart > 0].unique().numel() == 3


def test_cat_of_one_is_a_copy_of_it():
    """Of several rows as well, which no other could join: they stay rows, and the first stays as it is."""
    batch, hidden = LAYOUTS["padded"](STEP.sequences, KEYS)
    (context,) = GRPOLossContext.build_batches([config(loss_reduction="sample").build(batch)])
    joined = GRPOLossContext.cat([context])
    assert joined is not context and joined.loss_kwargs.cu_seq_lens is None
    losses = [one.forward(hidden, STEP.weight, STEP.bias).loss.item() for one in (context, joined)]
    assert losses[0] == losses[1] != 0.0


def test_cat_refuses_nothing_at_all_and_parts_of_rows():
    """Of contexts, and of their kwargs alone."""
    batch = LAYOUTS["packed"](STEP.sequences, KEYS)[0]
    context = config().build(batch)
    for cls in (GRPOLossContext, type(context.loss_kwargs)):
        with pytest.raises(BatchError, match=rf"{cls.__name__}\.cat got an empty list"):
            cls.cat([])
    without = config().build(batch)
    without.loss_kwargs.ref_logprobs = None
    for pair in ([context, without], [without, context]):
        with pytest.raises(BatchError, match="ref_logprobs is set in some of the chunks only"):
            GRPOLossContext.cat(pair)
    context.loss_kwargs.shard = Shard(None, 0, 2, 2 * batch["shifted_labels"].shape[1])
    with pytest.raises(BatchError, match="split over a sequence-parallel mesh"):
        GRPOLossContext.cat([without, context])


def test_cat_merges_what_calibration_measured():
    """Tokens dropped in some micro-batches only, and the metrics of the rollout correction, as if never cut."""
    contexts, hidden = [], []
    loss_cfg = config(rollout_is=RolloutImportanceSampling.mis(0.5, 2.0))
    for number, sequence in enumerate(STEP.sequences):
        batch, rows = LAYOUTS["packed"]([sequence], KEYS)
        shifts = 0.4 * torch.arange(rows.shape[1]) * (number % 2)
        batch["rollout_logprobs"] = batch["old_logprobs"] - shifts
        batch["old_logprobs"] = batch["old_logprobs"].clone()
        batch["old_logprobs"][0, -2:] = -torch.inf if number == 2 else batch["old_logprobs"][0, -2:]
        contexts.append(loss_cfg.build(batch))
        hidden.append(rows)
    contexts = GRPOLossContext.build_batches(contexts)
    pairs = zip(contexts, hidden, strict=True)
    apart = reduce(merge([ctx.forward(rows, STEP.weight, STEP.bias).extra for ctx, rows in pairs]))
    together = reduce(GRPOLossContext.cat(contexts).forward(torch.cat(hidden, dim=1), STEP.weight, STEP.bias).extra)
    assert together == pytest.approx(apart, rel=1e-12, abs=1e-12)
    assert together["dropped_tokens"] > 2


def test_totals_take_the_place_of_counts():
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    counted = int((batch["shifted_labels"] != -100).sum())
    plain = GRPOLossContext.build_batches([config().build(batch)])[0].forward(hidden, STEP.weight, STEP.bias).loss
    known = GRPOLossContext.build_batches([config().build(batch)], totals=Totals(tokens=2 * counted))[0]
    assert known.forward(hidden, STEP.weight, STEP.bias).loss.item() == pytest.approx(plain.item() / 2, rel=1e-12)
    for given in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"Totals\(tokens="):
            Totals(tokens=given)


@pytest.mark.parametrize("length", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("cls", [GRPOLossConfig, ValueLossConfig])
def test_a_length_that_is_no_number_is_refused(cls, length):
    with pytest.raises(ConfigError, match="loss_length"):
        cls(loss_reduction="constant", loss_length=length)


def test_per_sequence_advantages_and_number_types():
    batch, hidden = LAYOUTS["padded"](STEP.cast(torch.float32).sequences, KEYS)
    each = torch.tensor([1.0, -2.0, 3.0, 4.0])
    losses = []
    for advantages in (each, each[:, None], each[:, None].expand(batch["shifted_labels"].shape), each.long()):
        for labels in (batch["shifted_labels"], batch["shifted_labels"].int()):
            data = {**batch, "advantages": advantages, "shifted_labels": labels}
            context = GRPOLossContext.build_batches([config().build(data)])[0]
            losses.append(context.forward(hidden, STEP.weight.float(), STEP.bias.float()).loss.item())
    assert len(set(losses)) == 1


def test_metrics_hold_no_graph_and_merge_exactly():
    result = run_step(config("chunk"), STEP, 3, keys=KEYS)
    for extra in result.extras:
        for metric in extra.values():
            assert all(not part.requires_grad and part.grad_fn is None for part in metric.parts().values())
    first = {"frac": Mean(torch.tensor(3.0), torch.tensor(4.0)), "n": Sum(torch.tensor(1.0))}
    second = {"frac": Mean(torch.tensor(0.0), torch.tensor(1.0)), "n": Sum(torch.tensor(2.0))}
    assert reduce(merge([first, second])) == {"frac": pytest.approx(0.6), "n": 3.0}


class TokenSquareContext(BaseLossContext):
    """The second way to extend: a loss on log-probs, which runs in every mode."""

    def token_loss(self, stats, loss_kwargs):
        return (stats.log_prob.square() * loss_kwargs.loss_weight).sum(), {
            "n": Sum(stats.log_prob.new_ones(()).double())
        }


class TokenSquareConfig(CELossConfig):
    @property
    def loss_ctx_cls(self):
        return TokenSquareContext


@pytest.mark.parametrize("mode", MODES)
def test_a_context_on_log_probs_runs_in_every_mode(mode):
    batch, hidden = LAYOUTS["packed"](STEP.sequences, ())
    cfg = TokenSquareConfig(mode=mode, chunk_size=3)
    context = TokenSquareContext.build_batches([cfg.build(batch)])[0]
    hidden = hidden.clone().requires_grad_()
    loss = context.forward(hidden, STEP.weight, STEP.bias).loss
    loss.backward()
    leaf = hidden.detach().clone().requires_grad_()
    counted = batch["shifted_labels"] != -100
    log_prob = (
        (leaf @ STEP.weight.T + STEP.bias).log_softmax(-1).gather(-1, batch["shifted_labels"].clamp(min=0)[..., None])
    )
    expected = log_prob.squeeze(-1)[counted].square().mean()
    expected.backward()
    # Without any float64 tensor in the batch the weights are float32.
    bound = 1e-5 if mode == "liger" else 1e-7
    assert loss.item() == pytest.approx(expected.item(), rel=bound)
    assert torch.allclose(hidden.grad, leaf.grad, rtol=bound, atol=bound)


def test_a_config_must_say_its_classes():
    with pytest.raises(NotImplementedError, match="loss_ctx_cls"):
        BaseLossConfig().build({"shifted_labels": LABELS})
    kwargs = BaseLossKwargs(shifted_labels=LABELS)
    assert [part.shifted_labels.shape[1] for part in kwargs.chunk(3)] == [3, 1]


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_step(config("chunk", loss_reduction="sample"), STEP, 1, "packed", PER_TOKEN)
