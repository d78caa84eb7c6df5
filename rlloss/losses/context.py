"""The context: a config and one micro-batch, which together can be calibrated and evaluated."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import ConfigError
from rlloss.heads import HeadInputs, HeadOutput, Objective, TokenStats, run_head
from rlloss.heads.joint import evaluate_all
from rlloss.heads.per_chunk import evaluate_per_chunk
from rlloss.heads.vocab_parallel import Vocabulary, check_counted, refuse_vocabulary
from rlloss.layout import Segments, TokenLayout, from_jagged
from rlloss.losses.batch import LabelFacts
from rlloss.losses.chunk_kwargs import as_chunk
from rlloss.losses.head_inputs import head_inputs, stats_of_log_probs
from rlloss.losses.known_layout import KnownLayout, read_layout
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.output import LossDetails, LossOutput, over_ranks
from rlloss.losses.step_check import check_joinable
from rlloss.losses.terms import Level, evaluate
from rlloss.losses.token_record import TokenRecord, Watch, exported, flat_record, refuse_tokens
from rlloss.metrics import Metric, Sum, merge, require_metrics

if TYPE_CHECKING:
    from rlloss.losses.config import BaseLossConfig
    from rlloss.losses.totals import Totals

C = TypeVar("C", bound="BaseLossContext")


class BaseLossContext:
    """A loss on one micro-batch. The order of calls is `build`, `build_batches`, `forward`, `backward`.

    To write a loss of your own, override `token_loss` (runs in every mode) or `loss_fn` (sees logits; eager and chunk
    mode), and `build_batches` if your weights are not covered by terms.

    Args:
        loss_cfg: The config.
        loss_kwargs: The tensors of the micro-batch.
    """

    loss_cfg: "BaseLossConfig"
    loss_kwargs: BaseLossKwargs
    level: ClassVar[Level | None] = None
    """Set to "sequence" when an overridden `token_loss` looks across tokens; None takes the config's level."""

    def __init__(self, loss_cfg: Any, loss_kwargs: Any) -> None:
        self.loss_cfg = loss_cfg
        self.loss_kwargs = loss_kwargs
        self._batch_size = 1
        self._group: Group = None
        self._world: int | None = None
        self._dropped: Tensor | None = None
        self._step_metrics: dict[str, Metric] = {}
        self._known: KnownLayout | None = None

    @staticmethod
    def build_batches(
        loss_ctx_list: list[C],
        cu_seq_lens_list: Sequence[Tensor] | None = None,
        sp_mesh: DeviceMesh | None = None,
        group: Group = None,
        totals: "Totals | None" = None,
    ) -> list[C]:
        """Computes the token weights of one optimiser step over all its micro-batches and ranks.

        After it, the losses of the micro-batches add up to the loss of the whole step: nothing may be divided by the
        number of micro-batches or ranks afterwards. It may be called again; weights are assigned anew.

        Args:
            loss_ctx_list: The contexts of every micro-batch of the step on this rank, at least one.
            cu_seq_lens_list: Offsets of packed sequences, where the batches did not hold them.
            sp_mesh: Sequence-parallel mesh.
            group: Ranks that hold parts of the step; None is every rank.
            totals: Counts that are known, and are taken instead of being counted.

        Returns:
            The same contexts.

        Raises:
            BatchError: The list is empty, or a batch lacks what its loss needs.
        """
        from rlloss.losses.calibration import calibrate

        return calibrate(loss_ctx_list, cu_seq_lens_list, sp_mesh, group, totals)

    def check(self) -> None:
        """Hook of `build_batches` before any collective: raises where a tensor is missing or does not fit."""

    def prepare(self) -> Tensor | None:
        """Hook of `build_batches` before anything is counted: tokens that leave the step, `[B, T]` bool, or None."""
        return None

    @property
    def selects_step(self) -> bool:
        """Whether `select_step` does anything; the same on every rank."""
        return False

    def select_step(self, contexts: Sequence[Any], group: Group) -> None:
        """Hook of `build_batches` for choices over the whole step, before anything is counted; runs collectives."""

    def extra_ids(self) -> Tensor | None:
        """Hook of `forward`: more words of each token whose log-probs the loss reads, `[N, K]` int64, or None."""
        return None

    def token_loss(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Evaluates the loss on log-probs; the default sums the config's terms.

        Args:
            stats: Log-probs, entropies and labels of the N tokens that count, and their sequences.
            loss_kwargs: The kwargs of the same tokens: per-token fields are `[N]`.

        Returns:
            A scalar, weighted by the weights in `loss_kwargs` and additive over tokens, and metrics.
        """
        return evaluate(self.loss_cfg.terms(), stats, loss_kwargs)

    def loss_fn(
        self, hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None, loss_kwargs: Any
    ) -> tuple[Tensor, tuple[Tensor | None, dict[str, Any]]]:
        """Evaluates the loss of some kwargs from hidden states, with whole logits.

        Override it to write a loss on logits; `loss_kwargs` holds one chunk of the tokens in chunk mode.

        Returns:
            `loss, (logits, extra)` of this rank, not reduced.
        """
        part = type(self)(self.loss_cfg, as_chunk(self, loss_kwargs))
        inputs = part._inputs(hidden_states, head_weight, head_bias)
        output = run_head("eager", inputs, self.loss_cfg.head_options(), part._objective())
        return output.loss, (output.logits, dict(output.metrics))

    def forward(
        self,
        hidden_states: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None = None,
        *,
        vocab_group: Group = None,
        vocab_mesh: DeviceMesh | None = None,
        return_tokens: bool = False,
    ) -> LossOutput:
        """Computes the loss of this micro-batch, its gradients, and its metrics.

        Args:
            hidden_states: `[B, T, H]`, or jagged `[B, j, H]`; entry t predicts `shifted_labels[:, t]`.
            head_weight: `[V, H]`.
            head_bias: `[V]` or None.
            vocab_group: Ranks that hold other rows of the weight and see the same tokens; eager and chunk mode.
            vocab_mesh: Their mesh instead, of one dimension; the weight may be a DTensor `Shard(0)` on it.
            return_tokens: Add `per_token` to the output, a `TokenRecord`; it changes no loss and no metric.

        Returns:
            The loss (0-dim, float32 or better), logits in eager mode, and metrics. The loss is this micro-batch's share
            of the step, summed over ranks unless `reduce_loss=False`.

        Raises:
            NotCalibratedError: `build_batches` was not called.
            BatchError: A tensor does not fit the batch.
        """
        if type(self).loss_fn is not BaseLossContext.loss_fn:
            refuse_vocabulary(f"{type(self).__name__}.loss_fn", (vocab_group, vocab_mesh))
            refuse_tokens(self, return_tokens)
            return self._forward_on_logits(hidden_states, head_weight, head_bias)
        inputs = self._inputs(hidden_states, head_weight, head_bias, (vocab_group, vocab_mesh))
        check_counted(inputs.vocab, self._group)
        watch = Watch(self._objective(), return_tokens)
        output = self._run_head(inputs, watch.objective)
        return self._finish(output.loss, output.logits, {**output.metrics, **exported(self, watch.stats(self, inputs))})

    __call__ = forward

    def _run_head(self, inputs: HeadInputs, objective: Objective) -> HeadOutput:
        return run_head(self.loss_cfg.mode, inputs, self.loss_cfg.head_options(), objective)

    def forward_log_probs(
        self, log_probs: Tensor, entropy: Tensor | None = None, *, return_tokens: bool = False
    ) -> LossOutput:
        """Computes the loss from log-probs that an engine already has.

        Args:
            log_probs: `[B, T]` (or jagged) of the labels, nats, with a graph; ignored positions may hold anything.
            entropy: `[B, T]`, nats, where the loss needs it.
            return_tokens: Add `per_token` to the output; see `forward`.
        """
        stats = stats_of_log_probs(self, log_probs, entropy)
        loss, metrics = evaluate_all(stats, self._objective())
        return self._finish(loss, None, {**metrics, **exported(self, stats if return_tokens else None)})

    def token_numbers(self, stats: TokenStats, loss_kwargs: Any) -> dict[str, Tensor]:
        """Hook of `return_tokens`: numbers `[N]` by their names in `TokenRecord`."""
        return {"log_prob": stats.log_prob, **({} if stats.entropy is None else {"entropy": stats.entropy})}

    def token_record(self, stats: TokenStats) -> TokenRecord:
        """Hook of `return_tokens`: the record of the tokens that count, `[N]`."""
        return flat_record(self, stats, lambda *call: self.token_loss(*call)[0])

    @property
    def layout(self) -> TokenLayout:
        """Where the tokens that count stand; read from the labels once."""
        return self._read().layout

    @property
    def label_facts(self) -> LabelFacts:
        """Range and number of the labels that are not ignored."""
        return self._read().facts

    def check_labels(self) -> None:
        """Reads the labels once and raises `BatchError` when they, or the offsets, cannot be."""
        self._read()

    @property
    def batch_size(self) -> int:
        """Number of micro-batches that this one was calibrated with."""
        return self._batch_size

    @classmethod
    def cat(cls: type[C], chunks: list[C]) -> C:
        """Joins packed contexts along T; weights are kept, offsets shifted, what calibration measured is merged."""
        check_joinable(cls.__name__, chunks)
        kwargs = [chunk.loss_kwargs for chunk in chunks]
        joined = copy.copy(chunks[0])
        joined.loss_kwargs, joined._known = type(kwargs[0]).cat(kwargs), None
        dropped = [chunk._dropped for chunk in chunks if chunk._dropped is not None]
        joined._dropped = torch.stack(dropped).sum() if dropped else None
        joined._step_metrics = merge(chunk._step_metrics for chunk in chunks)
        return joined

    def know_segments(self, segments: Segments) -> TokenLayout:
        """Takes over segments that know their sizes, so that forward does not have to exchange them."""
        known = self._read()
        self._known = replace(known, layout=replace(known.layout, segments=segments))
        return self._known.layout

    def _read(self) -> KnownLayout:
        self._known = read_layout(self.loss_kwargs, self.loss_cfg.ignore_idx, self._known)
        return self._known

    def _inputs(
        self, hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None, vocab: Vocabulary = (None, None)
    ) -> HeadInputs:
        return head_inputs(self, (hidden_states, head_weight, head_bias), vocab)

    def _objective(self) -> Objective:
        flat = self.loss_kwargs.take(self.layout)
        names = [name for name in flat.tensors() if self.loss_kwargs.is_per_token(name)]

        def loss_of(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Metric]]:
            loss, metrics = self.token_loss(stats, flat.rows(rows, names))
            return loss, require_metrics(f"{type(self).__name__}.token_loss", metrics)

        level = type(self).level or self.loss_cfg.level()
        return Objective(loss_of, additive=level != "sequence")

    def _forward_on_logits(self, hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> LossOutput:
        mode = self.loss_cfg.mode
        if mode == "liger":
            raise ConfigError(
                f"{type(self).__name__} overrides loss_fn, which sees logits; mode='liger' never "
                f"forms them. Use mode='chunk'."
            )
        if mode == "eager":
            loss, (logits, extra) = self.loss_fn(from_jagged(hidden_states), head_weight, head_bias, self.loss_kwargs)
            return self._finish(loss, logits, dict(extra))
        size = self.loss_cfg.chunk_size or 1024
        parts = self.loss_kwargs.chunk(size)
        hidden_states = from_jagged(hidden_states)
        loss, extra = evaluate_per_chunk(self.loss_fn, (hidden_states, head_weight, head_bias), parts, size)
        return self._finish(loss, None, extra)

    def _finish(self, local: Tensor, logits: Tensor | None, extra: dict[str, Any]) -> LossOutput:
        extra.update(self._counted(), loss=Sum(local.detach().double()))
        loss = over_ranks(local, self.loss_cfg, self._group, self._world)
        return LossOutput(loss, LossDetails(logits, extra))

    def _counted(self) -> dict[str, Metric]:
        """Numbers of tokens and sequences, and what calibration measured."""
        segments = self.layout.segments
        tokens = torch.ones_like(segments.ids, dtype=torch.float64).sum()
        dropped = tokens.new_zeros(()) if self._dropped is None else self._dropped
        counts: dict[str, Metric] = {"tokens": Sum(tokens), "sequences": Sum(segments.counted.sum())}
        return {**self._step_metrics, **counts, "dropped_tokens": Sum(dropped)}

    def __getstate__(self) -> dict[str, Any]:
        # What is read from the labels is read again; a process group belongs to its process.
        return {**self.__dict__, "_known": None, "_group": None}

    def __deepcopy__(self: C, memo: dict[int, Any]) -> C:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__getstate__().items():
            setattr(twin, name, copy.deepcopy(value, memo))
        twin._group = self._group
        return twin
