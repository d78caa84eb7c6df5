"""Several losses in one batch: each on its own sequences, with its own denominator, through one head.

    MixedLossConfig(parts={"rl": GRPOLossConfig(...), "sft": CELossConfig()})

A part is calibrated by itself, exactly as if its sequences were the whole step; forward projects the tokens of all
parts once, and gives each part the rows that are its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, PrivateAttr, SerializeAsAny, field_serializer, field_validator, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import BatchError, require_known
from rlloss.heads import HeadOptions, Objective, TokenStats
from rlloss.losses.batch import check_field, packed_mapping
from rlloss.losses.calibration import calibrate
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.mixed_parts import (
    MixedLossKwargs,
    PartReader,
    check_places,
    class_name,
    config_from_fields,
    picked,
    with_shared,
    world_of,
)
from rlloss.losses.seen import Seen
from rlloss.losses.step_check import check_step, is_list
from rlloss.losses.terms import LEVELS, Level
from rlloss.losses.token_record import TokenRecord, joined
from rlloss.losses.totals import Totals
from rlloss.metrics import Metric, Sum

C = TypeVar("C", bound="MixedLossContext")

_SHARED = tuple(name for name in BaseLossConfig.model_fields if name != "entropy_metric")


class MixedLossConfig(BaseLossConfig):
    """`loss = sum_k coef_k loss_k`, where part k is about the tokens whose `part_ids` is k.

    The batch holds `part_ids`, one integer for each token `[B, T]` or sequence `[S]`: the place of its part in `parts`,
    or -1 for none. The other keys are those that the parts need; what a part does not read may hold anything.
    Fields of the head (`mode`, `temperature`, ...) are given here and hold for all parts.

    Example:
        >>> from rlloss import CELossConfig, GRPOLossConfig, MixedLossConfig
        >>> cfg = MixedLossConfig(parts={"rl": GRPOLossConfig(), "sft": CELossConfig()}, mode="chunk")
        >>> cfg.parts["sft"].mode
        'chunk'
    """

    parts: dict[str, SerializeAsAny[BaseLossConfig]] = Field(min_length=1)
    """The losses by name; their order is that of `part_ids`. A dict names its class: {"loss": "CELossConfig", ...}."""
    coefs: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    """Factors of parts, 1 where none is given."""
    _given: dict[str, BaseLossConfig] = PrivateAttr(default_factory=dict)
    """The parts as they were given, before the fields of the head were set in them."""
    _shared: dict[str, BaseLossConfig] = PrivateAttr(default_factory=dict)

    @field_validator("parts", mode="before")
    @classmethod
    def _find_classes(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: config_from_fields(part) if isinstance(part, Mapping) else part for name, part in given.items()}

    @field_serializer("parts")
    def _name_classes(self, parts: dict[str, BaseLossConfig]) -> dict[str, Any]:
        return {name: {"loss": class_name(type(part)), **part.model_dump()} for name, part in parts.items()}

    @model_validator(mode="after")
    def _check_parts(self) -> "MixedLossConfig":
        for name in self.coefs:
            require_known("part in coefs", name, self.parts)
        if self.parts is not self._shared:
            self._given = self.parts
        shared = {name: getattr(self, name) for name in _SHARED}
        # Not an assignment of the field: that would validate, and come back here.
        self.__dict__["parts"] = {name: with_shared(name, part, shared) for name, part in self._given.items()}
        self._shared = self.parts
        return self

    def given_fields(self) -> dict[str, Any]:
        """The fields as they were given; the parts without those of the head, which are set in them anew."""
        return super().given_fields() | {"parts": self._given}

    def __eq__(self, other: object) -> bool:
        # Not the private fields: how the parts were given does not matter.
        return isinstance(other, MixedLossConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    @property
    def loss_ctx_cls(self) -> type["MixedLossContext"]:
        """`MixedLossContext`."""
        return MixedLossContext

    @property
    def _loss_kwargs_cls(self) -> type["MixedLossKwargs"]:
        return MixedLossKwargs

    def level(self) -> Level:
        """The highest level among the parts."""
        levels = (part.loss_ctx_cls.level or part.level() for part in self.parts.values())
        return max(levels, key=LEVELS.index)

    def head_options(self) -> HeadOptions:
        """What any of the parts needs."""
        wanted = [super().head_options().entropy, *(part.head_options().entropy for part in self.parts.values())]
        options = super().head_options()
        order = ("none", "value", "gradient")
        return HeadOptions(**{**options.__dict__, "entropy": max(wanted, key=order.index)})

    def build(self, data: Mapping[str, Any], sp_mesh: DeviceMesh | None = None) -> "MixedLossContext":
        """Builds one context of every part from one batch; see `BaseLossConfig.build`.

        Raises:
            BatchError: `part_ids` is missing or names no part, or a part misses what it needs.
        """
        context: Any = super().build(data, sp_mesh)
        packed = packed_mapping(data)
        for name, part in self.parts.items():
            context.parts[name] = part.build(packed, sp_mesh)
        context.check()
        context.loss_kwargs.set_computed("keep_mask", context.loss_kwargs.part_ids >= 0)
        return context  # type: ignore[no-any-return]


class MixedLossContext(BaseLossContext):
    """Several losses on one micro-batch.

    Attributes:
        parts: The context of each part by name.
    """

    loss_cfg: MixedLossConfig
    loss_kwargs: MixedLossKwargs
    parts: dict[str, BaseLossContext]

    def __init__(self, loss_cfg: Any, loss_kwargs: Any) -> None:
        super().__init__(loss_cfg, loss_kwargs)
        self.parts = {}
        self._cut: tuple[Seen, Seen] | None = None

    def check(self) -> None:
        """Hook of `build_batches`: gives each part the labels of its own tokens, anew where labels or ids are others.

        Raises:
            BatchError: `part_ids` names no part.
        """
        if self._is_cut():
            return
        ids, labels, ignored = self.loss_kwargs.part_ids, self.loss_kwargs.shifted_labels, self.loss_cfg.ignore_idx
        check_places(ids[labels != ignored], self.parts)
        for place, part in enumerate(self.parts.values()):
            part.loss_kwargs.shifted_labels = labels.masked_fill(ids != place, ignored)
        self._cut = (Seen.of(labels), Seen.of(ids))

    def _is_cut(self) -> bool:
        """Whether the parts have the labels that labels and ids give them."""
        check_field(self.loss_kwargs, "part_ids")
        labels, ids, ignored = self.loss_kwargs.shifted_labels, self.loss_kwargs.part_ids, self.loss_cfg.ignore_idx
        if self._cut is not None and self._cut[0].is_still(labels) and self._cut[1].is_still(ids):
            return True
        own = [part.loss_kwargs.shifted_labels for part in self.parts.values()]
        same = all(torch.equal(labels.masked_fill(ids != place, ignored), given) for place, given in enumerate(own))
        self._cut = (Seen.of(labels), Seen.of(ids)) if same else None
        return same

    @staticmethod
    def build_batches(  # type: ignore[override]
        loss_ctx_list: list[C],
        cu_seq_lens_list: Sequence[Tensor] | None = None,
        sp_mesh: DeviceMesh | None = None,
        group: Group = None,
        totals: Mapping[str, Totals] | None = None,
    ) -> list[C]:
        """Calibrates every part over all micro-batches and ranks: one collective for each part.

        Args:
            loss_ctx_list: The contexts of every micro-batch of the step on this rank.
            cu_seq_lens_list: Offsets of packed sequences, where the batches did not hold them.
            sp_mesh: Sequence-parallel mesh.
            group: Ranks that hold parts of the step.
            totals: Known counts of parts, by name.

        Raises:
            BatchError: The list is empty, totals do not fit the parts or each other, or a part lacks what it needs; on
                every rank, if on one.
        """
        if not loss_ctx_list or not is_list(loss_ctx_list):
            return BaseLossContext.build_batches(loss_ctx_list, group=group)  # an error on every rank
        contexts: list[Any] = list(loss_ctx_list)
        world, problem = None, None
        try:
            world = world_of(totals, contexts[0].parts)
            check_step(contexts, cu_seq_lens_list, sp_mesh, group)
        except Exception as error:  # whatever it is: the other ranks must not wait for this one
            problem = error
        for name in contexts[0].parts:
            own = [context.parts[name] for context in contexts]
            given = Totals() if problem else replace((totals or {}).get(name) or Totals(), world=world)
            calibrate(own, cu_seq_lens_list, sp_mesh, group, given, problem)
        for context in contexts:
            kwargs = context.loss_kwargs
            keep = kwargs.part_ids >= 0
            for place, part in enumerate(context.parts.values()):
                kept = part.loss_kwargs.keep_mask
                if kept is not None:
                    keep = keep & (kept | (kwargs.part_ids != place))
            kwargs.set_computed("keep_mask", keep)
            context._batch_size, context._group, context._world = len(contexts), group, world
            sizes = torch.stack([part.layout.segments.sizes for part in context.parts.values()]).sum(dim=0)
            context.know_segments(replace(context.layout.segments, known_sizes=sizes))
        return loss_ctx_list

    @classmethod
    def cat(cls: type[C], chunks: list[C]) -> C:
        """Joins packed contexts along T, part by part."""
        joined = super().cat(chunks)
        joined._cut = None
        joined.parts = {
            name: type(part).cat([chunk.parts[name] for chunk in chunks]) for name, part in chunks[0].parts.items()
        }
        return joined

    def extra_ids(self) -> Tensor | None:
        """More words of each token, `[N, K]`: those of the part that it belongs to, 0 elsewhere."""
        found = {name: part.extra_ids() for name, part in self.parts.items()}
        given = {name: ids for name, ids in found.items() if ids is not None}
        if not given:
            return None
        width = max(ids.shape[1] for ids in given.values())
        joined = next(iter(given.values())).new_zeros((self.layout.num_tokens, width))
        for name, ids in given.items():
            rows = self._rows_of(name)
            joined = joined.index_put((rows[:, None], torch.arange(ids.shape[1], device=ids.device)[None]), ids)
        return joined

    def token_loss(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Evaluates all parts on all tokens at once."""
        return self._evaluator()(stats, slice(0, self.layout.num_tokens))  # type: ignore[no-any-return]

    def _objective(self) -> Objective:
        return Objective(self._evaluator(), additive=self.loss_cfg.level() != "sequence")

    def _rows_of(self, name: str) -> Tensor:
        """The rows of a part among the tokens that count, in order."""
        if not self._is_cut():
            raise BatchError(
                "part_ids or shifted_labels are others than those that build_batches gave to the parts. Call "
                "build_batches after setting them."
            )
        place = list(self.parts).index(name)
        return (self.layout.take(self.loss_kwargs.part_ids) == place).nonzero().squeeze(1)

    def _evaluator(self) -> Any:
        """The loss over a slice of tokens; which of them belong to a part is read by the host once."""
        readers = [PartReader(context, self._rows_of(name)) for name, context in self.parts.items()]
        names, coefs = list(self.parts), self.loss_cfg.coefs

        def loss_of(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Metric]]:
            total = stats.log_prob.new_zeros(())
            metrics: dict[str, Metric] = {}
            for name, reader in zip(names, readers, strict=True):
                loss, found = reader(stats, rows)
                loss = coefs.get(name, 1.0) * loss
                metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
                metrics[f"{name}/loss"] = Sum(loss.detach().double())
                total = total + loss.to(total.dtype)
            return total, metrics

        return loss_of

    def token_record(self, stats: TokenStats) -> TokenRecord:
        """The records of all parts, each on its own rows; `shares` are named `part/term`."""
        found = []
        for name, part in self.parts.items():
            rows = self._rows_of(name)
            own = part.token_record(picked(stats, rows, part.layout.segments))
            found.append((name, rows, own, self.loss_cfg.coefs.get(name, 1.0)))
        return joined(found, stats.log_prob)

    def _counted(self) -> dict[str, Metric]:
        counts = super()._counted()
        for name, part in self.parts.items():
            counts |= {f"{name}/{metric}": value for metric, value in part._counted().items()}
        return counts
