"""What a loss on logits may be given in chunk mode: a part of its sequences."""

from typing import Any

from rlloss.errors import ConfigError


def as_chunk(context: Any, loss_kwargs: Any) -> Any:
    """Returns kwargs for the terms of a context: its own, or a chunk, in which sequences have no bounds.

    A chunk is fine for a sum over tokens, and for nothing else.

    Raises:
        ConfigError: The loss looks at whole sequences.
    """
    if loss_kwargs is context.loss_kwargs:
        return loss_kwargs
    if context.loss_cfg.mode == "chunk" and (type(context).level or context.loss_cfg.level()) == "sequence":
        raise ConfigError(
            f"{type(context).__name__} overrides loss_fn, which sees one chunk at a time, but its loss looks at whole "
            "sequences. Use mode='eager', or override token_loss."
        )
    return loss_kwargs.with_tensors({"cu_seq_lens": None})
