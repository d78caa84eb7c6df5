"""What an error that a loss raised means."""

import re

from rlloss.errors import RLLossError


def explain(error: Exception) -> tuple[str, str]:
    """Says in plain words what is wrong with a loss that raised.

    Args:
        error: What it raised.

    Returns:
        The kind of fault, and a sentence.
    """
    text = " ".join(str(error).split())
    if "does not require grad and does not have a grad_fn" in text:
        return "not differentiable", (
            "the loss is not differentiable: nothing connects it to log_prob. A detach(), .item(), .data, numpy, "
            "no_grad, argmax or comparison cuts the graph."
        )
    if "in-place operation" in text or "inplace operation" in text:
        return "in place", (
            "the loss writes into a tensor that the gradient needs (an operation that ends in _, or x[...] = ...). "
            f"Make a new tensor instead. torch says: {text}"
        )
    if isinstance(error, RLLossError):
        return re.sub(r"[\d.]+", "", text), text
    return type(error).__name__, f"the loss raised {type(error).__name__}: {text}"
