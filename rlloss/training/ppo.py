"""PPO: sample, score, estimate advantages with a critic, and update both in epochs of minibatches."""

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.controllers import AdaptiveKLController, FixedKLController, KLController
from rlloss.functional.gae import gae
from rlloss.functional.masked import masked_whiten
from rlloss.functional.ppo_rewards import TokenRewards, compute_rewards
from rlloss.metrics import Metric, merge, over_ranks
from rlloss.training.evaluator import Evaluator
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.phase import Batch, Phase, label_logprobs
from rlloss.training.ppo_config import KLConfig, PPOConfig
from rlloss.training.ppo_model import ActorCritic
from rlloss.training.ppo_stats import rollout_statistics, update_statistics
from rlloss.training.ranks import gather_rows, own_rows
from rlloss.training.rollout import IGNORE, Rollout, prompt_seed, sample
from rlloss.training.tasks import FULL_SCORE, Task
from rlloss.training.trace import mismatch


class PPOPhase(Phase):
    """Proximal policy optimisation.

    Args:
        policy: The model.
        task: Questions and their scores.
        prompts: Token ids of the training questions.
        config: Sizes, optimisers, losses.
        seed: Seed of prompts and sampling.
    """

    name = "ppo"
    title = "PPO"

    def __init__(self, policy: Policy, task: Task, prompts: Sequence[list[int]], config: PPOConfig, seed: int) -> None:
        super().__init__(policy, config.steps, config.optimizer)
        if config.rollout.prompts > len(prompts):
            raise ConfigError(
                f"PPOConfig: rollout.prompts={config.rollout.prompts}, but there are {len(prompts)} training "
                "questions. Raise task.pool or ask fewer."
            )
        self.config = config
        self.task = task
        self.models = ActorCritic(policy, config)
        self.reference = {name: value.clone() for name, value in policy.model.state_dict().items()}
        self.controller = _controller(config.kl)
        self.evaluator = Evaluator(config.evaluator, task, policy.device)
        self._prompts = prompts
        self._seed = seed

    def step(self, index: int) -> dict[str, float]:
        """Samples, scores, and updates actor and critic."""
        started = time.perf_counter()
        size = self.config.rollout.group_size
        places = random.Random(f"ppo {self._seed} {index}").sample(
            range(len(self._prompts)), self.config.rollout.prompts
        )
        seeds = [prompt_seed(self._seed, index, place) for place in places]
        rollout = sample(self.policy, [self._prompts[place] for place in places], seeds, self.config.rollout)
        questions = [self.task.train[place] for place in places for _ in range(size)]
        own = own_rows(len(questions))
        raw = self.evaluator.score([rollout.texts[row] for row in own], [questions[row] for row in own])
        scores = gather_rows(self.evaluator.scaled(raw))
        raw = gather_rows(raw)
        sampled = time.perf_counter()
        batch, rewards = self._experience(rollout, scores)
        mask = rollout.labels != IGNORE
        found = rollout_statistics(rewards, batch["old_logprobs"], mask, scores)
        found |= {"objective/kl_coef": self.controller.value, **_environment(raw)}
        found |= mismatch(batch["old_logprobs"], rollout.rollout_logprobs, rollout.labels)
        found |= self._optimize(rollout, batch, index)
        if self.trace is not None:
            rows = torch.arange(len(scores), device=scores.device)
            numbers = {**batch, "rows": rows, "rewards": raw}
            self.trace.add_samples(self.policy, rollout, numbers, partial(self._logprobs, None))
        self.controller.update(found["objective/kl"], len(scores))
        now = time.perf_counter()
        found |= {
            "response_tokens": found["tokens/responses_len_mean"],
            "time/ppo/rollout": sampled - started,
            "time/ppo/optimize_step": now - sampled,
            "time/ppo/total": now - started,
        }
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Returns those of optimisers and critic, and the reference."""
        return {**self.models.tensors(), **{f"reference.{name}": value for name, value in self.reference.items()}}

    def facts(self) -> dict[str, Any]:
        """Returns coefficient and running moments."""
        return {"controller": self.controller.state_dict(), "moments": self.evaluator.moments.state_dict()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes over what `facts` returned."""
        self.controller.load_state_dict(facts["controller"])
        self.evaluator.moments.load_state_dict(facts["moments"])

    def _experience(self, rollout: Rollout, scores: Tensor) -> tuple[Batch, TokenRewards]:
        """Makes the batch that every update of this rollout learns from."""
        cfg, labels = self.config, rollout.labels
        mask = labels != IGNORE
        old, reference = (self._logprobs(weights, rollout.tokens, labels) for weights in (None, self.reference))
        batch = {"shifted_labels": labels, "old_logprobs": old, "values": self.models.values(rollout.tokens)}
        if cfg.loss.use_kl_loss:
            batch["ref_logprobs"] = reference
        rewards = compute_rewards(scores, old, reference, mask, self.controller.value, cfg.kl.kind)
        # Statistics over the rollout count over ranks, so each of them gives its own rows only.
        own = own_rows(len(labels))
        rows = slice(own.start, own.stop)
        given, counted = rewards.rewards[rows], mask[rows]
        if cfg.whiten_rewards:
            given = masked_whiten(given, counted, shift_mean=False)
        advantages, returns = gae(given, batch["values"][rows], counted, cfg.gamma, cfg.lam)
        advantages = masked_whiten(advantages, counted)
        batch["advantages"] = gather_rows(torch.where(advantages < 0, advantages * cfg.negative_scale, advantages))
        batch["returns"] = gather_rows(returns)
        return batch, rewards

    def _logprobs(self, weights: dict[str, Tensor] | None, tokens: TokenBatch, labels: Tensor) -> Tensor:
        """Returns log-probs by the policy, or by other weights in its place."""
        size, temperature = self.config.micro_batch_size, self.config.rollout.temperature
        with self.policy.whole(weights) as policy:
            return label_logprobs(policy, tokens, labels, size, temperature)

    def _optimize(self, rollout: Rollout, batch: Batch, index: int) -> dict[str, float]:
        """Makes every update of one rollout, until it has moved far enough."""
        parts: list[dict[str, Metric]] = []
        counts = {"updates": 0.0, "skipped_updates": 0.0, "early_stops": 0.0}
        done: dict[str, float] = {}
        for epoch in range(self.config.epochs):
            order = _permutation(len(rollout.labels), f"{self._seed} {index} {epoch}").to(rollout.labels.device)
            for rows in order.chunk(self.config.updates_per_epoch):
                metrics = over_ranks(self.models.accumulate(rollout.tokens, batch, rows, self.trace))
                parts.append(metrics)
                if _too_far(metrics, self.config.target_kl):
                    counts["early_stops"] = 1.0
                elif _ratio_too_large(metrics, self.config.ratio_threshold):
                    counts["skipped_updates"] += 1.0
                else:
                    done = self.models.apply_gradients(index, self.steps)
                    counts["updates"] += 1.0
                    continue
                # A loss times 0 would still let the optimiser's momentum move the weights.
                self.models.discard_gradients()
                if counts["early_stops"]:
                    return self._summary(parts, {**counts, **done})
        return self._summary(parts, {**counts, **done})

    def _summary(self, parts: list[dict[str, Metric]], numbers: dict[str, float]) -> dict[str, float]:
        merged = merge(parts)
        mean_losses = {
            name: value / len(parts) if name.startswith("loss/") else value
            for name, value in update_statistics(merged, self.models.vf_coef).items()
        }
        ours = {
            name: float(metric) / (len(parts) if name == "loss" or name.endswith("_loss") else 1)
            for name, metric in merged.items()
        }
        return {**ours, **{f"ppo/{name}": value for name, value in mean_losses.items()}, **numbers}


def _controller(config: KLConfig) -> KLController:
    if config.target is None:
        return FixedKLController(config.coef)
    return AdaptiveKLController(config.coef, config.target, config.horizon)


def _environment(raw: Tensor) -> dict[str, float]:
    return {
        "env/reward_mean": float(raw.mean()),
        "env/reward_std": float(raw.std()) if raw.numel() > 1 else 0.0,
        "reward_mean": float(raw.mean()),
        "reward_full": float((raw >= FULL_SCORE).float().mean()),
    }


def _too_far(metrics: dict[str, Metric], target_kl: float | None) -> bool:
    """Whether a minibatch has left the sampling policy; k3 cannot be negative, TRL's k1 can and then never stops."""
    return target_kl is not None and float(metrics["approx_kl_k3"]) > 1.5 * target_kl


def _ratio_too_large(metrics: dict[str, Metric], threshold: float | None) -> bool:
    return threshold is not None and not float(metrics["ratio_mean"]) <= threshold


def _permutation(size: int, key: str) -> Tensor:
    order = list(range(size))
    random.Random(f"order {key}").shuffle(order)
    return torch.tensor(order)
