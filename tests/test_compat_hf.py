"""Tiny random models of transformers: the head that is found gives the model's own logits, losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlloss import CELossConfig, LogProbConfig
from rlloss.compat import hf
from rlloss.errors import ConfigError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], attn_implementation="eager")
    # Large weights, so that a missing scale or cap shows.
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30.0)
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(3, 37, (2, 7), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    labels[0, :2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def own_loss(model: Any) -> Tensor:
    inputs, labels = batch()
    return nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def our_loss(model: Any, mode: Any = "chunk") -> Tensor:
    inputs, labels = batch()
    config = hf.configure(CELossConfig(mode=mode, chunk_size=4), model)
    # A float64 tensor in the batch makes the token weights float64.
    data = {"shifted_labels": labels, "temperature": torch.ones(labels.shape, dtype=torch.float64)}
    context = config.loss_ctx_cls.build_batches([config.build(data)])[0]
    return hf.evaluate(model, context, inputs).loss


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name: str, mode: str) -> None:
    model = make(name)
    found = []
    for loss in (own_loss(model), our_loss(model, mode)):
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), {key: part.grad.clone() for key, part in model.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=0)
    for key, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], grad, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_the_models_own(name: str) -> None:
    model = make(name)
    inputs, labels = batch()
    with torch.no_grad():
        expected = model(**inputs).logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        config = hf.configure(LogProbConfig(mode="chunk"), model)
        found = hf.evaluate(model, config.build({"shifted_labels": labels}), inputs).loss
    torch.testing.assert_close(found, expected.masked_fill(labels == -100, 0.0), rtol=0, atol=1e-10)
    assert hf.check_head(model, inputs) < 1e-10


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere"])
def test_a_config_without_the_models_scale_is_refused(name: str) -> None:
    model = make(name)
    inputs, labels = batch()
    context = CELossConfig(mode="chunk").build({"shifted_labels": labels})
    with pytest.raises(ConfigError, match="logit_softcap" if name == "Gemma2" else "logit_scale"):
        hf.evaluate(model, context, inputs)


def test_liger_mode_refuses_a_scaled_model_by_name() -> None:
    with pytest.raises(ConfigError, match="logit_scale"):
        hf.configure(CELossConfig(mode="liger"), make("Granite"))


def test_a_model_that_does_something_else_is_found_out() -> None:
    model = make("Granite")
    model.config.logits_scaling = 4.0
    inner = model.forward
    model.forward = lambda **inputs: transformers.modeling_outputs.CausalLMOutput(logits=inner(**inputs).logits * 3.0)
    with pytest.raises(ConfigError, match="differ from the model's own"):
        hf.check_head(model, batch()[0])


class Lora(nn.Module):
    """The attributes of a LoRA layer as PEFT has them."""

    def __init__(self, base: nn.Linear, rank: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False, dtype=torch.float64)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]
        self.disable_adapters = self.merged = False

    def forward(self, hidden: Tensor) -> Tensor:
        update: Tensor = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](hidden)))
        return self.base_layer(hidden) + 0.5 * update  # type: ignore[no-any-return]


def test_lora_on_the_head_trains() -> None:
    model = make("Qwen3")
    model.lm_head = Lora(model.lm_head)
    grads = []
    for loss in (own_loss(model), our_loss(model)):
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads.append([model.lm_head.lora_A["default"].weight.grad, model.lm_head.lora_B["default"].weight.grad])
    for mine, theirs in zip(*grads[::-1], strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_e08_the_case_with_its_number() -> None:
    head = Lora(nn.Linear(2, 3, bias=False, dtype=torch.float64), rank=1)
    head.scaling["default"] = 1.0
    with torch.no_grad():
        head.base_layer.weight.copy_(torch.tensor([[0.5, -0.5], [0.0, 1.0], [-1.0, 0.5]]))
        head.lora_A["default"].weight.copy_(torch.tensor([[1.0, 0.0]]))
        head.lora_B["default"].weight.copy_(torch.tensor([[0.0], [1.0], [0.0]]))
    weight, bias = hf._linear(head)
    config = CELossConfig(mode="chunk")
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([[0, 1]])})])[0]
    loss = context.forward(torch.eye(2, dtype=torch.float64)[None], weight, bias).loss
    assert float(loss.detach()) == pytest.approx(0.8295438, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.lora_A["default"].weight.grad.abs().sum() > 0


def test_lora_that_cannot_be_composed_is_refused_by_name() -> None:
    model = make("Qwen3")
    model.lm_head = Lora(model.lm_head, dropout=0.1)
    model.train()
    with pytest.raises(ConfigError, match="dropout"):
        hf.find_head(model)
    model.eval()
    hf.find_head(model)
    model.lm_head = nn.Sequential(nn.Identity())
    with pytest.raises(ConfigError, match="Sequential"):
        hf.find_head(model)
