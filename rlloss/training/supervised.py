"""Supervised warm start: cross-entropy on prompts with their right answers."""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlloss.losses.ce import CELossContext
from rlloss.metrics import reduce
from rlloss.training.config import SupervisedConfig
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.phase import Phase, accumulate, adapted, build_counted
from rlloss.training.ranks import micro_batches
from rlloss.training.rollout import IGNORE

RECENT_STEPS = 20
"""Steps whose mean loss is compared with `target_loss`."""


class SupervisedPhase(Phase):
    """Cross-entropy on the answers.

    Args:
        policy: The model.
        pairs: Token ids of prompt and answer, one pair for each training question.
        config: Sizes, optimiser, loss.
        seed: Seed of the order.
    """

    name = "supervised"
    title = "warm start"

    def __init__(
        self, policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], config: SupervisedConfig, seed: int
    ) -> None:
        super().__init__(policy, config.steps, config.optimizer)
        self.config = config
        self.loss = adapted(config.loss, policy.logit_options)
        self._pairs = pairs[: config.questions]
        self._recent: list[float] = []
        self._seed = seed

    def step(self, index: int) -> dict[str, float]:
        """Makes one optimiser step on a batch of questions."""
        started = time.perf_counter()
        chosen = random.Random(f"supervised {self._seed} {index}").choices(self._pairs, k=self.config.batch_size)
        tokens, labels = supervised_batch(self.policy, chosen)
        micro = micro_batches(torch.arange(len(chosen), device=labels.device), self.config.micro_batch_size)
        contexts = [build_counted(self.loss, {"shifted_labels": labels[part]}, counts) for part, counts in micro]
        contexts = CELossContext.build_batches(contexts)
        metrics = reduce(accumulate(self.policy.network, contexts, [tokens.rows(part) for part, _ in micro]))
        self._recent = [*self._recent, metrics["loss"]][-RECENT_STEPS:]
        metrics |= self.apply_gradients(index)
        return {**metrics, "seconds_update": time.perf_counter() - started}

    def enough(self) -> bool:
        """Tells whether the mean loss of the last steps is below `target_loss`."""
        target, recent = self.config.target_loss, self._recent
        return target is not None and len(recent) == RECENT_STEPS and sum(recent) / RECENT_STEPS < target

    def facts(self) -> dict[str, Any]:
        """Returns the last losses."""
        return {"recent": self._recent}

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes over what `facts` returned."""
        self._recent = list(facts["recent"])


def supervised_batch(policy: Policy, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[TokenBatch, Tensor]:
    """Lays out prompts, padded on the left as for generation, and answers, closed and padded on the right.

    Args:
        policy: Gives padding and end-of-sequence tokens.
        pairs: Token ids of prompts and answers.

    Returns:
        Input tokens `[N, T]`, and labels `[N, T]`, -100 in prompts and padding.
    """
    left = policy.left_padded([prompt for prompt, _ in pairs])
    answers = [[*answer, policy.eos_ids[0]] for _, answer in pairs]
    width = max(len(answer) for answer in answers)
    padded = [answer + [IGNORE] * (width - len(answer)) for answer in answers]
    right = torch.tensor(padded, device=policy.device)
    there = right != IGNORE
    ids = torch.cat([left.input_ids, right.masked_fill(~there, policy.pad_id)], -1)
    mask = torch.cat([left.attention_mask, there.long()], -1)
    labels = torch.full_like(ids[:, 1:], IGNORE)
    labels[:, left.input_ids.shape[1] - 1 :] = right
    return TokenBatch(ids[:, :-1], mask[:, :-1]), labels
