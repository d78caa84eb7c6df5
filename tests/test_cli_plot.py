"""`rlloss plot`: the curves are the losses, and a picture comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batches import built_in_policy_losses
from rlloss.cli import main
from rlloss.cli_plot import curves
from rlloss.losses.policy_registry import get_policy_loss


@pytest.mark.parametrize("name", built_in_policy_losses())
def test_curves_are_finite(name: str) -> None:
    for advantage in (1.0, -1.0):
        ratio, values, slope = curves(get_policy_loss(name), advantage)
        assert ratio.shape == values.shape == slope.shape
        assert bool(values.isfinite().all())
        assert bool(slope.isfinite().all())


def test_vanilla_is_flat_beyond_its_clip() -> None:
    ratio, values, slope = curves(get_policy_loss("vanilla"), 1.0)
    beyond = ratio > 1.2
    torch.testing.assert_close(values[~beyond], -ratio[~beyond])
    torch.testing.assert_close(slope[~beyond], -ratio[~beyond])
    assert bool((values[beyond] == -1.2).all())
    assert bool((slope[beyond] == 0).all())


def test_the_picture(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "losses.png"
    assert main(["plot", "vanilla", "geo_mean", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out


def test_an_unknown_loss_is_one_line(capsys: Any) -> None:
    assert main(["plot", "vanila"]) == 2
    assert "Did you mean 'vanilla'?" in capsys.readouterr().err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", "vanilla"]) == 2
    assert "matplotlib" in capsys.readouterr().err
