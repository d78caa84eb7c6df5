"""The documents the project starts from: XTuner's example and its custom-loss recipe, with the import changed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlloss import (
    BaseRLLossConfig,
    BaseRLLossContext,
    BaseRLLossKwargs,
    GRPOLossConfig,
    GRPOLossContext,
    gather_logprobs,
)


def small_model() -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    input_ids = torch.randint(0, 10, (1, 5))
    return embedding(input_ids[:, :-1]), head, input_ids[:, 1:]


@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
def test_minimal_example(mode):
    hidden_states, head, shifted_labels = small_model()
    advantages = torch.tensor([[0.5, 0.5, -0.5, -0.5]], dtype=torch.float32)
    with torch.no_grad():
        old_logprobs = gather_logprobs(head(hidden_states), shifted_labels)
    loss_cfg = GRPOLossConfig(
        policy_loss_cfg=dict(cliprange_high=0.2, cliprange_low=0.2, loss_type="vanilla"),
        use_kl_loss=False,
        mode=mode,
        chunk_size=1024,
    )
    loss_ctx = loss_cfg.build(
        {"shifted_labels": shifted_labels, "advantages": advantages, "old_logprobs": old_logprobs}
    )
    assert loss_ctx is not None
    loss_ctx = GRPOLossContext.build_batches([loss_ctx])[0]
    loss, _ = loss_ctx.forward(hidden_states, head.weight)
    loss.backward()

    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    weight = head.weight.detach().double().requires_grad_()
    log_prob = (hidden_states.detach().double() @ weight.T).log_softmax(-1).gather(-1, shifted_labels[..., None])
    (-(advantages.double() * log_prob.squeeze(-1)).sum() / 4).backward()
    assert torch.allclose(head.weight.grad.double(), weight.grad, atol=1e-6)


class CustomLossKwargs(BaseRLLossKwargs):
    arg1: Any | None = None


class CustomLossConfig(BaseRLLossConfig):
    arg1: Any

    @property
    def loss_ctx_cls(self) -> type["CustomLossContext"]:
        return CustomLossContext

    @property
    def _loss_kwargs_cls(self) -> type["CustomLossKwargs"]:
        return CustomLossKwargs

    def build(self, data: dict, sp_mesh: DeviceMesh | None = None) -> "CustomLossContext | None":
        if "shifted_labels" not in data or "advantages" not in data:
            return None
        loss_kwargs = self._loss_kwargs_cls(
            shifted_labels=data["shifted_labels"],
            advantages=data["advantages"],
            old_logprobs=data.get("old_logprobs"),
            arg1=self.arg1,
        )
        return self.loss_ctx_cls(self, loss_kwargs)


class CustomLossContext(BaseRLLossContext):
    loss_cfg: CustomLossConfig
    loss_kwargs: CustomLossKwargs

    @staticmethod
    def build_batches(loss_ctx_list: list["CustomLossContext"]) -> list["CustomLossContext"]:
        tokens = sum((ctx.loss_kwargs.shifted_labels != -100).sum() for ctx in loss_ctx_list)
        for ctx in loss_ctx_list:
            counted = ctx.loss_kwargs.shifted_labels != -100
            ctx.loss_kwargs.policy_loss_weight = counted.float() / tokens
        return loss_ctx_list

    def loss_fn(
        self,
        hidden_states: torch.Tensor,
        head_weight: torch.Tensor,
        head_bias: torch.Tensor | None,
        loss_kwargs: CustomLossKwargs,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, dict[str, Any]]]:
        logits = torch.nn.functional.linear(hidden_states, head_weight, head_bias).float()
        log_prob = gather_logprobs(logits, loss_kwargs.shifted_labels)
        values = -loss_kwargs.arg1 * loss_kwargs.advantages * (log_prob - loss_kwargs.old_logprobs).exp()
        extra = {"mean_value": values.mean(), "arg1": loss_kwargs.arg1}
        return (values * loss_kwargs.policy_loss_weight).sum(), (logits, extra)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_custom_loss_recipe(chunk_size):
    torch.manual_seed(1)
    labels = torch.randint(0, 10, (2, 7)).index_fill(1, torch.tensor([0, 4]), -100)
    batch = {"shifted_labels": labels, "advantages": torch.randn(2, 7), "old_logprobs": -2 + torch.randn(2, 7)}
    results = {}
    for mode in ("eager", "chunk"):
        hidden = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        weight = torch.randn(10, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
        bias = torch.randn(10, generator=torch.Generator().manual_seed(4)).requires_grad_()
        config = CustomLossConfig(arg1=2.0, policy_loss_cfg={"anything": 1}, mode=mode, chunk_size=chunk_size)
        context = config.build(batch)
        assert context.loss_kwargs.arg1 == 2.0
        (context,) = CustomLossContext.build_batches([context])
        loss, (logits, extra) = context(hidden, weight, bias)
        (3.0 * loss).backward()
        results[mode] = (loss.detach(), hidden.grad, weight.grad, bias.grad)
        assert (logits is not None) == (mode == "eager")
        assert extra["mean_value"].shape == (() if mode == "eager" else (-(-7 // chunk_size),))
    for found, expected in zip(results["chunk"], results["eager"], strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert CustomLossConfig(arg1=1).build({"shifted_labels": labels}) is None


def test_custom_loss_on_logits_is_refused_in_liger_mode():
    hidden, head, labels = small_model()
    with pytest.raises(ValueError, match=r"CustomLossConfig: CustomLossContext overrides loss_fn.*mode='chunk'"):
        CustomLossConfig(arg1=1.0, mode="liger")
    batch = {"shifted_labels": labels, "advantages": torch.ones(1, 4), "old_logprobs": -torch.ones(1, 4)}
    made_by_hand = CustomLossContext(GRPOLossConfig(mode="liger"), GRPOLossConfig().build(batch).loss_kwargs)
    with pytest.raises(ValueError, match=r"overrides loss_fn.*mode='chunk'"):
        made_by_hand.forward(hidden, head.weight)
