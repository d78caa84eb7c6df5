"""Three ways to write a loss of your own: a formula, a loss on log-probs, a loss on logits."""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field

from rlloss import CELossConfig, CELossContext, GRPOLossConfig, PolicyLossConfig, register_policy_loss


# 1. A formula. The names of the arguments say what it needs; it returns a number for each token.
class SoftClipConfig(PolicyLossConfig):
    sharpness: float = Field(default=4.0, gt=0)


@register_policy_loss("soft_clip", config=SoftClipConfig)
def soft_clip(log_prob, old_log_prob, advantages, policy_loss_cfg):
    log_ratio = (log_prob - old_log_prob).clamp(-20, 20)
    return -advantages * torch.tanh(log_ratio * policy_loss_cfg.sharpness) / policy_loss_cfg.sharpness


# 2. A loss on log-probs: a context with its own `token_loss`. It runs in every mode.
class FocalContext(CELossContext):
    def token_loss(self, stats, loss_kwargs):
        uncertain = 1.0 - stats.log_prob.exp()
        return -(uncertain * stats.log_prob * loss_kwargs.loss_weight).sum(), {}


class FocalConfig(CELossConfig):
    @property
    def loss_ctx_cls(self):
        return FocalContext


# 3. A loss on logits: `loss_fn` sees one chunk of them at a time in chunk mode.
class ZLossContext(CELossContext):
    def loss_fn(self, hidden_states, head_weight, head_bias, loss_kwargs) -> tuple[Any, tuple[Any, dict[str, Any]]]:
        labels, weights = loss_kwargs.shifted_labels, loss_kwargs.loss_weight
        hidden_states = hidden_states.masked_fill((labels == -100).unsqueeze(-1), 0)  # NaN times a weight of 0 is NaN
        logits = F.linear(hidden_states, head_weight, head_bias)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        z_loss = logits.logsumexp(-1).square()
        return ((nll.view_as(weights) + 1e-4 * z_loss) * weights).sum(), (logits, {})


class ZLossConfig(CELossConfig):
    @property
    def loss_ctx_cls(self):
        return ZLossContext


torch.manual_seed(0)
hidden, weight = torch.randn(2, 9, 16), torch.randn(50, 16) / 16
labels = torch.randint(0, 50, (2, 9)).index_fill(1, torch.tensor([0, 1]), -100)
batch = {"shifted_labels": labels, "advantages": torch.tensor([1.0, -1.0]), "old_logprobs": torch.full((2, 9), -4.0)}
for make in (lambda **f: GRPOLossConfig(policy_loss_cfg={"loss_type": "soft_clip"}, **f), FocalConfig, ZLossConfig):
    for mode in ("eager", "chunk"):
        config = make(mode=mode, chunk_size=4)
        (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
        leaf = hidden.clone().requires_grad_()
        loss = context.forward(leaf, weight).loss
        loss.backward()
        print(
            f"{type(config).__name__:<15} {mode:<6} loss {loss.item():+.6f}  |gradient| {leaf.grad.norm().item():.6f}"
        )
