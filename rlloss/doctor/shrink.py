"""Makes sequences smaller and their numbers simpler, as long as the same fault shows."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlloss.doctor.sequences import Sequence, log_probs, two_words

Fails = Callable[[list[Sequence]], bool]
TRIES = 150
"""A shrink stops after so many tries, wherever it is."""

PLAIN: dict[str, tuple[float, ...]] = {"advantages": (1.0, -1.0, 2.0), "log_prob": (-1.0,), "selection_entropy": (1.0,)}
"""Numbers that are simple for a column; 0 and 1 for those not named, -1 where its name ends in logprobs."""


def shrink(sequences: list[Sequence], fails: Fails) -> list[Sequence]:
    """Returns a smallest list of sequences that still fails: fewer sequences, fewer tokens, plain numbers.

    Args:
        sequences: A list that fails.
        fails: Whether a list shows the same fault.
    """
    tries = itertools.count()

    def still(candidate: list[Sequence]) -> bool:
        return next(tries) < TRIES and fails(candidate)

    sequences = _first(_fewer_sequences(sequences), still, sequences)
    sequences = _first(iter([[_two_words(columns) for columns in sequences]]), still, sequences)
    sequences = _fewer_tokens(sequences, still)
    for name in [name for name in sequences[0] if name not in ("labels", "logits", "counted")]:
        sequences = _first(_without(sequences, name), still, sequences)
    for name in ["log_prob", *_number_columns(sequences)]:
        sequences = _plainer(sequences, name, still)
    return _fewer_tokens(sequences, still)


def _first(candidates: Iterator[list[Sequence]], still: Fails, otherwise: list[Sequence]) -> list[Sequence]:
    return next((candidate for candidate in candidates if still(candidate)), otherwise)


def _fewer_sequences(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    shortest = sorted(sequences, key=lambda columns: len(columns["labels"]))
    for size in range(1, min(3, len(sequences))):
        yield from (list(chosen) for chosen in itertools.combinations(shortest, size))


def _fewer_tokens(sequences: list[Sequence], still: Fails) -> list[Sequence]:
    for place in range(len(sequences)):
        length = len(sequences[place]["labels"])
        for keep in ([index] for index in range(length)):
            if length == 1:
                break
            candidate = _with_tokens(sequences, place, keep)
            if still(candidate):
                sequences = candidate
                break
        else:
            for token in reversed(range(length)):
                keep = [index for index in range(len(sequences[place]["labels"])) if index != token]
                candidate = _with_tokens(sequences, place, keep)
                if len(keep) > 1 and still(candidate):
                    sequences = candidate
    return sequences


def _with_tokens(sequences: list[Sequence], place: int, keep: list[int]) -> list[Sequence]:
    shorter = {name: values[keep] for name, values in sequences[place].items()}
    return [shorter if index == place else columns for index, columns in enumerate(sequences)]


def _two_words(columns: Sequence) -> Sequence:
    plain = {"logits": two_words(log_probs(columns)), "labels": torch.zeros_like(columns["labels"])}
    return {**columns, **plain}


def _without(sequences: list[Sequence], name: str) -> Iterator[list[Sequence]]:
    yield [{key: values for key, values in columns.items() if key != name} for columns in sequences]


def _number_columns(sequences: list[Sequence]) -> list[str]:
    first = sequences[0]
    return [name for name, values in first.items() if values.is_floating_point() and values.ndim == 1]


def _plainer(sequences: list[Sequence], name: str, still: Fails) -> list[Sequence]:
    """Tries plain numbers for a whole column, then for each sequence, then for each token, then fewer digits."""
    if name == "log_prob" and sequences[0]["logits"].shape[1] != 2:
        return sequences
    numbers = PLAIN.get(name, (-1.0, -2.0) if name.endswith("logprobs") else (0.0, 1.0))
    before = [_read(columns, name) for columns in sequences]
    alike = [[torch.full_like(column, number) for column in before] for number in numbers]
    if name.endswith("logprobs"):
        alike.insert(0, [log_probs(columns) for columns in sequences])
    if name == "advantages":
        alike.append([column.sign() for column in before])
    for columns in alike:
        candidate = _write(sequences, name, columns)
        if still(candidate):
            return candidate
    for place, number in itertools.product(range(len(sequences)), numbers):
        column = [values.clone() for values in (_read(one, name) for one in sequences)]
        column[place].fill_(number)
        if not torch.equal(column[place], _read(sequences[place], name)) and still(_write(sequences, name, column)):
            sequences = _write(sequences, name, column)
    for digits in (0, 1, 2):
        candidate = _write(sequences, name, [_read(columns, name).round(decimals=digits) for columns in sequences])
        if still(candidate):
            return candidate
    return sequences


def _read(columns: Sequence, name: str) -> Tensor:
    return log_probs(columns) if name == "log_prob" else columns[name]


def _write(sequences: list[Sequence], name: str, columns: list[Tensor]) -> list[Sequence]:
    if name != "log_prob":
        return [{**one, name: column} for one, column in zip(sequences, columns, strict=True)]
    return [{**one, "logits": two_words(column)} for one, column in zip(sequences, columns, strict=True)]
