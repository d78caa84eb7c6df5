"""What a rank does in the tests of training: a tiny run, whole or cut off.

What a run imports late is imported here at once, so that the pool loads it once for all of its processes.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlloss.errors import RLLossError
from rlloss.training import checkpoint, logging
from rlloss.training import run as run_module
from rlloss.training.config import GRPOConfig, OptimizerConfig, RolloutConfig
from rlloss.training.phase import Phase
from rlloss.training.ppo_config import CriticConfig, EvaluatorConfig, KLConfig, PPOConfig
from rlloss.training.run import Run

sys.path.insert(0, str(Path(__file__).parent.parent))

from training.helpers import tiny_config

for name in ("transformers.models.qwen3.modeling_qwen3", "torch.utils.tensorboard", "matplotlib.figure"):
    importlib.import_module(name)


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


def digits(texts: list[str]) -> list[float]:
    """A reward on texts: digits after the equals sign."""
    return [float(sum(c.isdigit() for c in text.partition("=")[2])) for text in texts]


def ppo_config_of(steps: int, backbone: str) -> Any:
    """PPO whose every statistic looks at the whole rollout; an odd number of rows, so that ranks differ."""
    ppo = PPOConfig(
        steps=steps,
        rollout=RolloutConfig(prompts=5, group_size=3, max_new_tokens=4),
        updates_per_epoch=2,
        micro_batch_size=3,
        whiten_rewards=True,
        kl=KLConfig(coef=0.1, target=0.5, horizon=100.0),
        optimizer=OptimizerConfig(lr=1e-3),
        critic=CriticConfig(backbone=backbone, optimizer=OptimizerConfig(lr=1e-3), warmup_steps=int(backbone == "own")),
        evaluator=EvaluatorConfig(function=f"{__name__}.digits", scale=True, center=True, clip=3.0),
    )
    config = tiny_config(grpo=GRPOConfig(steps=0), ppo=ppo)
    return config.model_copy(update={"supervised": config.supervised.model_copy(update={"steps": 1})})


def train(folder: str, steps: int, resume: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains; returns the weights and the report."""
    return finished(config_of(steps), folder, resume)


def train_tied(folder: str, steps: int, resume: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with a head that is tied to the embeddings, and with a reference policy in the loss."""
    config = config_of(steps)
    loss = config.grpo.loss.model_copy(update={"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.5})
    changes = {
        "model": config.model.model_copy(update={"tie_embeddings": True}),
        "grpo": config.grpo.model_copy(update={"loss": loss}),
    }
    return finished(config.model_copy(update=changes), folder, resume)


def train_ppo(folder: str, steps: int, backbone: str, resume: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with PPO."""
    return finished(ppo_config_of(steps, backbone), folder, resume)


def finished(config: Any, folder: str, resume: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a config; returns the weights and the report."""
    logging.draw_curves = lambda folder: None  # most of the seconds of so short a run
    run = Run(config, Path(folder))
    report = run.train(resume=resume)
    with run.policy.whole() as policy:
        weights = {name: value.clone() for name, value in policy.model.state_dict().items()}
    return weights, {"finished": report.finished, "step": report.step}


def train_until(folder: str, steps: int, rank: int, place: tuple[str, int]) -> None:
    """Trains, and kills one rank (or all of them, -1) in the middle of a step, or of the checkpoint after a step."""
    original = Phase.apply_gradients

    def stepping(self: Phase, index: int) -> dict[str, float]:
        if (self.name, index) == place and rank in (dist.get_rank(), -1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, index)

    class Writer(checkpoint._Writer):
        """Dies when its file is there, and the checkpoint is not yet whole."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            if place == ("checkpoint", int(str(self.fs.concat_path(self.path, "")).rstrip("/")[-8:])):
                torch.futures.wait_all([written])
                if rank in (dist.get_rank(), -1):
                    os.kill(os.getpid(), signal.SIGKILL)
            return written

    Phase.apply_gradients = stepping  # type: ignore[method-assign]
    checkpoint._Writer = Writer  # type: ignore[misc]
    train(folder, steps)


def train_unlike(folder: str, what: str) -> None:
    """Trains where rank 1 starts from something else."""
    odd = dist.get_rank() == 1
    config, resume, original = config_of(1), False, run_module.load_policy

    def changed(*args: Any) -> Any:
        policy = original(*args)
        with torch.no_grad():
            policy.model.state_dict()["model.layers.0.mlp.up_proj.weight"][1, 2] += 1e-7
        return policy

    if what == "seed":
        config = config.model_copy(update={"seed": 7 + odd})
    elif what == "learning rate" and odd:
        optimizer = config.grpo.optimizer.model_copy(update={"lr": 0.5})
        config = config.model_copy(update={"grpo": config.grpo.model_copy(update={"optimizer": optimizer})})
    elif what == "resume":
        resume = odd
    elif what == "folder":
        folder = f"{folder}/{dist.get_rank()}"
    elif what == "questions" and odd:
        config = config.model_copy(update={"task": config.task.model_copy(update={"data_seed": 2})})
    elif what == "weights" and odd:
        run_module.load_policy = changed
    try:
        Run(config, Path(folder)).train(resume)
    finally:
        run_module.load_policy = original


def damaged_disk(folder: str, name: str, writes: bool) -> str:
    """Reads a tensor that was sharded over the ranks that wrote it, once a bit of a file has changed; what was said."""
    checkpoints = checkpoint.Checkpoints(Path(folder), keep=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = distribute_tensor(torch.arange(8000.0), mesh, [Shard(0)])
    if writes:
        checkpoints.save(1, {"value": value}, {})
        if dist.get_rank() == 0:
            path = checkpoints.saved()[-1] / name
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)
        dist.barrier()
    try:
        checkpoints.load({"value": value})
    except RLLossError as error:
        return str(error)
    return ""


def full_disk(folder: str) -> tuple[str, float]:
    """Saves twice, the second time where rank 1 may write 20 kB only; what was said, and what is read afterwards."""
    checkpoints = checkpoint.Checkpoints(Path(folder), keep=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first, large = (distribute_tensor(torch.ones(size), mesh, [Shard(0)]) for size in (4, 60_000))
    checkpoints.save(1, {"value": first}, {})
    before, said = resource.getrlimit(resource.RLIMIT_FSIZE), ""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        checkpoints.save(2, {"value": large}, {})
    except RLLossError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = torch.zeros_like(first)
    checkpoints.load({"value": found})
    return said, float(found.full_tensor().sum())
