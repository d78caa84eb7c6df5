"""Tiny random models of transformers: the head that is found gives the model's own logits, losses and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_models import MODELS, assert_same_step, batch, make, our_loss, own_loss, transformers
from rlloss import CELossConfig, LogProbConfig
from rlloss.compat import hf
from rlloss.errors import ConfigError


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name: str, mode: str) -> None:
    model = make(name)
    assert_same_step(model, own_loss(model), our_loss(model, mode))


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
def test_loss_and_gradients_are_the_models_own_in_liger_mode(name: str) -> None:
    """Log-probs of liger_kernel are float32."""
    model = make(name, torch.float32)
    assert_same_step(model, own_loss(model), our_loss(model, "liger"), rtol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Granite", "Cohere"])
def test_tied_and_untied_embeddings(name: str, tied: bool) -> None:
    """A tied weight gets the gradient of both of its uses."""
    model = make(name, tie_word_embeddings=tied)
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == tied
    assert_same_step(model, own_loss(model), our_loss(model))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Cohere"])
def test_padding_on_either_side(name: str, side: str) -> None:
    # Attention in "eager" form gives NaN to padding on the left, and with it to the model's own gradients.
    model = make(name, attn_implementation="sdpa")
    inputs, labels = batch()
    padding = slice(0, 3) if side == "left" else slice(4, 7)
    inputs["attention_mask"][1, padding] = 0
    inputs["input_ids"][1, padding] = 0
    # The token before a padding on the right has no next token either.
    labels[1, slice(0, 3) if side == "left" else slice(3, 7)] = -100
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_same_step(model, own_loss(model, (inputs, labels)), our_loss(model, given=(inputs, labels)))


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2"])
def test_packed_sequences_by_their_positions(name: str) -> None:
    """Positions that start again: the packed row is the model's own, and each sequence is as if alone."""
    model = make(name)
    ids = torch.randint(3, 37, (1, 9), generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    labels[0, 3] = -100
    given = {"input_ids": ids, "position_ids": positions}, labels
    assert_same_step(model, own_loss(model, given), our_loss(model, given=given))
    config = hf.configure(LogProbConfig(mode="chunk"), model)
    with torch.no_grad():
        whole = hf.evaluate(model, config.build({"shifted_labels": labels}), given[0]).loss
        across = hf.evaluate(model, config.build({"shifted_labels": labels}), {"input_ids": ids}).loss
        assert (whole - across)[:, 4:8].abs().min() > 1e-4
        for part in (slice(0, 4), slice(4, 9)):
            context = config.build({"shifted_labels": labels[:, part]})
            alone = hf.evaluate(model, context, {"input_ids": ids[:, part]}).loss
            # Norms and attention of these models are float32 inside, where a last digit may hang on the row's length.
            torch.testing.assert_close(whole[:, part], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_models(name: str) -> None:
    """Log-probs are float32, and within the rounding of bfloat16 those of the model's own logits."""
    model = make(name, torch.bfloat16)
    inputs, labels = batch()
    config = hf.configure(LogProbConfig(mode="chunk"), model)
    with torch.no_grad():
        logits = model(**inputs).logits.float()
        expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        found = hf.evaluate(model, config.build({"shifted_labels": labels}), inputs).loss
    assert found.dtype == torch.float32
    counted = labels != -100
    # Scale and cap are float32 here, and bfloat16 in the model: three roundings of a logit.
    bound = 3 * 2**-8 * float(logits.abs().max())
    assert (found - expected)[counted].abs().max() <= bound


def test_a_compiled_model_is_the_model() -> None:
    model = make("Granite")
    wrapped = torch.compile(model, backend="eager")
    assert_same_step(model, own_loss(model), our_loss(wrapped))


def test_a_wrapper_that_reduces_gradients_is_refused_by_name() -> None:
    """What runs past DistributedDataParallel's own forward is not averaged over ranks, silently."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = make("Qwen3")
    with pytest.raises(ConfigError, match=r"DistributedDataParallel hides its model.*hf\.evaluate"):
        our_loss(DistributedDataParallel(model))
    with pytest.raises(ConfigError, match="Linear is no causal language model"):
        hf.find_head(nn.Linear(2, 3))


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_quantised_heads_are_refused_by_name(dtype: torch.dtype) -> None:
    model = make("Qwen3")
    model.lm_head.weight = nn.Parameter(torch.zeros(37, 16, dtype=dtype), requires_grad=False)
    with pytest.raises(ConfigError, match="quantisation"):
        hf.find_head(model)


def test_a_head_that_is_no_linear_layer_is_refused_by_name() -> None:
    model = make("Qwen3")
    model.lm_head = nn.Sequential(nn.Identity())
    with pytest.raises(ConfigError, match="Sequential"):
        hf.find_head(model)
