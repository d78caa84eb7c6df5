"""TRL's trainer with our loss, on a tiny random model on the CPU, against TRL's own loss on the same micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import GRPOLossConfig, RolloutImportanceSampling
from rlloss.compat.trl_options import TRL_METRICS
from rlloss.errors import BatchError, ConfigError

trl = pytest.importorskip("trl", reason="TRL is not installed")

import pyarrow as pa  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlloss.compat.trl import GRPOTrainer, batch_of  # noqa: E402

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer and 29 words, from where TRL loads the reference as well."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Several words end a completion, so that completions differ in length.
    model.generation_config.eos_token_id = [1, 20, 21, 22, 23, 24]
    model.save_pretrained(path)
    return path


def tokenizer() -> Any:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [0.1 * len(set(text.split())) + (0.7 if "a" in text else 0.0) for text in completions]


def trainer_of(kind: Any, folder: Path, out: Path, loss_cfg: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(out), "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "num_generations": 4, "max_completion_length": 6, "max_steps": 3, "learning_rate": 0.05, "logging_steps": 1,
        "save_strategy": "no", "gradient_checkpointing": False, "seed": 1, "temperature": 1.2,
    }  # fmt: skip
    # With a fingerprint, datasets does not pickle the table to make one, which fails with some versions of dill.
    table = pa.table({"prompt": ["a b c", "d e", "f g h i", "j", "k l", "m n o"]})
    prompts = Dataset(table, fingerprint="prompts")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    extra = {} if kind is trl.GRPOTrainer else {"loss_cfg": loss_cfg}
    return kind(model, reward, trl.GRPOConfig(**settings | options), prompts, processing_class=tokenizer(), **extra)


class Compared(GRPOTrainer):
    """Evaluates TRL's loss beside ours on every micro-batch, and keeps losses, gradients and metrics of both."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.__dict__.setdefault("seen", [])
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = {name: list(values) for name, values in self._metrics["train"].items()}
        theirs = trl.GRPOTrainer._compute_loss(self, model, inputs)
        found = {name: self._metrics["train"][name][-1] for name in TRL_METRICS if self._metrics["train"].get(name)}
        self._metrics["train"].update({name: before.get(name, []) for name in self._metrics["train"]})
        ours = super()._compute_loss(model, inputs)
        grads = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in (ours, theirs)]
        self.seen.append((ours.detach(), theirs.detach(), grads))
        self.__dict__.setdefault("numbers", []).append((int(inputs["completion_mask"].sum()), found))
        return ours


LOSS_TYPES = [
    ("grpo", {"beta": 0.1}),
    ("bnpo", {}),
    ("dr_grpo", {"delta": 1.3}),
    ("dapo", {"beta": 0.1, "use_bias_correction_kl": False}),
    ("cispo", {"epsilon_high": 1.2}),
    ("sapo", {"importance_sampling_level": "sequence"}),
    ("vespo", {"beta": 0.1}),
    ("luspo", {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.6}),
]


@pytest.mark.parametrize(("loss_type", "options"), LOSS_TYPES, ids=[name for name, _ in LOSS_TYPES])
def test_equals_trl(loss_type: str, options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Three optimiser steps of two micro-batches; the second step of a generation is off policy."""
    trainer = trainer_of(Compared, folder, tmp_path, loss_type=loss_type, **options)
    trainer.train()
    check_equal(trainer)
    if options.get("importance_sampling_level", "token") == "token":
        check_logged(trainer)


def check_equal(trainer: Any) -> None:
    assert len(trainer.seen) == 6
    assert trainer.loss_cfg.mode == "chunk"
    for ours, theirs, (mine, other) in trainer.seen:
        assert float((ours - theirs).abs()) < TOLERANCE
        scale = max(float(grad.abs().max()) for grad in other)
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=10 * TOLERANCE * max(scale, 1e-3))
    assert max(float(theirs.abs()) for _, theirs, _ in trainer.seen) > 1e-4


def check_logged(trainer: Any) -> None:
    """One number for each step, the mean over its tokens; TRL's own log has the mean of its micro-batches' means."""
    history = trainer.state.log_history
    assert {"rlloss/ess", "rlloss/policy_loss", "entropy", "reward"} <= history[0].keys()
    for step in range(3):
        parts = trainer.numbers[2 * step : 2 * step + 2]
        assert history[step]["rlloss/tokens"] == sum(count for count, _ in parts)
        for name in set(TRL_METRICS) & parts[0][1].keys():
            expected = sum(count * found[name] for count, found in parts) / sum(count for count, _ in parts)
            assert history[step][name] == pytest.approx(expected, abs=1e-5), name


def test_equals_trl_on_a_model_with_a_soft_cap(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.6,
        final_logit_softcapping=1.5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    trainer = trainer_of(Compared, tmp_path / "model", tmp_path, loss_type="dapo")
    trainer.train()
    assert trainer.loss_cfg.logit_softcap == 1.5
    check_equal(trainer)


class Recorded(GRPOTrainer):
    """Keeps each micro-batch with its loss and the log-probs of the policy by TRL's own head."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.__dict__.setdefault("seen", [])
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            now, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, inputs["completion_ids"].size(1))
        loss = super()._compute_loss(model, inputs)
        self.seen.append((inputs, now, loss.detach()))
        return loss


def by_hand(step: list[Any], reduction: str, length: float) -> list[float]:
    """The clipped loss of each micro-batch of a step, its denominator counted over the whole step, token by token."""
    rows = [int(n) for inputs, _, _ in step for n in inputs["completion_mask"].sum(1)]
    losses = []
    for inputs, now, _ in step:
        total = 0.0
        old = inputs.get("old_per_token_logps", now)
        for i, mask in enumerate(inputs["completion_mask"]):
            n = int(mask.sum())
            weight = {"token": 1 / sum(rows), "sample": 1 / (len(rows) * n), "constant": 1 / (len(rows) * length)}
            for t in range(n):
                ratio, advantage = math.exp(float(now[i, t] - old[i, t])), float(inputs["advantages"][i])
                clipped = min(max(ratio, 0.8), 1.3)
                total -= weight[reduction] * min(ratio * advantage, clipped * advantage)
        losses.append(total)
    return losses


@pytest.mark.parametrize(("mode", "reduction"), [("eager", "sample"), ("chunk", "constant"), ("liger", "token")])
def test_a_loss_config_is_calibrated_over_the_step(mode: str, reduction: str, folder: Path, tmp_path: Path) -> None:
    length = 6.0 if reduction == "constant" else None
    policy = {"cliprange_low": 0.2, "cliprange_high": 0.3, "clip_ratio_c": None}
    cfg = GRPOLossConfig(policy_loss_cfg=policy, mode=mode, loss_reduction=reduction, loss_length=length)
    trainer = trainer_of(Recorded, folder, tmp_path, loss_cfg=cfg, max_completion_length=14)
    trainer.train()
    assert len(trainer.seen) == 6
    assert cfg.temperature == 1.0 and trainer.loss_cfg.temperature == 1.2
    lengths = {int(n) for inputs, _, _ in trainer.seen for n in inputs["completion_mask"].sum(1)}
    assert len(lengths) > 1
    for first in (0, 2, 4):
        step = trainer.seen[first : first + 2]
        expected = by_hand(step, reduction, 6.0)
        for (_, _, loss), wanted in zip(step, expected, strict=True):
            assert float(loss) == pytest.approx(wanted, abs=TOLERANCE)


def test_a_choice_over_the_step(folder: Path, tmp_path: Path) -> None:
    """A loss that chooses tokens by the current policy gets it, and the loss of the same step says how many."""
    cfg = GRPOLossConfig(policy_loss_cfg={"loss_type": "kl_cov", "kl_cov_ratio": 0.2}, top_entropy_quantile=0.5)
    trainer = trainer_of(GRPOTrainer, folder, tmp_path, loss_cfg=cfg, max_steps=2)
    trainer.train()
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    model = trainer.model.train()
    trainer._window = []
    context = trainer._context_of(model, trainer._buffered_inputs[0])
    chosen = [context, *(other for _, other in trainer._window)]
    tokens = sum(int((c.loss_kwargs.shifted_labels >= 0).sum()) for c in chosen)
    kept = sum(int(c.loss_kwargs.policy_mask.sum()) for c in chosen)
    selected = sum(int(c.loss_kwargs.selected.sum()) for c in chosen)
    assert tokens / 2 <= kept < tokens
    assert selected == max(1, int(tokens * 0.2))


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no multiple of gradient_accumulation_steps=4"):
        trainer_of(GRPOTrainer, folder, tmp_path, loss_cfg=GRPOLossConfig(), gradient_accumulation_steps=4,
                   steps_per_generation=2)  # fmt: skip
    with pytest.raises(ConfigError, match="reference model"):
        trainer_of(GRPOTrainer, folder, tmp_path, loss_cfg=GRPOLossConfig(use_kl_loss=True))
    trainer = trainer_of(GRPOTrainer, folder, tmp_path, loss_cfg=GRPOLossConfig())
    trainer.current_gradient_accumulation_steps = 2
    with pytest.raises(BatchError, match="number None of 0"):
        trainer._step_of({})
    trainer.model.set_output_embeddings(torch.nn.Sequential(torch.nn.Linear(16, 29)))
    context = GRPOLossConfig().build(
        {"shifted_labels": torch.ones(1, 2, dtype=torch.long), "advantages": torch.ones(1)}
    )
    with pytest.raises(ConfigError, match="head is a Sequential"):
        trainer.model(input_ids=torch.ones(1, 3, dtype=torch.long), loss_ctx=context)


def test_names_of_a_micro_batch() -> None:
    inputs = {
        "completion_ids": torch.tensor([[5, 6, 7]]),
        "completion_mask": torch.tensor([[1, 1, 0]]),
        "tool_mask": torch.tensor([[0, 1, 1]]),
        "advantages": torch.tensor([0.5]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, torch.nan, -3.0]]),
        "importance_sampling_ratio": torch.tensor([[2.0]]),
    }
    batch = batch_of(inputs)
    assert batch["shifted_labels"].tolist() == [[-100, 6, -100]]
    assert batch["rollout_logprobs"].tolist() == [[-1.5, -2.0, -3.0]]
    assert batch["rollout_is_weights"] is inputs["importance_sampling_ratio"]
    assert batch_of(inputs, corrects=True)["rollout_is_weights"] is None
    rules = RolloutImportanceSampling.tis()
    context = GRPOLossConfig(rollout_is=rules).build(batch_of(inputs, corrects=True))
    (context,) = context.build_batches([context])
    assert context.loss_kwargs.is_weights[0, 1] == 1.0
