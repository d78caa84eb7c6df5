"""XTuner's surface gives XTuner's recorded numbers, and takes XTuner's calls as they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlloss
from golden_cases import assert_close, tensor
from golden_xtuner import batch_of
from rlloss.compat import xtuner
from rlloss.compat.xtuner.names import ABSENT, NAMES
from rlloss.errors import BatchError, ConfigError, UnknownNameError

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "xtuner.json").read_text())
KEYS = ("advantages", "old_logprobs", "ref_logprobs", "is_weights")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlloss.compat.xtuner.contexts.device_of_training", lambda: CPU)


def named(entries: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(entry, id=entry["name"]) for entry in entries]


# ---- contexts ---------------------------------------------------------------------------------------------------


def over_chunks(name: str, values: Any) -> Tensor:
    """XTuner stacks the numbers of chunks, and its log reduces them."""
    stacked = tensor(values).reshape(-1)
    if name.endswith(("max", "ratio")):
        return stacked.amax()
    return stacked.amin() if name.endswith("min") else stacked.sum()


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("case", named(GOLDEN["cases"]))
def test_losses_and_metrics_of_a_step(case: dict[str, Any], mode: str) -> None:
    kind = case["loss"]
    config = getattr(xtuner, f"{kind}LossConfig")(**case["config"] | {"mode": mode, "chunk_size": 4})
    keys = () if kind == "CE" else KEYS
    contexts = [config.build(batch_of(row, keys)) for row in case["micro_batches"]]
    contexts = config.loss_ctx_cls.build_batches(contexts)
    weight = tensor(case["head_weight"])
    outputs = case["outputs"]
    for i, (context, row) in enumerate(zip(contexts, case["micro_batches"], strict=True)):
        loss, (_, extra) = context(tensor([row["hidden"]]), weight)
        assert_close(loss, outputs["losses"][i], 1e-6, "loss")
        assert all(isinstance(value, Tensor) and value.ndim == 0 for value in extra.values())
        for name, expected in outputs["metrics"][i].items():
            assert_close(extra[name], over_chunks(name, expected), 1e-6, name)
        assert set(extra) == set(outputs["metrics"][i]) or kind == "Oreal"
        assert float(extra.metrics["loss"]) == pytest.approx(float(loss), abs=1e-12)


def test_metrics_over_no_token_take_no_part_in_extremes() -> None:
    config = xtuner.GRPOLossConfig()
    zeros = torch.zeros(1, 3)
    batch = {"shifted_labels": torch.full((1, 3), -100), "advantages": zeros, "old_logprobs": zeros}
    (context,) = xtuner.GRPOLossContext.build_batches([config.build(batch)])
    extra = context(torch.randn(1, 3, 4), torch.randn(5, 4)).extra
    assert extra["max_ratio"] == 0
    assert extra["reduced_train_policy_ratio_min"] == torch.inf
    assert extra["reduced_train_policy_valid_count"] == 0


@pytest.mark.parametrize("name", ["CELoss", "LogProb", "GRPOLoss", "OrealLoss"])
def test_build_is_none_without_a_required_key(name: str) -> None:
    config = getattr(xtuner, f"{name}Config")()
    labels = torch.tensor([[1, 2, -100]])
    assert config.build({"advantages": torch.ones(1, 3)}) is None
    only_labels = config.build({"shifted_labels": labels})
    assert (only_labels is None) == (name in ("GRPOLoss", "OrealLoss"))
    context = config.build({"shifted_labels": labels, "advantages": torch.ones(1, 3), "seq_ctx": object()})
    assert type(context) is getattr(xtuner, f"{name}Context")
    with pytest.raises(BatchError, match="advantages has shape"):
        xtuner.GRPOLossConfig().build({"shifted_labels": labels, "advantages": torch.ones(1, 2)})


def test_build_moves_to_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlloss.compat.xtuner.contexts.device_of_training", lambda: torch.device("meta"))
    moved = xtuner.contexts._Builds.build
    seen: dict[str, Any] = {}

    class Probe(rlloss.CELossConfig):
        def build(self, data: Any, sp_mesh: Any = None) -> Any:
            seen.update(data)

    class Both(xtuner.contexts._Builds, Probe):
        pass

    moved(Both(), {"shifted_labels": torch.ones(1, 2, dtype=torch.long), "num_tokens": torch.tensor([2])})
    assert {name: value.device.type for name, value in seen.items()} == {"shifted_labels": "meta", "num_tokens": "meta"}


def test_log_probs() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(1, 5, 4), torch.randn(7, 4), torch.tensor([[1, -100, 3, 6, 0]])
    context = xtuner.LogProbConfig(mode="chunk", chunk_size=2).build({"shifted_labels": labels})
    log_probs, (logits, extra) = context.forward(hidden, weight)
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(log_probs[labels >= 0], expected[labels >= 0])
    assert (logits, extra) == (None, {})


def test_a_loss_fn_as_xtuner_users_write_it() -> None:
    """The whole of a context on logits: policy_loss_fn, gather_logprobs, kl_penalty, tensors in extra."""

    class Context(xtuner.BaseRLLossContext):
        @staticmethod
        def build_batches(loss_ctx_list: list[Any]) -> list[Any]:  # type: ignore[override]
            count = sum((ctx.loss_kwargs.shifted_labels != ctx.loss_cfg.ignore_idx).sum() for ctx in loss_ctx_list)
            for ctx in loss_ctx_list:
                labels = ctx.loss_kwargs.shifted_labels
                ctx.loss_kwargs.policy_loss_weight = (labels != ctx.loss_cfg.ignore_idx) / count
                ctx.loss_kwargs.kl_loss_weight = xtuner.compute_kl_loss_weight(labels, count, ctx.loss_cfg.kl_loss_coef)
            return loss_ctx_list

        def loss_fn(self, hidden_states: Tensor, head_weight: Tensor, head_bias: Any, loss_kwargs: Any) -> Any:
            logits = torch.nn.functional.linear(hidden_states, head_weight, head_bias).float()
            log_probs = xtuner.gather_logprobs(logits, loss_kwargs.shifted_labels)
            weights = loss_kwargs.policy_loss_weight
            cfg = self.loss_cfg.policy_loss_cfg
            loss = self.policy_loss_fn(log_probs, loss_kwargs.old_logprobs, loss_kwargs.advantages, weights, cfg)
            kl = xtuner.kl_penalty(
                log_probs, loss_kwargs.ref_logprobs, loss_kwargs.kl_loss_weight, self.loss_cfg.kl_loss_type
            )
            return loss + kl, (logits, {"kl": kl.detach()})

    class Config(xtuner.GRPOLossConfig):
        @property
        def loss_ctx_cls(self) -> Any:
            return Context

    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 6, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    batch = {"shifted_labels": torch.tensor([[1, -100, 3, 6, 0, 2]])}
    batch |= {name: torch.randn(1, 6) for name in ("advantages", "old_logprobs", "ref_logprobs")}
    settings: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
    for mode in ("eager", "chunk"):
        losses = []
        for config in (Config(mode=mode, chunk_size=4, **settings), xtuner.GRPOLossConfig(mode=mode, **settings)):
            (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
            losses.append(context(hidden, weight))
        torch.testing.assert_close(losses[0].loss.double(), losses[1].loss.double(), rtol=1e-6, atol=1e-6)
        assert losses[0].extra["kl"].shape == (() if mode == "eager" else (2,))


# ---- functions --------------------------------------------------------------------------------------------------


def row(*shape: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(4)]


def loop_of_pg(new: Any, old: Any, adv: Any, weight: Any, low: float, high: float, c: float) -> float:
    import math

    total = 0.0
    for lp, lo, a, w in zip(*(t.reshape(-1).tolist() for t in (new, old, adv, weight)), strict=True):
        ratio = math.exp(min(20.0, max(-20.0, lp - lo)))
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        total += w * (min(loss, -a * c) if a < 0 else loss)
    return total


def test_pg_loss_fn() -> None:
    new, old, advantages, weight = row(1, 40)
    cfg = {"cliprange_low": 0.2, "cliprange_high": 0.3, "clip_ratio_c": 2.0}
    expected = loop_of_pg(new, old, advantages, weight, 0.2, 0.3, 2.0)
    for fn in (
        xtuner.pg_loss_fn,
        xtuner.get_policy_loss_fn("vanilla"),
        xtuner.GRPOLossContext(xtuner.GRPOLossConfig(policy_loss_cfg=cfg), None).policy_loss_fn,
    ):
        assert float(fn(new, old, advantages, weight, cfg)) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ConfigError, match="lacks 'cliprange_low'"):
        xtuner.pg_loss_fn(new, old, advantages, weight, {"cliprange_high": 0.2})


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", ["vanilla", "importance", "cispo", "kl_penalty"])
def test_a_token_of_weight_zero_may_hold_anything(name: str, place: int) -> None:
    """Neither the value nor the gradient knows what it is, its own gradient is 0."""
    new, old, advantages, weight = row(1, 6)
    weight[0, 2] = 0.0
    cfg: dict[str, Any] = {} if name == "importance" else {"cliprange_low": 0.2, "cliprange_high": 0.2}
    found = []
    for garbage in (0.5, torch.nan, -torch.inf):
        tensors = [new.clone(), old, advantages]
        tensors[place] = tensors[place].clone()
        tensors[place][0, 2] = garbage
        leaf = tensors[0].requires_grad_()
        if name == "kl_penalty":
            loss = xtuner.kl_penalty(leaf, tensors[1], weight, "k3")
        else:
            loss = xtuner.get_policy_loss_fn(name)(*tensors, weight, cfg)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaf)])
    for other in found[1:]:
        assert all(torch.equal(mine, clean) for mine, clean in zip(other, found[0], strict=True))
    assert found[0][1][0, 2] == 0.0
    assert found[0][1].count_nonzero() > 1


def test_other_losses_in_xtuners_form() -> None:
    new, old, advantages, weight = row(1, 9)
    fn = xtuner.get_policy_loss_fn("importance")
    expected = (-advantages * (new - old).exp() * weight).sum()
    torch.testing.assert_close(fn(new, old, advantages, weight, {}), expected)
    with pytest.raises(ConfigError, match="whole sequences"):
        xtuner.get_policy_loss_fn("gspo")
    with pytest.raises(UnknownNameError, match="Did you mean 'vanilla'"):
        xtuner.get_policy_loss_fn("vanila")


def test_sft_loss_fn() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 5, 7, dtype=torch.float64, requires_grad=True)
    labels, weight = torch.tensor([[1, 3, -100, 6, 0]]), torch.rand(1, 5, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none", ignore_index=-100) @ weight[0]
    loss = xtuner.sft_loss_fn(logits, labels, weight)
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = (torch.autograd.grad(value, logits) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    ignored = torch.nn.functional.cross_entropy(logits[0], labels[0].clamp(min=0), reduction="none", ignore_index=6)
    torch.testing.assert_close(xtuner.sft_loss_fn(logits, labels.clamp(min=0), weight, 6), ignored @ weight[0])


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_penalty(kind: str) -> None:
    new, ref, _, weight = row(1, 30)
    d = new - ref
    base = {"kl": d, "k1": d, "abs": d.abs(), "mse": d**2 / 2, "k2": d**2 / 2}.get(
        kind, ((-d).exp() + d - 1).clamp(max=10)
    )
    torch.testing.assert_close(xtuner.kl_penalty(new, ref, weight, kind), (base * weight).sum())
    mask = weight > weight.median()
    torch.testing.assert_close(xtuner.kl_penalty(new, ref, mask, kl_penalty=kind), base[mask].sum())


def test_kl_penalty_refuses_none() -> None:
    with pytest.raises(UnknownNameError, match="kl_penalty is None"):
        xtuner.kl_penalty(*row(1, 3)[:3], None)  # type: ignore[arg-type]


def test_compute_kl_loss_weight() -> None:
    labels = torch.tensor([[3, -100, 0, 7]])
    weight = xtuner.compute_kl_loss_weight(labels, torch.tensor(3), 0.03)
    torch.testing.assert_close(weight, torch.tensor([[0.01, 0.0, 0.01, 0.01]]))
    assert float(xtuner.compute_kl_loss_weight(labels, torch.tensor(3), 0.03, ignore_idx=0)[0, 2]) == 0.0


def test_register_policy_loss_by_position() -> None:
    """Names of arguments are the user's own; the tensors are rows; a second registration replaces the first."""
    for sign in (1.0, -1.0):

        @xtuner.register_policy_loss("compat_mine")
        def mine(new: Tensor, old: Tensor, adv: Tensor, w: Tensor, cfg: Any, sign: float = sign) -> Tensor:
            assert new.ndim == 2 and new.shape[0] == 1
            return sign * cfg["factor"] * ((new - old) * adv * w).sum()

    try:
        assert xtuner.get_policy_loss_fn("compat_mine") is mine
        config = xtuner.GRPOLossConfig(policy_loss_cfg={"loss_type": "compat_mine", "factor": 3.0}, mode="chunk")
        torch.manual_seed(0)
        batch = {"shifted_labels": torch.tensor([[1, -100, 2]])}
        batch |= {name: torch.randn(1, 3) for name in ("advantages", "old_logprobs")}
        (context,) = xtuner.GRPOLossContext.build_batches([config.build(batch)])
        hidden, weight = torch.randn(1, 3, 4), torch.randn(5, 4)
        new = torch.log_softmax(hidden @ weight.T, -1)[0, [0, 2], [1, 2]]
        old, adv = batch["old_logprobs"][0, [0, 2]], batch["advantages"][0, [0, 2]]
        torch.testing.assert_close(context(hidden, weight).loss, -3.0 * ((new - old) * adv).mean())
    finally:
        rlloss.unregister_policy_loss("compat_mine")
        xtuner.functions._OWN.pop("compat_mine")
    with pytest.raises(ConfigError, match="registered already"):
        xtuner.register_policy_loss("vanilla")(mine)


def test_finalize_train_policy_metrics() -> None:
    prefix = "reduced_train_policy_"
    given = {"ratio_abs_dev_sum": 4.0, "kl1_sum": -2.0, "kl3_sum": 1.0, "valid_count": 8.0}
    given |= {"clip_low_count": 2.0, "clip_high_count": 1.0, "ratio_max": 1.5, "ratio_min": 0.5}
    info: dict[str, Any] = {prefix + name: value for name, value in given.items()} | {"local_base_loss": 0.25}
    before = dict(info)
    found = xtuner.finalize_train_policy_metrics(info, "cpu")
    means = {"ratio_abs_dev_mean": 0.5, "kl1": -0.25, "kl3": 0.125, "clip_frac_low": 0.25, "clip_frac_high": 0.125}
    expected = {prefix + name: value for name, value in means.items()}
    expected |= {f"{prefix}ratio_max": 1.5, f"{prefix}ratio_min": 0.5, "max_ratio": 1.5, "local_base_loss": 0.25}
    assert found == expected
    assert info == before
    without = {name: value for name, value in info.items() if "clip" not in name}
    kept = {name: value for name, value in expected.items() if "clip" not in name}
    assert xtuner.finalize_train_policy_metrics(without, "cpu") == kept
    assert xtuner.finalize_train_policy_metrics({"a": 1}, "cpu") == {"a": 1}
    empty = dict.fromkeys(info, 0.0) | {f"{prefix}ratio_min": float("inf")}
    assert set(xtuner.finalize_train_policy_metrics(empty, "cpu").values()) == {0.0}


# ---- rollout correction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", named(GOLDEN["rollout_is"]))
def test_rollout_numbers(case: dict[str, Any]) -> None:
    given, inputs, outputs = case["config"], case["inputs"], case["outputs"]
    rules = xtuner.RolloutImportanceSampling(
        rollout_is_level=given["level"],
        rollout_is_mode=given["mode"],
        rollout_is_threshold=given["threshold_upper_lower"],
        rollout_is_mask_threshold=given["mask_threshold_upper_lower"],
        rollout_is_veto_threshold=given["veto_upper_lower"],
    )
    old, rollout = tensor([inputs["old_logprobs"]]), tensor([inputs["rollout_logprobs"]])
    lengths, mask = torch.tensor(inputs["seq_lens"]), tensor([inputs["mask"]])
    weights, kept, mismatch, metrics = rules.compute_rollout_importance_weights_and_metrics(
        old_log_prob=old, rollout_log_prob=rollout, num_tokens=lengths, response_mask=mask
    )
    assert weights is not None
    assert_close(weights[0], outputs["weights"], 1e-6, "weights")
    assert_close(kept[0], outputs["mask"], 0.0, "mask")
    same_numbers(mismatch, outputs["mismatch"])
    same_numbers(metrics, outputs["metrics"])
    labels = torch.where(mask != 0, 1, -100)
    batch = {
        "shifted_labels": labels,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "advantages": torch.ones(1, 13),
    }
    context = xtuner.GRPOLossConfig(rollout_is=rules).build({**batch, "advantages": torch.ones_like(old)})
    assert context.compute_rollout_is(None, lengths) == (mismatch, metrics)
    assert_close(context.loss_kwargs.is_weights[0][labels[0] > 0], weights[0][labels[0] > 0], 1e-12, "is_weights")
    assert bool((context.loss_kwargs.shifted_labels == labels).all())


def same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        # XTuner adds 1e-8 to the denominators of its means, and forms some of them in float32
        assert float(found[name]) == pytest.approx(float(value), rel=2e-6, abs=1e-7), name


def test_rollout_without_rules() -> None:
    old, rollout, mask = torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([[1, 1, 0, 1]])
    rules = xtuner.RolloutImportanceSampling()
    weights, kept, mismatch, metrics = rules.compute_rollout_importance_weights_and_metrics(
        old, rollout, torch.tensor([2, 2]), mask
    )
    assert weights is None and kept is mask and metrics == {}
    assert mismatch["mismatch/mismatch_kl"] == 1.0
    with pytest.raises(BatchError, match="one packed row"):
        rules.compute_rollout_importance_weights_and_metrics(old, rollout, torch.tensor([2, 3]), mask)


def test_merge_rollout_is_metrics() -> None:
    parts = [
        {"mismatch/valid": True, "mismatch/a_max": -3.0, "mismatch/a_min": 1.0, "mismatch/a": 2.0},
        {"mismatch/valid": False, "mismatch/a_max": 9.0, "mismatch/a_min": 0.0, "mismatch/a": 7.0},
        {"mismatch/valid": True, "mismatch/a_max": -5.0, "mismatch/a_min": 0.5, "mismatch/a": 4.0},
    ]
    expected = {"mismatch/a_max": -3.0, "mismatch/a_min": 0.5, "mismatch/a": 3.0}
    assert xtuner.merge_rollout_is_metrics(parts, "cpu") == expected
    assert set(xtuner.merge_rollout_is_metrics(parts[1:2], "cpu").values()) == {0.0}


# ---- advantages -------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "grpo": xtuner.GRPOAdvantageConfig(),
    "drgrpo_xtuner": xtuner.DrGRPOAdvantageConfig(max_length=16),
    "rloo": xtuner.RLOOAdvantageConfig(),
    "opo": xtuner.OPOAdvantageConfig(),
    "passk": xtuner.PassKAdvantageConfig(k=3),
}


def responses(lengths: Any) -> list[Any]:
    """Half of them as XTuner's data items, half as rollout states."""
    items = [SimpleNamespace(response_ids=[0] * length) for length in lengths]
    return [item if i % 2 else SimpleNamespace(env=SimpleNamespace(rollout=item)) for i, item in enumerate(items)]


@pytest.mark.parametrize("case", named(GOLDEN["advantages"]))
def test_advantages(case: dict[str, Any]) -> None:
    inputs, config = case["inputs"], ESTIMATORS[case["estimator"]]
    found = config.build().compute(tensor(inputs["rewards"]), responses(inputs["lengths"]))
    assert_close(found, case["outputs"], 1e-6, case["name"])


def test_advantages_at_the_edges() -> None:
    alone, right = torch.tensor([2.0]), torch.ones(4)
    assert xtuner.RLOOEstimator().compute(alone) == alone
    with pytest.warns(UserWarning, match="one sequence"):
        assert xtuner.GRPOEstimator().compute(alone) == 0
    for equal in (right, -right):
        assert xtuner.PassKEstimator(k=2).compute(equal).tolist() == [0.0] * 4
    mixed = xtuner.PassKEstimator(k=2).compute(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    # rho = 1 - C(3,2)/C(4,2) = 1/2; a wrong one: 1/2 - C(2,1)/C(3,1)
    torch.testing.assert_close(mixed, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]), rtol=1e-5, atol=0)
    with pytest.raises(BatchError, match="2 responses for 1 rewards"):
        xtuner.OPOEstimator().compute(alone, responses([1, 2]))
    assert repr(xtuner.DrGRPOEstimator(8.0)) == "DrGRPOEstimator(max_length=8.0, eps=1e-08)"


# ---- helpers ----------------------------------------------------------------------------------------------------


def test_chunk_loss() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 7, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    kwargs = rlloss.CELossKwargs(shifted_labels=torch.randint(0, 9, (1, 7)), loss_weight=torch.rand(1, 7))

    def forward(states: Tensor, head: Tensor, bias: Any, chunk: Any) -> Any:
        logits = states @ head.T
        return xtuner.sft_loss_fn(logits, chunk.shifted_labels, chunk.loss_weight), (logits, {"n": torch.ones(())})

    loss, extra = xtuner.ChunkLoss.apply(hidden, weight, None, forward, kwargs.chunk(3), 3)
    whole, _ = forward(hidden, weight, None, kwargs)
    torch.testing.assert_close(loss, whole)
    for ours, theirs in zip(*(torch.autograd.grad(v, (hidden, weight)) for v in (loss, whole)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert extra["n"].shape == (3,)


def test_split_and_gather_over_a_mesh_of_one() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 1)
    values = torch.arange(5.0)[None]
    assert xtuner.sp_split(values, mesh, 1, 0.0) is values
    assert xtuner.sp_gather(values, mesh, 1) is values


def test_split_pads_and_takes_the_part_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2, get_group=lambda: None)
    values = torch.arange(5.0)[None]
    parts = []
    for number in (0, 1):
        monkeypatch.setattr("rlloss.compat.xtuner.utils.rank", lambda group, number=number: number)
        parts.append(xtuner.sp_split(values, mesh, 1, -1.0).tolist())
    assert parts == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, -1.0]]]
    both = torch.tensor([parts[0], parts[1]]).squeeze(1)[:, None].transpose(1, 2).reshape(6, 1)
    monkeypatch.setattr("rlloss.compat.xtuner.utils.all_gather", lambda tensor, group: both)
    assert xtuner.sp_gather(torch.tensor(parts[0]), mesh, 1).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, -1.0]]


# ---- tables of names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name(module: str, name: str) -> None:
    assert getattr(xtuner, name) is not None
    assert name in xtuner.__all__
    assert f"{module}.{name}" not in ABSENT


def test_every_public_name_has_a_row() -> None:
    rows = [name for names in NAMES.values() for name in names]
    assert sorted(rows) == sorted(set(rows))
    assert {*xtuner.__all__} - {*rows} == {"ExtraInfo"}
    missing = [path for path in ABSENT if hasattr(xtuner, path.rpartition(".")[2])]
    assert not missing
