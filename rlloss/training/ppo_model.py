"""Actor and critic of a PPO phase, on two backbones or on one, with their optimisers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlloss.losses.ppo import ActorCriticLossConfig, ActorCriticLossContext, PPOLossContext
from rlloss.losses.value import ValueLossContext
from rlloss.metrics import Metric, merge
from rlloss.training.config import OptimizerConfig
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.optimizer import apply_gradients, learning_rate, make_optimizer
from rlloss.training.phase import Batch, accumulate, adapted, row_blocks, take_rows
from rlloss.training.ppo_config import PPOConfig


class ActorCritic:
    """The two networks that PPO trains.

    Args:
        policy: The actor.
        config: Losses and optimisers.
    """

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        self.policy, self.config = policy, config
        self.shared = config.critic.backbone == "shared"
        self.vf_coef = config.critic.vf_coef if self.shared else 1.0
        weight = policy.head_arguments()[0]
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.body = policy if self.shared else Policy(copy.deepcopy(policy.model), policy.tokenizer)
        options = {**policy.logit_options, "temperature": config.rollout.temperature}
        self.actor_loss = adapted(config.loss, options)
        self.critic_loss = config.critic.loss
        self.joint_loss = _joint(self.actor_loss, config) if self.shared else None
        self._trained = [nn.ModuleList([policy.model, *([self.head] if self.shared else [])])]
        self._settings: list[OptimizerConfig] = [config.optimizer]
        if not self.shared:
            self._trained.append(nn.ModuleList([self.body.backbone, self.head]))
            self._settings.append(config.critic.optimizer)
        self._optimizers = [make_optimizer(*pair) for pair in zip(self._trained, self._settings, strict=True)]

    @torch.no_grad()
    def values(self, tokens: TokenBatch) -> Tensor:
        """Returns the value of the state before each label, `[N, T]` float32."""
        rows = row_blocks(len(tokens.input_ids), self.config.micro_batch_size, tokens.input_ids.device)
        return torch.cat([self.head(self.body.hidden(tokens.rows(part)).float()).squeeze(-1) for part in rows])

    def accumulate(self, tokens: TokenBatch, batch: Batch, rows: Tensor) -> dict[str, Metric]:
        """Runs forward and backward over the micro-batches of one minibatch; returns its metrics."""
        blocks = torch.split(rows, self.config.micro_batch_size)
        data = [take_rows(batch, block) for block in blocks]
        parts = [tokens.rows(block) for block in blocks]
        if self.joint_loss is not None:
            return self._accumulate_joint(self.joint_loss, data, parts)
        actors = PPOLossContext.build_batches([self.actor_loss.build(part) for part in data])
        critics = ValueLossContext.build_batches([self.critic_loss.build(part) for part in data])
        found = accumulate(self.policy, actors, parts)
        extras = []
        for context, part in zip(critics, parts, strict=True):
            loss, (_, extra) = context.forward(self.body.hidden(part), self.head.weight, self.head.bias)
            loss.backward()  # type: ignore[no-untyped-call]
            extras.append(extra)
        return {**merge(extras), **found}

    def apply_gradients(self, step: int, steps: int) -> dict[str, float]:
        """Makes one optimiser step of both, or of the critic alone while it warms up."""
        found: dict[str, float] = {}
        for place, (module, optimizer) in enumerate(zip(self._trained, self._optimizers, strict=True)):
            name, settings = ("", "critic_")[place], self._settings[place]
            # The policy's own warm-up begins when the critic's has ended.
            late = self.config.critic.warmup_steps if place == 0 else 0
            if step < late:
                optimizer.zero_grad(set_to_none=True)
                continue
            lr = learning_rate(settings, step - late, steps - late)
            found[f"{name}grad_norm"] = apply_gradients(module, optimizer, lr, settings.max_grad_norm)
            found[f"{name}lr"] = lr
        return found

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Returns optimisers, value head, and an own backbone; the actor's weights are the run's."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "head": self.head.state_dict(),
            "backbone": None if self.shared else self.body.backbone.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.head.load_state_dict(state["head"])
        if not self.shared:
            self.body.backbone.load_state_dict(state["backbone"])

    def _accumulate_joint(
        self, config: ActorCriticLossConfig, data: list[Batch], parts: list[TokenBatch]
    ) -> dict[str, Metric]:
        contexts = [ActorCriticLossContext(config, config.build(part).loss_kwargs) for part in data]
        extras = []
        for context, part in zip(ActorCriticLossContext.build_batches(contexts), parts, strict=True):
            weight, bias = self.policy.head_arguments()
            hidden = self.policy.hidden(part)
            loss, (_, extra) = context.forward(hidden, weight, bias, self.head.weight, self.head.bias)
            loss.backward()  # type: ignore[no-untyped-call]
            extras.append(extra)
        return merge(extras)


def _joint(actor_loss: Any, config: PPOConfig) -> ActorCriticLossConfig:
    fields = {name: getattr(actor_loss, name) for name in type(actor_loss).model_fields}
    critic = {name: getattr(config.critic.loss, name) for name in ("cliprange_value", "huber_delta")}
    return ActorCriticLossConfig(**fields, **critic, vf_coef=config.critic.vf_coef)
