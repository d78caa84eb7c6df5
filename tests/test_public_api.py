"""The public surface is a contract: names, signatures and errors that users rely on."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rlloss
from rlloss import errors

NAMES = """
CELossConfig CELossContext CELossKwargs GRPOLossConfig GRPOLossContext GRPOLossKwargs LogProbConfig LogProbContext
LogProbKwargs LossOutput RolloutImportanceSampling Totals
PPOLossConfig PPOLossContext PPOLossKwargs ValueLossConfig ValueLossContext ValueLossKwargs
ActorCriticLossConfig ActorCriticLossContext ActorCriticLossKwargs
BaseLossConfig BaseLossContext BaseLossKwargs BaseRLLossConfig BaseRLLossContext BaseRLLossKwargs PerSequence PerToken
PolicyLossConfig Term TokenRecord TokenStats
get_policy_loss policy_loss_names register_policy_loss unregister_policy_loss
gather_logprobs kl_penalty AdaptiveEntropyCoef reverse_kl_advantages
advantage_names compute_advantages get_advantage register_advantage unregister_advantage
OrealLossConfig OrealLossContext OrealLossKwargs MixedLossConfig MixedLossContext MixedLossKwargs
DistillLossConfig DistillLossContext DistillLossKwargs
LMHead errors metrics release_buffers
""".split()  # noqa: SIM905

HEAD_ARGUMENTS = ["self", "hidden_states", "head_weight", "head_bias=None", "*vocab_group=None", "*vocab_mesh=None"]
HEAD_ARGUMENTS += ["*return_tokens=False"]

SIGNATURES: dict[str, tuple[Any, list[str]]] = {
    "build": (rlloss.BaseLossConfig.build, ["self", "data", "sp_mesh=None"]),
    "build_batches": (
        rlloss.GRPOLossContext.build_batches,
        ["loss_ctx_list", "cu_seq_lens_list=None", "sp_mesh=None", "group=None", "totals=None"],
    ),
    "forward": (rlloss.GRPOLossContext.forward, HEAD_ARGUMENTS),
    "__call__": (rlloss.GRPOLossContext.__call__, HEAD_ARGUMENTS),
    "LogProbContext.forward": (
        rlloss.LogProbContext.forward,
        HEAD_ARGUMENTS,
    ),
    "forward_log_probs": (
        rlloss.GRPOLossContext.forward_log_probs,
        ["self", "log_probs", "entropy=None", "*return_tokens=False"],
    ),
    "loss_fn": (
        rlloss.BaseLossContext.loss_fn,
        ["self", "hidden_states", "head_weight", "head_bias", "loss_kwargs"],
    ),
    "token_loss": (rlloss.BaseLossContext.token_loss, ["self", "stats", "loss_kwargs"]),
    "Context": (rlloss.BaseLossContext.__init__, ["self", "loss_cfg", "loss_kwargs"]),
    "register_policy_loss": (
        rlloss.register_policy_loss,
        [
            "name",
            "*config=None",
            "*aliases=()",
            "*level=None",
            "*reduction=None",
            "*surrogate=False",
            "*selection=None",
        ],
    ),
    "gather_logprobs": (rlloss.gather_logprobs, ["logits", "shifted_labels", "temperature=1.0"]),
    "Totals": (rlloss.Totals, ["tokens=None", "sequences=None", "prompts=None", "world=None"]),
}

ERRORS = {
    "ConfigError": ValueError,
    "BatchError": ValueError,
    "UnknownNameError": ValueError,
    "NotCalibratedError": RuntimeError,
    "BackendUnavailableError": ImportError,
}


def written(function: Any) -> list[str]:
    """Parameters as `name`, `name=default`, keyword-only ones with a star."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{star}{parameter.name}{default}")
    return found


def test_names() -> None:
    assert sorted(rlloss.__all__) == sorted(NAMES)
    assert len(set(rlloss.__all__)) == len(rlloss.__all__)
    for name in NAMES:
        assert getattr(rlloss, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    function, parameters = SIGNATURES[name]
    assert written(function) == parameters


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items())
def test_errors_refine_builtin_ones(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.RLLossError)
    assert issubclass(error, builtin)


def test_output_unpacks_as_in_xtuner() -> None:
    output = rlloss.LossOutput(1, (2, 3))
    loss, (logits, extra) = output
    assert (loss, logits, extra) == (1, 2, 3)


def test_contexts_and_kwargs_of_the_configs() -> None:
    for name in ("CELoss", "GRPOLoss", "LogProb"):
        config = getattr(rlloss, f"{name}Config")()
        assert config.loss_ctx_cls is getattr(rlloss, f"{name}Context")
        assert config._loss_kwargs_cls is getattr(rlloss, f"{name}Kwargs")


def test_kwargs_have_xtuners_fields() -> None:
    names = "shifted_labels advantages old_logprobs ref_logprobs rollout_logprobs is_weights policy_loss_weight"
    expected = {*names.split(), "kl_loss_weight", "global_grad_tokens"}
    assert expected <= rlloss.GRPOLossKwargs.model_fields.keys()
    assert {"loss_weight", "shifted_labels"} <= rlloss.CELossKwargs.model_fields.keys()


def test_package_is_typed_and_versioned() -> None:
    package = Path(rlloss.__file__).parent
    assert (package / "py.typed").is_file()
    project = tomllib.loads((package.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == rlloss.__version__
