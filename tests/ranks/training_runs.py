"""What a rank does in the tests of training: a tiny run, whole or cut off."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlloss.training.phase import Phase
from rlloss.training.run import Run

sys.path.insert(0, str(Path(__file__).parent.parent))

from training.helpers import tiny_config


def config_of(steps: int) -> Any:
    """A warm start and GRPO, `steps` each; a checkpoint every two steps."""
    config = tiny_config()
    short = {"steps": steps}
    return config.model_copy(
        update={
            "supervised": config.supervised.model_copy(update=short),
            "grpo": config.grpo.model_copy(update={**short, "micro_batch_size": 4}),
        }
    )


def train(folder: str, steps: int, resume: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains; returns the weights and the report."""
    run = Run(config_of(steps), Path(folder))
    report = run.train(resume=resume)
    with run.policy.whole() as policy:
        weights = {name: value.clone() for name, value in policy.model.state_dict().items()}
    return weights, {"finished": report.finished, "step": report.step}


def train_until(folder: str, steps: int, rank: int, place: tuple[str, int]) -> None:
    """Trains, and kills one rank (or all of them, -1) in the middle of a step."""
    original = Phase.apply_gradients

    def stepping(self: Phase, index: int) -> dict[str, float]:
        if (self.name, index) == place and rank in (dist.get_rank(), -1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, index)

    Phase.apply_gradients = stepping  # type: ignore[method-assign]
    train(folder, steps)
