"""What a phase of training is: something with an optimiser that makes one step at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.logprob import LogProbConfig
from rlloss.losses.token_record import PER_TOKEN
from rlloss.metrics import Metric, merge
from rlloss.training.config import OptimizerConfig
from rlloss.training.model import Policy, TokenBatch
from rlloss.training.optimizer import apply_gradients, learning_rate, make_optimizer, optimizer_tensors
from rlloss.training.ranks import gather_rows, share
from rlloss.training.sharding import prepare_backward
from rlloss.training.trace import Trace

Batch = dict[str, Tensor]
L = TypeVar("L", bound=BaseLossConfig)


class Phase(ABC):
    """One phase of a run. What a step does depends on its index and on the state only, so that a run can resume.

    Args:
        policy: The model that is trained.
        steps: Steps of the phase.
        config: Its optimiser.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, policy: Policy, steps: int, config: OptimizerConfig) -> None:
        self.policy = policy
        self.steps = steps
        self.optimizer_config = config
        self.trace: Trace | None = None  # set for a step that is to leave more than its metrics behind

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """The optimiser of the policy, made when it is first used."""
        return make_optimizer(self.policy.network, self.optimizer_config)

    @abstractmethod
    def step(self, index: int) -> dict[str, float]:
        """Makes one step and returns its metrics.

        Args:
            index: Number of the step, from 0.
        """

    def enough(self) -> bool:
        """Tells whether the phase has reached its goal before its last step."""
        return False

    def apply_gradients(self, index: int) -> dict[str, float]:
        """Makes one optimiser step with the gradients that were accumulated."""
        lr = learning_rate(self.optimizer_config, index, self.steps)
        norm = apply_gradients(self.policy.network, self.optimizer, lr, self.optimizer_config.max_grad_norm)
        return {"lr": lr, "grad_norm": norm}

    def tensors(self) -> dict[str, Tensor]:
        """Returns by name, beside the weights, the tensors that a checkpoint saves, and fills in place to resume."""
        return optimizer_tensors(self.optimizer)

    def facts(self) -> dict[str, Any]:
        """Returns the numbers that a checkpoint saves, as JSON can hold them."""
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes over what `facts` returned, after the tensors were filled."""
        assert not facts, facts


def accumulate(
    network: nn.Module,
    contexts: Sequence[BaseLossContext],
    batches: Sequence[TokenBatch],
    trace: Trace | None = None,
    **arguments: Any,
) -> dict[str, Metric]:
    """Runs forward and backward over the micro-batches of one optimiser step.

    Args:
        network: What is trained; called with a batch and its context.
        contexts: Calibrated contexts, one for each micro-batch: their losses add up to the loss of the step.
        batches: The tokens of the micro-batches.
        trace: Takes notice of single tokens, where it is given.
        **arguments: More arguments of the contexts' `forward`.

    Returns:
        The metrics of this rank's part of the step.
    """
    extras = []
    if trace is not None:
        arguments["return_tokens"] = True
    for place, (context, batch) in enumerate(zip(contexts, batches, strict=True)):
        prepare_backward(network, context.loss_cfg.mode, place + 1 == len(contexts))
        loss, (_, extra) = network(batch, context, **arguments)
        loss.backward()
        if trace is not None:
            trace.add(extra.pop(PER_TOKEN))
        extras.append(extra)
    return merge(extras)


@torch.no_grad()
def label_logprobs(
    policy: Policy, tokens: TokenBatch, labels: Tensor, micro_batch_size: int, temperature: float
) -> Tensor:
    """Returns the log-probs of labels, `[N, T]`, nats, 0 at ignored positions, by the same head as the loss.

    Args:
        policy: One that has all of its weights here.
        tokens: Input tokens `[N, T]`, the same on every rank.
        labels: Next tokens `[N, T]`.
        micro_batch_size: Rows of one forward pass.
        temperature: Of the sampling.
    """
    config = adapted(LogProbConfig(mode="chunk", temperature=temperature), policy.logit_options)
    parts = [torch.zeros((0, labels.shape[1]), device=labels.device)]
    own = share(torch.arange(len(labels), device=labels.device))  # type: ignore[arg-type,var-annotated]
    for rows in torch.split(own, micro_batch_size) if len(own) else ():  # type: ignore[arg-type]
        context = config.build({"shifted_labels": labels[rows]})
        parts.append(policy.network(tokens.rows(rows), context).loss)
    return gather_rows(torch.cat(parts))


def adapted(config: L, options: Mapping[str, float]) -> L:
    """Returns a loss config with some fields set, validated anew."""
    fields = {name: getattr(config, name) for name in type(config).model_fields}
    return type(config)(**{**fields, **options})


def build_counted(config: BaseLossConfig, batch: Batch, counts: bool) -> BaseLossContext:
    """Builds the context of a micro-batch; one that does not count has every label ignored."""
    return config.build(batch) if counts else config.empty(batch)


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Returns some rows of every tensor of a batch."""
    return {name: value[rows] for name, value in batch.items()}
