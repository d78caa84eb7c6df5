"""Watches what a loss is handed, and names what it has written into."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlloss.doctor.sequences import Sequence, head_of
from rlloss.doctor.step import How, contexts_of, with_fields
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.terms import evaluate


class _Watch:
    """Remembers tensors by name, and later tells which were written into."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def call(self, fn: Callable[..., Any], stats: Any, loss_kwargs: Any) -> Any:
        """Calls what takes stats and kwargs, and compares both before and after."""
        handed = {name: value for name, value in stats._asdict().items() if isinstance(value, Tensor)}
        handed.update(loss_kwargs.tensors())
        before = _photograph(handed)
        result = fn(stats, loss_kwargs)
        self.compare(handed, before)
        return result

    def compare(self, handed: dict[str, Tensor], before: dict[str, tuple[int, Tensor]]) -> None:
        """Notes the tensors whose version or bits are others."""
        for name, tensor in handed.items():
            version, bits = before[name]
            if tensor._version != version or not torch.equal(_bits(tensor), bits):
                self.found.append(name)


def written(config: BaseLossConfig, sequences: list[Sequence]) -> list[str]:
    """Names of the tensors that the loss writes into: of its arguments, or of the batch.

    Args:
        config: The loss.
        sequences: One micro-batch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _written(with_fields(config, {}), sequences)


def _written(config: BaseLossConfig, sequences: list[Sequence]) -> list[str]:
    ((context, hidden),) = contexts_of(config, (sequences,), How())
    weight, more = head_of(config, sequences[0]["logits"].shape[1])
    watch = _Watch()
    token_loss = context.token_loss
    if type(context).token_loss is BaseLossContext.token_loss:
        terms = tuple(replace(term, fn=_watched(watch, term.fn)) for term in config.terms())

        def token_loss(stats: Any, loss_kwargs: Any) -> Any:
            return evaluate(terms, stats, loss_kwargs)

    vars(context)["token_loss"] = _watched(watch, token_loss)
    outer = {"hidden_states": hidden, "head_weight": weight, **context.loss_kwargs.tensors()}
    before = _photograph(outer)
    context.forward(hidden.requires_grad_(), weight, **more)
    watch.compare(outer, before)
    return list(dict.fromkeys(watch.found))


def _watched(watch: _Watch, fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stats, loss_kwargs: watch.call(fn, stats, loss_kwargs)


def _photograph(tensors: dict[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    return {name: (tensor._version, _bits(tensor).clone()) for name, tensor in tensors.items()}


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN."""
    plain = tensor.detach()
    return plain.view(torch.int64) if plain.dtype == torch.float64 and plain.ndim else plain
