"""The walk over chunks: project rows, turn them into log-probs, and add up gradients without whole logits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlloss.distributed import all_reduce_sum
from rlloss.heads.bfloat16 import products_of
from rlloss.heads.buffer import ChunkLogits
from rlloss.heads.inputs import HeadInputs, HeadOptions
from rlloss.heads.memory import large_empty
from rlloss.heads.softmax import RowGradients, RowStats, Transform, label_gradient, off_label_gradient_

CHUNK_BYTES = 256 << 20
"""Size of one chunk of logits when `chunk_size` is None."""

CHUNK_ROWS = (128, 4096)
"""Bounds of `chunk_size` when it is None: fewer rows make slow products, more gain nothing."""

Rows = slice | Tensor


def choose_chunk_size(vocabulary: int, itemsize: int) -> int:
    """Returns the rows of a chunk for a head of `vocabulary` words, from the memory that one chunk may take."""
    rows = CHUNK_BYTES // (itemsize * vocabulary) // 64 * 64
    return min(max(rows, CHUNK_ROWS[0]), CHUNK_ROWS[1])


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
        weight = inputs.weight.detach()
        bias = None if inputs.bias is None else inputs.bias.detach().to(self.dtype)
        self.transform = Transform(bias, options.logit_scale, options.logit_softcap)
        self.wants_gradients = any(wanted)
        self.products = products_of(weight, self.dtype, options.float32_logits, self.hidden, bias)
        vocabulary = weight.shape[0]
        # Ranks of one vocabulary must walk over the same chunks, also where one holds a word more than another.
        whole = vocabulary if inputs.vocab is None else inputs.vocab.total
        self.chunk_size = options.chunk_size or choose_chunk_size(whole, self.dtype.itemsize)
        self.logits = ChunkLogits(
            self.products, self.transform, self.chunk_size, keep=self.wants_gradients, vocab=inputs.vocab
        )
        # float16 gradients would underflow before the loss scale multiplies them.
        kept = torch.float32 if self.hidden.dtype == torch.float16 else self.hidden.dtype
        self.grad_hidden = large_empty(weight, tuple(self.hidden.shape), kept).zero_() if wanted[0] else None
        # Uninitialised: the first chunk with a gradient writes it.
        self.grad_weight = large_empty(weight, tuple(weight.shape), self.dtype) if wanted[1] else None
        self.grad_bias = weight.new_zeros((vocabulary,), dtype=self.dtype) if wanted[2] else None
        self._untouched = True

    def chunks(self, num_rows: int, logits: ChunkLogits | None = None) -> Iterator[tuple[int, int]]:
        """Yields the bounds of the chunks; at least one, which may be empty."""
        step = (logits or self.logits).most_rows
        for start in range(0, max(num_rows, 1), step):
            yield start, min(start + step, num_rows)

    def gradients(self) -> list[Tensor | None]:
        """Returns the gradients of hidden states (in their shape), weight and bias."""
        if self._untouched and self.grad_weight is not None:
            self.grad_weight.zero_()
        hidden = None if self.grad_hidden is None else self.grad_hidden.reshape(self.inputs.hidden.shape)
        if hidden is not None and self.inputs.vocab is not None:
            hidden = all_reduce_sum(hidden, self.inputs.vocab.group)
        return [hidden, self.grad_weight, self.grad_bias]

    def stats(self) -> RowStats:
        """Returns the numbers of all rows, log-probs (and entropies) among them."""
        passing = ChunkLogits(self.products, self.transform, self.chunk_size, keep=False, vocab=self.inputs.vocab)
        chunks = self.chunks(self.inputs.layout.num_tokens, passing)
        return RowStats.cat([self.forward(slice(*bounds), passing) for bounds in chunks])

    def second_pass(self, grads: RowGradients) -> None:
        """Projects the rows that have a gradient once more, and adds their gradients up."""
        rows = torch.arange(grads.log_prob.shape[0], device=grads.log_prob.device)
        # Which rows have a gradient may hang on a last digit, and the ranks of a vocabulary walk together.
        if self.options.skip_zero_rows and self.inputs.vocab is None:
            rows = grads.nonzero().nonzero().squeeze(1)
        for start, stop in self.chunks(int(rows.shape[0])):
            part = rows[start:stop]
            self.backward(part, self.forward(part), grads.pick(part))

    def repeat(self, grads: RowGradients) -> None:
        """Adds up the gradients of every chunk once more, exactly as the first time."""
        for start, stop in self.chunks(self.inputs.layout.num_tokens):
            part = slice(start, stop)
            self.backward(part, self.forward(part), grads.pick(part))

    def forward(self, rows: Rows, logits: ChunkLogits | None = None) -> RowStats:
        """Projects rows into a chunk (the sweep's own), which holds their exponentials afterwards."""
        return (logits or self.logits).fill(
            self._hidden(rows),
            self.inputs.labels[rows],
            self._temperature(rows),
            self._extra_ids(rows),
            self.options.entropy != "none",
        )

    def backward(self, rows: Rows, stats: RowStats, grads: RowGradients) -> None:
        """Adds up the gradients of rows whose exponentials lie in the chunk."""
        count = grads.log_prob.shape[0]
        if self.options.skip_zero_rows and count:
            kept = self.logits.compact(grads.nonzero() | ~stats.log_prob.isfinite())
            if kept is not None:
                count = int(kept.shape[0])
                stats, grads = stats.pick(kept), grads.pick(kept)
                rows = kept + rows.start if isinstance(rows, slice) else rows[kept]
        if count == 0:
            return
        labels, temperature = self.inputs.labels[rows], self._temperature(rows)
        if grads.entropy is None and grads.extra is None and self.transform.softcap is None:
            # The whole row shares one factor: fold it into the narrow operands, leave the wide matrix as it is.
            factor = grads.log_prob / stats.total * self.transform.slope(stats.q_label, stats.shift, temperature)
            target, positive = -stats.rest, True
        else:
            grads = grads.split_extra(labels, self._extra_ids(rows))
            factor = torch.ones_like(grads.log_prob)
            if self.products.operand_dtype == torch.float16:
                # A derivative of 1 / tokens has no digits left there: each row is multiplied up, and its factor folded.
                factor = grads.unit(stats)
                grads = grads.over(factor)
            self._write_gradient(rows, stats, grads)
            target = -label_gradient(stats, grads) * self.transform.slope(stats.q_label, stats.shift, temperature)
            positive = False
        self._accumulate(rows, factor, labels, target, positive)

    def _write_gradient(self, rows: Rows, stats: RowStats, grads: RowGradients) -> None:
        temperature, extra_ids = self._temperature(rows), self._extra_ids(rows)
        for piece in self.logits.pieces(stats.rest.shape[0]):
            self._differentiate(piece.numbers, stats, grads, temperature)
        if grads.extra is not None and extra_ids is not None and stats.q_extra is not None:
            own = grads.extra.T * self.transform.slope(stats.q_extra.T, stats.shift, temperature)
            self.logits.put_words(extra_ids, -own.T, add=True)

    def _differentiate(
        self, numbers: Tensor, stats: RowStats, grads: RowGradients, temperature: float | Tensor
    ) -> None:
        """Replaces some words of `E` by negative derivatives by the raw products."""
        slope: Tensor | float
        if self.transform.softcap is None:
            slope = self.transform.slope(stats.q_label, stats.shift, temperature)
        else:
            tiny = torch.finfo(self.dtype).tiny
            slope = self.transform.slope(numbers.clamp(min=tiny).log_(), stats.shift, temperature)
        off_label_gradient_(numbers, stats, grads).mul_(slope)

    def _accumulate(self, rows: Rows, factor: Tensor, labels: Tensor, target: Tensor, positive: bool) -> None:
        """Adds `-factor` times the chunk, with `target` at the labels, times W or h.

        Args:
            rows: Rows of the batch.
            factor: `[C]`.
            labels: `[C]`.
            target: `[C]`.
            positive: Whether no number of the chunk, labels aside, is negative.
        """
        products = self.products
        if not products.hidden_apart:
            self.logits.put_words(labels[:, None], target[:, None])
        hidden = self._hidden(rows)
        folded = products.fold(hidden, -factor)
        gradient = large_empty(hidden, tuple(hidden.shape), self.dtype) if self.grad_hidden is not None else None
        first = self._untouched
        # Operands that are converted on the way are converted some words at a time.
        for piece in self.logits.pieces(factor.shape[0], whole=not products.converts):
            words, numbers = slice(piece.start, piece.stop), products.numbers(piece.numbers)
            if gradient is not None:
                products.add_hidden(numbers, words, gradient, piece.start == 0, positive)
            if products.hidden_apart and not products.weight_apart:
                # Such products convert nothing on the way, so that this piece is the whole chunk.
                self.logits.put_words(labels[:, None], target[:, None])
            if self.grad_weight is not None:
                products.add_weight(numbers, folded, self.grad_weight[words], first)
            if self.grad_bias is not None:
                self.grad_bias[words].addmv_(piece.numbers, -factor)
        self._untouched = False
        if products.weight_apart:
            self._add_labels(hidden, labels, -factor * target)
        if gradient is not None:
            scale = products.scale()
            if scale is not None:
                factor, target = factor * scale, target / scale
            if products.hidden_apart:
                own, part = self._own(labels, target)
                gradient.addcmul_(products.weight.index_select(0, own).to(self.dtype), part[:, None])
            self._store_hidden(rows, gradient, -factor[:, None])

    def _add_labels(self, hidden: Tensor, labels: Tensor, part: Tensor) -> None:
        """Adds the labels' part of the gradients of weight and bias."""
        labels, part = self._own(labels, part)
        if self.grad_weight is not None:
            self.grad_weight.index_add_(0, labels, hidden.to(self.dtype) * part[:, None])
        if self.grad_bias is not None:
            self.grad_bias.index_add_(0, labels, part)

    def _own(self, labels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns labels as rows of the weight that is here, and numbers, 0 for labels that other ranks hold."""
        if self.inputs.vocab is None:
            return labels, numbers
        labels, mine = self.inputs.vocab.local(labels)
        return labels, torch.where(mine, numbers, 0.0)

    def _store_hidden(self, rows: Rows, gradient: Tensor, factor: Tensor) -> None:
        assert self.grad_hidden is not None
        if self.inputs.layout.index is None and isinstance(rows, slice):
            torch.mul(gradient, factor, out=self.grad_hidden[rows])
        else:
            self.grad_hidden.index_copy_(0, self._places(rows), gradient.mul_(factor).to(self.grad_hidden.dtype))

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
