"""Fixtures and the summary that all tests share."""

from __future__ import annotations

from typing import Any

import pytest


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
