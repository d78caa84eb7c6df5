"""Pydantic bases: a strict model whose errors name the nearest field, and the config of all losses."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.errors import ConfigError
from rlloss.heads import HeadOptions
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.peer_fields import choice_hint, field_hint
from rlloss.losses.terms import LEVELS, Level, Term

if TYPE_CHECKING:
    from rlloss.losses.context import BaseLossContext


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown fields and raises `ConfigError` with plain sentences."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, validate_assignment=True, ser_json_inf_nan="constants"
    )

    def __init__(self, **fields: Any) -> None:
        with _named_errors(type(self)):
            super().__init__(**fields)

    @classmethod
    def model_validate(cls, *args: Any, **options: Any) -> Self:
        """Pydantic's, with our error."""
        with _named_errors(cls):
            return super().model_validate(*args, **options)

    @classmethod
    def model_validate_json(cls, *args: Any, **options: Any) -> Self:
        """Pydantic's, with our error."""
        with _named_errors(cls):
            return super().model_validate_json(*args, **options)

    @classmethod
    def model_validate_strings(cls, *args: Any, **options: Any) -> Self:
        """Pydantic's, with our error."""
        with _named_errors(cls):
            return super().model_validate_strings(*args, **options)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy; unlike in pydantic, changed fields are checked as those of a new config are.

        Raises:
            ConfigError: A changed field is unknown, or does not fit.
        """
        copied = super().model_copy(deep=deep)
        return type(self)(**{**copied.given_fields(), **update}) if update else copied

    def given_fields(self) -> dict[str, Any]:
        """The fields that were set, as they were given: what a new config like this one is made of."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def __setattr__(self, name: str, value: Any) -> None:
        before = dict(self.__dict__)
        try:
            with _named_errors(type(self)):
                super().__setattr__(name, value)
        except ConfigError:
            # Checks over several fields see the new value in place; a refused one must not stay there.
            self.__dict__.clear()
            self.__dict__.update(before)
            raise


@contextlib.contextmanager
def _named_errors(model: type[BaseModel]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(model, item) for item in error.errors())) from error


def _sentence(model: type[BaseModel], item: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(model, item["loc"][:-1])
        return f"{model.__name__}: unknown field {path!r}.{field_hint(str(item['loc'][-1]), known)}"
    cause = item.get("ctx", {}).get("error") if item["type"] != "json_invalid" else item["msg"]
    if isinstance(cause, ConfigError):
        return str(cause) if str(cause).startswith(model.__name__) else f"{model.__name__}: {cause}"
    if cause is not None:
        return f"{model.__name__}: {cause}"
    if item["type"] == "missing":
        return f"{model.__name__}: field {path!r} is required"
    given = repr(item["input"]) if len(repr(item["input"])) < 100 else f"{repr(item['input'])[:97]}..."
    choices = re.findall("'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []
    hint = choice_hint(item["input"], choices)
    return f"{model.__name__}: {path + '=' if path else ''}{given}: {item['msg']}{'.' if hint else ''}{hint}"


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    kind: Any = model
    for part in path:
        if isinstance(part, int):
            kind = next(iter(get_args(kind)), None)
        else:
            field = getattr(kind, "model_fields", {}).get(part)
            kind = None if field is None else field.annotation
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "model_fields", ()))


class BaseLossConfig(StrictModel):
    """Fields that every loss has.

    To declare a loss of your own: return your context and kwargs classes from `loss_ctx_cls` and `_loss_kwargs_cls`.
    """

    ignore_idx: int = -100
    """Label of tokens that do not count."""
    mode: Literal["eager", "chunk", "liger"] = "eager"
    """How the head is evaluated: whole logits, chunk by chunk with gradients in forward, or by liger_kernel."""
    chunk_size: int | None = Field(default=1024, ge=1)
    """Tokens of one chunk in chunk mode; None chooses from the shape."""
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """The logits are divided by it; a `temperature` in the batch takes its place."""
    logit_scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """The logits are multiplied by it (a model that divides by s: give 1/s)."""
    logit_softcap: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Final soft cap c of the logits, `c * tanh(logits / c)`."""
    logits_dtype: Literal["auto", "float32"] = "auto"
    """float32 forms the logits in float32 out of 16-bit inputs; auto rounds them as the model's own forward does."""
    skip_zero_rows: bool = True
    """Leave tokens whose gradient is exactly zero out of the backward products (one host read for each chunk)."""
    entropy_metric: bool = False
    """Report the mean entropy even when the loss does not need it."""
    reduce_loss: bool = True
    """Return the global loss from `forward` (one collective); False returns this rank's share, without one."""
    grad_reduction: Literal["mean", "sum"] = "mean"
    """What the wrapper does with gradients over ranks: DDP and FSDP average them."""
    check_finite: bool = False
    """Raise `BatchError` in `build_batches` when a number at a valid token is NaN (one host read)."""

    _liger_refuses: ClassVar[tuple[str, ...]] = ("logit_softcap", "logit_scale", "entropy_metric")

    @model_validator(mode="after")
    def _check_mode(self) -> "BaseLossConfig":
        if self.mode == "liger":
            for name in self._liger_refuses:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ConfigError(
                        f"{type(self).__name__}: mode='liger' does not support {name}={getattr(self, name)!r}. "
                        f"Use mode='chunk', or leave {name} at its default."
                    )
            self._refuse_loss_on_logits()
        return self

    def _refuse_loss_on_logits(self) -> None:
        from rlloss.losses.context import BaseLossContext

        if type(self).loss_ctx_cls is BaseLossConfig.loss_ctx_cls:
            return
        if self.loss_ctx_cls.loss_fn is not BaseLossContext.loss_fn:
            raise ConfigError(
                f"{type(self).__name__}: {self.loss_ctx_cls.__name__} overrides loss_fn, which sees logits; "
                "mode='liger' never forms them. Use mode='chunk'."
            )

    @model_validator(mode="after")
    def _check_length(self) -> "BaseLossConfig":
        reductions = [getattr(self, name, None) for name in ("loss_reduction", "entropy_reduction")]
        constant, length = "constant" in reductions, getattr(self, "loss_length", None)
        if constant and "loss_length" not in type(self).model_fields:
            raise ConfigError(
                f"{type(self).__name__}: the reduction 'constant' divides by a loss_length, which this loss does not "
                "have. Use loss_reduction='sequence_sum', and divide the loss by a length of your own."
            )
        if constant != (length is not None):
            raise ConfigError(
                f"{type(self).__name__}: loss_reduction={reductions[0]!r} with loss_length={length}. The constant "
                "reduction needs a loss_length (the longest response), and no other one takes it."
            )
        return self

    @property
    def loss_ctx_cls(self) -> "type[BaseLossContext]":
        """The context class that `build` returns."""
        raise NotImplementedError(f"{type(self).__name__} must return its context class from loss_ctx_cls")

    @property
    def _loss_kwargs_cls(self) -> type[BaseLossKwargs]:
        raise NotImplementedError(f"{type(self).__name__} must return its kwargs class from _loss_kwargs_cls")

    def terms(self) -> tuple[Term, ...]:
        """The list of terms that the loss is the sum of."""
        return ()

    def level(self) -> Level:
        """The highest level among the terms: over tokens, sequences, or the whole step."""
        return max((term.level for term in self.terms()), key=LEVELS.index, default="token")

    def head_options(self) -> HeadOptions:
        """What the head has to compute for this loss."""
        entropy_gradient = any(term.needs_entropy for term in self.terms())
        entropy = "gradient" if entropy_gradient else "value" if self.entropy_metric else "none"
        return HeadOptions(
            chunk_size=self.chunk_size,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            float32_logits=self.logits_dtype == "float32",
            entropy=entropy,  # type: ignore[arg-type]
            skip_zero_rows=self.skip_zero_rows,
        )

    def build(self, data: Mapping[str, Any], sp_mesh: DeviceMesh | None = None) -> "BaseLossContext":
        """Builds a context out of a batch; the mapping and its tensors are only read.

        Args:
            data: Batch, keys as the fields of the kwargs class; a value of None is an absent key. `shifted_labels`
                `[B, T]` is always required; other tensors are aligned with it.
            sp_mesh: Sequence-parallel mesh: rows are padded to a multiple of its ranks and split over them. A per-token
                tensor may be whole, or this rank's part already; offsets are those of the whole row.

        Returns:
            The context, not calibrated yet: hand it to `build_batches`.

        Raises:
            BatchError: A key is missing, or a tensor does not fit.
        """
        from rlloss.losses.batch import kwargs_of
        from rlloss.losses.sharding import shard_of, split_over_ranks

        context_cls, shard = self.loss_ctx_cls, shard_of(data, sp_mesh)
        kwargs = kwargs_of(self._loss_kwargs_cls, data, shard)
        if shard is not None:
            kwargs = split_over_ranks(kwargs.with_tensors({"shard": shard}), self.ignore_idx)
        context = context_cls(self, kwargs)
        context.check_labels()
        return context

    def empty(self, like: Mapping[str, Any], sp_mesh: DeviceMesh | None = None) -> "BaseLossContext":
        """Builds the context of a rank without data: the batch `like` with every label ignored."""
        from rlloss.losses.batch import packed_mapping

        data = packed_mapping(like)
        labels = data.get("shifted_labels")
        if isinstance(labels, Tensor):
            data["shifted_labels"] = labels.new_full(labels.shape, self.ignore_idx)
        return self.build(data, sp_mesh)
