"""What a step leaves behind beyond its metrics: counts of log-ratios and advantages, and a few responses.

Two files beside metrics.jsonl, one JSON object a line. `histograms.jsonl` begins with the edges of the bins at step 0;
every other line holds counts. `samples.jsonl` holds one response a line, token by token.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import all_reduce_sum
from rlloss.losses.token_record import TokenRecord
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.rollout import IGNORE, Rollout

HISTOGRAMS_FILE = "histograms.jsonl"
SAMPLES_FILE = "samples.jsonl"
LONGEST_SAMPLE = 1024
"""Tokens of a response that are kept."""


def _both_sides(*distances: float) -> tuple[float, ...]:
    return (*(-distance for distance in reversed(distances)), *distances)


EDGES = {
    "log_ratio": _both_sides(
        *(0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.5, 5.0)
    ),
    "advantage": _both_sides(*(0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)),
}
"""Bounds between bins, nats for log-ratios: one bin more than bounds, the first and the last are open. Fixed, so that
the lines of a run, and of several runs, can be laid side by side."""


class Trace:
    """What one step is to leave behind. Every rank fills its own; counts are of all ranks.

    Args:
        samples: Number of responses that are wanted.
    """

    def __init__(self, samples: int = 0) -> None:
        self.wanted = samples
        self.samples: list[dict[str, Any]] = []
        self._counts: dict[str, Tensor] = {}

    def add(self, record: TokenRecord) -> None:
        """Counts the tokens of one micro-batch."""
        for name, edges in EDGES.items():
            values = getattr(record, name)
            if values is not None:
                counts = count(values[record.mask], edges)
                self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def histograms(self) -> dict[str, list[int]]:
        """Returns the counts over all micro-batches and ranks; a NaN is in no bin."""
        return {name: [int(n) for n in all_reduce_sum(self._counts[name]).tolist()] for name in sorted(self._counts)}

    def add_samples(
        self, policy: Policy, rollout: Rollout, numbers: dict[str, Tensor], evaluate: Callable[..., Tensor]
    ) -> None:
        """Takes a few responses, of those that were learned from, as they are after the updates of the step.

        Args:
            policy: Gives the texts of tokens.
            rollout: The responses.
            numbers: `rows` `[n]`, those of the rollout that were learned from, and of the same rows `old_logprobs`
                `[n, T]`, `advantages` `[n, T]` or `[n]`; `rewards` of all rows.
            evaluate: From tokens and labels to log-probs under the policy as it is now.
        """
        if not self.wanted:
            return
        advantages = numbers["advantages"].reshape(len(numbers["rows"]), -1)
        telling = (advantages != 0).any(-1).nonzero().squeeze(1)
        if len(telling) < self.wanted:
            telling = torch.arange(len(advantages), device=advantages.device)
        count = min(self.wanted, len(telling))
        places = telling[torch.arange(count, device=telling.device) * len(telling) // max(count, 1)]
        rows = numbers["rows"][places]
        tokens, labels = rollout.tokens.rows(rows), rollout.labels[rows]
        moved = evaluate(tokens, labels) - numbers["old_logprobs"][places]
        for place, row in enumerate(rows.tolist()):
            own = labels[place] != IGNORE
            pushes = advantages[places[place]].expand(labels.shape[1])[own]
            self.samples.append(
                {
                    "prompt": _prompt_of(policy, tokens, labels, place),
                    "tokens": _pieces(policy, labels[place][own].tolist()[:LONGEST_SAMPLE]),
                    "length": int(own.sum()),
                    "log_ratio": _rounded(moved[place][own])[:LONGEST_SAMPLE],
                    "advantage": _rounded(pushes)[:LONGEST_SAMPLE],
                    "reward": _rounded(numbers["rewards"][row : row + 1])[0],
                }
            )


def count(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Counts numbers in the bins between edges: `[N]` -> `[len(edges) + 1]` float64; an edge is in the bin above."""
    values = values[~values.isnan()].double()
    bounds = torch.tensor(edges, dtype=torch.float64, device=values.device)
    bins = torch.bucketize(values, bounds, right=True)
    return torch.bincount(bins, minlength=len(edges) + 1).double()


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, labels: Tensor) -> dict[str, float]:
    """Distance of training's log-probs from those of generation, nats: the largest and the mean, over all rows."""
    gap = (old_logprobs - rollout_logprobs).abs()[labels != IGNORE]
    return {"rollout_logprob_gap": float(gap.max()), "rollout_logprob_gap_mean": float(gap.mean())}


def _prompt_of(policy: Policy, tokens: TokenBatch, labels: Tensor, place: int) -> str:
    """The text before the first label."""
    first = int((labels[place] != IGNORE).long().argmax()) + 1
    there = tokens.attention_mask[place, :first].bool()
    return "".join(_pieces(policy, tokens.input_ids[place, :first][there].tolist()[-LONGEST_SAMPLE:]))


def _pieces(policy: Policy, ids: list[int]) -> list[str]:
    return [str(policy.tokenizer.decode([token])) for token in ids]


def _rounded(values: Tensor) -> list[float | None]:
    return [round(value, 4) if math.isfinite(value) else None for value in values.tolist()]
