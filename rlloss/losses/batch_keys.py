"""The keys of a batch: which fields they fill, and which look as if they should and would be passed over in silence."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from rlloss.errors import BatchError
from rlloss.losses.kwargs import BaseLossKwargs, PerToken

PEER_KEYS = {
    "old_log_probs": "old_logprobs",
    "old_per_token_logps": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "sampling_per_token_logps": "rollout_logprobs",
    "importance_sampling_ratio": "rollout_is_weights",
}
"""verl's and TRL's names of ours."""

MASKS = ("response_mask", "completion_mask", "loss_mask")
"""Peers' masks of the tokens that count, which here are those whose label is not ignored."""

ALIKE = 0.85
"""Similarity from which on an unknown key is taken for a misspelt one."""


def batch_key(cls: type[BaseLossKwargs], name: str, batch: Mapping[str, Any] | None = None) -> str:
    """Returns the key under which a batch holds a field: the field's own name too, where the batch has it."""
    role = cls.role(name)
    key = role.key if isinstance(role, PerToken) and role.key else name
    return name if batch is not None and key not in batch and name in batch else key


def check_keys(cls: type[BaseLossKwargs], batch: Mapping[str, Any]) -> None:
    """Refuses keys that a user believes to be read, and are not.

    Args:
        cls: The kwargs class.
        batch: The batch, without the keys whose value is None.

    Raises:
        BatchError: A required key is missing; a key is filled by `build_batches`, is another's name of a field that
            the batch does not hold, or holds a field a second time.
    """
    keys = {name: batch_key(cls, name, batch) for name in cls.model_fields if name != "shard"}
    required = [keys[name] for name, field in cls.model_fields.items() if field.is_required()]
    missing = [key for key in required if key not in batch]
    if missing:
        raise BatchError(
            f"the batch lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, batch)) or 'nothing'}. "
            f"{cls.__name__} requires {', '.join(map(repr, required))}."
        )
    for name, key in keys.items():
        if key in batch and cls.is_computed(name):
            raise BatchError(
                f"the batch holds {key!r}, which build_batches computes. Leave it out; a token that does not count has "
                f"the label ignore_idx, and rollout_is_weights weigh single tokens."
            )
        if key != name and name in batch:
            raise BatchError(f"the batch holds both {key!r} and {name!r}, two names of one field. Leave one out.")
    known = {*keys, *keys.values(), "num_tokens"}
    for key in batch:
        if isinstance(key, str) and key not in known:
            _check_unknown(cls, key, [field for field in keys.values() if field not in batch])


def _check_unknown(cls: type[BaseLossKwargs], key: str, absent: list[str]) -> None:
    if key in MASKS:
        warnings.warn(
            f"the batch holds {key!r}, which no loss reads: a token that does not count has the label ignore_idx. "
            f"Apply the mask to shifted_labels, and leave it out.",
            stacklevel=6,
        )
        return
    alike = difflib.get_close_matches(key, [field for field in absent if not cls.is_computed(field)], 1, ALIKE)
    if PEER_KEYS.get(key) in absent:
        alike = [PEER_KEYS[key]]
    if alike:
        raise BatchError(
            f"the batch holds {key!r}, which {cls.__name__} does not read. Did you mean {alike[0]!r}? Rename it, or "
            f"leave it out."
        )
