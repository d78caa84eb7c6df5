"""The table of peers' names; the golden cases of TRL, verl and Liger run through it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

import golden_cases
from rlloss import GRPOLossConfig, GRPOLossContext, Totals
from rlloss.compat.names import (
    TRL_LOSS_TYPES,
    VERL_LOSS_AGG_MODES,
    VERL_LOSS_MODES,
    TRLCounts,
    trl_policy_loss,
    trl_totals,
    verl_policy_loss,
    verl_totals,
)
from rlloss.errors import UnknownNameError
from rlloss.losses.policy_registry import get_policy_loss
from rlloss.losses.terms import Reduction

OPTIONS: dict[str, Any] = {
    "epsilon": 0.1,
    "epsilon_high": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}


def seen(name: str) -> set[str]:
    """The values of a parameter over all golden cases."""
    return {str(case.data["params"][name]) for case in golden_cases.all_cases() if name in case.data.get("params", {})}


def test_every_name_is_in_a_golden_case() -> None:
    assert set(TRL_LOSS_TYPES) <= seen("loss_type")
    assert set(VERL_LOSS_AGG_MODES) <= seen("loss_agg_mode")
    keys = {case.key for case in golden_cases.all_cases()}
    assert all(f"core_algos policy loss '{mode}'" in keys for mode in VERL_LOSS_MODES)


@pytest.mark.parametrize("name", TRL_LOSS_TYPES)
def test_trl_names_give_a_config(name: str) -> None:
    peer = TRL_LOSS_TYPES[name]
    length = {"loss_length": 8.0} if peer.reduction == "constant" else {}
    config = GRPOLossConfig(
        policy_loss_cfg=trl_policy_loss(OPTIONS | {"loss_type": name}), loss_reduction=peer.reduction, **length
    )
    assert config.policy_loss.name == peer.policy_loss
    if peer.policy_loss == "vanilla":
        assert config.policy_loss_cfg["cliprange_high"] == 0.1


def test_trl_totals() -> None:
    counts = TRLCounts(rows=4, tokens=17, items=100.0, accumulation=2, per_generation=8, processes=3)
    assert trl_totals("grpo", counts) == Totals(sequences=24, world=3)
    assert trl_totals("bnpo", counts) == Totals(tokens=102, world=3)
    assert trl_totals("dapo", counts) == Totals(tokens=25.0, world=3)


def test_verl_names_give_a_config() -> None:
    for mode in VERL_LOSS_MODES:
        fields = verl_policy_loss(mode, {"clip_ratio": 0.3, "clip_ratio_low": None, "dro_beta": 0.1})
        GRPOLossConfig(policy_loss_cfg=fields, loss_reduction="sample")
    assert verl_policy_loss("vanilla", {"clip_ratio": 0.3, "clip_ratio_low": None})["cliprange_low"] == 0.3
    assert verl_totals(9, 3, 2) == Totals(tokens=9, sequences=3, world=2)
    assert {peer.reduction for peer in VERL_LOSS_AGG_MODES.values()} <= set(get_args(Reduction))


@pytest.mark.parametrize(("alias", "name"), [("geo_mean", "gmpo"), ("gpg", "reinforce"), ("kimi15", "opmd")])
def test_peers_names_are_aliases(alias: str, name: str) -> None:
    assert get_policy_loss(alias).name == name


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'dapo'"):
        trl_policy_loss({"loss_type": "dap"})
    with pytest.raises(UnknownNameError, match="'geo_mean'"):
        verl_policy_loss("geomean", {})


@pytest.mark.parametrize(
    ("reduction", "totals", "expected"),
    [
        ("token", Totals(tokens=8), 0),
        ("sample", Totals(sequences=2), 0),
        ("sum", Totals(), 0),
        ("token", Totals(sequences=2), 1),
        ("sample", Totals(tokens=8), 1),
        ("square", Totals(tokens=8, sequences=2), 1),
        ("prompt", Totals(tokens=8, sequences=2), 2),
    ],
)
def test_a_given_total_is_not_counted(
    reduction: str, totals: Totals, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rlloss.losses import calibration

    calls = []
    monkeypatch.setattr(calibration, "all_reduce_sum", lambda values, group: calls.append(1) or values)
    config = GRPOLossConfig(on_policy=True, loss_reduction=reduction, reduce_loss=False)
    batch = {
        "shifted_labels": torch.zeros(2, 2, dtype=torch.long),
        "advantages": torch.ones(2),
        "group_ids": torch.tensor([0, 1]),
        "num_prompts": 2,
    }
    GRPOLossContext.build_batches([config.build(batch)], totals=totals)
    assert len(calls) == expected
    calls.clear()
    config = GRPOLossConfig(on_policy=True, loss_reduction=reduction)  # forward waits for every rank: first they agree
    GRPOLossContext.build_batches([config.build(batch)], totals=totals)
    assert len(calls) == max(expected, 1)
