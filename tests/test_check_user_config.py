"""`rlloss check` on the config file of a user, as the user calls it: a wrong level is found, a right one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlloss import policy_loss_names, unregister_policy_loss
from rlloss.cli import main

ROOT = Path(__file__).parents[1]

FORMULA = """
from rlloss import GRPOLossConfig, register_policy_loss


@register_policy_loss("of_a_user"{more})
def of_a_user(log_prob, old_log_prob, advantages{asked}):
    log_ratio = (log_prob - old_log_prob).clamp(-20, 20)
    return {value}


config = GRPOLossConfig(policy_loss_cfg={{"loss_type": "of_a_user"}}, loss_reduction="sample")
"""
# Over all tokens that it sees: right for one batch, another number for each way to cut it.
ACROSS = "-advantages * (log_ratio - log_ratio.mean()).exp()"
SEQUENCE = "-advantages * segments.broadcast(segments.mean(log_ratio)).exp()"
TOKEN = "-advantages * log_ratio.exp()"

CONTEXT = """
import torch
from rlloss import CELossConfig, CELossContext


class Normalised(CELossContext):
    level = "{level}"

    def token_loss(self, stats, loss_kwargs):
        nll = -stats.log_prob
        {lines}
        return (nll * loss_kwargs.loss_weight).sum(), {{}}


class NormalisedConfig(CELossConfig):
    @property
    def loss_ctx_cls(self):
        return Normalised


config = NormalisedConfig()
"""
OVER_SEQUENCES = "nll = nll / stats.segments.broadcast(stats.segments.mean(nll.detach() + 1.0))"
FILES = {
    "formula across tokens": (FORMULA.format(more="", asked="", value=ACROSS), "level"),
    "formula across a sequence, declared token": (
        FORMULA.format(more=', level="token"', asked=", segments", value=SEQUENCE),
        "level",
    ),
    "context across a sequence, declared token": (CONTEXT.format(level="token", lines=OVER_SEQUENCES), "level"),
    "formula of a sequence": (FORMULA.format(more="", asked=", segments", value=SEQUENCE), None),
    "formula of a token": (FORMULA.format(more="", asked="", value=TOKEN), None),
    "context of a token": (CONTEXT.format(level="token", lines="nll = nll.square()"), None),
}


def failures(printed: str) -> list[str]:
    """Lines of what does not hold."""
    return [line.strip() for line in printed.splitlines() if line.strip().startswith("FAIL")]


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_level_is_found_and_a_right_one_is_not(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, finding = FILES[case]
    path = tmp_path / "config_of_a_user.py"
    path.write_text(source)
    try:
        status = main(["check", str(path)])
    finally:
        if "of_a_user" in policy_loss_names():
            unregister_policy_loss("of_a_user")
    found = failures(capsys.readouterr().out)
    assert status == (0 if finding is None else 1), found
    if finding is None:
        assert found == []
    else:
        (level,) = [line for line in found if line.startswith(f"FAIL {finding}")]
        assert "declared level 'token'" in level
        assert "Declare level='sequence'" in level


def test_the_command_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "config_of_a_user.py"
    path.write_text(FILES["formula across tokens"][0])
    done = subprocess.run(
        [sys.executable, "-m", "rlloss", "check", str(path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert any(line.startswith("FAIL level") for line in failures(done.stdout))
