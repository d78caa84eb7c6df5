"""Everything a loss needs of a batch, in one record whose annotations say how each field travels."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from torch import Tensor

from rlloss.errors import BatchError, nearest
from rlloss.layout import Shard, TokenLayout, normal


@dataclass(frozen=True)
class PerToken:
    """A tensor `[B, T]` aligned with the labels.

    Attributes:
        pad: Value of positions that are added at the end.
        kind: "number" (integers become float32), "mask" (any type becomes bool), "id" (integers) or "label".
        wide: Whether each token has several numbers, `[B, T, K]`.
        spread: Whether the batch may give one number for each sequence instead.
        key: Its key in a batch, where that differs from the field's name.
    """

    pad: float = 0.0
    kind: str = "number"
    spread: bool = False
    key: str = ""
    wide: bool = False


@dataclass(frozen=True)
class PerSequence:
    """A tensor `[S]`, one number for each sequence."""


@dataclass(frozen=True)
class Offsets:
    """Offsets `[S+1]` of packed sequences."""


@dataclass(frozen=True)
class Computed:
    """A field that `build_batches` makes anew; a batch may not hold it.

    Attributes:
        refuses: Whether `build_batches` refuses a value that somebody else assigned, instead of replacing it.
    """

    refuses: bool = False


TokenTensor = Annotated[Tensor | None, PerToken()]
WeightTensor = Annotated[Tensor | None, PerToken(), Computed()]
SequenceTensor = Annotated[Tensor | None, PerSequence()]

K = TypeVar("K", bound="BaseLossKwargs")


class BaseLossKwargs(BaseModel):
    """Tensors of one micro-batch. Fields may be assigned at any time; tensors are never written into.

    Attributes:
        shifted_labels: `[B, T]` integers; entry t is the label that `hidden_states[:, t]` predicts.
        cu_seq_lens: `[S+1]` int32 offsets of packed sequences, or None: each row is one sequence.
        temperature: `[B, T]`, or None: the config's.
        keep_mask: `[B, T]` bool, tokens that calibration kept; None: all whose label is not ignored.
        group_ids: `[S]` int64, the prompt of each sequence, dense over the whole step.
        num_prompts: Number of prompts of the whole step.
        loss_weight: `[B, T]`, the token weights of a loss with a single term.
        global_grad_tokens: 0-dim, number of tokens that count in the whole step.
        shard: Which part of whole rows the per-token fields are, under sequence parallelism (made by `build`).
    """

    model_config = ConfigDict(title="loss keyword arguments", extra="forbid", arbitrary_types_allowed=True)

    shifted_labels: Annotated[Tensor, PerToken(-100, kind="label")]
    cu_seq_lens: Annotated[Tensor | None, Offsets()] = None
    temperature: Annotated[Tensor | None, PerToken(1.0, spread=True)] = None
    keep_mask: Annotated[Tensor | None, PerToken(kind="mask"), Computed(refuses=True)] = None
    group_ids: SequenceTensor = None
    num_prompts: int | None = None
    loss_weight: WeightTensor = None
    global_grad_tokens: Annotated[Tensor | None, Computed()] = None
    shard: Shard | None = None

    # Travels with every copy (`to`, `cat`, `take`), which the identity of a tensor does not.
    _computed: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise BatchError(f"{type(self).__name__}: {found}.") from error

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields and not hasattr(type(self), name) and not name.startswith("_"):
            raise BatchError(f"{type(self).__name__} has no field {name!r}.{nearest(name, type(self).model_fields)}")
        super().__setattr__(name, value)
        if name in self._computed:
            self._computed -= {name}

    def set_computed(self, name: str, value: Any) -> None:
        """Assigns a field that was computed here, and is computed anew by the next `build_batches`."""
        setattr(self, name, value)
        self._computed |= {name}

    def given(self, name: str) -> Any:
        """Returns a field, unless `set_computed` assigned it: then None."""
        return None if name in self._computed else getattr(self, name)

    @classmethod
    def role(cls, name: str) -> object:
        """Returns the annotation of a field that says how it travels, or None."""
        roles = (PerToken, PerSequence, Offsets)
        return next((note for note in cls.model_fields[name].metadata if isinstance(note, roles)), None)

    @classmethod
    def is_computed(cls, name: str) -> bool:
        """Tells whether `build_batches` makes a field."""
        return cls._computed_note(name) is not None

    @classmethod
    def _computed_note(cls, name: str) -> Computed | None:
        field = cls.model_fields.get(name)
        return next((note for note in field.metadata if isinstance(note, Computed)), None) if field else None

    def refuse_assigned(self) -> None:
        """Refuses a value that would be replaced without a word.

        Raises:
            BatchError: A field that says so was assigned by somebody else than `build_batches`.
        """
        for name in type(self).model_fields:
            note = self._computed_note(name)
            if note is not None and note.refuses and self.given(name) is not None:
                raise BatchError(
                    f"loss_kwargs.{name} was assigned, but build_batches computes it and would replace it. Leave it "
                    f"alone: a token that does not count has the label ignore_idx, and is_weights weigh single tokens."
                )

    def is_per_token(self, name: str) -> bool:
        """Tells whether a field is one tensor `[B, T, ...]`: by its annotation, else by its shape."""
        value = getattr(self, name)
        if not isinstance(value, Tensor):
            return False
        role = self.role(name)
        if role is not None:
            return isinstance(role, PerToken)
        if self.shard is not None and value.ndim >= 2 and value.shape[1] == self.shard.length:
            return bool(value.shape[0] == self.shifted_labels.shape[0])
        return value.ndim >= 2 and value.shape[:2] == self.shifted_labels.shape[:2]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the fields that hold a tensor."""
        return {name: value for name, value in self if isinstance(value, Tensor)}

    def with_tensors(self: K, changed: dict[str, Any]) -> K:
        """Returns a copy with some fields replaced; the other tensors are shared."""
        return self.model_copy(update=changed)

    def to(self: K, device: torch.device | str) -> K:
        """Returns a copy whose tensors are on `device`."""
        return self.with_tensors({name: value.to(device) for name, value in self.tensors().items()})

    def take(self: K, layout: TokenLayout) -> K:
        """Returns a copy whose per-token fields are flat: only the tokens that count, `[N, ...]`, without a graph.

        They share no memory with these: a loss that writes into its arguments must not change the user's batch.
        """
        flat = {name: layout.take(value) for name, value in self.tensors().items() if self.is_per_token(name)}
        if layout.index is None:
            flat = {name: value.clone() for name, value in flat.items()}
        taken = {name: normal(value) for name, value in self.tensors().items()} | flat
        return self.with_tensors({name: value.detach() for name, value in taken.items()})

    def rows(self: K, part: slice, names: list[str]) -> K:
        """Returns a copy of flat kwargs with a slice of the given per-token fields."""
        return self.with_tensors({name: getattr(self, name)[part] for name in names})

    def chunk(self: K, chunk_size: int) -> list[K]:
        """Splits the per-token fields along T; every other field travels whole with each chunk."""
        names = [name for name in self.tensors() if self.is_per_token(name)]
        pieces = {name: getattr(self, name).split(chunk_size, dim=1) for name in names}
        count = len(pieces["shifted_labels"])
        return [self.with_tensors({name: pieces[name][i] for name in names}) for i in range(count)]

    @classmethod
    def cat(cls: type[K], chunks: list[K]) -> K:
        """Joins packed rows along T; offsets are shifted, per-sequence fields joined, all else is the first's.

        A row without offsets is one sequence, and stays one.

        Raises:
            BatchError: A field is set in some of the chunks only, or a chunk has several rows.
        """
        if not chunks:
            raise BatchError(f"{cls.__name__}.cat got an empty list; expected at least one.")
        if any(chunk.shard is not None for chunk in chunks):
            raise BatchError(
                f"{cls.__name__}.cat: the rows are split over a sequence-parallel mesh, and parts of different rows do "
                f"not join to the part of a longer row. Join the batches before build."
            )
        rows = [int(chunk.shifted_labels.shape[0]) for chunk in chunks]
        if len(chunks) > 1 and set(rows) != {1}:
            raise BatchError(
                f"{cls.__name__}.cat joins packed rows [1, T], but the chunks have {rows} rows: sequences side by side "
                f"would run into each other. Pack them into one row, with num_tokens, before build."
            )
        joined = chunks[0].with_tensors({name: _cat_field(cls, name, chunks) for name, _ in chunks[0]})
        assigned = {name for name, _ in joined if any(chunk.given(name) is not None for chunk in chunks)}
        joined._computed = frozenset().union(*(chunk._computed for chunk in chunks)) - assigned
        return joined


def _cat_field(cls: type[BaseLossKwargs], name: str, chunks: list[Any]) -> Any:
    values = [getattr(chunk, name) for chunk in chunks]
    missing = [value is None for value in values]
    if isinstance(cls.role(name), Offsets):
        return values[0] if len(chunks) == 1 else _cat_offsets(chunks)
    if name == "keep_mask" and not all(missing):
        return torch.cat([_kept(chunk) for chunk in chunks], dim=1)
    if any(missing) and not all(missing):
        raise BatchError(
            f"{cls.__name__}.cat: {name} is set in some of the chunks only. Set it in all of them, or in none."
        )
    if isinstance(cls.role(name), PerSequence) and not all(missing):
        return torch.cat(values)
    if all(chunk.is_per_token(name) for chunk in chunks):
        return torch.cat(values, dim=1)
    return values[0]


def _kept(chunk: Any) -> Tensor:
    if chunk.keep_mask is None:
        return torch.ones_like(chunk.shifted_labels, dtype=torch.bool)
    return chunk.keep_mask  # type: ignore[no-any-return]


def _cat_offsets(chunks: list[Any]) -> Tensor:
    pieces, start = [], 0
    for chunk in chunks:
        length = int(chunk.shifted_labels.shape[1])
        offsets = chunk.cu_seq_lens
        if offsets is None:
            offsets = torch.tensor([0, length], device=chunk.shifted_labels.device, dtype=torch.int32)
        pieces.append(offsets[1:] + start)
        start += length
    return torch.cat([pieces[0].new_zeros(1), *pieces])
