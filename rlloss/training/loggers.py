"""Places that the numbers of a run go to: TensorBoard, Weights & Biases, trackio, behind one interface."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlloss.errors import BackendUnavailableError
from rlloss.training.config_parts import LoggingConfig
from rlloss.training.extras import require


class MetricsLogger(Protocol):
    """Takes the numbers of each step; a logger of one's own has these two methods."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of one step, named `phase/metric`; steps never go back."""

    def close(self) -> None:
        """Sends or writes what is left."""


class TensorBoardLogger:
    """Events in `tensorboard/`, in the folder of the run.

    Args:
        folder: Folder of the run.
        config: Not read.
        done: Steps that are done already: later events of an interrupted run are hidden; at 0 its files are removed.
    """

    def __init__(self, folder: Path, config: LoggingConfig, done: int = 0) -> None:
        writer = require("torch.utils.tensorboard").SummaryWriter
        events = folder / "tensorboard"
        if done == 0:
            # Files of one second are read in the order of their names, where .10 comes before .9: hiding is not enough.
            for stale in filter(Path.is_file, events.glob("events.out.tfevents.*")):
                stale.unlink()
        self._events = writer(str(events), purge_step=done + 1 if done else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar for each number."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the events."""
        self._events.close()


class WandbLogger:
    """Weights & Biases; a run that resumes goes on under its id, which is made of its folder.

    Args:
        folder: Folder of the run; offline data lie in `wandb/`.
        config: Project and mode.
        done: Steps that are done already.
    """

    def __init__(self, folder: Path, config: LoggingConfig, done: int = 0) -> None:
        wandb = _optional("wandb")
        self._run = wandb.init(
            project=config.project,
            name=folder.name,
            id=_identity(folder),
            dir=str(folder),
            resume="allow" if done else None,
            mode=config.wandb_mode,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class TrackioLogger:
    """trackio, which keeps its data on this machine.

    Args:
        folder: Folder of the run, whose name the run has.
        config: Project.
        done: Steps that are done already.
    """

    def __init__(self, folder: Path, config: LoggingConfig, done: int = 0) -> None:
        trackio = _optional("trackio")
        self._run = trackio.init(project=config.project, name=folder.name, resume="allow" if done else "never")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


_LOGGERS: dict[str, Callable[..., MetricsLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def make_loggers(folder: Path, config: LoggingConfig, done: int = 0) -> list[MetricsLogger]:
    """Makes the loggers that a config names.

    Args:
        folder: Folder of the run.
        config: Names and settings.
        done: Steps that are done already.

    Raises:
        BackendUnavailableError: The package of one is not installed.
    """
    return [_LOGGERS[name](folder, config, done) for name in config.loggers]


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailableError(
            f"logging.loggers names {name!r}, but the package {name!r} cannot be imported ({error}). Install it with: "
            f"pip install {name}, or leave it out of logging.loggers."
        ) from error


def _identity(folder: Path) -> str:
    """A name that stays the same when the run resumes, and differs between folders."""
    return "-".join(part for part in folder.absolute().parts[-3:] if part.strip("/")).replace(" ", "_")[-100:]
