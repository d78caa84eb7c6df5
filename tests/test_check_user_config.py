"""`rlloss check` on the config file of a user, as the user calls it: a wrong level is found, a right one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_level_is_found(case: str, tmp_path: Path) -> None:
    source, finding = FILES[case]
    path = tmp_path / "config_of_a_user.py"
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "rlloss", "check", str(path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith("FAIL")]
    assert done.returncode == (0 if finding is None else 1), done.stdout + done.stderr
    assert done.stderr == ""
    if finding is None:
        assert failed == []
    else:
        assert finding in failed, done.stdout
        assert "token" in next(line for line in done.stdout.splitlines() if "FAIL level" in line)
