"""The walk over chunks: project rows, turn them into log-probs, and add up gradients without whole logits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlloss.heads.inputs import HeadInputs, HeadOptions
from rlloss.heads.softmax import (
    RowGradients,
    RowStats,
    Transform,
    exponentiate_,
    label_gradient,
    off_label_gradient_,
)

TILE_ELEMENTS = 1 << 21
"""On a CPU the passes over logits run on tiles of about this many numbers, so that they stay in cache."""

CHUNK_BYTES = 256 << 20
"""Size of one chunk of logits when `chunk_size` is None."""

Rows = slice | Tensor


class Sweep:
    """One pass of a batch through the head; holds the one chunk of logits and the gradient accumulators.

    Args:
        inputs: The tensors of the call.
        options: What to compute.
        wanted: Which gradients are wanted: hidden states, weight, bias.
    """

    def __init__(self, inputs: HeadInputs, options: HeadOptions, wanted: tuple[bool, bool, bool]) -> None:
        self.inputs, self.options = inputs, options
        self.dtype = inputs.compute_dtype
        self.hidden = inputs.hidden.detach().reshape(-1, inputs.hidden.shape[-1])
        self.weight = inputs.weight.detach()
        bias = None if inputs.bias is None else inputs.bias.detach().to(self.dtype)
        self.transform = Transform(bias, options.logit_scale, options.logit_softcap)
        self.wants_gradients = any(wanted)
        vocabulary, width = self.weight.shape
        self.chunk_size = options.chunk_size or max(64, CHUNK_BYTES // (4 * vocabulary))
        rows = min(self.chunk_size, max(inputs.layout.num_tokens, 1))
        self.logits = self.hidden.new_empty((rows, vocabulary), dtype=self.dtype)
        # float16 gradients would underflow before the loss scale multiplies them.
        kept = torch.float32 if self.hidden.dtype == torch.float16 else self.hidden.dtype
        self.grad_hidden = self.hidden.new_zeros(self.hidden.shape, dtype=kept) if wanted[0] else None
        self.grad_weight = self.weight.new_zeros((vocabulary, width), dtype=self.dtype) if wanted[1] else None
        self.grad_bias = self.weight.new_zeros((vocabulary,), dtype=self.dtype) if wanted[2] else None

    def chunks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yields the bounds of the chunks; at least one, which may be empty."""
        for start in range(0, max(num_rows, 1), self.chunk_size):
            yield start, min(start + self.chunk_size, num_rows)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of hidden states (in their shape), weight and bias."""
        hidden = None if self.grad_hidden is None else self.grad_hidden.reshape(self.inputs.hidden.shape)
        return hidden, self.grad_weight, self.grad_bias

    def stats(self) -> RowStats:
        """Returns the numbers of all rows, log-probs (and entropies) among them."""
        parts = [self.forward(slice(*bounds)) for bounds in self.chunks(self.inputs.layout.num_tokens)]
        return RowStats.cat(parts)

    def second_pass(self, grads: RowGradients) -> None:
        """Projects the rows that have a gradient once more, and adds their gradients up."""
        rows = torch.arange(grads.log_prob.shape[0], device=grads.log_prob.device)
        if self.options.skip_zero_rows:
            rows = grads.nonzero().nonzero().squeeze(1)
        for start, stop in self.chunks(int(rows.shape[0])):
            part = rows[start:stop]
            self.backward(part, self.forward(part), grads.pick(part))

    def forward(self, rows: Rows) -> RowStats:
        """Projects rows into the chunk buffer, which holds their exponentials afterwards."""
        hidden, labels = self._hidden(rows), self.inputs.labels[rows]
        count, vocabulary = hidden.shape[0], self.weight.shape[0]
        on_cpu = hidden.device.type == "cpu"
        step = max(64, TILE_ELEMENTS // vocabulary) if on_cpu else max(count, 1)
        temperature, extra_ids = self._temperature(rows), self._extra_ids(rows)
        parts = []
        for start in range(0, max(count, 1), step):
            tile = slice(start, min(start + step, count))
            logits = self.logits[tile]
            self._project(hidden[tile], logits)
            self.transform.apply_(logits, temperature[tile] if isinstance(temperature, Tensor) else temperature)
            extra = None if extra_ids is None else extra_ids[tile]
            parts.append(exponentiate_(logits, labels[tile], self.options.entropy != "none", extra))
        return RowStats.cat(parts)

    def backward(self, rows: Rows, stats: RowStats, grads: RowGradients) -> None:
        """Adds up the gradients of rows whose exponentials lie in the chunk buffer."""
        count = grads.log_prob.shape[0]
        if self.options.skip_zero_rows:
            kept = self._compact(grads.nonzero() | ~stats.log_prob.isfinite())
            if kept is not None:
                count = int(kept.shape[0])
                stats, grads = stats.pick(kept), grads.pick(kept)
                rows = (
                    torch.arange(rows.start, rows.stop, device=kept.device)[kept]
                    if isinstance(rows, slice)
                    else rows[kept]
                )
        if count == 0:
            return
        labels, temperature = self.inputs.labels[rows], self._temperature(rows)
        grads = grads.split_extra(labels, self._extra_ids(rows))
        label_part = label_gradient(stats, grads)
        label_part = label_part * self.transform.slope(stats.q_label, stats.peak, temperature)
        exponentials = self.logits[:count]
        if grads.entropy is None and grads.extra is None and self.transform.softcap is None:
            # The whole row shares one factor: fold it into the narrow operands, leave the wide matrix as it is.
            factor = grads.log_prob / stats.total * self.transform.slope(stats.q_label, stats.peak, temperature)
        else:
            self._write_gradient(rows, exponentials, stats, grads)
            factor = torch.ones_like(grads.log_prob)
        self._accumulate(rows, exponentials, factor, labels, label_part)

    def _write_gradient(self, rows: Rows, exponentials: Tensor, stats: RowStats, grads: RowGradients) -> None:
        temperature, extra_ids = self._temperature(rows), self._extra_ids(rows)
        slope: Tensor | float
        if self.transform.softcap is None:
            slope = self.transform.slope(stats.q_label, stats.peak, temperature)
            slope = slope[:, None] if isinstance(slope, Tensor) else slope
        else:
            tiny = torch.finfo(exponentials.dtype).tiny
            slope = self.transform.slope(exponentials.clamp(min=tiny).log_(), stats.peak, temperature)
        off_label_gradient_(exponentials, stats, grads).mul_(slope)
        if grads.extra is not None and extra_ids is not None and stats.q_extra is not None:
            own = grads.extra * self.transform.slope(stats.q_extra, stats.peak, temperature)
            exponentials.scatter_add_(1, extra_ids, -own)

    def _accumulate(self, rows: Rows, wide: Tensor, factor: Tensor, labels: Tensor, label_part: Tensor) -> None:
        """Adds `label_part` at the labels minus `factor * wide` everywhere, times W or h."""
        dtype = self.weight.dtype
        operand = wide if dtype == self.dtype else wide.to(dtype)
        if self.grad_hidden is not None:
            gradient = torch.mm(operand, self.weight).to(self.dtype).mul_(-factor[:, None])
            gradient.addcmul_(self.weight.index_select(0, labels).to(self.dtype), label_part[:, None])
            self._store_hidden(rows, gradient.to(self.grad_hidden.dtype))
        if self.grad_weight is not None:
            hidden = self._hidden(rows).to(self.dtype)
            folded = hidden * factor[:, None]
            if dtype == self.dtype:
                self.grad_weight.addmm_(operand.T, folded, alpha=-1.0)
            else:
                # float16 has no room for gradients of 1e-6: keep the largest near 1 during the product.
                unit = folded.abs().amax().clamp(min=1e-30) if dtype == torch.float16 else folded.new_ones(())
                self.grad_weight.sub_(torch.mm(operand.T, (folded / unit).to(dtype)).to(self.dtype).mul_(unit))
            self.grad_weight.index_add_(0, labels, hidden * label_part[:, None])
        if self.grad_bias is not None:
            self.grad_bias.sub_(torch.mv(wide.T, factor)).index_add_(0, labels, label_part)

    def _store_hidden(self, rows: Rows, gradient: Tensor) -> None:
        assert self.grad_hidden is not None
        index = self.inputs.layout.index
        if index is None and isinstance(rows, slice):
            self.grad_hidden[rows] = gradient
        else:
            self.grad_hidden.index_copy_(0, self._places(rows), gradient)

    def _places(self, rows: Rows) -> Tensor:
        index = self.inputs.layout.index
        if index is not None:
            return index[rows]
        assert isinstance(rows, Tensor)
        return rows

    def _hidden(self, rows: Rows) -> Tensor:
        if self.inputs.layout.index is None and isinstance(rows, slice):
            return self.hidden[rows]
        return self.hidden.index_select(0, self._places(rows))

    def _temperature(self, rows: Rows) -> float | Tensor:
        temperature = self.inputs.temperature
        return temperature[rows].to(self.dtype) if isinstance(temperature, Tensor) else temperature

    def _extra_ids(self, rows: Rows) -> Tensor | None:
        return None if self.inputs.extra_ids is None else self.inputs.extra_ids[rows]

    def _project(self, hidden: Tensor, out: Tensor) -> None:
        if hidden.dtype == self.dtype:
            torch.mm(hidden, self.weight.T, out=out)
        elif self.options.float32_logits:
            torch.mm(hidden.float(), self.weight.float().T, out=out)
        else:
            out.copy_(torch.mm(hidden, self.weight.T))

    def _compact(self, keep: Tensor) -> Tensor | None:
        """Moves the rows of the chunk that are kept to its front; returns their numbers in the new order."""
        kept = keep.nonzero().squeeze(1)
        count = int(kept.shape[0])
        if count == keep.shape[0]:
            return None
        order = torch.arange(count, device=keep.device)
        holes = (~keep[:count]).nonzero().squeeze(1)
        movers = kept[kept >= count]
        for start in range(0, int(holes.shape[0]), 64):
            part = slice(start, start + 64)
            self.logits.index_copy_(0, holes[part], self.logits.index_select(0, movers[part]))
        return order.index_copy(0, holes, movers)
