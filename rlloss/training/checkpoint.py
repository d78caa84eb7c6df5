"""Checkpoints that are either whole or absent, and the random states that make a run resume bit for bit."""

import base64
import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from rlloss.distributed import all_gather_text, rank, world_size
from rlloss.errors import ConfigError, RLLossError
from rlloss.training.extras import require
from rlloss.training.ranks import is_lost, is_main, share

FACTS_FILE = "run.json"
"""Written last: a folder with it is whole."""
EARLIER_FILE = "state.pt"
"""What checkpoints consisted of before all ranks wrote them; no version since then reads it."""
SUMS = "sums_"
"""Start of the files that hold the checksums of the others: torch reads a changed byte as another number."""
BLOCK = 1 << 24
"""Bytes of a file that are in memory at a time while its checksum is made."""
_PREFIX = "step_"
_PARTIAL = ".partial-"


class Checkpoints:
    """The checkpoints of one run, newest last; one format, whatever the number of ranks.

    A checkpoint is written to a hidden folder by all ranks, each its part of the tensors, flushed to disk, and renamed
    by the first rank once all have finished; a folder under its final name is whole.

    Args:
        folder: Where they lie; the same disk for every rank.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def saved(self) -> list[Path]:
        """Returns the whole checkpoints, oldest first."""
        found = [path for path in self.folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
        whole = [path for path in found if (path / FACTS_FILE).is_file()]
        return sorted(whole, key=lambda path: int(path.name.removeprefix(_PREFIX)))

    def refuse_earlier(self) -> None:
        """Refuses a folder with checkpoints of an earlier version: they would pass for none.

        Raises:
            ConfigError: There are some.
        """
        earlier = sorted(path.parent.name for path in self.folder.glob(f"{_PREFIX}*/{EARLIER_FILE}"))
        if earlier:
            raise ConfigError(
                f"{self.folder} holds checkpoints of an earlier version ({EARLIER_FILE} in {earlier[-1]}), which this "
                f"one cannot read. Finish that run with the version that wrote it, or choose another --output."
            )

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Writes one checkpoint, then removes what is older than the newest `keep`; every rank must come here.

        Args:
            step: Steps of all phases that are done.
            tensors: By name, whole or sharded over the ranks.
            facts: What JSON can hold; those of the first rank are written.

        Raises:
            RLLossError: A rank could not write, for instance because the disk is full; raised on every rank.
        """
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        for part in (
            lambda: self._begin(partial),
            lambda: _save(tensors, partial),
            lambda: _write_sums(share(_files_of(partial)), rank()),
            lambda: self._finish(partial, final, facts),
        ):
            problem = _on_every_rank(part)
            if problem:
                if is_main():
                    shutil.rmtree(partial, ignore_errors=True)
                raise RLLossError(
                    f"the checkpoint of step {step} cannot be written to {self.folder}: {problem}. The ones before "
                    f"are whole: make room on the disk, then go on with --resume."
                )

    def facts(self) -> dict[str, Any]:
        """Returns the facts of the newest checkpoint.

        Raises:
            ConfigError: There is none.
            RLLossError: They cannot be read.
        """
        saved = self.saved()
        if not saved:
            raise ConfigError(f"There is no checkpoint in {self.folder}. Start the run without --resume.")
        try:
            _check_sums([saved[-1] / FACTS_FILE])
            facts: dict[str, Any] = json.loads((saved[-1] / FACTS_FILE).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(saved[-1], str(error)) from error
        return facts

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fills tensors in place from the newest checkpoint, whatever the number of ranks that wrote it.

        Args:
            tensors: By name, whole or sharded over the ranks.

        Raises:
            RLLossError: A tensor is missing there, or a file cannot be read or is not as it was written.
        """
        newest = self.saved()[-1]
        problem = _on_every_rank(lambda: _check_sums(share(_files_of(newest))))
        problem = problem or _on_every_rank(lambda: _load(tensors, newest))
        if problem:
            raise _unreadable(newest, problem)

    def _begin(self, partial: Path) -> None:
        if is_main():
            for path in self.folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path)
            partial.mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, facts: dict[str, Any]) -> None:
        if not is_main():
            return
        (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2))
        _flush(partial / FACTS_FILE)
        _write_sums([partial / FACTS_FILE], FACTS_FILE)
        _flush(partial)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _flush(self.folder)
        for old in self.saved()[: -self.keep]:
            shutil.rmtree(old)


def _on_every_rank(action: Callable[[], None]) -> str:
    """Runs an action on every rank, waits for all, and returns on each of them what has gone wrong on any."""
    problem = ""
    try:
        action()
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, CheckpointException) as error:
        if isinstance(error, RuntimeError) and is_lost(error):
            raise
        problem = _sentence(error)
    problems = all_gather_text(problem)
    named = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    return "; ".join(named) if len(problems) > 1 else problem


def _sentence(error: BaseException) -> str:
    """Returns what a rank says of an error; torch wraps those of all ranks into one."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(str(inner).splitlines()[0] for inner, _ in error.failures.values()))
    return str(error)


def _unreadable(folder: Path, problem: str) -> RLLossError:
    return RLLossError(
        f"The checkpoint {folder} cannot be read: {problem}. Remove that folder to resume from the one before."
    )


def _files_of(folder: Path) -> list[Path]:
    """The files of tensors, in the same order on every rank."""
    return sorted(path for path in folder.iterdir() if path.name != FACTS_FILE and not path.name.startswith(SUMS))


def _write_sums(files: Sequence[Path], name: object) -> None:
    """Writes the checksums of some files beside them."""
    for folder in {path.parent for path in files}:
        target = folder / f"{SUMS}{name}"
        target.write_text(json.dumps({path.name: _sum(path) for path in files}))
        _flush(target)


def _check_sums(files: Sequence[Path]) -> None:
    """Compares files with their checksums, where there are some.

    Raises:
        ValueError: One is not as it was written.
    """
    for folder in {path.parent for path in files}:
        known: dict[str, int] = {}
        for path in folder.glob(f"{SUMS}*"):
            known |= json.loads(path.read_text())
        for path in files:
            if path.name in known and known[path.name] != _sum(path):
                raise ValueError(f"{path.name} is not as it was written, its checksum is another")


def _sum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found = zlib.crc32(block, found)
    return found


class _Writer(FileSystemWriter):
    """Writes this rank's part; an error is the system's own, which torch's packing would hide."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is enough, where there is one
        state_dict_saver.save(dict(tensors), storage_writer=_Writer(folder), no_dist=world_size() == 1)


def _load(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=world_size() == 1)


def random_states() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators, as JSON can hold them."""
    numpy = require("numpy")
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, numbers, spare = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(numbers), spare],
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = [_text(state) for state in torch.cuda.get_rng_state_all()]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the generators to what `random_states` returned."""
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers), spare))
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy = require("numpy")
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes(state) for state in states["cuda"][: torch.cuda.device_count()]])


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
