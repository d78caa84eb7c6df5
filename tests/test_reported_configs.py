"""Faults of configs and weights that a review found: refused assignments, mixed parts, tokens of weight 0."""

import pytest
import torch

from batches import LAYOUTS, random_step
from rlloss import (
    CELossConfig,
    GRPOLossConfig,
    GRPOLossContext,
    MixedLossConfig,
    OrealLossConfig,
    OrealLossContext,
    RolloutImportanceSampling,
    Totals,
)
from rlloss.errors import BatchError, ConfigError

STEP = random_step(11, [6, 4, 7])
KEYS = ("old_logprobs", "advantages")


@pytest.mark.parametrize("name", ["old_logprobs", "advantages"])
@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
def test_a_token_of_weight_zero_gives_no_gradient_whatever_it_holds(mode, name):
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    place = tuple((batch["shifted_labels"] != -100).nonzero()[1])
    batch["rollout_is_weights"] = torch.ones_like(batch["advantages"])
    batch["rollout_is_weights"][place] = 0.0
    gradients = []
    for value in (batch[name][place].item(), torch.nan):
        data = {**batch, name: batch[name].clone()}
        data[name][place] = value
        (context,) = GRPOLossContext.build_batches([GRPOLossConfig(mode=mode, chunk_size=5).build(data)])
        weight = STEP.weight.clone().requires_grad_()
        loss = context.forward(hidden, weight, STEP.bias).loss
        loss.backward()
        gradients.append((loss.item(), weight.grad))
    assert gradients[0][0] == gradients[1][0]
    assert torch.equal(gradients[0][1], gradients[1][1])
    assert gradients[0][1].abs().max() > 0


def test_a_term_without_weight_takes_no_part():
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    data = {
        **batch,
        "advantages": torch.ones_like(batch["advantages"]),
        "old_logprobs": batch["old_logprobs"] * torch.nan,
    }
    (context,) = OrealLossContext.build_batches([OrealLossConfig(pos_policy_loss_weight=0.0).build(data)])
    weight = STEP.weight.clone().requires_grad_()
    context.forward(hidden, weight, STEP.bias).loss.backward()
    assert weight.grad.isfinite().all()


def test_a_refused_assignment_leaves_the_config_as_it_was():
    config = GRPOLossConfig(entropy_coef=0.1)
    before = config.model_copy(deep=True)
    for name, value in {"loss_reduction": "constant", "mode": "liger", "entropy_coef": -1.0}.items():
        with pytest.raises(ConfigError):
            setattr(config, name, value)
        assert config == before
    with pytest.raises(ConfigError, match="loss_type"):
        config.policy_loss_cfg.loss_type = "gspo"
    assert config == before


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: GRPOLossConfig.model_validate({"entropy_coeff": 0.1}), "Did you mean 'entropy_coef'"),
        (lambda: GRPOLossConfig.model_validate({"policy_loss_cfg": {"loss_type": "gpso"}}), "Did you mean 'gspo'"),
        (lambda: GRPOLossConfig.model_validate(7), "GRPOLossConfig: 7: "),
        (lambda: GRPOLossConfig.model_validate_json('{"entropy_coef": -1}'), "entropy_coef=-1: "),
        (lambda: GRPOLossConfig.model_validate_json("{"), "GRPOLossConfig: Invalid JSON"),
        (lambda: CELossConfig.model_validate_strings({"temperature": "0"}), "temperature='0': "),
        (lambda: RolloutImportanceSampling.model_validate({"rule": ()}), "Did you mean 'rules'"),
        (lambda: GRPOLossConfig().model_copy(update={"entropy_coeff": 0.1}), "Did you mean 'entropy_coef'"),
        (lambda: GRPOLossConfig().model_copy(update={"mode": "fast"}), "mode='fast'"),
        (
            lambda: GRPOLossConfig(entropy_coef=0.1).model_copy(update={"mode": "liger"}),
            "does not support entropy_coef",
        ),
    ],
)
def test_every_way_to_make_a_config_names_what_is_wrong_in_one_line(made, message):
    with pytest.raises(ConfigError) as caught:
        made()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_copies_with_other_fields():
    """Several fields may change that fit together only; the parts of a mixed loss follow its head."""
    config = GRPOLossConfig(policy_loss_cfg={"cliprange_high": 0.3})
    changed = config.model_copy(update={"loss_reduction": "constant", "loss_length": 8})
    assert changed == GRPOLossConfig(
        policy_loss_cfg={"cliprange_high": 0.3}, loss_reduction="constant", loss_length=8.0
    )
    assert changed.model_fields_set == {"policy_loss_cfg", "loss_reduction", "loss_length"}
    assert config.model_copy(update={}) == config
    part = CELossConfig()
    mixed = MixedLossConfig(parts={"sft": part}, mode="chunk", temperature=0.7)
    for copied in (mixed.model_copy(update={"temperature": 0.9}), mixed.model_copy(deep=True)):
        assert copied.parts["sft"].temperature == copied.temperature
        assert copied.parts["sft"].mode == "chunk"
    assert (part.mode, mixed.parts["sft"].temperature) == ("eager", 0.7)


@pytest.mark.parametrize(
    "policy_loss_cfg",
    [
        {"loss_type": "sapo", "tau_pos": torch.inf},
        {"loss_type": "sapo", "tau_neg": torch.inf},
        {"loss_type": "vespo", "k_pos": torch.inf},
        {"loss_type": "vespo", "lambda_neg": torch.inf},
        {"loss_type": "dro", "beta": torch.inf},
        {"loss_type": "opmd", "tau": torch.inf},
        {"loss_type": "kl_cov", "ppo_kl_coef": torch.inf},
    ],
)
def test_a_factor_is_a_finite_number(policy_loss_cfg):
    with pytest.raises(ConfigError, match="finite"):
        GRPOLossConfig(policy_loss_cfg=policy_loss_cfg)


def test_infinite_bounds_survive_json():
    config = GRPOLossConfig(
        policy_loss_cfg={"cliprange_high": float("inf"), "clip_ratio_c": None},
        rollout_is=RolloutImportanceSampling(rollout_is_threshold=(0.5, float("inf"))),
    )
    assert GRPOLossConfig.model_validate_json(config.model_dump_json()) == config


class GRPOConfigOfAUser(GRPOLossConfig):
    """A subclass; another one of the same name is made in the test."""


def test_parts_of_a_mixed_loss_are_found_by_their_own_class():
    other = type("GRPOLossConfig", (GRPOLossConfig,), {"__module__": "elsewhere", "__doc__": "Another one."})
    for part in (GRPOLossConfig(), other(), GRPOConfigOfAUser()):
        config = MixedLossConfig(parts={"rl": part, "sft": CELossConfig()}, mode="chunk")
        again = MixedLossConfig(**config.model_dump())
        assert again == config
        assert type(again.parts["rl"]) is type(part)


def test_fields_of_the_one_head_may_be_assigned_again():
    config = MixedLossConfig(parts={"rl": GRPOLossConfig(), "sft": CELossConfig()}, mode="chunk", temperature=0.7)
    config.mode = "eager"
    config.temperature = 0.9
    assert {(part.mode, part.temperature) for part in config.parts.values()} == {("eager", 0.9)}


def test_totals_of_an_unknown_part_are_refused():
    config = MixedLossConfig(parts={"rl": GRPOLossConfig(on_policy=True), "sft": CELossConfig()})
    labels = torch.tensor([[1, 2], [3, 4]])
    batch = {"shifted_labels": labels, "advantages": torch.ones(2), "part_ids": torch.tensor([0, 1])}
    context = config.build(batch)
    with pytest.raises(BatchError, match="rll"):
        type(context).build_batches([context], totals={"rll": Totals(tokens=3)})


def test_contexts_of_different_configs_do_not_share_a_step():
    batch, _ = LAYOUTS["packed"](STEP.sequences, KEYS)
    contexts = [GRPOLossConfig().build(batch), GRPOLossConfig(loss_reduction="sum").build(batch)]
    with pytest.raises(BatchError, match="different loss configs"):
        GRPOLossContext.build_batches(contexts)


class OnLogits(GRPOLossContext):
    def loss_fn(self, hidden_states, head_weight, head_bias, loss_kwargs):
        return super().loss_fn(hidden_states, head_weight, head_bias, loss_kwargs)


class OnLogitsConfig(GRPOLossConfig):
    @property
    def loss_ctx_cls(self):
        return OnLogits


def test_a_loss_on_logits_that_calls_the_terms():
    batch, hidden = LAYOUTS["packed"](STEP.sequences, KEYS)
    losses = []
    for mode in ("eager", "chunk"):
        config = OnLogitsConfig(mode=mode, chunk_size=4)
        (context,) = OnLogits.build_batches([config.build(batch)])
        losses.append(context.forward(hidden, STEP.weight, STEP.bias).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    config = OnLogitsConfig(mode="chunk", chunk_size=4, policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample")
    (context,) = OnLogits.build_batches([config.build(batch)])
    with pytest.raises(ConfigError, match="whole sequences"):
        context.forward(hidden, STEP.weight, STEP.bias)
