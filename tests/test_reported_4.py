"""Faults that a hostile user found: each was silent, or an error that did not say what to do."""

import argparse
import math
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import GRPOLossConfig, GRPOLossContext, MixedLossConfig, PPOLossConfig, register_policy_loss
from rlloss.cli import main, resume_command
from rlloss.config_file import override
from rlloss.errors import BatchError, ConfigError
from rlloss.functional.controllers import AdaptiveKLController
from rlloss.functional.gae import gae
from rlloss.functional.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlloss.functional.moments import RunningMoments
from rlloss.functional.ppo_rewards import compute_rewards
from rlloss.functional.rewards import combine_rewards, repetition_penalty
from rlloss.losses import (
    CELossConfig,
    DPPOConfig,
    GSPOConfig,
    OrealLossConfig,
    ReinforceConfig,
    ValueLossConfig,
    VanillaConfig,
)
from rlloss.losses.policy_registry import PolicyLossConfig, unregister_policy_loss
from rlloss.metrics import reduce
from rlloss.training.evaluator import Evaluator
from rlloss.training.ppo_config import CriticConfig, EvaluatorConfig, PPOConfig
from rlloss.training.tasks import Question

B, T, H, V = 2, 5, 4, 11


def make_batch(all_count: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, V, (B, T), generator=generator)
    if not all_count:
        labels[0, :2] = -100
    numbers = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    hidden = torch.randn(B, T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    return {"shifted_labels": labels, "advantages": numbers[0], "old_logprobs": numbers[1] - 2.0}, hidden, weight


def loss_of(config: Any, batch: dict[str, Tensor], hidden: Tensor, weight: Tensor) -> tuple[float, Tensor, Any]:
    (context,) = GRPOLossContext.build_batches([config.build(batch)])
    leaf = hidden.clone().requires_grad_()
    loss, (_, extra) = context.forward(leaf, weight)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, extra


class Steep(VanillaConfig):
    """A config of a user's own loss that inherits PPO's bounds."""

    tau: float = 2.0


def steep(log_prob: Tensor, policy_loss_cfg: Steep) -> Tensor:
    return -policy_loss_cfg.tau * log_prob


def test_a_typed_config_names_its_loss() -> None:
    register_policy_loss("steep", config=Steep)(steep)
    try:
        assert GRPOLossConfig(policy_loss_cfg=Steep()).policy_loss.fn is steep
        # What was "vanilla" for every one of them: the loss was PPO's, without a word.
        for typed, name in ((ReinforceConfig(), "reinforce"), (GSPOConfig(cliprange_low=0.1), "gspo")):
            config = GRPOLossConfig(policy_loss_cfg=typed, loss_reduction="sample")
            assert (config.policy_loss.name, config.policy_loss_cfg["loss_type"]) == (name, name)
            assert GRPOLossConfig.model_validate_json(config.model_dump_json()) == config
            assert PPOLossConfig(policy_loss_cfg=typed, loss_reduction="sample").policy_loss.name == name
            assert config.policy_loss_cfg.get("cliprange_low", 0.1) == 0.1
        assert GRPOLossConfig(policy_loss_cfg=VanillaConfig(delta=2.0)).policy_loss_cfg == VanillaConfig(delta=2.0)
        assert GRPOLossConfig(policy_loss_cfg=PolicyLossConfig()).policy_loss.name == "vanilla"
        named = GRPOLossConfig(policy_loss_cfg=DPPOConfig(loss_type="dppo_kl"))
        assert named.policy_loss.name == "dppo_kl"
        with pytest.raises(ConfigError, match="DPPOConfig is the config of dppo_tv, dppo_kl: give it the loss_type"):
            GRPOLossConfig(policy_loss_cfg=DPPOConfig())
    finally:
        unregister_policy_loss("steep")
    with pytest.raises(ConfigError, match="Steep is not the config of a registered loss"):
        GRPOLossConfig(policy_loss_cfg=Steep())


def test_another_loss_from_the_command_line_has_its_own_defaults() -> None:
    config = override(GRPOLossConfig(), ["policy_loss_cfg.loss_type=gspo", "loss_reduction=sample"])
    assert config == GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    given = GRPOLossConfig(policy_loss_cfg={"clip_ratio_c": 4.0})
    with pytest.raises(ConfigError, match="GSPOConfig: unknown field 'clip_ratio_c'"):
        override(given, ["policy_loss_cfg.loss_type=gspo", "loss_reduction=sample"])
    with pytest.warns(UserWarning, match="loss_reduction='sample'"):  # a field that was not given stays so
        override(GRPOLossConfig(), ["policy_loss_cfg.loss_type=gspo"])
    mixed = MixedLossConfig(parts={"rl": GRPOLossConfig(kl_loss_coef=0.5), "sft": CELossConfig()}, mode="chunk")
    changed = override(mixed, ["mode=eager", "parts.rl.entropy_coef=0.25"])
    assert isinstance(changed.parts["rl"], GRPOLossConfig)
    assert (changed.parts["rl"].mode, changed.parts["rl"].kl_loss_coef) == ("eager", 0.5)
    assert changed.parts["rl"].entropy_coef == 0.25


def writes(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    advantages *= 2
    old_log_prob += 1
    return -advantages * (log_prob - old_log_prob).exp()


@pytest.mark.parametrize("all_count", [True, False])
@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_a_loss_that_writes_into_its_arguments_leaves_the_batch_alone(mode: Any, all_count: bool) -> None:
    batch, hidden, weight = make_batch(all_count)
    copies = {name: value.clone() for name, value in batch.items()}
    register_policy_loss("writes")(writes)
    try:
        config = GRPOLossConfig(policy_loss_cfg={"loss_type": "writes"}, mode=mode, chunk_size=3)
        (context,) = GRPOLossContext.build_batches([config.build(batch)])
        first, (_, extra) = context.forward(hidden, weight)
        second, _ = context.forward(hidden, weight)
    finally:
        unregister_policy_loss("writes")
    assert all(torch.equal(batch[name], copies[name]) for name in copies)
    assert first == second
    _, _, plain = loss_of(GRPOLossConfig(mode=mode, chunk_size=3), batch, hidden, weight)
    assert reduce(extra)["ratio_mean"] == pytest.approx(reduce(plain)["ratio_mean"], rel=1e-12)


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("number", [1.0, torch.ones(())])
def test_a_metric_that_does_not_add_up_is_refused(mode: Any, number: Any) -> None:
    """It was dropped without a word, in chunk mode by forward and in eager mode by merge."""
    batch, hidden, weight = make_batch(True)

    def measured(log_prob: Tensor, advantages: Tensor) -> Any:
        return -advantages * log_prob, {"spread": number}

    register_policy_loss("measured")(measured)
    try:
        for kind in (GRPOLossConfig, OrealLossConfig):
            with pytest.raises(
                ConfigError, match=f"'measured' returned the metric 'spread' as a {type(number).__name__}"
            ):
                loss_of(kind(policy_loss_cfg={"loss_type": "measured"}, mode=mode), batch, hidden, weight)
    finally:
        unregister_policy_loss("measured")


class OwnContext(GRPOLossContext):
    def token_loss(self, stats: Any, loss_kwargs: Any) -> Any:
        loss, metrics = super().token_loss(stats, loss_kwargs)
        return loss, {**metrics, "seen": stats.log_prob.mean()}


class OwnConfig(GRPOLossConfig):
    @property
    def loss_ctx_cls(self) -> type[OwnContext]:
        return OwnContext


def test_a_metric_of_token_loss_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OwnContext\.token_loss returned the metric 'seen' as a Tensor"):
        loss_of(OwnConfig(mode="chunk"), *make_batch(True))


@pytest.mark.parametrize("all_count", [True, False])
@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
@pytest.mark.parametrize("loss_type", ["vanilla", "gspo"])
def test_contexts_made_in_inference_mode_train(loss_type: str, mode: Any, all_count: bool) -> None:
    batch, hidden, weight = make_batch(all_count)
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": loss_type}, loss_reduction="sample", mode=mode)
    expected, gradient, _ = loss_of(config, batch, hidden, weight)
    with torch.inference_mode():
        copies = {name: value.clone() for name, value in batch.items()}
        (context,) = GRPOLossContext.build_batches([config.build(copies)])
    leaf = hidden.clone().requires_grad_()
    loss = context.forward(leaf, weight).loss
    loss.backward()
    assert leaf.grad is not None
    assert loss.item() == expected
    assert torch.equal(leaf.grad, gradient)


def test_16_bit_rewards_and_values_lose_no_digits_on_the_way() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.rand(2, 300, generator=generator).bfloat16() for _ in range(2))
    mask = torch.ones(2, 300)
    exact, found = (gae(r, v, mask, 1.0, 0.99) for r, v in ((rewards.double(), values.double()), (rewards, values)))
    for right, got in zip(exact, found, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    log_probs, refs = (-torch.rand(2, 4, generator=generator).bfloat16() for _ in range(2))
    scores = torch.tensor([0.3, 0.7])
    given = compute_rewards(scores, log_probs, refs, torch.ones(2, 4), 0.05, "low_var_kl")
    right = compute_rewards(scores.double(), log_probs.double(), refs.double(), torch.ones(2, 4), 0.05, "low_var_kl")
    torch.testing.assert_close(given.rewards.double(), right.rewards, rtol=1e-5, atol=1e-6)


def test_integers_are_numbers_too() -> None:
    """Weights and statistics were cut off to the type of integer rewards: 0.5 became 0."""
    rewards, weights = torch.tensor([[1, 0], [1, 1]]), torch.tensor([0.5, 0.25])
    for given in (rewards, rewards.to(torch.uint8), rewards.bool()):
        assert combine_rewards(given, weights).tolist() == [0.5, 0.75]
        for mask in (torch.ones(2, 2), torch.tensor([[0.5, 0.25], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])):
            assert masked_sum(given, mask).item() == masked_sum(given.float(), mask).item()
            assert masked_mean(given, mask).item() == masked_mean(given.float(), mask).item()
        mask = torch.tensor([[1, 1], [1, 0]])
        assert torch.equal(masked_whiten(given, mask), masked_whiten(given.float(), mask))
        assert torch.equal(masked_var(given, mask), masked_var(given.float(), mask))
    moments = RunningMoments()
    moments.update(rewards)
    assert torch.equal(moments.scale(rewards), moments.scale(rewards.float()))
    assert torch.equal(moments.scale(rewards, center=True), moments.scale(rewards.float(), center=True))


def test_repetition_of_tokens_in_tensors() -> None:
    tokens = [[7, 7, 7, 7, 7], [1, 2, 3, 1, 2]]
    expected = repetition_penalty(tokens, ngram=2)
    assert expected.tolist() == pytest.approx([-0.75, -0.25])
    assert torch.equal(repetition_penalty(torch.tensor(tokens), ngram=2), expected)
    assert torch.equal(repetition_penalty([torch.tensor(ids) for ids in tokens], ngram=2), expected)


def reward_of_texts(texts: list[str]) -> list[float]:
    return [math.nan if "odd" in text else 1.0 for text in texts]


def test_a_reward_that_is_no_number_is_named() -> None:
    """Whitened, it made the advantages of every response NaN."""
    evaluator = Evaluator(EvaluatorConfig(), SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    evaluator._on_texts = reward_of_texts
    question = Question("1+1=", "2", {})
    assert evaluator.score(["2"], [question]).tolist() == [1.0]
    with pytest.raises(BatchError, match=r"the reward of 'odd' is nan"):
        evaluator.score(["2", "odd"], [question, question])


def test_a_reduction_of_the_critic_that_a_shared_backbone_ignores_is_refused() -> None:
    sample = ValueLossConfig(loss_reduction="sample")
    with pytest.raises(ConfigError, match=r"critic\.loss\.loss_reduction='sample' has no effect on a shared backbone"):
        PPOConfig(critic=CriticConfig(backbone="shared", loss=sample))
    PPOConfig(critic=CriticConfig(backbone="shared", loss=sample), loss=PPOLossConfig(loss_reduction="sample"))
    PPOConfig(critic=CriticConfig(backbone="own", loss=sample))
    constant = PPOLossConfig(loss_reduction="constant", loss_length=8.0)
    PPOConfig(critic=CriticConfig(backbone="shared"), loss=constant)


def test_a_coefficient_of_kl_never_changes_its_sign() -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=10.0)
    with pytest.raises(ConfigError, match=r"horizon counts samples, not steps: give one above 12\.8"):
        controller.update(0.0, 64)
    with pytest.raises(ConfigError, match="could make the coefficient 0"):
        AdaptiveKLController(0.1, target=6.0, horizon=12.8).update(0.0, 64)
    assert controller.value == 0.1
    controller.update(0.0, 49)
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 49 / 10))


@pytest.mark.parametrize(
    ("name", "reason"), [("losses.xyz", "'xyz' is not supported"), ("file/losses.png", "file exists")]
)
def test_a_picture_that_cannot_be_written(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["plot", "vanilla", "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlloss: --out: ")
    assert reason.lower() in error.lower()


TINY = ["task.pool=60", "task.heldout=2", "supervised.steps=0", "grpo.steps=0", "model.hidden=16", "model.heads=1"]


@pytest.mark.parametrize(
    ("assignment", "output", "reason"),
    [
        ("device=foo", "run", "TrainConfig: device='foo' cannot be used"),
        ("device=cuda:77", "run", "TrainConfig: device='cuda:77' cannot be used"),
        ("grpo.optimizer.betas=(0.9,2)", "run", "OptimizerConfig: betas.1=2: Input should be less than 1"),
        ("seed=1", "file/run", "--output: "),
    ],
)
def test_a_run_that_cannot_begin(
    assignment: str, output: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of torch and of the system that came as tracebacks."""
    pytest.importorskip("reasoning_gym")
    (tmp_path / "file").write_text("")
    (tmp_path / "config.py").write_text("from rlloss.training.config import TrainConfig\nconfig = TrainConfig()\n")
    settings = [word for text in (*TINY, "model.kv_heads=1", assignment) for word in ("--set", text)]
    assert main(["train", str(tmp_path / "config.py"), *settings, "--output", str(tmp_path / output)]) == 2
    assert reason in capsys.readouterr().err


def test_a_config_file_that_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.py").write_text("import sys\nsys.exit(0)\n")
    assert main(["show", str(tmp_path / "config.py")]) == 2
    assert "config.py cannot be run: SystemExit: 0" in capsys.readouterr().err


def test_the_command_that_resumes_can_be_pasted_into_a_shell(monkeypatch: Any) -> None:
    chosen = "grpo.loss.policy_loss_cfg={'loss_type': 'gspo'}"
    options = argparse.Namespace(config="my config.py", set=[chosen, "seed=1"])
    # `make train` runs without the environment's programs on the path.
    monkeypatch.setattr(shutil, "which", lambda name: None)
    away = shlex.split(resume_command(options, Path("a run")))
    python = Path(sys.executable)
    assert python in (Path(away[0]), Path.cwd() / away[0])
    assert away[1:3] == ["-m", "rlloss"]
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    words = shlex.split(resume_command(options, Path("a run")))
    assert words[1:] == away[3:]
    assert words[:3] == ["rlloss", "train", "my config.py"]
    assert words[3:] == ["--set", chosen, "--set", "seed=1", "--output", "a run", "--resume"]
