"""Stumbles of a newcomer who followed the README: each had no way out, or the wrong one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloss import CELossConfig, GRPOLossConfig, register_policy_loss
from rlloss.cli import main
from rlloss.compat.names import TRL_LOSS_TYPES, VERL_LOSS_AGG_MODES
from rlloss.config_file import load_config
from rlloss.doctor import Finding, ignored_sequence, sequence
from rlloss.errors import BatchError, ConfigError
from rlloss.losses.config import StrictModel
from rlloss.losses.peer_fields import FIELDS, REDUCTIONS
from rlloss.losses.policy_losses import VanillaConfig
from rlloss.losses.policy_registry import unregister_policy_loss


def test_a_table_of_sequences_of_which_one_is_ignored() -> None:
    a = sequence(log_prob=[-1.0, -2.0], advantages=[1.0, 0.5])
    found = Finding("splits", False, "", [a, ignored_sequence(a)])
    assert [line.split() for line in found.table().splitlines()] == [
        ["sequence", "token", "log_prob", "advantages", "counted"],
        ["a", "0", "-1", "1", "1"],
        ["a", "1", "-2", "0.5", "1"],
        ["b", "0", "-1", "1", "0"],
        ["b", "1", "-2", "0.5", "0"],
    ]


@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_a_scalar_of_a_loss_that_never_saw_the_weights_is_refused(mode: Any) -> None:
    """It would train, and hang on how the step is cut."""

    @register_policy_loss("plain mean")
    def plain_mean(log_prob: Any, advantages: Any) -> Any:
        return (-log_prob * advantages).mean()

    try:
        config = GRPOLossConfig(policy_loss_cfg={"loss_type": "plain mean"}, mode=mode)
        batch = {"shifted_labels": torch.zeros(1, 3, dtype=torch.long), "advantages": torch.ones(1)}
        (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
        with pytest.raises(ConfigError, match=r"'plain mean' returned a scalar.*\(3,\).*loss_weights"):
            context.forward(torch.ones(1, 3, 4), torch.ones(5, 4))
    finally:
        unregister_policy_loss("plain mean")


def test_a_config_of_another_name_is_named(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from rlloss import GRPOLossConfig\nloss_cfg = GRPOLossConfig()\n")
    with pytest.raises(ConfigError, match="Call 'loss_cfg' config"):
        load_config(file, StrictModel)
    file.write_text("")
    assert main(["check", str(file)]) == 2
    assert "config = GRPOLossConfig(...)" in capsys.readouterr().err


def test_a_config_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script does; and what lies where the command runs, as `python -m` does."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "beside_it_7.py").write_text("size = 11\n")
    (tmp_path / "where_it_runs_7.py").write_text("seed = 0.5\n")
    file = tmp_path / "a" / "mine.py"
    lines = ["from beside_it_7 import size", "from where_it_runs_7 import seed", "from rlloss import CELossConfig"]
    file.write_text("\n".join([*lines, "config = CELossConfig(chunk_size=size, temperature=seed)\n"]))
    monkeypatch.chdir(tmp_path)
    assert load_config("a/mine.py", CELossConfig).chunk_size == 11


def test_a_transposed_head_is_no_question_of_the_tokenizer() -> None:
    config = CELossConfig()
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([[9]])})])
    with pytest.raises(BatchError, match=r"hidden_states has shape \(1, 1, 8\), expected \(1, 1, 50\)"):
        context.forward(torch.ones(1, 1, 8), torch.ones(8, 50))


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"policy_loss_cfg": {"clip_ratio_low": 0.2}}, "'cliprange_low' of policy_loss_cfg"),
        ({"clip_ratio_high": 0.2}, "'cliprange_high' of policy_loss_cfg"),
        ({"policy_loss_cfg": {"epsilon": 0.2}}, "'cliprange_low' and 'cliprange_high'"),
        ({"beta": 0.1}, "'kl_loss_coef', with use_kl_loss=True"),
        ({"loss_agg_mode": "token-mean"}, "'loss_reduction'"),
        ({"loss_type": "dapo"}, "'loss_type' of policy_loss_cfg, and 'loss_reduction'"),
        ({"loss_reduction": "dr_grpo"}, "Here that is 'constant'."),
        ({"loss_reduction": "seq-mean-token-mean"}, "Here that is 'sample'."),
        ({"loss_reduction": "tokens"}, "Did you mean 'token'?"),
        ({"entropy_coeff": 0.1}, "Did you mean 'entropy_coef'?"),
    ],
)
def test_names_of_verl_and_trl_are_translated(fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOLossConfig(**fields)
    assert hint in str(caught.value)


def test_the_translations_are_those_of_compat_and_name_fields_that_exist() -> None:
    peers = {**TRL_LOSS_TYPES, **VERL_LOSS_AGG_MODES}
    assert {name: peers[name].reduction for name in REDUCTIONS} == REDUCTIONS
    known = {*GRPOLossConfig.model_fields, *VanillaConfig.model_fields}
    for text in FIELDS.values():
        assert set(re.findall(r"'(\w+)'", text)) <= known
