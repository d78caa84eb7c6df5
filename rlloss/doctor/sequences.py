"""Sequences as a person writes them down: a number for each token, in columns; and the batches made out of them.

The hidden states of a token are its logits and the head is the identity, so that a table holds log-probs as they are.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlloss.losses.batch_keys import batch_key
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.kwargs import BaseLossKwargs, PerToken
from rlloss.losses.mixed import MixedLossConfig
from rlloss.losses.ppo import ActorCriticLossConfig
from rlloss.losses.value import ValueLossConfig

Sequence = dict[str, Tensor]
"""Columns `[L]` of one sequence (`logits` `[L, V]`, top-k columns `[L, K]`), float64 or integers."""

LENGTHS = (5, 3, 6, 1, 4)
VOCABULARY, TEACHER_WORDS = 7, 3
OWN = ("logits", "value", "labels", "counted", "group_ids")
"""Columns that are not tensors of a batch as they stand."""


def sequence(**columns: Any) -> Sequence:
    """Writes down one sequence.

    Args:
        **columns: Numbers of each token: the keys of a batch; `log_prob` of the current policy (then there are two
            words, and the label is word 0), or `logits` and `labels`; `value` of a critic; `counted`, 0 at an ignored
            position.

    Example:
        >>> from rlloss.doctor import sequence
        >>> sequence(log_prob=[-1.0], old_logprobs=[-1.0], advantages=[1.0])["logits"].shape
        torch.Size([1, 2])
    """
    given = {name: _column(values) for name, values in columns.items()}
    if "log_prob" in given:
        given["logits"] = two_words(given.pop("log_prob"))
    length = len(given["logits"])
    given.setdefault("labels", torch.zeros(length, dtype=torch.long))
    given["counted"] = given.get("counted", torch.ones(length)).bool()
    given["labels"] = given["labels"].long()
    return given


def two_words(log_prob: Tensor) -> Tensor:
    """Returns the logits `[L, 2]` of two words, the first of which has this log-prob."""
    return torch.stack([log_prob, torch.log(-torch.expm1(log_prob))], dim=-1)


def log_probs(columns: Sequence) -> Tensor:
    """Returns the current log-prob of each label, `[L]`."""
    return columns["logits"].log_softmax(-1).gather(1, columns["labels"][:, None]).squeeze(1)


def random_sequences(config: BaseLossConfig, seed: int) -> list[Sequence]:
    """Draws sequences of several lengths with every column that the loss knows; the first third is ignored."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(config, number, length, generator) for number, length in enumerate(LENGTHS)]


def ignored_sequence(columns: Sequence) -> Sequence:
    """Returns the same sequence with every token ignored."""
    return {**columns, "counted": torch.zeros_like(columns["counted"])}


def batch_of(
    config: BaseLossConfig, part: list[Sequence], packed: bool, garbage: float, prompts: Mapping[int, int]
) -> tuple[dict[str, Any], Tensor]:
    """Lays sequences side by side.

    Args:
        config: The loss.
        part: The sequences of one micro-batch.
        packed: In one row, or one row for each sequence.
        garbage: Stands at ignored positions and in the padding.
        prompts: The prompt of each group id, dense over the whole step.

    Returns:
        A batch, and hidden states `[B, T, H]`.
    """
    lengths = torch.tensor([len(columns["labels"]) for columns in part])
    rows = {name: [_filled(columns, name, garbage) for columns in part] for name in part[0] if name not in OWN}
    rows["hidden"] = [_cleaned(_hidden(config, columns), columns, garbage) for columns in part]
    rows["shifted_labels"] = [columns["labels"].masked_fill(~columns["counted"], config.ignore_idx) for columns in part]
    if packed:
        laid: dict[str, Any] = {name: torch.cat(values)[None] for name, values in rows.items()}
    else:
        fill = {"shifted_labels": config.ignore_idx}
        laid = {
            name: torch.nn.utils.rnn.pad_sequence(
                values, batch_first=True, padding_value=fill.get(name, garbage if values[0].is_floating_point() else 0)
            )
            for name, values in rows.items()
        }
    hidden = laid.pop("hidden")
    if packed:
        laid["num_tokens"] = lengths
    if "group_ids" in part[0]:
        laid["group_ids"] = torch.tensor([prompts[int(columns["group_ids"][0])] for columns in part])
        laid["num_prompts"] = len(prompts)
    return laid, hidden


def head_of(config: BaseLossConfig, vocabulary: int) -> tuple[Tensor, dict[str, Any]]:
    """Returns the head for which hidden states are logits, and what else `forward` takes."""
    if isinstance(config, ValueLossConfig):
        return torch.ones(1, 1, dtype=torch.float64), {}
    if isinstance(config, ActorCriticLossConfig):
        wide = torch.eye(vocabulary + 1, dtype=torch.float64)
        return wide[:-1], {"value_weight": wide[-1:]}
    return torch.eye(vocabulary, dtype=torch.float64), {}


def names_of(sequences: list[Sequence]) -> list[str]:
    """Returns a name for each sequence: a, b, c, ..."""
    return list(itertools.islice("abcdefghijklmnop", len(sequences)))


def _column(values: Any) -> Tensor:
    column = torch.as_tensor(values)
    return column.double() if column.is_floating_point() else column


def _hidden(config: BaseLossConfig, columns: Sequence) -> Tensor:
    if isinstance(config, ValueLossConfig):
        return columns["value"][:, None]
    if isinstance(config, ActorCriticLossConfig):
        return torch.cat([columns["logits"], columns["value"][:, None]], dim=1)
    return columns["logits"]


def _filled(columns: Sequence, name: str, garbage: float) -> Tensor:
    return _cleaned(columns[name], columns, garbage if columns[name].is_floating_point() else 0)


def _cleaned(values: Tensor, columns: Sequence, fill: float) -> Tensor:
    ignored = ~columns["counted"]
    return values.masked_fill(ignored[:, None] if values.ndim == 2 else ignored, fill)


def _random(config: BaseLossConfig, number: int, length: int, generator: torch.Generator) -> Sequence:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = (1.5 * normal(length, VOCABULARY)).log_softmax(-1)
    labels = torch.randint(0, VOCABULARY, (length,), generator=generator)
    log_prob = logits.gather(1, labels[:, None]).squeeze(1)
    known = {
        "advantages": (normal(1) + 0.5).expand(length),
        **{name: log_prob + 0.15 * normal(length) for name in ("old_logprobs", "rollout_logprobs")},
        **{name: log_prob + 0.3 * normal(length) for name in ("ref_logprobs", "teacher_logprobs")},
        "selection_logprobs": log_prob + 0.05 * normal(length),
        "selection_entropy": normal(length).abs(),
        "values": normal(length),
        "returns": normal(length),
        "teacher_topk_ids": torch.arange(TEACHER_WORDS).expand(length, -1),
        "teacher_topk_logprobs": normal(length, TEACHER_WORDS).log_softmax(-1),
        "part_ids": torch.full((length,), number % len(getattr(config, "parts", "x"))),
        "group_ids": torch.full((length,), number // 2),
    }
    fields = {
        batch_key(kwargs, name): (kwargs.role(name), field.is_required())
        for kwargs in _kwargs_classes(config)
        for name, field in kwargs.model_fields.items()
    }
    foreign = [
        name
        for name, (role, required) in fields.items()
        if required and isinstance(role, PerToken) and name not in known
    ]
    return {
        **{name: normal(length) for name in foreign if name != "shifted_labels"},
        **{name: values for name, values in known.items() if name in fields},
        "logits": logits,
        "labels": labels,
        "value": normal(length),
        "counted": torch.arange(length) >= length // 3,
    }


def _kwargs_classes(config: BaseLossConfig) -> list[type[BaseLossKwargs]]:
    """The kwargs classes of a loss, and of the losses that it is made of."""
    parts = config.parts.values() if isinstance(config, MixedLossConfig) else ()
    return [config._loss_kwargs_cls, *(kwargs for part in parts for kwargs in _kwargs_classes(part))]
