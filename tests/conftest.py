"""Fixtures and the summary that all tests share."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloss.heads import native

ROOT = Path(__file__).parents[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many golden cases passed, failed, and were excluded, by reason."""
    reports: list[Any] = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    golden = [r for r in reports if r.when == "call" and "test_golden.py::test_golden[" in r.nodeid]
    if not golden:
        return
    passed = sum(report.outcome == "passed" for report in golden)
    terminalreporter.section("golden numbers")
    terminalreporter.line(f"{passed} runs passed, {len(golden) - passed} failed (a case runs once in each mode)")
    for report in reports:
        for name, value in getattr(report, "user_properties", []):
            if name.startswith("golden_"):
                terminalreporter.line(f"{value:5d}  {name.removeprefix('golden_').replace('_', ' ')}")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled part, built from the source with the options of pyproject.toml."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    out = tmp_path_factory.mktemp("native") / "native.so"
    sources = [str(ROOT / source) for source in module["sources"]]
    options = [*module["extra-compile-args"], *module["extra-link-args"], "-shared", "-fPIC", "-Wall", "-Wextra"]
    found = subprocess.run([compiler, *sources, *options, "-o", str(out)], capture_output=True, text=True, check=False)
    if "fopenmp" in found.stderr:
        pytest.skip("no OpenMP")
    assert found.returncode == 0, found.stderr
    assert "warning" not in found.stderr
    return native.load(str(out))


@pytest.fixture
def with_native(built: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "library", lambda: built)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
