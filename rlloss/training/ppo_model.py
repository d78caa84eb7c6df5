"""Actor and critic of a PPO phase, on two backbones or on one, with their optimisers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlloss.distributed import all_reduce_sum, world_size
from rlloss.losses.context import BaseLossContext
from rlloss.losses.ppo import ActorCriticLossConfig, ActorCriticLossContext, PPOLossContext
from rlloss.losses.value import ValueLossContext
from rlloss.metrics import Metric
from rlloss.training.config import OptimizerConfig
from rlloss.training.model import Policy, TokenBatch, hidden_states
from rlloss.training.optimizer import apply_gradients, learning_rate, make_optimizer, optimizer_tensors
from rlloss.training.phase import Batch, accumulate, adapted, build_counted, take_rows
from rlloss.training.ppo_config import PPOConfig
from rlloss.training.ranks import gather_rows, micro_batches
from rlloss.training.sharding import blocks_of, shard
from rlloss.training.trace import Trace


class ValueReader:
    """Reads values in the place of a loss.

    Args:
        head: From hidden states to a value.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def forward(self, hidden: Tensor, *unused: Tensor | None) -> Tensor:
        """Returns the values `[B, T]`, float32, of hidden states `[B, T, H]`."""
        return self._head(hidden.float()).squeeze(-1)  # type: ignore[no-any-return]


class Critic(nn.Module):
    """A backbone with a value head, in one call.

    Args:
        backbone: From tokens to hidden states.
        head: From hidden states to a value.
    """

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, batch: TokenBatch, loss_ctx: Any) -> Any:
        """Returns what `loss_ctx.forward` gives on the hidden states of a batch and the value head."""
        return loss_ctx.forward(hidden_states(self.backbone, batch), self.head.weight, self.head.bias)


class ActorCritic:
    """The two networks that PPO trains.

    Args:
        policy: The actor.
        config: Losses and optimisers.
    """

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        self.policy, self.config = policy, config
        self.vf_coef = config.critic.vf_coef if config.critic.backbone == "shared" else 1.0
        width = policy.network.head.in_features
        self.head = nn.Linear(width, 1, device=policy.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.critic = None if config.critic.backbone == "shared" else _own_critic(policy, self.head)
        options = {**policy.logit_options, "temperature": config.rollout.temperature}
        self.actor_loss = adapted(config.loss, options)
        self.critic_loss = config.critic.loss
        self.joint_loss = _joint(self.actor_loss, config) if self.critic is None else None
        self._trained: list[nn.Module] = [policy.network]
        self._settings: list[OptimizerConfig] = [config.optimizer]
        if self.critic is None:
            self._trained = [nn.ModuleList([policy.network, self.head])]
        else:
            self._trained.append(self.critic)
            self._settings.append(config.critic.optimizer)
        self._optimizers = [make_optimizer(*pair) for pair in zip(self._trained, self._settings, strict=True)]

    @torch.no_grad()
    def values(self, tokens: TokenBatch) -> Tensor:
        """Returns the value of the state before each label, `[N, T]` float32."""
        count, length = tokens.input_ids.shape
        rows = torch.arange(count, device=tokens.input_ids.device)
        network, reader = self.critic or self.policy.network, ValueReader(self.head)
        parts = [torch.zeros((0, length), device=rows.device)]
        for block, counts in micro_batches(rows, self.config.micro_batch_size):
            found = network(tokens.rows(block), reader)
            parts += [found] if counts else []
        return gather_rows(torch.cat(parts))

    def accumulate(
        self, tokens: TokenBatch, batch: Batch, rows: Tensor, trace: Trace | None = None
    ) -> dict[str, Metric]:
        """Runs forward and backward over the micro-batches of one minibatch; returns this rank's metrics."""
        micro = micro_batches(rows, self.config.micro_batch_size)
        data = [(take_rows(batch, block), counts) for block, counts in micro]
        parts = [tokens.rows(block) for block, _ in micro]
        if self.critic is None:
            assert self.joint_loss is not None
            return self._accumulate_joint(self.joint_loss, data, parts, trace)
        actors = PPOLossContext.build_batches([build_counted(self.actor_loss, *part) for part in data])
        critics = ValueLossContext.build_batches([build_counted(self.critic_loss, *part) for part in data])
        found = accumulate(self.policy.network, actors, parts, trace)
        return {**accumulate(self.critic, critics, parts), **found}

    def apply_gradients(self, step: int, steps: int) -> dict[str, float]:
        """Makes one optimiser step of both, or of the critic alone while it warms up."""
        found: dict[str, float] = {}
        if self.critic is None:
            self._average_head()
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

    def tensors(self) -> dict[str, Tensor]:
        """Returns those of the optimisers and of the critic; the actor's weights are the run's."""
        critic = self.head if self.critic is None else self.critic
        found = {f"critic.{name}": value for name, value in critic.state_dict().items()}
        for name, optimizer in zip(("actor", "critic"), self._optimizers, strict=False):
            found |= {f"{name}.{key}": value for key, value in optimizer_tensors(optimizer).items()}
        return found

    def _average_head(self) -> None:
        """Averages the gradient of a value head that every rank holds whole, beside a sharded backbone."""
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(all_reduce_sum(parameter.grad) / world_size())

    def _accumulate_joint(
        self,
        config: ActorCriticLossConfig,
        data: list[tuple[Batch, bool]],
        parts: list[TokenBatch],
        trace: Trace | None,
    ) -> dict[str, Metric]:
        contexts: list[BaseLossContext] = [
            ActorCriticLossContext(config, build_counted(config, *part).loss_kwargs) for part in data
        ]
        head = {"value_weight": self.head.weight, "value_bias": self.head.bias}
        contexts = ActorCriticLossContext.build_batches(contexts)
        return accumulate(self.policy.network, contexts, parts, trace, **head)


def _own_critic(policy: Policy, head: nn.Linear) -> Critic:
    with policy.whole() as whole:
        backbone = copy.deepcopy(whole.model.base_model).requires_grad_(True)
    critic = Critic(backbone, head)
    shard(critic, blocks_of(backbone))
    return critic


def _joint(actor_loss: Any, config: PPOConfig) -> ActorCriticLossConfig:
    fields = {name: getattr(actor_loss, name) for name in type(actor_loss).model_fields}
    critic = {name: getattr(config.critic.loss, name) for name in ("cliprange_value", "huber_delta")}
    return ActorCriticLossConfig(**fields, **critic, vf_coef=config.critic.vf_coef)
