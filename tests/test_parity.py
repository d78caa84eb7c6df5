"""The same sequences, cut and laid out in any way and in any mode, give the same loss, gradients and metrics."""

import math

import pytest
import torch

from batches import PER_TOKEN, Step, assert_same, random_step, run_step
from rlloss import CELossConfig, GRPOLossConfig, register_policy_loss
from rlloss.errors import ConfigError
from rlloss.layout import Segments


@register_policy_loss("parity_per_token")
def per_token(log_prob, old_log_prob, advantages):
    """A loss of each token, weighted by the context."""
    return -advantages * torch.sigmoid(log_prob - old_log_prob)


@register_policy_loss("parity_scalar")
def scalar(log_prob, old_log_prob, advantages, loss_weights, policy_loss_cfg):
    """XTuner's form: a scalar that used the weights."""
    return (-advantages * (log_prob - old_log_prob).exp().clamp(max=policy_loss_cfg["cap"]) * loss_weights).sum()


@register_policy_loss("parity_sequence")
def sequence(log_prob, old_log_prob, advantages, segments: Segments):
    """A ratio of the whole sequence."""
    return -advantages * segments.broadcast(segments.mean(log_prob - old_log_prob)).exp()


KL = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
LOSSES = {
    "vanilla": (GRPOLossConfig, {"policy_loss_cfg": CLIP}),
    "vanilla-sample-kl": (GRPOLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sample", **KL}),
    "vanilla-kl-entropy": (GRPOLossConfig, {"policy_loss_cfg": CLIP, "entropy_coef": 0.05, **KL}),
    "per-token": (GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "parity_per_token"}, "loss_reduction": "sample"}),
    "scalar": (GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "parity_scalar", "cap": 2.0}, **KL}),
    "sequence": (GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "parity_sequence"}, "loss_reduction": "sample"}),
    "ce-token": (CELossConfig, {}),
    "ce-sample": (CELossConfig, {"loss_reduction": "sample"}),
}
LENGTHS = [5, 9, 1, 7, 12, 3, 8, 6]
STEP = random_step(3, LENGTHS)
N = sum(int((sequence["shifted_labels"] != -100).sum()) for sequence in STEP.sequences)
CHUNKS = [1, 3, N - 1, N, N + 1]


def make(name: str, **fields):
    config, given = LOSSES[name]
    return config(**given, **fields)


def keys_for(mode: str) -> tuple[str, ...]:
    return PER_TOKEN if mode != "liger" else tuple(key for key in PER_TOKEN if key != "temperature")


@pytest.fixture(scope="module")
def reference():
    """One padded batch in eager mode, float64 and float32, with and without a temperature for each token."""
    cache: dict[tuple, object] = {}

    def get(name: str, dtype: torch.dtype, mode: str):
        key = (name, dtype, mode == "liger")
        if key not in cache:
            cache[key] = run_step(make(name), STEP.cast(dtype), keys=keys_for(mode))
        return cache[key]

    return get


one_padded_row = pytest.mark.filterwarnings("ignore:a row .1, T. without cu_seq_lens")


@one_padded_row
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_and_mode_float32(name, mode, parts, layout, reference):
    if mode == "liger" and "entropy" in name:
        with pytest.raises(ConfigError, match="entropy_coef"):
            make(name, mode=mode)
        return
    expected = reference(name, torch.float32, mode)
    bound = 2e-6 if mode == "liger" else 1e-6
    for size in CHUNKS if mode == "chunk" else [1024]:
        config = make(name, mode=mode, chunk_size=size)
        found = run_step(config, STEP.cast(torch.float32), parts, layout, keys_for(mode))
        assert_same(found, expected, bound, bound)


@one_padded_row
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_and_mode_float64(name, mode, parts, layout, reference):
    expected = reference(name, torch.float64, mode)
    for size in CHUNKS if mode == "chunk" else [1024]:
        assert_same(run_step(make(name, mode=mode, chunk_size=size), STEP, parts, layout), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_close_to_float64(name, reference):
    assert_same(reference(name, torch.float32, "eager"), reference(name, torch.float64, "eager"), 3e-6, 3e-6)


@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
def test_order_of_sequences_does_not_matter(mode):
    config = make("vanilla-sample-kl", mode=mode)
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    shuffled = Step([STEP.sequences[index] for index in order], STEP.weight, STEP.bias)
    found = run_step(config, shuffled, 3, keys=keys_for(mode))
    found.grad_hidden = [found.grad_hidden[order.index(index)] for index in range(len(order))]
    bound = 2e-6 if mode == "liger" else 1e-12
    assert_same(found, run_step(config, STEP, 2, "packed", keys_for(mode)), bound, bound)


def test_a_wrong_denominator_would_be_seen():
    """The comparison itself can fail: a loss that is averaged over micro-batches differs."""
    whole, cut = run_step(make("vanilla"), STEP), run_step(make("vanilla"), STEP, 3)
    cut.loss /= 3
    with pytest.raises(AssertionError, match="loss"):
        assert_same(cut, whole, 1e-6, 1e-6)
    assert math.isfinite(whole.loss)
