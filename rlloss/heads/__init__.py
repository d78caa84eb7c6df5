"""Hidden states to per-token log-probs and losses: the only place where logits exist.

`run_head` is the door; `eager`, `chunk` and `liger` are the three modes behind it.
"""

from rlloss.heads.inputs import HeadInputs, HeadOptions, HeadOutput, LossFn, Objective, TokenStats
from rlloss.heads.logits import gather_logprobs
from rlloss.heads.run import run_head, token_stats

__all__ = [
    "HeadInputs",
    "HeadOptions",
    "HeadOutput",
    "LossFn",
    "Objective",
    "TokenStats",
    "gather_logprobs",
    "run_head",
    "token_stats",
]
