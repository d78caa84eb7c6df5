"""Hidden states to per-token log-probs and losses: the only place where logits exist.

`run_head` is the door; `eager`, `chunk` and `liger` are the three modes behind it.
"""

from rlloss.heads.inputs import HeadInputs, HeadOptions, HeadOutput, LossFn, Objective, TokenStats
from rlloss.heads.logits import gather_logprobs
from rlloss.heads.memory import release_buffers
from rlloss.heads.run import fused_cross_entropy, run_head, token_stats

__all__ = [
    "HeadInputs",
    "HeadOptions",
    "HeadOutput",
    "LossFn",
    "Objective",
    "TokenStats",
    "fused_cross_entropy",
    "gather_logprobs",
    "release_buffers",
    "run_head",
    "token_stats",
]
