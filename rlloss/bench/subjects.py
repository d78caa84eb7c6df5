"""Who is measured: the modes of rlloss, the bare matrix products, and other libraries where they are installed."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss.bench.problem import Problem
from rlloss.heads.inputs import Mode
from rlloss.losses import CELossConfig, GRPOLossConfig

Loss = Callable[[Tensor, Tensor], Tensor]
"""`(hidden [B, T, H], weight [V, H]) -> scalar with a graph`."""


@dataclass(frozen=True)
class Subject:
    """One line of the table.

    Attributes:
        name: Its name.
        run: Runs it once on the i-th input; returns its gradients, hidden and head, where it has any.
        baseline: The bare products that it is compared with.
    """

    name: str
    run: Callable[[int], tuple[Tensor | None, Tensor | None]]
    baseline: Callable[[int], None]


def bare_products(problem: Problem) -> Callable[[int], None]:
    """The three matrix products of the whole batch, into memory that is there already."""
    shape, weight = problem.shape, problem.weight
    wide = weight.new_empty(shape.tokens, shape.vocabulary)
    grad_hidden, grad_weight = weight.new_empty(shape.tokens, shape.hidden), torch.empty_like(weight)
    rows = [hidden.reshape(-1, shape.hidden) for hidden in problem.hidden]

    def run(number: int) -> None:
        torch.mm(rows[number], weight.T, out=wide)
        torch.mm(wide, weight, out=grad_hidden)
        torch.mm(wide.T, rows[number], out=grad_weight)

    return run


def bare_product(problem: Problem) -> Callable[[int], None]:
    """The one product of the tokens that count."""
    rows = [hidden.reshape(-1, problem.shape.hidden)[problem.mask.reshape(-1)] for hidden in problem.hidden]
    wide = problem.weight.new_empty(rows[0].shape[0], problem.shape.vocabulary)

    def run(number: int) -> None:
        torch.mm(rows[number], problem.weight.T, out=wide)

    return run


def subjects(problem: Problem) -> tuple[list[Subject], dict[str, str]]:
    """Returns who can be measured here, and why the others cannot."""
    three, one = bare_products(problem), bare_product(problem)
    modes: tuple[Mode, ...] = ("chunk", "eager", "liger")
    found = [_training(f"rlloss {mode}", problem, three, _ours(problem, mode)) for mode in modes]
    found.insert(1, _forward_only(problem, one))
    found.append(_training("torch, whole logits", problem, three, _torch_eager(problem)))
    missing: dict[str, str] = {}
    makers = (_torch_chunked, _liger_grpo, _trl, _cut_cross_entropy)
    for name, make in zip(
        ("torch linear_cross_entropy", "liger GRPO", "TRL", "cut-cross-entropy"), makers, strict=True
    ):
        try:
            found.append(_training(name, problem, three, make(problem)))
        except (ImportError, NotImplementedError, AttributeError) as error:
            missing[name] = str(error)
    return found, missing


def _training(name: str, problem: Problem, baseline: Callable[[int], None], loss: Loss) -> Subject:
    hidden = [part.detach().clone().requires_grad_() for part in problem.hidden]
    weight = problem.weight.detach().clone().requires_grad_()

    def run(number: int) -> tuple[Tensor | None, Tensor | None]:
        hidden[number].grad = weight.grad = None
        loss(hidden[number], weight).backward()  # type: ignore[no-untyped-call]
        return hidden[number].grad, weight.grad

    return Subject(name, run, baseline)


def _context(problem: Problem, mode: Mode) -> Any:
    batch: dict[str, Any] = {"shifted_labels": problem.labels}
    config: Any
    if problem.shape.batch == "dense":
        config = CELossConfig(mode=mode, chunk_size=problem.shape.chunk_size)
    else:
        config = GRPOLossConfig(mode=mode, chunk_size=problem.shape.chunk_size)
        batch |= {"advantages": problem.advantages, "old_logprobs": problem.old_logprobs}
    return config.loss_ctx_cls.build_batches([config.build(batch)])[0]


def _ours(problem: Problem, mode: Mode) -> Loss:
    context = _context(problem, mode)
    return lambda hidden, weight: context.forward(hidden, weight).loss


def _forward_only(problem: Problem, baseline: Callable[[int], None]) -> Subject:
    context = _context(problem, "chunk")

    def run(number: int) -> tuple[None, None]:
        with torch.no_grad():
            context.forward(problem.hidden[number], problem.weight)
        return None, None

    return Subject("rlloss chunk, no_grad (to one product)", run, baseline)


def _rows(problem: Problem) -> Tensor:
    return problem.mask.reshape(-1).nonzero().squeeze(1)


def _torch_eager(problem: Problem) -> Loss:
    labels, rows = problem.labels.reshape(-1), torch.arange(problem.labels.numel(), device=problem.labels.device)
    counted = problem.mask.reshape(-1)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden.reshape(-1, weight.shape[1]), weight).float()
        log_probs = -F.cross_entropy(logits, labels, reduction="none")
        return problem.loss_of(log_probs[counted], rows[counted])

    return loss


def _torch_chunked(problem: Problem) -> Loss:
    if problem.shape.batch != "dense":
        raise NotImplementedError("computes cross-entropy only")
    from torch.nn import LinearCrossEntropyOptions  # type: ignore[attr-defined, unused-ignore]

    options = LinearCrossEntropyOptions(batch_chunk_size=problem.shape.chunk_size, chunking_method=None)
    labels = problem.labels.reshape(-1)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden.reshape(-1, weight.shape[1])
        return F.linear_cross_entropy(rows, weight, labels, options=options)  # type: ignore[attr-defined, no-any-return, unused-ignore]

    return loss


def _liger_grpo(problem: Problem) -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    kernel = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
    labels, mask = problem.labels.clamp(min=0), problem.mask
    advantages = problem.advantages[:, -1].contiguous()
    # A dense batch asks for the gradient of cross-entropy: ratio 1 (no old log-probs) and advantage 1.
    old = None if problem.shape.batch == "dense" else problem.old_logprobs

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return kernel(hidden, weight, labels, mask, advantages, old_per_token_logps=old)[0]  # type: ignore[no-any-return]

    return loss


def _trl(problem: Problem) -> Loss:
    from trl.kernels import ChunkedLogProbFunction

    # Its backward imports this; a package that is missing would be noticed too late.
    importlib.import_module("trl.trainer.utils")

    rows = _rows(problem)
    labels = problem.labels.reshape(-1)[rows]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        taken = hidden.reshape(-1, weight.shape[1]).index_select(0, rows)
        log_probs = ChunkedLogProbFunction.apply(taken, weight, None, labels, 1.0, 32768, None, 1.0, ("log_probs",))[0]
        return problem.loss_of(log_probs, rows)

    return loss


def _cut_cross_entropy(problem: Problem) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    if problem.shape.device == "cpu":
        raise NotImplementedError("its kernels need a CUDA device")
    rows = _rows(problem)
    labels = problem.labels.reshape(-1)[rows]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        taken = hidden.reshape(-1, weight.shape[1]).index_select(0, rows)
        return problem.loss_of(-linear_cross_entropy(taken, weight, labels, reduction="none").float(), rows)

    return loss
