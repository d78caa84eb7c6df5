"""Training on two ranks: the weights of one rank, and runs that survive the death of a rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import training_runs
from ranks.pool import Failure, Ranks
from rlloss.training.checkpoint import Checkpoints
from rlloss.training.logging import read_lines, read_metrics

pytest.importorskip("reasoning_gym")
ROOT = Path(__file__).parents[2]


def assert_close(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= bound * float(value.abs().max()), name


def test_two_ranks_reach_the_weights_of_one(tmp_path: Path, ranks: Ranks) -> None:
    ((alone, report),) = ranks.run(training_runs.train, str(tmp_path / "one"), 10, world=1, limit=120)
    assert report == {"finished": True, "step": 20}
    both = ranks.run(training_runs.train, str(tmp_path / "two"), 10, world=2, limit=120)
    for weights, report in both:
        assert report == {"finished": True, "step": 20}
        assert_close(weights, alone, 1e-5)
    assert all(torch.equal(both[0][0][name], value) for name, value in both[1][0].items()), "ranks drift apart"
    assert (tmp_path / "two" / "policy").is_dir()
    for one, other in zip(
        *(read_lines(tmp_path / run / "histograms.jsonl")[1:] for run in ("one", "two")), strict=True
    ):
        assert one["advantage"] == other["advantage"]
        assert sum(one["log_ratio"]) == sum(other["log_ratio"])
    samples = [read_lines(tmp_path / run / "samples.jsonl") for run in ("one", "two")]
    assert [line["tokens"] for line in samples[0]] == [line["tokens"] for line in samples[1]] != []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("straight")
    ((weights, _),) = ranks.run(training_runs.train, str(folder / "run"), 3, world=1, limit=120)
    return weights


GRPO, WRITING = ("grpo", 1), ("checkpoint", 6)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("killed", "place", "before", "after"),
    [
        (1, GRPO, 2, 1),
        (-1, WRITING, 1, 2),
        (0, WRITING, 2, 2),
        pytest.param(1, WRITING, 2, 3, marks=SLOW),
        pytest.param(0, GRPO, 2, 3, marks=SLOW),
        pytest.param(-1, GRPO, 2, 2, marks=SLOW),
        pytest.param(-1, GRPO, 1, 2, marks=SLOW),
        pytest.param(-1, WRITING, 2, 1, marks=SLOW),
    ],
)
def test_a_run_survives_a_kill(
    tmp_path: Path, ranks: Ranks, undisturbed: Any, killed: int, place: Any, before: int, after: int
) -> None:
    """SIGKILL of one rank or of all, in a step or while a checkpoint is written; on any ranks the run goes on."""
    folder = tmp_path / "run"
    outcomes = ranks.outcomes(training_runs.train_until, str(folder), 3, killed, place, world=before, limit=60)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert [outcome.kind == "died" for outcome in outcomes] == [killed in (rank, -1) for rank in range(before)]
    assert bool(list((folder / "checkpoints").glob(".partial*/*"))) == (place == WRITING)
    whole = [path.name for path in Checkpoints(folder / "checkpoints", 2).saved()]
    assert whole == (["step_00000003", "step_00000005"] if place == WRITING else ["step_00000002", "step_00000003"])
    for weights, report in ranks.run(training_runs.train, str(folder), 3, True, world=after, limit=60):
        assert report == {"finished": True, "step": 6}
        assert_close(weights, undisturbed, 1e-5)
    assert not list((folder / "checkpoints").glob(".partial*"))


@pytest.mark.parametrize("place", [GRPO, WRITING])
def test_one_process_that_is_killed_resumes_bit_for_bit(
    tmp_path: Path, ranks: Ranks, undisturbed: Any, place: Any
) -> None:
    ranks.outcomes(training_runs.train_until, str(tmp_path / "run"), 3, 0, place, world=1, limit=60)
    ((weights, report),) = ranks.run(training_runs.train, str(tmp_path / "run"), 3, True, world=1, limit=60)
    assert report == {"finished": True, "step": 6}
    assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())


def test_tied_embeddings_and_a_reference_policy(tmp_path: Path, ranks: Ranks) -> None:
    """The reference is sharded as well, and lends its weights to the replica; the run resumes with it on one rank."""
    ((alone, _),) = ranks.run(training_runs.train_tied, str(tmp_path / "one"), 3, world=1, limit=60)
    for weights, report in ranks.run(training_runs.train_tied, str(tmp_path / "two"), 3, world=2, limit=60):
        assert report == {"finished": True, "step": 6}
        assert_close(weights, alone, 1e-5)
    lines = [line for line in read_metrics(tmp_path / "two") if line.get("kl_loss")]
    assert max(line["kl_loss"] for line in lines) > 1e-4
    shutil.rmtree(Checkpoints(tmp_path / "two" / "checkpoints", 2).saved()[-1])
    ((resumed, _),) = ranks.run(training_runs.train_tied, str(tmp_path / "two"), 3, True, world=1, limit=60)
    assert_close(resumed, alone, 1e-5)


UNLIKE = {
    "seed": r"config\.seed is 7 on rank 0, 8 on rank 1",
    "learning rate": r"config\.grpo\.optimizer\.lr is 0\.01 on rank 0, 0\.5 on rank 1\.",
    "resume": r"--resume is False on rank 0, True on rank 1\.",
    "folder": r"output is '\S+/0' on rank 0, '\S+/1' on rank 1\.",
    "questions": r"config\.task\.data_seed is 1 on rank 0, 2 on rank 1; questions is \d+ on rank 0",
    "weights": r"alike: sum of the weights model\.layers\.0\.mlp\.up_proj\.weight is \S+ on rank 0, \S+ on rank 1\.",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_do_not_start_alike(what: str, tmp_path: Path, ranks: Ranks) -> None:
    """Each of them would train on: weights of two models sharded into one."""
    for failure in ranks.outcomes(training_runs.train_unlike, str(tmp_path), what, limit=30):
        assert isinstance(failure, Failure)
        assert failure.kind == "ConfigError", failure.trace
        assert re.search(UNLIKE[what], failure.message), failure.message


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, ranks: Ranks) -> None:
    for said, total in ranks.run(training_runs.full_disk, str(tmp_path), limit=30):
        assert re.search(r"step 2 cannot be written(.|\n)*rank 1: (.|\n)*File too large(.|\n)*--resume", said), said
        assert total == 4.0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_changed_bit_in_the_file_of_any_rank_is_found_by_all(tmp_path: Path, ranks: Ranks, name: str) -> None:
    """Each rank sums the files that it has written, and checks its share of all: also one that reads alone."""
    for said in ranks.run(training_runs.damaged_disk, str(tmp_path), name, True, limit=30):
        assert re.search(rf"rank \d: {re.escape(name)} is not as it was written", said), said
    (alone,) = ranks.run(training_runs.damaged_disk, str(tmp_path), name, False, world=1, limit=30)
    assert f"{name} is not as it was written" in alone


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_ppo_over_ranks_is_the_run_of_one(tmp_path: Path, ranks: Ranks, backbone: str) -> None:
    """Whitening, advantages, running moments and the adaptive penalty count every row once: also in the log."""
    ((alone, _),) = ranks.run(training_runs.train_ppo, str(tmp_path / "one"), 3, backbone, world=1, limit=60)
    for weights, report in ranks.run(training_runs.train_ppo, str(tmp_path / "two"), 3, backbone, world=2, limit=60):
        assert report == {"finished": True, "step": 4}
        assert_close(weights, alone, 1e-5)
    for one, two in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        assert one["phase"] == two["phase"]
        for name in (name for name in one if "time/" not in name and "seconds" not in name and name != "phase"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


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
    assert re.search(r"Root Cause(.|\n)*rank +: 1(.|\n)*Signal 9", died.stderr), died.stderr
    said = r"rlloss: rank 0 lost another rank: rank 1 has given no sign of life for \d+ s(.|\n)*--resume"
    assert re.search(said, died.stderr), died.stderr
    done = subprocess.run(
        [*command, *rest, "--resume"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.json").is_file()
