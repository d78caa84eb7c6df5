"""Checkpoints that are either whole or absent, and the random states that make a run resume bit for bit."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from rlloss.errors import ConfigError, RLLossError
from rlloss.training.extras import require

STATE_FILE = "state.pt"
CONFIG_FILE = "config.json"
_PREFIX = "step_"
_PARTIAL = ".partial-"


class Checkpoints:
    """The checkpoints of one run, newest last.

    A checkpoint is written to a hidden folder, flushed to disk, and renamed; a folder under its final name is whole.

    Args:
        folder: Where they lie.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def saved(self) -> list[Path]:
        """Returns the whole checkpoints, oldest first."""
        found = [path for path in self.folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))

    def save(self, step: int, state: dict[str, Any], config: dict[str, Any]) -> Path:
        """Writes one checkpoint, then removes what is older than the newest `keep`.

        Args:
            step: Steps of all phases that are done.
            state: Tensors, numbers, strings, and containers of these.
            config: The resolved config, as JSON can hold it.
        """
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            self._write(partial, final, state, config)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RLLossError(
                f"the checkpoint of step {step} cannot be written to {self.folder}: {error}. The ones before are "
                f"whole: make room on the disk, then go on with --resume."
            ) from error
        for old in self.saved()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _write(self, partial: Path, final: Path, state: dict[str, Any], config: dict[str, Any]) -> None:
        self._remove_partial()
        partial.mkdir(parents=True)
        torch.save(state, partial / STATE_FILE)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        for name in (STATE_FILE, CONFIG_FILE):
            _flush(partial / name)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _flush(self.folder)

    def load(self, device: str) -> dict[str, Any]:
        """Returns the state of the newest checkpoint.

        Raises:
            ConfigError: There is none.
        """
        saved = self.saved()
        if not saved:
            raise ConfigError(f"There is no checkpoint in {self.folder}. Start the run without --resume.")
        try:
            state: dict[str, Any] = torch.load(saved[-1] / STATE_FILE, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise RLLossError(
                f"The checkpoint {saved[-1]} cannot be read: {error}. Remove that folder to resume from the one before."
            ) from error
        return state

    def config(self) -> dict[str, Any]:
        """Returns the config that the newest checkpoint was written with."""
        text = (self.saved()[-1] / CONFIG_FILE).read_text()
        config: dict[str, Any] = json.loads(text)
        return config

    def _remove_partial(self) -> None:
        for path in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path)


def random_states() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators."""
    numpy = require("numpy")
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, numbers, spare = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(numbers), spare],
        "numpy": [name, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to what `random_states` returned."""
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers), spare))
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy = require("numpy")
    numpy.random.set_state((name, keys.cpu().numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
