"""LoRA on the head, in PEFT's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_models import assert_same_step, batch, make, our_loss, own_loss
from rlloss.compat import hf
from rlloss.errors import ConfigError

peft = pytest.importorskip("peft")


def adapted(name: str = "Qwen3", dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A model with LoRA on the head and one projection; `B` is not zero, or `A` would have no gradient."""
    model = make(name, dtype)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["lm_head", "q_proj"], **fields})
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    fill(model)
    return model


def fill(model: Any) -> None:
    make_random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, part in model.named_parameters():
            if "lora_" in key:
                part.copy_(0.5 * torch.randn(part.shape, generator=make_random).to(part.dtype))


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Granite", "Cohere"])
def test_values_and_gradients_are_those_of_pefts_forward(name: str, mode: str) -> None:
    model = adapted(name)
    assert_same_step(model, own_loss(model), our_loss(model, mode))
    grads = {key: part.grad for key, part in model.named_parameters() if "lm_head.lora" in key}
    assert len(grads) == 2
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values())
    assert hf.check_head(model, batch()[0]) < 1e-10


def test_liger_mode_takes_an_adapted_head() -> None:
    model = adapted(dtype=torch.float32)
    assert_same_step(model, own_loss(model), our_loss(model, "liger"), rtol=2e-5)


@pytest.mark.parametrize(
    "fields",
    [{"use_rslora": True}, {"lora_bias": True}, {"bias": "lora_only"}, {"r": 1, "lora_alpha": 32}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_options_of_lora(fields: dict[str, Any]) -> None:
    model = adapted(**fields)
    assert_same_step(model, own_loss(model), our_loss(model))


def test_dropout_is_the_same_draw() -> None:
    model = adapted(lora_dropout=0.4).train()
    losses = []
    for loss_of in (own_loss, our_loss):
        torch.manual_seed(11)
        losses.append(loss_of(model))
    model.eval()
    assert abs(float(own_loss(model)) - float(losses[0])) > 1e-3
    assert_same_step(model, *losses)


def test_several_adapters_and_none() -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=1, target_modules=["lm_head"]))
    fill(model)
    model = model.double()
    found = []
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        assert_same_step(model, own_loss(model), our_loss(model))
        found.append(float(our_loss(model)))
    with model.disable_adapter():
        found.append(float(our_loss(model)))
        assert found[-1] == pytest.approx(float(own_loss(model)), rel=1e-12)
    assert len({round(each, 6) for each in found}) == 4


def test_merged_adapters() -> None:
    model = adapted()
    before = float(our_loss(model))
    model.merge_adapter()
    assert float(our_loss(model)) == pytest.approx(before, rel=1e-10)
    assert float(our_loss(model)) == pytest.approx(float(own_loss(model)), rel=1e-12)
    with model.disable_adapter(), pytest.raises(ConfigError, match="unmerge_adapter"):
        hf.find_head(model)
    model.unmerge_adapter()
    whole = model.merge_and_unload()
    assert float(our_loss(whole)) == pytest.approx(before, rel=1e-10)


def test_a_head_that_is_trained_whole() -> None:
    """`modules_to_save` trains a copy of the head; the adapters are elsewhere."""
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    assert_same_step(model, own_loss(model), our_loss(model))
    with model.disable_adapter():
        assert float(our_loss(model)) == pytest.approx(float(own_loss(model)), rel=1e-12)


def test_an_update_below_the_last_digit_of_the_weight_counts() -> None:
    """bf16 has 8 bits: `W + B A` rounded to it would be W, and training would stand still at first."""
    model = adapted(dtype=torch.bfloat16, target_modules=["lm_head"])
    layer = model.get_base_model().lm_head
    for part in (layer.lora_A, layer.lora_B):
        part.float()
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1e-3 / layer.lora_B["default"].weight.abs().max())
    head = hf.find_head(model)
    hidden = hf.hidden_states(model, batch()[0]).detach()
    rows, columns = hidden.shape[-1], head.weight.detach().double()
    update = head.inputs(hidden)[..., rows:].double() @ columns[:, rows:].T
    exact = 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    true = hidden.double() @ exact.T
    kept = layer.base_layer.weight
    assert ((kept.double() + exact).bfloat16() == kept).double().mean() > 0.5
    assert (update - true).norm() <= 1e-2 * true.norm()


@pytest.mark.parametrize("fields", [{"use_dora": True}], ids=str)
def test_variants_are_refused_by_name(fields: dict[str, Any]) -> None:
    model = adapted(**fields)
    with pytest.raises(ConfigError, match="variant of LoRA"):
        our_loss(model)
    with model.disable_adapter():
        assert float(our_loss(model)) == pytest.approx(float(own_loss(model)), rel=1e-12)


def test_an_adapter_on_the_parameter_is_refused_by_name() -> None:
    model = adapted(target_modules=["q_proj"], target_parameters=["lm_head.weight"])
    with pytest.raises(ConfigError, match="targets a parameter"):
        our_loss(model)


def test_other_adapters_are_refused_by_name() -> None:
    model = peft.get_peft_model(make("Qwen3"), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="expected a Linear layer or one with LoRA"):
        our_loss(model)
