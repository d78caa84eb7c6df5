"""Log-probs of more words than the label, through the head: values and gradients against plain loops and eager mode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.heads import HeadInputs, HeadOptions, Objective, TokenStats, run_head, token_stats
from rlloss.layout import token_layout

VOCABULARY, WIDTH, TOKENS = 7, 3, 5


def problem(dtype: torch.dtype = torch.float64) -> HeadInputs:
    """Five tokens of six positions; the label is among the more words of some tokens, and one word comes twice."""
    make = torch.Generator().manual_seed(3)
    mask = torch.tensor([[True, True, False, True, True, True]])
    hidden = torch.randn(1, 6, WIDTH, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.tensor([[0, 1], [2, 2], [4, 6], [6, 0], [5, 3]])
    labels = torch.tensor([0, 1, 6, 2, 5])
    return HeadInputs(hidden, weight, bias, labels, 1.0, token_layout(mask, None, TOKENS), ids)


G_LABEL = [0.3, -1.1, 0.7, 0.0, 2.0]
G_EXTRA = [[0.5, -0.2], [1.0, 0.25], [0.0, 0.0], [-0.9, 0.4], [0.1, 0.6]]
E_ENTROPY = [0.2, 0.0, -0.4, 0.1, 0.3]


def linear(entropy: bool) -> Any:
    """The loss whose derivatives are the constants above."""

    def loss(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        assert stats.extra_log_prob is not None
        dtype = stats.log_prob.dtype
        total = (stats.log_prob * torch.tensor(G_LABEL, dtype=dtype)[rows]).sum()
        total = total + (stats.extra_log_prob * torch.tensor(G_EXTRA, dtype=dtype)[rows]).sum()
        if entropy:
            assert stats.entropy is not None
            total = total + (stats.entropy * torch.tensor(E_ENTROPY, dtype=dtype)[rows]).sum()
        return total, {}

    return loss


def gradients(mode: Any, options: HeadOptions, inputs: HeadInputs, additive: bool = True) -> list[Tensor]:
    output = run_head(mode, inputs, options, Objective(linear(options.entropy == "gradient"), additive))
    leaves = [part for part in (inputs.hidden, inputs.weight, inputs.bias) if part is not None]
    return [output.loss.detach(), *torch.autograd.grad(3.0 * output.loss, leaves)]


def test_values_and_gradients_are_those_of_plain_loops() -> None:
    """`d log p_k / d z_j = 1[j = k] - p_j`, and the chain rule through `z = h W^T + b` by hand."""
    inputs = problem()
    assert inputs.bias is not None and inputs.extra_ids is not None
    grad_weight = torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    total = 0.0
    places = [0, 1, 3, 4, 5]
    for n, place in enumerate(places):
        row = inputs.hidden.detach()[0, place].tolist()
        logits = [
            math.fsum(h * w for h, w in zip(row, inputs.weight.detach()[v].tolist(), strict=True))
            + float(inputs.bias.detach()[v])
            for v in range(VOCABULARY)
        ]
        log_sum = math.log(math.fsum(math.exp(z) for z in logits))
        words = [int(inputs.labels[n]), *(int(word) for word in inputs.extra_ids[n])]
        for word, slope in zip(words, [G_LABEL[n], *G_EXTRA[n]], strict=True):
            total += slope * (logits[word] - log_sum)
            for v in range(VOCABULARY):
                factor = 3.0 * slope * ((v == word) - math.exp(logits[v] - log_sum))
                grad_weight[v] += factor * torch.tensor(row, dtype=torch.float64)
    loss, _, found, _ = gradients("chunk", HeadOptions(chunk_size=2), inputs)
    assert float(loss) == pytest.approx(total, abs=1e-13)
    torch.testing.assert_close(found, grad_weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize("entropy", ["none", "gradient"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("temperature", ["one", "per token"])
def test_chunk_equals_eager(entropy: Any, softcap: float | None, additive: bool, temperature: str) -> None:
    options = HeadOptions(chunk_size=2, logit_scale=0.8, logit_softcap=softcap, entropy=entropy)
    inputs = problem()
    if temperature == "per token":
        inputs = replace(inputs, temperature=torch.tensor([1.0, 0.5, 2.0, 1.3, 0.9], dtype=torch.float64))
    wanted = gradients("eager", options, inputs)
    for mine, theirs in zip(gradients("chunk", options, inputs, additive), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_log_probs_alone_equal_eager(entropy: Any) -> None:
    options = HeadOptions(chunk_size=2, entropy=entropy)
    inputs = problem()
    found = []
    for mode in ("eager", "chunk"):
        stats, _ = token_stats(mode, inputs, options)  # type: ignore[arg-type]
        loss, _ = linear(entropy == "gradient")(stats, slice(0, TOKENS))
        assert stats.extra_log_prob is not None
        found.append([stats.extra_log_prob.detach(), *torch.autograd.grad(loss, [inputs.hidden, inputs.weight])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_row_with_a_gradient_of_its_extra_words_only_is_not_skipped() -> None:
    inputs = problem()

    def loss(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        assert stats.extra_log_prob is not None
        return (stats.extra_log_prob[:, 1] * torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])[rows]).sum(), {}

    found = []
    for mode in ("eager", "chunk"):
        output = run_head(mode, inputs, HeadOptions(chunk_size=3), Objective(loss, True))  # type: ignore[arg-type]
        found.append(torch.autograd.grad(output.loss, inputs.hidden)[0])
    assert bool((found[0][0, [1, 4]] != 0).all()) and not bool(found[1][0, [0, 2, 3, 5]].any())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)


def test_a_word_far_below_the_maximum_has_its_log_prob() -> None:
    """The second token asks twice for word 2, which lies 300 nats lower than without the bias."""
    inputs = problem(torch.float32)
    assert inputs.bias is not None
    bias = inputs.bias.detach() + torch.tensor([0.0, 0.0, -300.0, 0.0, 0.0, 0.0, 0.0])
    logits = inputs.hidden.detach()[0, 1].double() @ inputs.weight.detach().double().T + bias.double()
    for mode in ("eager", "chunk"):
        stats, _ = token_stats(mode, replace(inputs, bias=bias), HeadOptions(chunk_size=2))  # type: ignore[arg-type]
        assert stats.extra_log_prob is not None
        assert stats.extra_log_prob[1].tolist() == pytest.approx([float(logits.log_softmax(-1)[2])] * 2, rel=1e-6)


@pytest.mark.parametrize(("float32_logits", "bound"), [(True, 2.0**-7), (False, 2e-2)])
def test_bfloat16(float32_logits: bool, bound: float) -> None:
    """Against float64 on the same numbers: gradients are rounded before and after they are multiplied, logits once."""
    half = problem(torch.bfloat16)
    assert half.bias is not None
    exact = [part.detach().double().requires_grad_() for part in (half.hidden, half.weight, half.bias)]
    wanted = gradients("eager", HeadOptions(), replace(half, hidden=exact[0], weight=exact[1], bias=exact[2]))
    for mode in ("eager", "chunk"):
        options = HeadOptions(chunk_size=2, float32_logits=float32_logits)
        for mine, theirs in zip(gradients(mode, options, half), wanted, strict=True):
            assert (mine.double() - theirs).abs().max() <= bound * theirs.abs().max()


def test_liger_refuses_by_name() -> None:
    with pytest.raises(ConfigError, match="extra_ids"):
        token_stats("liger", problem(torch.float32), HeadOptions())


def test_a_batch_without_tokens_has_no_extra_words() -> None:
    layout = token_layout(torch.zeros(1, 4, dtype=torch.bool), None, 0)
    none = torch.zeros(0, dtype=torch.int64)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    inputs = HeadInputs(torch.randn(1, 4, WIDTH), weight, None, none, 1.0, layout, none.reshape(0, 2))
    for mode in ("eager", "chunk"):
        stats, _ = token_stats(mode, inputs, HeadOptions())  # type: ignore[arg-type]
        assert stats.extra_log_prob is not None
        assert stats.extra_log_prob.shape == (0, 2)
