"""Tiny random causal language models of transformers, one batch for them, and its loss in two ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlloss import CELossConfig
from rlloss.compat import hf

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
    "Gemma3": {"final_logit_softcapping": 5.0, "sliding_window": 4},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def make(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    torch.manual_seed(0)
    config_cls = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_cls(**{**SIZES, **MODELS[name], "attn_implementation": "eager", **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    # Large weights, so that a missing scale or cap shows.
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30.0)
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(3, 37, (2, 7), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    labels[0, :2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


Batch = tuple[dict[str, Tensor], Tensor]


def own_loss(model: Any, given: Batch | None = None) -> Tensor:
    inputs, labels = given or batch()
    logits = model(**inputs, use_cache=False).logits.to(torch.float64)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def our_loss(model: Any, mode: Any = "chunk", given: Batch | None = None) -> Tensor:
    inputs, labels = given or batch()
    config = hf.configure(CELossConfig(mode=mode, chunk_size=4), model)
    # A float64 tensor in the batch makes the token weights float64.
    data: dict[str, Any] = {"shifted_labels": labels}
    if mode != "liger":
        data["temperature"] = torch.ones(labels.shape, dtype=torch.float64)
    context = config.loss_ctx_cls.build_batches([config.build(data)])[0]
    return hf.evaluate(model, context, inputs).loss


def assert_same_step(model: Any, own: Tensor, ours: Tensor, rtol: float = 1e-8) -> None:
    """Two losses and their gradients in every parameter of a model."""
    found = []
    for loss in (own, ours):
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {key: part.grad.clone() for key, part in model.named_parameters() if part.grad is not None}
        found.append((loss.detach(), grads))
    torch.testing.assert_close(found[1][0].double(), found[0][0].double(), rtol=rtol, atol=0)
    assert found[1][1].keys() == found[0][1].keys() and found[0][1]
    for key, grad in found[0][1].items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[1][1][key], grad, rtol=0, atol=rtol * scale + 1e-12, msg=key)
