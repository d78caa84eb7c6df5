"""Responses: sampled with one seed for each prompt, or greedy, and laid out for the training forward."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.training.config import RolloutConfig
from rlloss.training.extras import require
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.ranks import gather_rows, share

IGNORE = -100


@dataclass(frozen=True)
class Rollout:
    """Prompts with their responses, one sequence a row; T counts prompt and response, less the last token."""

    tokens: TokenBatch
    """Input of the training forward, `[N, T]`."""
    labels: Tensor
    """Next tokens `[N, T]`, -100 in prompts and padding."""
    rollout_logprobs: Tensor
    """Log-probs of the labels as generation computed them, `[N, T]`, nats, 0 at ignored positions."""
    group_ids: Tensor
    """Which prompt a row answers, `[N]`, from 0."""
    texts: list[str]
    """The responses."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, `[N]`."""
        return (self.labels != IGNORE).sum(-1)


class SeededSampler:
    """Logits processor that leaves the sampled token, and takes note of its log-prob.

    Adding Gumbel noise and taking the maximum is sampling from the softmax. The noise of a prompt comes from a
    generator of its own, so it depends neither on the other prompts of the batch nor on the number of ranks.

    Args:
        seeds: One seed for each prompt.
        group_size: Rows of each prompt, next to each other.
        temperature: The logits are divided by it.
    """

    def __init__(self, seeds: Sequence[int], group_size: int, temperature: float) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._group_size = group_size
        self._temperature = temperature
        self.logprobs: list[Tensor] = []
        """For each new token, its log-prob in each row, `[N]`."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores `[N, V]` that are finite at the sampled token only."""
        logits = scores.float() / self._temperature
        shape = (self._group_size, logits.shape[-1])
        uniform = torch.cat([torch.rand(shape, generator=generator) for generator in self._generators])
        exponential = -torch.log(uniform.clamp_(min=1e-30))
        noisy = logits - torch.log(exponential.clamp_(min=1e-30)).to(logits.device)
        chosen = noisy.argmax(-1, keepdim=True)
        self.logprobs.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


def prompt_seed(seed: int, step: int, prompt: int) -> int:
    """Returns the seed of one prompt in one step of one run."""
    digest = hashlib.sha256(f"{seed} {step} {prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample(policy: Policy, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: RolloutConfig) -> Rollout:
    """Samples `group_size` responses to each prompt.

    Args:
        policy: The model.
        prompts: Token ids of each prompt.
        seeds: One seed for each prompt.
        config: Sizes and temperature.

    Returns:
        Rows of one prompt next to each other, in the order of the prompts.
    """
    size = config.group_size
    batch = max(1, config.batch_size // size)
    own, own_seeds = share(prompts), share(seeds)
    responses = [torch.zeros((0, config.max_new_tokens), dtype=torch.long, device=policy.device)]
    logprobs = [torch.zeros((0, config.max_new_tokens), device=policy.device)]
    with policy.whole() as whole:
        for start in range(0, len(own), batch):
            part = [list(prompt) for prompt in own[start : start + batch] for _ in range(size)]
            sampler = SeededSampler(own_seeds[start : start + batch], size, config.temperature)
            responses.append(_generate(whole, part, config.max_new_tokens, sampler))
            logprobs.append(_widened(torch.stack(sampler.logprobs, -1), config.max_new_tokens, 0.0))
    rows = [list(prompt) for prompt in prompts for _ in range(size)]
    group_ids = torch.arange(len(prompts), device=policy.device).repeat_interleave(size)
    sampled = gather_rows(torch.cat(responses)), gather_rows(torch.cat(logprobs))
    return _laid_out(policy, rows, *sampled, group_ids)


def greedy(policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> list[str]:
    """Returns the greedy response to each prompt."""
    own = share(prompts)
    responses = [torch.zeros((0, max_new_tokens), dtype=torch.long, device=policy.device)]
    with policy.whole() as whole:
        for start in range(0, len(own), batch_size):
            responses.append(_generate(whole, own[start : start + batch_size], max_new_tokens, None))
    return policy.decode(_trimmed(policy, gather_rows(torch.cat(responses))))


@torch.no_grad()
def _generate(policy: Policy, prompts: Sequence[Sequence[int]], length: int, sampler: SeededSampler | None) -> Tensor:
    """Returns the new tokens `[N, length]`, padded after the end of each response."""
    transformers = require("transformers")
    batch = policy.left_padded(prompts)
    processors = transformers.LogitsProcessorList([] if sampler is None else [sampler])
    tokens: Any = policy.model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        logits_processor=processors,
        max_new_tokens=length,
        do_sample=False,
    )
    return _widened(tokens[:, batch.input_ids.shape[1] :], length, policy.pad_id)


def _laid_out(
    policy: Policy, prompts: Sequence[Sequence[int]], responses: Tensor, logprobs: Tensor, group_ids: Tensor
) -> Rollout:
    left = policy.left_padded(prompts)
    valid = _valid(policy, responses)
    used = max(1, int(valid.sum(-1).max()))
    responses, valid = responses[:, :used], valid[:, :used]
    ids = torch.cat([left.input_ids, responses.masked_fill(~valid, policy.pad_id)], -1)
    mask = torch.cat([left.attention_mask, valid.long()], -1)
    width = left.input_ids.shape[1]
    labels = torch.full_like(ids[:, 1:], IGNORE)
    labels[:, width - 1 :] = responses.masked_fill(~valid, IGNORE)
    sampled = torch.zeros(labels.shape, device=ids.device)
    sampled[:, width - 1 :] = logprobs[:, :used].masked_fill(~valid, 0.0)
    texts = policy.decode(_trimmed(policy, responses))
    return Rollout(TokenBatch(ids[:, :-1], mask[:, :-1]), labels, sampled, group_ids, texts)


def _valid(policy: Policy, responses: Tensor) -> Tensor:
    """Tells which tokens belong to a response: those up to the first end of sequence, which counts."""
    ends = torch.isin(responses, torch.tensor(policy.eos_ids, device=responses.device))
    return ends.cumsum(-1) - ends.long() == 0


def _trimmed(policy: Policy, responses: Tensor) -> list[list[int]]:
    lengths = _valid(policy, responses).sum(-1).tolist()
    return [row[:length] for row, length in zip(responses.tolist(), lengths, strict=True)]


def _widened(values: Tensor, width: int, fill: float) -> Tensor:
    missing = width - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing > 0 else values
