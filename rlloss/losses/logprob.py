"""Log-probs alone: old and reference log-probs by the same head, so that the first ratio is 1 to rounding."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.heads import token_stats
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.output import LossDetails, LossOutput
from rlloss.losses.step_check import check_list, check_step
from rlloss.losses.token_record import exported
from rlloss.losses.totals import Totals


class LogProbConfig(BaseLossConfig):
    """Evaluates log-probs of labels; `entropy_metric=True` gives entropies as well.

    `forward` returns the log-probs `[B, T]` in the place of the loss, 0 at ignored positions, with a graph where one is
    wanted, and `extra["entropy"]` `[B, T]`. No calibration is needed.
    """

    @property
    def loss_ctx_cls(self) -> type["LogProbContext"]:
        """`LogProbContext`."""
        return LogProbContext

    @property
    def _loss_kwargs_cls(self) -> type["LogProbKwargs"]:
        return LogProbKwargs


class LogProbKwargs(BaseLossKwargs):
    """Labels, and how they are laid out."""


class LogProbContext(BaseLossContext):
    """Log-probs of one micro-batch."""

    loss_cfg: LogProbConfig
    loss_kwargs: LogProbKwargs

    @staticmethod
    def build_batches(
        loss_ctx_list: list[Any],
        cu_seq_lens_list: Sequence[Tensor] | None = None,
        sp_mesh: DeviceMesh | None = None,
        group: Group = None,
        totals: Totals | None = None,
    ) -> list[Any]:
        """Checks what was set after `build` and returns the contexts: log-probs have no denominator."""
        check_list("build_batches", loss_ctx_list)
        for index, context in enumerate(loss_ctx_list):
            offsets = None if cu_seq_lens_list is None else [cu_seq_lens_list[index]]
            check_step([context], offsets, sp_mesh, group)
            context._batch_size = len(loss_ctx_list)
        return loss_ctx_list

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
        """Computes log-probs from hidden states.

        Args:
            hidden_states: `[B, T, H]`.
            head_weight: `[V, H]`.
            head_bias: `[V]` or None.
            vocab_group: Ranks that hold other rows of the weight; see `BaseLossContext.forward`.
            vocab_mesh: Their mesh instead.
            return_tokens: Add `per_token` to the output; see `BaseLossContext.forward`.

        Returns:
            Log-probs `[B, T]` (nats, float32 or better), logits in eager mode, and entropies `[B, T]` if asked for.
        """
        inputs = self._inputs(hidden_states, head_weight, head_bias, (vocab_group, vocab_mesh))
        stats, logits = token_stats(self.loss_cfg.mode, inputs, self.loss_cfg.head_options())
        extra: dict[str, Any] = {} if stats.entropy is None else {"entropy": self.layout.put(stats.entropy)}
        extra |= exported(self, stats if return_tokens else None)
        return LossOutput(self.layout.put(stats.log_prob), LossDetails(logits, extra))

    __call__ = forward
