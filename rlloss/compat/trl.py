"""TRL's GRPOTrainer with a loss of rlloss: its data, generation, rewards and logging, our loss, gradients and head.

from rlloss.compat.trl import GRPOTrainer
trainer = GRPOTrainer(model, reward_funcs, args, dataset, loss_cfg=GRPOLossConfig(mode="chunk", ...))
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlloss import metrics
from rlloss.compat import hf
from rlloss.compat.names import TRLCounts, trl_totals
from rlloss.compat.trl_options import TRL_METRICS, trl_loss_config
from rlloss.errors import BackendUnavailableError, BatchError, ConfigError
from rlloss.losses import BaseRLLossConfig, BaseRLLossContext, LossOutput, Totals

try:
    import trl
except ImportError as error:
    raise BackendUnavailableError(
        f'rlloss.compat.trl needs TRL: {error}. Install it with: pip install "rlloss[trl]"'
    ) from error

_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
_IGNORE = -100


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer whose loss is a context of rlloss on the model's hidden states, in any of the modes.

    With a `loss_cfg` the loss is calibrated over the whole optimiser step, all micro-batches and processes, however TRL
    cuts it. Without one it is the loss that `args` describes, with TRL's own counts, so that it equals TRL's.

    Metrics are logged once for each optimiser step, exact over its micro-batches and processes: ours as
    `rlloss/<name>`, and those of `rlloss.compat.trl_options.TRL_METRICS` under TRL's names.

    Not supported: the auxiliary loss of mixtures of experts, and DeepSpeed ZeRO-3.

    Args:
        args: As TRL's. (Positional and keyword arguments are passed on.)
        loss_cfg: A loss config on a policy. The trainer works on a copy and sets its temperature, logit scale and soft
            cap, which belong to `args` and the model.
        kwargs: As TRL's.

    Raises:
        ConfigError: Something that is not supported, or a KL loss while `args.beta` is 0 and no reference is loaded.
    """

    def __init__(self, *args: Any, loss_cfg: BaseRLLossConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calibrates = loss_cfg is not None
        base = loss_cfg if loss_cfg is not None else trl_loss_config(self.args, mode="chunk", reduce_loss=False)
        self.loss_cfg = _for_model(base, self)
        self._refuse()
        self._window: list[tuple[Any, BaseRLLossContext]] = []
        self._extras: list[dict[str, Any]] = []
        _add_loss_head(self.model, self.args.cast_lm_head_to_fp32)

    def _refuse(self) -> None:
        cfg, args = self.loss_cfg, self.args
        if self.aux_loss_enabled:
            raise ConfigError(
                f"the auxiliary loss of a mixture of experts (coefficient {self.router_aux_loss_coef}) is not added "
                f"here. Set router_aux_loss_coef=0.0 in GRPOConfig."
            )
        if cfg.use_kl_loss and not self.beta:
            raise ConfigError(
                "loss_cfg.use_kl_loss needs a reference model, which TRL loads where GRPOConfig.beta > 0."
            )
        if self._calibrates and args.steps_per_generation % args.gradient_accumulation_steps:
            raise ConfigError(
                f"steps_per_generation={args.steps_per_generation} is no multiple of gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}, so an optimiser step spans generations that do not exist yet. "
                f"Make it one, or leave loss_cfg out for TRL's own counts."
            )

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        context = self._context_of(model, inputs)
        with self.accelerator.autocast():
            output = model(**_model_inputs(inputs), loss_ctx=context)
        self._extras.append(output.extra)
        if not self.model.training or self.accelerator.sync_gradients:
            self._log_step()
        return output.loss  # type: ignore[no-any-return]

    def _context_of(self, model: Any, inputs: Any) -> BaseRLLossContext:
        """The calibrated context of a micro-batch; with `loss_cfg` its whole optimiser step is calibrated at once."""
        if not self._calibrates or not self.model.training:
            context = self._build(model, inputs)
            self._calibrate([context], None if self._calibrates else self._totals(inputs))
            return context
        if not self._window or self._window[0][0] is not inputs:
            window = self._step_of(inputs)
            contexts = [self._build(model, micro) for micro in window]
            self._calibrate(contexts, None)
            self._window = list(zip(window, contexts, strict=True))
        return self._window.pop(0)[1]

    def _step_of(self, inputs: Any) -> Sequence[Any]:
        buffered = self._buffered_inputs or []
        size = self.current_gradient_accumulation_steps
        start = next((i for i, micro in enumerate(buffered) if micro is inputs), None)
        if start is None or start % size or start + size > len(buffered):
            raise BatchError(
                f"this micro-batch is number {start} of {len(buffered)} generated ones, expected one that begins an "
                f"optimiser step of {size}: the whole step is needed to calibrate the loss."
            )
        return buffered[start : start + size]

    def _calibrate(self, contexts: list[BaseRLLossContext], totals: Totals | None) -> None:
        self.loss_cfg.loss_ctx_cls.build_batches(contexts, totals=totals)

    def _build(self, model: Any, inputs: Any) -> BaseRLLossContext:
        batch = batch_of(inputs, corrects=bool(self.loss_cfg.rollout_is.compiled()))
        if _selects(self.loss_cfg):
            ids, size = _model_inputs(inputs), inputs["completion_ids"].size(1)
            with torch.no_grad():
                log_probs, entropy, _ = self._get_per_token_logps_and_entropies(
                    model, logits_to_keep=size, compute_entropy=True, num_images=inputs.get("num_images"), **ids
                )
            batch |= {"selection_logprobs": log_probs, "selection_entropy": entropy}
        context: Any = self.loss_cfg.build(batch)
        return context  # type: ignore[no-any-return]

    def _totals(self, inputs: Any) -> Totals:
        training = self.model.training
        counts = TRLCounts(
            rows=inputs["completion_ids"].size(0),
            tokens=int(_mask(inputs).sum()) if self.loss_type == "bnpo" else 0,
            items=float(inputs["num_items_in_batch"]),
            accumulation=self.current_gradient_accumulation_steps if training else 1,
            per_generation=self.args.steps_per_generation if training else 1,
            processes=self.accelerator.num_processes,
        )
        return trl_totals(self.loss_type, counts)

    def _log_step(self) -> None:
        ours = metrics.reduce(metrics.merge(self._extras))
        self._extras = []
        log = self._metrics["train" if self.model.training else "eval"]
        for name, value in ours.items():
            log[f"rlloss/{name}"].append(value)
        for name, of in TRL_METRICS.items():
            try:
                log[name].append(of(ours))
            except KeyError:
                continue


def batch_of(inputs: Any, corrects: bool = False) -> dict[str, Any]:
    """Names a micro-batch of TRL as rlloss does: `[B, C]` over the completion.

    Args:
        inputs: TRL's micro-batch.
        corrects: The loss corrects for the sampling engine by itself; TRL's importance ratios are left out then.
    """
    labels = torch.where(_mask(inputs) != 0, inputs["completion_ids"], _IGNORE)
    batch = {
        "shifted_labels": labels,
        "advantages": inputs["advantages"],
        "old_logprobs": inputs.get("old_per_token_logps"),
        "ref_logprobs": inputs.get("ref_per_token_logps"),
        "rollout_logprobs": inputs.get("sampling_per_token_logps"),
        "rollout_is_weights": None if corrects else inputs.get("importance_sampling_ratio"),
    }
    sampled, old = batch["rollout_logprobs"], batch["old_logprobs"]
    if sampled is not None and old is not None:
        # A token that the engine could not score is NaN in TRL, and has ratio 1.
        batch["rollout_logprobs"] = torch.where(sampled.isnan(), old, sampled)
    return batch


def _mask(inputs: Any) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _model_inputs(inputs: Any) -> dict[str, Any]:
    found = {name: inputs[name] for name in _MULTIMODAL if inputs.get(name) is not None}
    found["input_ids"] = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    found["attention_mask"] = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return found


def _selects(cfg: Any) -> bool:
    """Whether the loss chooses tokens over the whole step by the current policy."""
    loss = getattr(cfg, "policy_loss", None)
    return getattr(cfg, "top_entropy_quantile", 1.0) < 1.0 or (loss is not None and loss.selection is not None)


def _for_model(loss_cfg: BaseRLLossConfig, trainer: Any) -> BaseRLLossConfig:
    """A copy of a config with the temperature, logit scale and soft cap of the model that is trained."""
    cfg = hf.configure(loss_cfg, trainer.model)
    cfg.temperature = trainer.temperature
    # TRL leaves old log-probs out where they would equal the current ones.
    cfg.on_policy = True
    if cfg.mode != "liger":
        cfg.entropy_metric = True
    return cfg


def _add_loss_head(model: Any, float32: bool) -> None:
    """Lets `model(..., loss_ctx=context)` return the loss: inside forward, where wrappers have the weights."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    previous = base.forward

    @functools.wraps(previous)
    def forward(*args: Any, loss_ctx: BaseRLLossContext | None = None, **kwargs: Any) -> Any:
        return previous(*args, **kwargs) if loss_ctx is None else _loss_of(model, loss_ctx, kwargs, float32)

    base.forward = forward


def _loss_of(model: Any, context: BaseRLLossContext, inputs: dict[str, Any], float32: bool) -> LossOutput:
    length = int(context.loss_kwargs.shifted_labels.shape[1])
    hidden = hf.hidden_states(model, inputs)[:, -length - 1 : -1]
    head = hf.find_head(model)
    hidden = hidden.to(head.weight.device)
    if not float32:
        return context.forward(head.inputs(hidden), head.weight, head.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        return context.forward(head.inputs(hidden.float()), head.weight, head.bias)
