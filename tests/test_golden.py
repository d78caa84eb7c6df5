"""Every recorded number of other projects' code is reproduced through the public API, or excluded with a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import golden_advantages  # noqa: F401  (registers its families)
import golden_cases
import golden_heads  # noqa: F401  (registers its families)
import golden_liger  # noqa: F401
import golden_ppo  # noqa: F401
import golden_ppo_steps  # noqa: F401
import golden_rollout  # noqa: F401
import golden_trl  # noqa: F401
import golden_verl  # noqa: F401
import golden_xtuner  # noqa: F401
from golden_cases import Case
from golden_exclusions import EXCLUSIONS


def exclusion_reason(case: Case) -> str | None:
    return next((row.reason for row in EXCLUSIONS if row.covers(case)), None)


def runs() -> list[Any]:
    """One parameter for each case that is not excluded and each variant; a case without a family fails in its test."""
    parameters = []
    for case in golden_cases.all_cases():
        if exclusion_reason(case) is None:
            family = golden_cases.family_of(case)
            for variant in family.variants if family else (None,):
                suffix = "" if variant is None else f"-{variant}"
                parameters.append(pytest.param(case, variant, id=f"{case}{suffix}"))
    return parameters


@pytest.mark.parametrize(("case", "variant"), runs())
def test_golden(case: Case, variant: Any) -> None:
    family = golden_cases.family_of(case)
    assert family is not None, f"no family for {case} (key {case.key!r}), and no row in the table of exclusions"
    family.adapter(case, variant)


def test_every_exclusion_covers_a_case() -> None:
    stale = [row for row in EXCLUSIONS if not any(row.covers(case) for case in golden_cases.all_cases())]
    assert not stale


def test_counts(record_property: Any) -> None:
    """Leaves the counts for the summary of the run; `test_golden_pins.py` has the limit and what happens instead."""
    reasons = Counter(exclusion_reason(case) for case in golden_cases.all_cases())
    record_property("golden_cases_run", reasons.pop(None, 0))
    for reason, count in sorted(reasons.items()):
        record_property(f"golden_excluded: {reason}", count)


def test_an_unknown_case_fails() -> None:
    stray = Case("stray", "cases", {"name": "x", "function": "novel.loss"})
    assert exclusion_reason(stray) is None
    with pytest.raises(AssertionError, match="no family"):
        test_golden(stray, None)


def test_a_wrong_number_fails() -> None:
    golden_cases.assert_close(golden_cases.tensor([1.0, "nan", "-Infinity"]), [1.0 + 5e-7, "NaN", "-inf"], 1e-6, "x")
    for wrong in ([1.0 + 2e-6, "nan", "-inf"], [1.0, 0.0, "-inf"], [1.0, "nan", "inf"], [1.0, "nan"]):
        with pytest.raises(AssertionError):
            golden_cases.assert_close(golden_cases.tensor([1.0, "nan", "-inf"]), wrong, 1e-6, "x")


def test_a_folder_of_more_cases_is_read(tmp_path: Any) -> None:
    content = '{"README": "r", "sizes": [1, 2], "cases": [{"name": "a", "loss": "GRPO"}], "other": [{"name": "b"}]}'
    (tmp_path / "more.json").write_text(content)
    cases = list(golden_cases.read_folder(tmp_path))
    assert [(case.key, str(case)) for case in cases] == [("cases:GRPO", "more-cases-a"), ("other", "more-other-b")]
