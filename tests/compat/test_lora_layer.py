"""LoRA on the head, in a layer with the attributes of PEFT's: these tests run without PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_models import assert_same_step, make, our_loss, own_loss
from rlloss import CELossConfig
from rlloss.compat import hf
from steps import every_mode


class Lora(nn.Module):
    """The attributes of a LoRA layer as PEFT has them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False, dtype=torch.float64)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]
        self.disable_adapters = self.merged = False

    def forward(self, hidden: Tensor) -> Tensor:
        update: Tensor = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](hidden)))
        return self.base_layer(hidden) + self.scaling["default"] * update  # type: ignore[no-any-return]


def test_a_layer_with_the_attributes_of_lora_trains() -> None:
    model = make("Qwen3")
    model.lm_head = Lora(model.lm_head)
    assert_same_step(model, own_loss(model), our_loss(model))
    assert model.lm_head.lora_A["default"].weight.grad.abs().max() > 0


@every_mode
def test_e08_the_case_with_its_number(head: dict[str, Any]) -> None:
    """`W + B A` has this loss; the gradients of `A` and `B` are those by the whole weight, by the chain rule."""
    layer = Lora(nn.Linear(2, 3, bias=False, dtype=torch.float64), rank=1)
    layer.scaling["default"] = 1.0
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.tensor([[0.5, -0.5], [0.0, 1.0], [-1.0, 0.5]]))
        down.copy_(torch.tensor([[1.0, 0.0]]))
        up.copy_(torch.tensor([[0.0], [1.0], [0.0]]))
    weight, bias, adapters = hf._linear(layer)
    found = hf.CausalHead(weight, bias, 1.0, None, adapters)
    config = CELossConfig(**head)
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([[0, 1]])})])
    loss = context.forward(found.inputs(torch.eye(2, dtype=torch.float64)[None]), found.weight, found.bias).loss
    assert float(loss.detach()) == pytest.approx(0.8295438, abs=1e-6)
    loss.backward()
    whole = (layer.base_layer.weight + up @ down).detach()
    slope = (whole.T.softmax(-1) - torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])).T / 2  # hidden states: identity
    for part, true in ((up, slope @ down.detach().T), (down, up.detach().T @ slope)):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, true, rtol=1e-6, atol=1e-8)
