"""Training on two ranks: the weights of one rank, and runs that survive the death of a rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import training_runs
from ranks.pool import Failure, Ranks

pytest.importorskip("reasoning_gym")
ROOT = Path(__file__).parents[2]


def assert_close(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= bound * float(value.abs().max()), name


@pytest.mark.slow
def test_two_ranks_reach_the_weights_of_one(tmp_path: Path, ranks: Ranks) -> None:
    ((alone, report),) = ranks.run(training_runs.train, str(tmp_path / "one"), 10, world=1, limit=120)
    assert report == {"finished": True, "step": 20}
    both = ranks.run(training_runs.train, str(tmp_path / "two"), 10, world=2, limit=120)
    for weights, report in both:
        assert report == {"finished": True, "step": 20}
        assert_close(weights, alone, 1e-5)
    assert all(torch.equal(both[0][0][name], value) for name, value in both[1][0].items()), "ranks drift apart"
    assert (tmp_path / "two" / "policy").is_dir()


@pytest.mark.parametrize(
    "killed", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(-1, marks=pytest.mark.slow)]
)
def test_a_killed_rank_ends_the_run_and_nothing_is_lost(tmp_path: Path, ranks: Ranks, killed: int) -> None:
    """The others notice it at once; on another number of ranks the run goes on to the same weights."""
    ((undisturbed, _),) = ranks.run(training_runs.train, str(tmp_path / "straight"), 3, world=1, limit=60)
    folder = str(tmp_path / "killed")
    outcomes = ranks.outcomes(training_runs.train_until, folder, 3, killed, ("grpo", 1), world=2, limit=60)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert not list((Path(folder) / "checkpoints").glob(".partial*"))
    ((resumed, report),) = ranks.run(training_runs.train, folder, 3, True, world=1, limit=60)
    assert report == {"finished": True, "step": 6}
    assert_close(resumed, undisturbed, 1e-5)


@pytest.mark.slow
def test_torchrun_trains_and_a_killed_rank_is_named(tmp_path: Path) -> None:
    """The command of the README: whole, and with a rank that dies; the message says how to go on."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config = tmp_path / "tiny.py"
    config.write_text(
        f"import os, signal, sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from ranks.training_runs import config_of\nfrom rlloss.training.phase import Phase\n"
        "config = config_of(3)\noriginal = Phase.apply_gradients\n"
        "def stepping(self, index):\n"
        "    if os.environ.get('DIES') == os.environ['RANK'] and (self.name, index) == ('grpo', 1):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(self, index)\n"
        "Phase.apply_gradients = stepping\n"
    )
    rest = ["-m", "rlloss", "train", str(config), "--output", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    died = subprocess.run(
        command + rest, env={**environment, "DIES": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert died.returncode != 0
    named = r"Root Cause(.|\n)*rank +: 1(.|\n)*Signal 9"  # torchrun may stop rank 0 before it says that it lost rank 1
    assert re.search(named, died.stderr), died.stderr
    done = subprocess.run(
        [*command, *rest, "--resume"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.json").is_file()
