"""Causal language models of transformers: the backbone without its head, and the head as a loss needs it.

Example:
    >>> cfg = hf.configure(GRPOLossConfig(mode="chunk"), model)  # doctest: +SKIP
    >>> ctxs = cfg.loss_ctx_cls.build_batches([cfg.build(batch) for batch in batches])  # doctest: +SKIP
    >>> loss, (logits, extra) = hf.evaluate(model, ctxs[0], {"input_ids": ids})  # doctest: +SKIP
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlloss.errors import ConfigError
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.output import LossOutput

C = TypeVar("C", bound=BaseLossConfig)

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Fields of a model's config that multiply its logits (Cohere; Falcon-H1; Muse)."""

DIVISOR = "logits_scaling"
"""The field that divides them (Granite, MiniCPM)..."""

DIVISOR_MULTIPLIES = ("hyperclovax",)
"""...except in these models, which multiply by it."""


@dataclass(frozen=True)
class CausalHead:
    """The head of a causal language model: `softcap(scale * (h W^T + bias))`.

    Attributes:
        weight: `[V, H]`, with the graph of an adapter where there is one.
        bias: `[V]` or None.
        logit_scale: What the logits are multiplied by.
        logit_softcap: Final soft cap, or None.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None


def find_head(model: nn.Module) -> CausalHead:
    """Finds a model's head, its bias, logit scale and soft cap.

    Args:
        model: A causal language model of transformers, or one that PEFT wraps.

    Raises:
        ConfigError: The head is no linear layer, or has an adapter that cannot be composed into its weight.
    """
    base = _unwrapped(model)
    weight, bias = _linear(base.get_output_embeddings())
    settings = base.config.get_text_config()
    return CausalHead(weight, bias, _scale(settings), getattr(settings, "final_logit_softcapping", None))


def configure(loss_cfg: C, model: nn.Module) -> C:
    """Returns a copy of a loss config with the model's logit scale and soft cap."""
    base = _unwrapped(model)
    settings = base.config.get_text_config()
    fields = {"logit_scale": _scale(settings), "logit_softcap": getattr(settings, "final_logit_softcapping", None)}
    same = {name: getattr(loss_cfg, name) for name in type(loss_cfg).model_fields}
    return type(loss_cfg)(**{**same, **fields})


def hidden_states(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Runs the backbone without the head.

    Args:
        model: A causal language model.
        inputs: What its backbone takes: `input_ids`, `attention_mask`, `position_ids`, ...

    Returns:
        `[B, T, H]`; entry t predicts token t + 1.

    Raises:
        ConfigError: The model has no backbone of its own, or a prompt is learned in front of its inputs.
    """
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"the adapter {type(peft_config).__name__} puts learned tokens in front of the inputs, which the backbone "
            f"alone does not. Use LoRA, or evaluate the model's own logits."
        )
    base = _unwrapped(model)
    backbone = base.base_model
    if backbone is base:
        raise ConfigError(
            f"{type(base).__name__} has no backbone apart from its head (base_model is the model itself)."
        )
    return backbone(**{"use_cache": False, **inputs}).last_hidden_state  # type: ignore[no-any-return]


def evaluate(model: nn.Module, context: Any, inputs: Mapping[str, Any]) -> LossOutput:
    """Evaluates a calibrated context on a model without forming its logits.

    Args:
        model: A causal language model.
        context: A context whose config has the model's logit scale and soft cap; see `configure`.
        inputs: What the backbone takes; `shifted_labels` of the context are aligned with its positions.

    Returns:
        What `context.forward` returns.

    Raises:
        ConfigError: The config's logit scale or soft cap is not the model's.
    """
    head = find_head(model)
    for name in ("logit_scale", "logit_softcap"):
        given, own = getattr(context.loss_cfg, name), getattr(head, name)
        if given != own:
            raise ConfigError(
                f"{type(context.loss_cfg).__name__} has {name}={given}, but {type(_unwrapped(model)).__name__} has "
                f"{own}. Make the config with rlloss.compat.hf.configure(config, model)."
            )
    return context.forward(hidden_states(model, inputs), head.weight, head.bias)  # type: ignore[no-any-return]


def _unwrapped(model: nn.Module) -> Any:
    """The model inside a PEFT wrapper."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def _scale(settings: Any) -> float:
    for name in MULTIPLIERS:
        if getattr(settings, name, None) is not None:
            return float(getattr(settings, name))
    divisor = getattr(settings, DIVISOR, None)
    if divisor is None:
        return 1.0
    return float(divisor) if settings.model_type.startswith(DIVISOR_MULTIPLIES) else 1.0 / float(divisor)


def _linear(module: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
        return _with_lora(module)
    saved = getattr(module, "modules_to_save", None)
    if saved is not None:
        # PEFT trains a copy of the whole head.
        return _linear(module.original_module if module.disable_adapters else saved[module.active_adapter])
    raise ConfigError(
        f"the head is a {type(module).__name__}, expected a Linear layer or one with LoRA. Give hidden states, weight "
        f"and bias to context.forward yourself."
    )


def _with_lora(module: Any) -> tuple[Tensor, Tensor | None]:
    """Composes `W + sum_a scaling_a B_a A_a` of the active adapters."""
    weight, bias = _linear(module.base_layer)
    if module.disable_adapters or module.merged:
        return weight, bias
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        dropout = module.lora_dropout[name]
        obstacles = {
            "a LoRA variant such as DoRA": name in getattr(module, "lora_variant", {}),
            "a LoRA bias": bool(getattr(module, "lora_bias", {}).get(name, False)),
            "dropout": module.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 0.0) > 0.0,
        }
        for obstacle, present in obstacles.items():
            if present:
                raise ConfigError(
                    f"the adapter {name!r} on the head ({type(module).__name__}) has {obstacle}, which cannot be "
                    f"composed into the head's weight. Leave the head out of target_modules, or set it to zero."
                )
        update = module.lora_B[name].weight @ module.lora_A[name].weight
        weight = weight + (module.scaling[name] * update).to(weight.dtype)
    return weight, bias


def check_head(model: nn.Module, inputs: Mapping[str, Any], tolerance: float = 1e-3) -> float:
    """Compares logits from the found head with the model's own, for models that scale theirs in a way of their own.

    Args:
        model: A causal language model.
        inputs: A small input.
        tolerance: Largest difference allowed, relative to the largest logit.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        ConfigError: They differ.
    """
    with torch.no_grad():
        own = model(**inputs).logits
        wide = torch.promote_types(own.dtype, torch.float32)
        own = own.to(wide)
        head = find_head(model)
        logits = head.logit_scale * nn.functional.linear(hidden_states(model, inputs), head.weight, head.bias).to(wide)
        if head.logit_softcap is not None:
            logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
        difference = float((logits - own).abs().max() / own.abs().max().clamp(min=1e-30))
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(_unwrapped(model)).__name__}: logits from the head that was found (logit_scale={head.logit_scale}, "
            f"logit_softcap={head.logit_softcap}) differ from the model's own by {difference:.1e} of the largest. The "
            f"model does something else between its backbone and its logits."
        )
    return difference
