"""Causal language models of transformers: the backbone without its head, and the head as a loss needs it.

Example:
    >>> cfg = hf.configure(GRPOLossConfig(mode="chunk"), model)  # doctest: +SKIP
    >>> ctxs = cfg.loss_ctx_cls.build_batches([cfg.build(batch) for batch in batches])  # doctest: +SKIP
    >>> loss, (logits, extra) = hf.evaluate(model, ctxs[0], {"input_ids": ids})  # doctest: +SKIP
"""

from collections.abc import Callable, Mapping
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


Adapter = Callable[[Tensor], Tensor]
"""LoRA's way down, from hidden states `[..., H]` to `scaling * A h`, `[..., r]`."""


@dataclass(frozen=True)
class CausalHead:
    """The head of a causal language model: `softcap(scale * (inputs(h) W^T + bias))`.

    LoRA is no sum `W + scaling * B A`, in which an update below the last digit of a 16-bit weight would vanish: the
    head's weight is `[W, B]`, and hidden states are given as `[h, scaling * A h]`.

    Attributes:
        weight: `[V, H]`, or with LoRA `[V, H + r]`, with the graph of each `B`.
        bias: `[V]` or None.
        logit_scale: What the logits are multiplied by.
        logit_softcap: Final soft cap, or None.
        adapters: The ways down of LoRA adapters, in the order of their columns of the weight.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None
    adapters: tuple[Adapter, ...] = ()

    def inputs(self, hidden: Tensor) -> Tensor:
        """Returns hidden states `[..., H]` as the weight takes them, `[..., H]` or with LoRA `[..., H + r]`."""
        if not self.adapters:
            return hidden
        return torch.cat([hidden, *(down(hidden).to(hidden.dtype) for down in self.adapters)], dim=-1)


def find_head(model: nn.Module) -> CausalHead:
    """Finds a model's head, its bias, logit scale and soft cap.

    Args:
        model: A causal language model of transformers, or one that PEFT or `torch.compile` wraps.

    Raises:
        ConfigError: The head is no linear layer, or has an adapter that is not plain LoRA.
    """
    base = _unwrapped(model)
    weight, bias, adapters = _linear(base.get_output_embeddings())
    settings = base.config.get_text_config()
    softcap = getattr(settings, "final_logit_softcapping", None)
    return CausalHead(weight, bias, _scale(settings), softcap, adapters)


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
    hidden = head.inputs(hidden_states(model, inputs))
    return context.forward(hidden, head.weight, head.bias)  # type: ignore[no-any-return]


def _unwrapped(model: nn.Module) -> Any:
    """The model inside `torch.compile` and PEFT."""
    model = getattr(model, "_orig_mod", model)
    base: Any = getattr(model, "get_base_model", lambda: model)()
    if hasattr(base, "get_output_embeddings"):
        return getattr(base, "_orig_mod", base)
    name = type(model).__name__
    if isinstance(getattr(model, "module", None), nn.Module):
        raise ConfigError(
            f"{name} hides its model, and does not reduce the gradients of what runs past its own forward. Wrap a "
            f"module in it whose forward calls rlloss.compat.hf.evaluate, or give model.module and reduce gradients "
            f"yourself."
        )
    raise ConfigError(f"{name} is no causal language model of transformers: it has no get_output_embeddings().")


def _scale(settings: Any) -> float:
    for name in MULTIPLIERS:
        if getattr(settings, name, None) is not None:
            return float(getattr(settings, name))
    divisor = getattr(settings, DIVISOR, None)
    if divisor is None:
        return 1.0
    return float(divisor) if settings.model_type.startswith(DIVISOR_MULTIPLIES) else 1.0 / float(divisor)


def _linear(module: Any) -> tuple[Tensor, Tensor | None, tuple[Adapter, ...]]:
    if isinstance(module, nn.Linear):
        if not module.weight.is_floating_point():
            raise ConfigError(
                f"the head is a {type(module).__name__} with weights of {module.weight.dtype}, expected floating-point "
                f"numbers. Leave the head out of the quantisation."
            )
        return module.weight, module.bias, ()
    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
        return _with_lora(module)
    saved = getattr(module, "modules_to_save", None)
    if saved is not None:
        # PEFT trains a copy of the whole head; one name in its first releases, a list of at most one today.
        names = [module.active_adapter] if isinstance(module.active_adapter, str) else module.active_adapter
        return _linear(module.original_module if module.disable_adapters or not names else saved[names[0]])
    raise ConfigError(
        f"the head is a {type(module).__name__}, expected a Linear layer or one with LoRA. Give hidden states, weight "
        f"and bias to context.forward yourself."
    )


def _with_lora(module: Any) -> tuple[Tensor, Tensor | None, tuple[Adapter, ...]]:
    """Puts `B` of each active adapter next to the weight."""
    weight, bias, _ = _linear(module.base_layer)
    if module.merged and module.disable_adapters:
        raise ConfigError(
            "the adapters of the head are merged into its weight and disabled as well. Call model.unmerge_adapter() "
            "first."
        )
    if module.disable_adapters or module.merged:
        return weight, bias, ()
    columns, adapters = [weight], []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        variant = name in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(name, False)
        if variant or hasattr(module, "parameter_name"):
            raise ConfigError(
                f"the adapter {name!r} on the head ({type(module).__name__}) is a variant of LoRA (DoRA, or one that "
                f"targets a parameter), which is no plain sum of two products. Leave the head out of the adapter's "
                f"targets, or use plain LoRA on the module."
            )
        up = module.lora_B[name]
        columns.append(up.weight.to(weight.dtype))
        adapters.append(_way_down(module, name))
        if up.bias is not None:
            added = (module.scaling[name] * up.bias).to(weight.dtype)
            bias = added if bias is None else bias + added
    return torch.cat(columns, dim=1) if adapters else weight, bias, tuple(adapters)


def _way_down(module: Any, name: str) -> Adapter:
    down, dropout, scaling = module.lora_A[name], module.lora_dropout[name], module.scaling[name]

    def project(hidden: Tensor) -> Tensor:
        narrow: Tensor = down(dropout(hidden.to(down.weight.dtype)))
        return scaling * narrow  # type: ignore[no-any-return]

    return project


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
        hidden = head.inputs(hidden_states(model, inputs)).to(head.weight.dtype)
        logits = head.logit_scale * nn.functional.linear(hidden, head.weight, head.bias).to(wide)
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
