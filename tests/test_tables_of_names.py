"""The tables of names in README and docs say what the library does: every row is read from the page and tried."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from typing import get_args

import pytest

import rlloss
from rlloss.compat.names import TRL_LOSS_TYPES, VERL_LOSS_AGG_MODES
from rlloss.config_file import load_config
from rlloss.losses.policy_registry import get_policy_loss
from rlloss.losses.terms import Reduction
from rlloss.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
REDUCTIONS = get_args(Reduction)
FIELDS = {*rlloss.GRPOLossConfig.model_fields, *get_policy_loss("vanilla").config.model_fields}


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the rows below the table head that starts so."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_reductions_and_the_names_of_peers() -> None:
    rows = table("README.md", "| `loss_reduction` | weight")
    assert sorted(spans(row[0])[0] for row in rows) == sorted(REDUCTIONS)
    for name, _, trl, verl in rows:
        (ours,) = spans(name)
        assert all(TRL_LOSS_TYPES[theirs].reduction == ours for theirs in spans(trl))
        assert all(VERL_LOSS_AGG_MODES[theirs].reduction == ours for theirs in spans(verl))
    assert {theirs for row in rows for theirs in spans(row[3])} == VERL_LOSS_AGG_MODES.keys()


HERE = [
    *(row[1] for row in table("README.md", "| verl | here")),
    *(row[4] for row in table("README.md", "| verl | here")),
    *(row[1] for row in table("docs/migrating.md", "| verl | here")),
    *(row[1] for row in table("docs/migrating.md", "| TRL | here")),
]


@pytest.mark.parametrize("span", sorted({span for cell in HERE for span in spans(cell) if ">=" not in span}))
def test_a_name_of_ours_exists(span: str) -> None:
    if span.startswith("rlloss train "):
        load_config(ROOT / span.split()[-1], TrainConfig)
        return
    path = re.match(r"[A-Za-z_.]+", span)
    assert path is not None or span.startswith('"')
    if span.startswith('"'):
        assert span.strip('"') in REDUCTIONS or get_policy_loss(span.strip('"')).name
    elif "." in path[0] or hasattr(rlloss, path[0]):
        found = pkgutil.resolve_name(f"rlloss.{path[0].removeprefix('rlloss.')}")
        asked = re.findall(r"(\w+)=", span)
        assert set(asked) <= set(inspect.signature(found).parameters), asked
    else:
        names = re.findall(r"\b([a-z_]+)\b(?==|$|,)", re.sub(r"=[^,}]*", "=", re.sub(r"\(.*\)", "", span)))
        assert names
        assert {"policy_loss_cfg" if name == "loss_type" else name for name in names} <= FIELDS
