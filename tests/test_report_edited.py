"""`rlloss report` of files that somebody changed by hand: the error names the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report_runs import make_run
from rlloss.cli import main
from rlloss.errors import ConfigError
from rlloss.report.data import read_run
from rlloss.report.page import page

FILES = ("metrics.jsonl", "histograms.jsonl", "samples.jsonl", "report.json", "config.json")


def edited(folder: Path, file: str, line: int, change: dict[str, Any], without: tuple[str, ...] = ()) -> Path:
    """A run with fields of one line put in or taken out; a name with dots lies in objects."""
    make_run(folder)
    path = folder / file
    texts = path.read_text().splitlines()
    found = json.loads(texts[line - 1])
    for dotted, value in change.items():
        *outer, name = dotted.split(".")
        inner = found
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = value
    for name in without:
        del found[name]
    texts[line - 1] = json.dumps(found)
    path.write_text("\n".join(texts) + "\n")
    return folder


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder), "--open", "no"]) == 2
    assert not (folder / "report.html").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


COUNTS = [1] * 37
CASES: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...], str]] = {
    "metrics: no step": ("metrics.jsonl", 3, {}, ("step",), '"step" is missing, expected a whole number from 0'),
    "metrics: a step in words": ("metrics.jsonl", 3, {"step": "two"}, (), '"step" is "two", expected a whole number'),
    "metrics: below zero": ("metrics.jsonl", 3, {"step": -2}, (), '"step" is -2, expected a whole number from 0'),
    "metrics: no phase": ("metrics.jsonl", 51, {}, ("phase",), '"phase" is missing, expected the name of a phase'),
    "metrics: a phase that is none": ("metrics.jsonl", 51, {"phase": ["grpo"]}, (), '"phase" is ["grpo"], expected'),
    "metrics: a metric in words": ("metrics.jsonl", 30, {"loss": "low"}, (), '"loss" is "low", expected a number'),
    "metrics: yes or no": ("metrics.jsonl", 30, {"loss": True}, (), '"loss" is true, expected a number or null'),
    "edges: one is missing": ("histograms.jsonl", 1, {"edges": {"log_ratio": [0.0]}}, (), '"edges.advantage" is'),
    "edges: falling": (
        "histograms.jsonl", 1, {"edges.advantage": [1, 0]}, (), '"edges.advantage" is [1, 0], expected a list',
    ),
    "counts: too few": ("histograms.jsonl", 4, {"log_ratio": [1, 2]}, (), '"log_ratio" is [1, 2], expected 37 counts'),
    "counts: half a token": ("histograms.jsonl", 4, {"advantage": [0.5]}, (), '"advantage" is [0.5], expected a list'),
    "counts: null": ("histograms.jsonl", 4, {"advantage": None}, (), '"advantage" is null, expected a list of'),
    "counts: no step": ("histograms.jsonl", 4, {}, ("step",), '"step" is missing'),
    "samples: no tokens": ("samples.jsonl", 2, {}, ("tokens",), '"tokens" is missing, expected a list of texts'),
    "samples: a text for tokens": ("samples.jsonl", 2, {"tokens": "abc"}, (), '"tokens" is "abc", expected a list of'),
    "samples: no prompt": ("samples.jsonl", 1, {"prompt": None}, (), '"prompt" is null, expected a text'),
    "samples: no reward": ("samples.jsonl", 1, {}, ("reward",), '"reward" is missing, expected a number or null'),
    "samples: a word": ("samples.jsonl", 1, {"log_ratio": ["x"]}, (), '"log_ratio" is ["x"], expected a list'),
    "samples: no advantage": ("samples.jsonl", 1, {}, ("advantage",), '"advantage" is missing'),
    "samples: length": ("samples.jsonl", 1, {"length": "9"}, (), '"length" is "9", expected a whole number from 0'),
    "report: seconds": ("report.json", 0, {"seconds": {"grpo": "long"}}, (), '"seconds.grpo" is "long", expected'),
    "report: finished": ("report.json", 0, {"finished": 1}, (), '"finished" is 1, expected true or false'),
    "report: no step": ("report.json", 0, {}, ("step",), '"step" is missing'),
    "config: a part": ("config.json", 0, {"grpo.loss": 5}, (), '"grpo.loss" is 5, expected an object'),
    "config: steps": ("config.json", 0, {"supervised.steps": "x"}, (), '"supervised.steps" is "x", expected a whole'),
    "config: a rate": ("config.json", 0, {"grpo.optimizer.lr": "1e-3"}, (), '"grpo.optimizer.lr" is "1e-3", expected'),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_field_is_named_with_its_file_and_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, line, change, without, words = CASES[case]
    folder = edited(tmp_path / "run", file, line, change, without)
    where = f"{folder / file}, line {line}" if line else f"{folder / file}"
    assert f"{where}: {words}" in said(folder, capsys)


@pytest.mark.parametrize("file", FILES[:3])
@pytest.mark.parametrize("cut", ['{"step": 2, "pha', "5", "[1]", "null", "\0\0\0", "[" * 100_000])
def test_a_line_that_cannot_be_read_is_named_where_others_follow(
    file: str, cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    texts = (folder / file).read_text().splitlines()
    (folder / file).write_text("\n".join([texts[0], cut, *texts[1:]]) + "\n")
    assert f"{folder / file}, line 2: this is no JSON object: lines that are follow." in said(folder, capsys)


@pytest.mark.parametrize("file", FILES[3:])
def test_a_file_that_cannot_be_read_is_named(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / file
    whole = json.dumps(json.loads(path.read_text()), indent=2)
    for text, words in (
        (whole[:-2], f"{path}, line {whole.count(chr(10))}: this is no JSON object: "),
        (whole.replace(",\n", "\n", 1), f"{path}, line 3: this is no JSON object: "),
        ("[1]", f"{path}, line 1: this is no JSON object: it is [1]"),
        ("9" * 5000, f"{path}: this is no JSON object: "),
    ):
        path.write_text(text)
        assert words in said(folder, capsys)
    for nothing in ("", "\n"):
        path.write_text(nothing)
        assert main(["report", str(folder), "--open", "no"]) == 0
        (folder / "report.html").unlink()
    path.unlink()
    assert main(["report", str(folder), "--open", "no"]) == 0


VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    5e-324,
    float("inf"),
    float("nan"),
    10**400,
    "x",
    [],
    [1],
    [None],
    {},
    {"a": 1},
)


@pytest.mark.parametrize("file", FILES)
def test_no_value_of_any_field_ends_in_anything_but_a_page_or_a_named_error(file: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", supervised=2, rl=3)
    path = folder / file
    whole = path.read_text()
    *before, last = whole.splitlines()
    tried = errors = 0
    for number, text in {0: (before or [last])[0], len(before): last}.items():
        for change in changes(json.loads(text)):
            lines = whole.splitlines()
            lines[number] = json.dumps(change)
            path.write_text("\n".join(lines) + "\n")
            tried += 1
            try:
                page(read_run(folder))
            except ConfigError as error:
                errors += 1
                assert str(path) in str(error)
    assert tried > errors > 0


def changes(found: Any) -> list[Any]:
    """What becomes of JSON when one value anywhere in it is another, or one field is missing."""
    if not isinstance(found, dict):
        return [*VALUES, *([[*found[:-1], value] for value in VALUES] if isinstance(found, list) else [])]
    changed = [{name: value for name, value in found.items() if name != left} for left in found]
    for name, value in found.items():
        changed += [{**found, name: other} for other in changes(value)]
    return changed
