"""What verl and TRL call fields and reductions of a loss, so that an error says what they are called here."""

from collections.abc import Iterable

from rlloss.errors import nearest

_BOUNDS = "'cliprange_low' and 'cliprange_high' of policy_loss_cfg"
FIELDS = {
    "clip_ratio": _BOUNDS,
    "clip_ratio_low": "'cliprange_low' of policy_loss_cfg",
    "clip_ratio_high": "'cliprange_high' of policy_loss_cfg",
    "epsilon": _BOUNDS,
    "epsilon_low": "'cliprange_low' of policy_loss_cfg",
    "epsilon_high": "'cliprange_high' of policy_loss_cfg",
    "eps_clip": _BOUNDS,
    "beta": "'kl_loss_coef', with use_kl_loss=True",
    "loss_agg_mode": "'loss_reduction'",
    "loss_mode": "'loss_type' of policy_loss_cfg",
    "loss_type": "'loss_type' of policy_loss_cfg, and 'loss_reduction'",
    "ignore_index": "'ignore_idx'",
}
"""A peer's field -> ours."""

REDUCTIONS = {
    "token-mean": "token",
    "token-sum": "sum",
    "seq-mean-token-mean": "sample",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "dapo": "token",
    "bnpo": "token",
    "grpo": "sample",
    "luspo": "sequence_sum",
    "dr_grpo": "constant",
}
"""A peer's reduction, or loss that stands for one -> ours."""


def field_hint(name: str, known: Iterable[str]) -> str:
    """Returns a sentence about an unknown field: what a peer's is called here, or the nearest one that is known."""
    return f" Here that is {FIELDS[name]}." if name in FIELDS else nearest(name, known)


def choice_hint(given: object, choices: Iterable[str]) -> str:
    """Returns a sentence about an unknown choice, in the same way."""
    choices, name = list(choices), str(given)
    known = REDUCTIONS.get(name)
    return f" Here that is {known!r}." if known in choices else nearest(name, choices)
