"""Configs that are XTuner's as well: what its trainers' typed fields accept, with stand-ins for XTuner's classes."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from rlloss.compat import xtuner
from rlloss.errors import BackendUnavailableError, ConfigError

INSIDE = "rlloss.compat.xtuner.inside"


class TheirCE(BaseModel):
    """XTuner's class in what matters here: fields of its own, and a refusal after init."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    ignore_idx: int = -100
    mode: str = "eager"
    loss_reduction: str = "token"

    def model_post_init(self, context: Any) -> None:
        assert self.mode != "liger" or self.loss_reduction == "token"


class TheirRL(TheirCE):
    policy_loss_cfg: dict[str, Any]
    rollout_is: Any = None

    def build(self, data: Any, sp_mesh: Any = None) -> Any:
        raise AssertionError("ours is taken")


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    contents: dict[str, dict[str, Any]] = {"xtuner": {}, "xtuner.v1": {}, "xtuner.v1.rl": {}}
    contents |= {"xtuner.v1.loss": {"CELossConfig": TheirCE}, "xtuner.v1.rl.loss": {"BaseRLLossConfig": TheirRL}}
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, INSIDE, raising=False)
    yield importlib.import_module(INSIDE)
    sys.modules.pop(INSIDE, None)


class Worker(BaseModel):
    loss_cfg: TheirRL
    sft_loss_cfg: TheirCE


@pytest.mark.parametrize("name", ["GRPOLossConfig", "OrealLossConfig"])
def test_typed_fields_accept_them(inside: Any, name: str) -> None:
    config = getattr(inside, name)(mode="chunk", policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    worker = Worker(loss_cfg=config, sft_loss_cfg=inside.CELossConfig(mode="liger", loss_reduction="square"))
    assert worker.loss_cfg is config
    plain = getattr(xtuner, name)(mode="chunk", policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    assert config.model_dump() == plain.model_dump()
    assert config.loss_ctx_cls is plain.loss_ctx_cls
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="unknown field 'chunk_sizes'"):
        getattr(inside, name)(chunk_sizes=3)


def test_the_loss_is_ours(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlloss.compat.xtuner.contexts.device_of_training", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    batch = {"shifted_labels": torch.tensor([[1, -100, 3]]), "num_tokens": torch.tensor([3])}
    batch |= {name: torch.randn(1, 3) for name in ("advantages", "old_logprobs")}
    hidden, weight = torch.randn(1, 3, 4), torch.randn(5, 4)
    losses = []
    for module in (xtuner, inside):
        config = module.GRPOLossConfig()
        (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
        losses.append(context(hidden, weight).loss)
    assert losses[0] == losses[1]
    assert inside.GRPOLossConfig().build({"shifted_labels": batch["shifted_labels"]}) is None


@pytest.mark.skipif(importlib.util.find_spec("xtuner") is not None, reason="XTuner is installed")
def test_without_xtuner_the_error_says_so() -> None:
    sys.modules.pop(INSIDE, None)
    with pytest.raises(BackendUnavailableError, match=r"needs XTuner: .* Without it use rlloss\.compat\.xtuner"):
        importlib.import_module(INSIDE)
