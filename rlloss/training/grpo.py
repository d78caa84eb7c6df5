"""GRPO: sample groups, score them, compare within each group, and update the policy."""

import random
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.advantage_registry import compute_advantages, taken_by
from rlloss.losses.grpo import GRPOLossContext
from rlloss.metrics import Metric, merge, reduce
from rlloss.training.config import OF_RESPONSES, GRPOConfig
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.phase import Batch, Phase, accumulate, adapted, build_counted, label_logprobs, take_rows
from rlloss.training.ranks import gather_rows, micro_batches, own_rows
from rlloss.training.rollout import IGNORE, Rollout, prompt_seed, sample
from rlloss.training.tasks import FULL_SCORE, Question, Task
from rlloss.training.trace import mismatch


class GRPOPhase(Phase):
    """Group relative policy optimisation.

    Args:
        policy: The model.
        task: Questions and their scores.
        prompts: Token ids of the training questions.
        config: Sizes, optimiser, loss.
        seed: Seed of prompts and sampling.
    """

    name = "grpo"
    title = "GRPO"

    def __init__(self, policy: Policy, task: Task, prompts: Sequence[list[int]], config: GRPOConfig, seed: int) -> None:
        super().__init__(policy, config.steps, config.optimizer)
        if config.rollout.prompts > len(prompts):
            raise ConfigError(
                f"GRPOConfig: rollout.prompts={config.rollout.prompts}, but there are {len(prompts)} training "
                "questions. Raise task.pool or ask fewer."
            )
        self.config = config
        self.task = task
        self.loss = adapted(config.loss, {**policy.logit_options, "temperature": config.rollout.temperature})
        self._prompts = prompts
        self._seed = seed
        self._reference: dict[str, Tensor] | None = None
        if config.loss.use_kl_loss:
            self._reference = {name: value.clone() for name, value in policy.model.state_dict().items()}

    def step(self, index: int) -> dict[str, float]:
        """Samples, scores, and updates the policy."""
        started = time.perf_counter()
        chosen = random.Random(f"grpo {self._seed} {index}").sample(
            range(len(self._prompts)), self.config.rollout.prompts
        )
        seeds = [prompt_seed(self._seed, index, place) for place in chosen]
        rollout = sample(self.policy, [self._prompts[place] for place in chosen], seeds, self.config.rollout)
        rewards = self._rewards(rollout, [self.task.train[place] for place in chosen])
        sampled = time.perf_counter()
        lengths = (rollout.labels != IGNORE).sum(-1)
        given = dict(zip(OF_RESPONSES, (rewards, rollout.group_ids, lengths), strict=True))
        name, options = self.config.advantage, self.config.advantage_options
        advantages = compute_advantages(name, **taken_by(name, given), **options)
        advantages = torch.where(advantages < 0, advantages * self.config.negative_scale, advantages)
        metrics = _rollout_metrics(rollout, rewards, self.config.rollout.group_size)
        metrics |= self._optimize(rollout, advantages, index, rewards)
        metrics |= {"seconds_rollout": sampled - started, "seconds_update": time.perf_counter() - sampled}
        return metrics

    def tensors(self) -> dict[str, Tensor]:
        """Returns those of the optimiser, and the reference policy where there is one."""
        reference = {f"reference.{name}": value for name, value in (self._reference or {}).items()}
        return {**super().tensors(), **reference}

    def _rewards(self, rollout: Rollout, questions: Sequence[Question]) -> Tensor:
        size = self.config.rollout.group_size
        rows = own_rows(len(rollout.texts))
        values = [self.task.reward(rollout.texts[row], questions[row // size]) for row in rows]
        return gather_rows(torch.tensor(values, dtype=torch.float32, device=self.policy.device))

    def _optimize(self, rollout: Rollout, advantages: Tensor, index: int, rewards: Tensor) -> dict[str, float]:
        """Makes every optimiser step of one rollout."""
        rows = torch.arange(len(advantages), device=advantages.device)
        if self.config.skip_zero_advantages:
            rows = rows[advantages != 0]
        if not len(rows):
            return {"updates": 0.0}
        tokens = rollout.tokens.rows(rows)
        batch = self._batch(rollout, advantages, rows)
        numbers = mismatch(batch["old_logprobs"], batch["rollout_logprobs"], batch["shifted_labels"])
        parts: list[dict[str, Metric]] = []
        norms: list[float] = []
        for epoch in range(self.config.epochs):
            order = _permutation(len(rows), f"{self._seed} {index} {epoch}").to(rows.device)
            for update in order.chunk(self.config.updates_per_epoch):
                parts.append(self._accumulate(tokens, batch, update))
                if not norms:
                    numbers["ratio_dev_first_update"] = _deviation(parts[0])
                done = self.apply_gradients(index)
                norms.append(done["grad_norm"])
        if self.trace is not None:
            found = {**batch, "rows": rows, "rewards": rewards}
            self.trace.add_samples(self.policy, rollout, found, partial(self._logprobs, None))
        numbers |= {"lr": done["lr"], "grad_norm": sum(norms) / len(norms), "updates": float(len(norms))}
        return {**_mean_losses(reduce(merge(parts)), len(norms)), **numbers}

    def _batch(self, rollout: Rollout, advantages: Tensor, rows: Tensor) -> Batch:
        tokens, labels = rollout.tokens.rows(rows), rollout.labels[rows]
        batch = {
            "shifted_labels": labels,
            "advantages": advantages[rows],
            "rollout_logprobs": rollout.rollout_logprobs[rows],
            "old_logprobs": self._logprobs(None, tokens, labels),
        }
        if self._reference is not None:
            batch["ref_logprobs"] = self._logprobs(self._reference, tokens, labels)
        return batch

    def _accumulate(self, tokens: TokenBatch, batch: Batch, update: Tensor) -> dict[str, Metric]:
        micro = micro_batches(update, self.config.micro_batch_size)
        contexts = [build_counted(self.loss, take_rows(batch, part), counts) for part, counts in micro]
        contexts = GRPOLossContext.build_batches(contexts)
        return accumulate(self.policy.network, contexts, [tokens.rows(part) for part, _ in micro], self.trace)

    def _logprobs(self, weights: dict[str, Tensor] | None, tokens: TokenBatch, labels: Tensor) -> Tensor:
        """Returns log-probs by the policy, or by other weights in its place."""
        size, temperature = self.config.micro_batch_size, self.config.rollout.temperature
        with self.policy.whole(weights) as policy:
            return label_logprobs(policy, tokens, labels, size, temperature)


def _rollout_metrics(rollout: Rollout, rewards: Tensor, group_size: int) -> dict[str, float]:
    grouped = rewards.view(-1, group_size)
    mixed = grouped.amax(-1) > grouped.amin(-1)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_full": float((rewards >= FULL_SCORE).float().mean()),
        "groups_mixed": float(mixed.float().mean()),
        "response_tokens": float((rollout.labels != IGNORE).sum(-1).float().mean()),
    }


def _mean_losses(metrics: dict[str, float], updates: int) -> dict[str, float]:
    """Divides the losses, which add up over micro-batches, by the number of updates that were merged."""
    return {
        name: value / updates if name == "loss" or name.endswith("_loss") else value for name, value in metrics.items()
    }


def _deviation(metrics: dict[str, Metric]) -> float:
    """Returns the largest |ratio - 1| of an update."""
    return max(abs(float(metrics["ratio_max"]) - 1.0), abs(float(metrics["ratio_min"]) - 1.0))


def _permutation(size: int, key: str) -> Tensor:
    order = list(range(size))
    random.Random(f"order {key}").shuffle(order)
    return torch.tensor(order)
