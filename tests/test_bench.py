"""The bench: exact reference, a table with peers, files, and what counts as noise."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from rlloss.bench.measure import Line, Plan, busy_neighbour, measure_peak, measure_times
from rlloss.bench.problem import Shape, exact_gradients, make_problem
from rlloss.bench.quiet import Usage, usage
from rlloss.bench.subjects import Subject, subjects
from rlloss.cli import main

SMALL = Shape(tokens=64, hidden=8, vocabulary=40, chunk_size=16)


@pytest.mark.parametrize("batch", ["dense", "rl"])
def test_every_subject_computes_the_same_gradients(batch: str) -> None:
    """Peers and modes are compared on one loss, so all of them must be close to the float64 gradients."""
    problem = make_problem(Shape(64, 8, 40, 16, batch=batch))  # type: ignore[arg-type]
    found, _ = subjects(problem)
    exact = exact_gradients(problem)
    checked = 0
    for subject in found:
        grads = subject.run(0)
        if grads[0] is None:
            continue
        checked += 1
        for mine, true in zip(grads, exact, strict=True):
            assert mine is not None
            assert (mine.double().reshape(true.shape) - true).norm() < 1e-5 * true.norm(), subject.name
    assert checked >= 5


def test_the_rl_batch_is_as_described() -> None:
    problem = make_problem(Shape(1024, 8, 40, 16, batch="rl"))
    share = problem.mask.double().mean().item()
    assert share == pytest.approx(0.65, abs=0.02)
    advantages = problem.advantages[problem.mask]
    assert (advantages == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)


def test_the_command_writes_a_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--tokens", "64", "--hidden", "8", "--vocabulary", "40", "--chunk-size", "16"]
    arguments += ["--pairs", "2", "--most", "4", "--others", "9", "--only", "rlloss", "--output", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "rlloss chunk" in printed.out
    assert "rlloss chunk: 2 pairs, 0 noisy" in printed.err
    content = json.loads((tmp_path / "bench.json").read_text())
    chunk = content["lines"][0]
    assert len(chunk["ratios"]) == 2
    assert chunk["weight_error"] < 1e-5
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_pairs_beside_a_busy_process_are_thrown_away() -> None:
    before, later = Usage(0.0, 0.0, 0.0, 0.0), Usage(1.0, 0.5, 1.5, 0.25)
    assert before.others_until(later) == pytest.approx(0.75 / (os.cpu_count() or 1))
    plan, line = Plan(pairs=2, most=3, others_allowed=-1.0), Line("x")
    work = torch.randn(200, 200)
    shown: list[int] = []
    subject = Subject("x", lambda i: (work @ work, None), lambda i: None)
    measure_times(subject, line, SMALL, plan, None, lambda: shown.append(line.noisy))
    assert (line.ratios, line.noisy, line.ratio) == ([], 3, None)
    assert shown == [1, 2, 3]  # or the bar would stand still on a busy machine, without a word


def test_a_line_is_the_time_of_the_subject_over_that_of_its_products() -> None:
    line = Line("x")
    slow = Subject("x", lambda i: (time.sleep(0.04), (None, None))[1], lambda i: time.sleep(0.01))
    measure_times(slow, line, SMALL, Plan(pairs=4, most=4, others_allowed=9.0), None, lambda: None)
    assert min(line.seconds) >= 0.04
    assert len(line.ratios) == 4
    assert 2.0 < min(line.ratios) <= max(line.ratios) < 6.0
    known = Line("y", ratios=[1.0, 4.0, 2.0, 3.0])
    assert (known.ratio, known.spread) == (2.5, (1.75, 3.25))


def test_peak_memory_is_what_one_run_adds() -> None:
    def run(number: int) -> tuple[None, None]:
        block = torch.ones(64 << 18)  # 64 MiB
        time.sleep(0.05)
        del block
        return None, None

    found = measure_peak(Subject("x", run, lambda i: None), SMALL)
    assert found is None or 60 < found < 80


def test_a_neighbour_that_was_asked_for_is_excused() -> None:
    """Its processor time is read, in seconds, and it is gone afterwards."""
    with busy_neighbour(True) as pid:
        assert pid is not None
        before, start = usage(pid), time.monotonic()
        while usage(pid).excused < before.excused + 0.1:
            assert time.monotonic() < start + 60
            time.sleep(0.02)
        assert usage(pid).excused - before.excused <= 1.2 * (time.monotonic() - start) + 0.05
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_unknown_subject_is_named() -> None:
    assert main(["bench", "--tokens", "64", "--hidden", "8", "--vocabulary", "40", "--only", "nobody"]) == 2
