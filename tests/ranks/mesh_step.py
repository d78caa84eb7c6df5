"""One optimiser step cut over a mesh of data, sequence and vocabulary ranks: what a rank does, how parts are joined."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ranks.losses  # noqa: F401  (registers its losses on every rank)
from batches import LAYOUTS, Result, Step, split
from rlloss import ActorCriticLossConfig, ValueLossConfig, metrics

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]


@dataclass
class Case:
    """A step, how it is cut, and the loss."""

    config: Any
    step: Step
    mesh: tuple[int, int, int] = (1, 1, 1)
    parts: int = 1
    layout: str = "padded"
    keys: Sequence[str] = ("old_logprobs", "ref_logprobs", "advantages")
    late: Sequence[str] = ()
    """Fields set after build: this rank's part."""
    per_sequence: Sequence[str] = ()
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        dp, sp, tp = self.mesh
        return dp * sp * tp


KINDS = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce",
    "scatter",
    "send",
    "recv",
    "gather",
)
WATCHED = [
    name for name in dir(dist) if name.startswith(KINDS) and callable(getattr(dist, name)) and "coalesced" not in name
]


class Collectives:
    """Notes every collective that runs inside, backward included: its name, and with how many numbers it does what."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[str] = []

    def __enter__(self) -> Collectives:
        self._before = {name: getattr(dist, name) for name in WATCHED}
        for name, function in self._before.items():
            setattr(dist, name, self._watch(name, function))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _watch(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            sent = next(arg for arg in reversed(args) if isinstance(arg, Tensor)) if args else torch.empty(0)
            kind = str(kwargs["op"]).rpartition(".")[2].lower() if "op" in kwargs else name.removeprefix("all_")
            self.calls.append(f"{kind} {sent.numel()}")
            return function(*args, **kwargs)

        return watched


@dataclass
class Part:
    """What one rank gave."""

    losses: list[float]
    hidden_grads: list[Tensor]
    weight_grad: Tensor
    bias_grad: Tensor | None
    metrics: dict[str, float]
    collectives: dict[str, list[str]]
    """Names by phase; forward and backward are those of the last micro-batch."""
    calls: dict[str, list[str]]


def run_parts(cases: Sequence[Case]) -> list[Part]:
    """Runs this rank's share of steps that are cut over one mesh."""
    mesh = init_device_mesh("cpu", cases[0].mesh, mesh_dim_names=("dp", "sp", "tp"))
    group = mesh["dp", "sp"]._flatten().get_group()
    return [run_part(case, mesh, group) for case in cases]


def run_part(case: Case, mesh: DeviceMesh, group: Any) -> Part:
    """Runs this rank's share of the step."""
    dp_rank, sp_rank = (mesh[name].get_local_rank() for name in ("dp", "sp"))
    dp, sp, _ = case.mesh
    groups = split(split(case.step.sequences, dp)[dp_rank], case.parts)
    laid = [lay_out(case, part) for part in groups]
    seen: dict[str, Collectives] = {}
    contexts = [build(case, batch, mesh["sp"], sp_rank, sp) for batch, _ in laid]
    with Collectives() as seen["build_batches"]:
        contexts = type(contexts[0]).build_batches(contexts, sp_mesh=mesh["sp"], group=group)
    weight, bias, head = head_of(case, mesh)
    hidden = [local(value, sp_rank, sp, 7.0).clone().requires_grad_() for _, value in laid]
    losses, extras = [], []
    for context, states in zip(contexts, hidden, strict=True):
        with Collectives() as seen["forward"]:
            loss, (_, extra) = context.forward(states, weight, bias, **head)
        with Collectives() as seen["backward"]:
            loss.backward()
        losses.append(loss.item())
        extras.append(extra)
    with Collectives() as seen["metrics"]:
        reduced = metrics.reduce(metrics.merge(extras), group)
    grads = [states.grad for states in hidden]
    if "value_weight" in head:
        grads.append(head["value_weight"].grad[None])
    names = {phase: counter.names for phase, counter in seen.items()}
    calls = {phase: counter.calls for phase, counter in seen.items()}
    return Part(losses, grads, weight.grad, None if bias is None else bias.grad, reduced, names, calls)


def lay_out(case: Case, sequences: list[dict[str, Tensor]]) -> tuple[dict[str, Any], Tensor]:
    """Batch and hidden states of a micro-batch."""
    batch, hidden = LAYOUTS[case.layout](sequences, [key for key in case.keys if key in sequences[0]])
    whole = {name: torch.stack([sequence[name] for sequence in sequences]) for name in case.per_sequence}
    return {**batch, **whole, **case.constants}, hidden


def head_of(case: Case, mesh: DeviceMesh) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """This rank's rows of weight and bias, and what else forward takes; the head of a critic has one row."""
    tp, place = mesh["tp"].size(), mesh["tp"].get_local_rank()
    values = torch.linspace(-1.0, 1.0, case.step.weight.shape[1], dtype=case.step.weight.dtype)[None].requires_grad_()
    if isinstance(case.config, ValueLossConfig):
        return values, None, {}
    weight = case.step.weight.tensor_split(tp)[place].clone().requires_grad_()
    bias = None if case.step.bias is None else case.step.bias.tensor_split(tp)[place].clone().requires_grad_()
    head: dict[str, Any] = {"vocab_group": mesh["tp"].get_group()} if tp > 1 else {}
    if isinstance(case.config, ActorCriticLossConfig):
        head["value_weight"] = values
    return weight, bias, head


def build(case: Case, batch: dict[str, Any], sp_mesh: DeviceMesh, sp_rank: int, sp: int) -> Any:
    """Builds a context; some fields are set afterwards, as the parts that a model of this rank would compute."""
    context = case.config.build({key: value for key, value in batch.items() if key not in case.late}, sp_mesh)
    for name in case.late:
        setattr(context.loss_kwargs, name, local(batch[name], sp_rank, sp, 0.0))
    return context


def local(values: Tensor, sp_rank: int, sp: int, fill: float) -> Tensor:
    """This rank's columns of whole rows, padded to a multiple of `sp`."""
    length = -(-values.shape[1] // sp)
    tail = values.new_full((values.shape[0], length * sp - values.shape[1], *values.shape[2:]), fill)
    padded = torch.cat([values, tail], dim=1)
    return padded[:, sp_rank * length : (sp_rank + 1) * length]


def join(case: Case, parts: list[Part]) -> Result:
    """Puts the parts of all ranks together: gradients as a wrapper would, the loss as any rank says it."""
    dp, sp, tp = case.mesh
    grid = [[[parts[(d * sp + s) * tp + t] for t in range(tp)] for s in range(sp)] for d in range(dp)]
    share = 1.0 if case.config.grad_reduction == "sum" else 1.0 / (dp * sp)
    lines = [cell for row in grid for cell in row]
    cut = 1 if isinstance(case.config, ValueLossConfig) else tp
    weight = torch.cat([share * sum(cell[t].weight_grad for cell in lines) for t in range(cut)])
    bias = None
    if parts[0].bias_grad is not None:
        bias = torch.cat([share * sum(cell[t].bias_grad for cell in lines) for t in range(tp)])
    hidden = []
    for d, sequences in enumerate(split(case.step.sequences, dp)):
        for m, part in enumerate(split(sequences, case.parts)):
            for t in range(1, tp):
                assert all(torch.equal(grid[d][s][t].hidden_grads[m], grid[d][s][0].hidden_grads[m]) for s in range(sp))
            whole = share * torch.cat([grid[d][s][0].hidden_grads[m] for s in range(sp)], dim=1)
            lengths = [len(sequence["hidden"]) for sequence in part]
            rows = whole[0][: sum(lengths)].split(lengths) if case.layout == "packed" else whole
            assert not whole[:, sum(lengths) if case.layout == "packed" else max(lengths) :].any(), "padding"
            hidden += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    if len(parts[0].hidden_grads) > case.parts:
        hidden.append(share * sum(cell[0].hidden_grads[-1][0] for cell in lines))
    for part in parts[1:]:
        assert part.losses == parts[0].losses if case.config.reduce_loss else True
        assert part.metrics == parts[0].metrics
    return Result(sum(parts[0].losses), hidden, weight, bias, parts[0].metrics, [])
