"""What a rank does in the test of accumulation on several ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlloss import GRPOLossConfig
from steps import HEADS, Step, run_step, tok

NLLs = Sequence[float | None]
Micro = Sequence[NLLs]


def policy_step(config: GRPOLossConfig, parts: Sequence[Micro]) -> Step:
    """REINFORCE with A = 1, whose loss is the NLL: each micro-batch is a list of sequences, None a masked token."""
    batches, hidden = [], []
    for part in parts:
        nlls = [nll for sequence in part for nll in sequence]
        batches.append(
            {
                "shifted_labels": torch.tensor([[-100 if nll is None else 0 for nll in nlls]]),
                "num_tokens": [len(sequence) for sequence in part],
                "advantages": torch.tensor([[1e6 if nll is None else 1.0 for nll in nlls]], dtype=torch.float64),
            }
        )
        hidden.append(tok(*(-1.0 if nll is None else -nll for nll in nlls)))
    return run_step(config, batches, hidden)


def accumulated(by_rank: Sequence[Sequence[Micro]], fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Losses and head gradients of this rank, by head and by the fields of the config."""
    found = {}
    for head_name, head in HEADS.items():
        for name, more in fields.items():
            config = GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, **head, **more)
            step = policy_step(config, by_rank[dist.get_rank()])
            found[head_name, name] = (step.losses, step.weight_grad, step.extra)
    return found
