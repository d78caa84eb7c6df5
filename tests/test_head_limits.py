"""What a fused head must not cost or lose: memory, digits, buffers of what is frozen, small gradients."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import steps
from rlloss import CELossConfig, DistillLossConfig, GRPOLossConfig, LogProbConfig, Totals, gather_logprobs

IGNORED = -100


class Watch(TorchDispatchMode):
    """Follows all memory that operations make: its shapes, the largest, and the most bytes that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.shapes: list[tuple[int, ...]] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._count(given, size=0)
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and self._count(made, made.untyped_storage().nbytes()):
                self.shapes.append(tuple(made.shape))
                self.largest = max(self.largest, made.numel())
        return out

    def _count(self, made: Tensor, size: int) -> bool:
        """Takes note of a storage; tells whether it is a new one."""
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return False
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)
        return True

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def tensors(n: int, h: int, v: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, n, h, generator=make).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=make) / h**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (1, n), generator=make)


def context(labels: Tensor, totals: Totals | None = None, **fields: Any) -> Any:
    config = CELossConfig(mode="chunk", **fields)
    return config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels})], totals=totals)[0]


def test_e19_no_tensor_of_the_size_of_the_logits() -> None:
    hidden, weight, labels = tensors(4096, 8, 4096)
    with Watch() as watch:
        output = context(labels, chunk_size=256).forward(hidden, weight)
        output.loss.backward()
    assert watch.largest < 4096 * 4096 // 4
    assert "entropy" not in output.extra
    with Watch() as whole:
        config = CELossConfig(mode="eager")
        config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels})])[0].forward(hidden, weight)
    assert whole.largest == 4096 * 4096


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1.3), (torch.bfloat16, 1.8)])
@pytest.mark.parametrize("n", [1024, 16384])
def test_peak_memory_is_one_chunk(n: int, dtype: torch.dtype, limit: float) -> None:
    """Above gradients and the float32 accumulator; flat in N."""
    h, v, chunk = 16, 8192, 128
    hidden, weight, labels = tensors(n, h, v, dtype)
    # The labels' own scalars, 8 bytes a token and a few of them, are no logits.
    per_token = 64 * n
    ready = context(labels, chunk_size=chunk)
    with Watch() as watch:
        loss = ready.forward(hidden, weight).loss
    gradients = hidden.numel() * hidden.element_size() + 4 * weight.numel()
    assert (watch.peak - gradients - per_token) / (4 * chunk * v) < limit
    with Watch() as watch:
        loss.backward()
    assert watch.peak <= (0 if dtype == torch.float32 else 2 * weight.numel() + hidden.numel() * 2) + 4096


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_e05_no_gradient_buffer_without_gradients(guard: Any) -> None:
    hidden, weight, labels = tensors(256, 8, 512)
    ready = context(labels, chunk_size=64)
    with guard(), Watch() as watch:
        ready.forward(hidden, weight)
    assert (512, 8) not in watch.shapes
    assert watch.largest <= 256 * 512 // 4 + 1


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_e06_frozen_parts_cost_nothing(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    from rlloss.heads.products import Products

    for name in ("add_hidden", "add_weight"):
        real = getattr(Products, name)
        monkeypatch.setattr(Products, name, lambda *a, _r=real, _n=name: (calls.append(_n), _r(*a))[1])
    hidden, weight, labels = tensors(64, 8, 512)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with Watch() as watch:
        context(labels, chunk_size=16).forward(hidden, weight).loss.backward()
    assert set(calls) == {"add_weight" if frozen == "hidden" else "add_hidden"}
    if frozen == "weight":
        assert weight.grad is None
        assert (512, 8) not in watch.shapes


@pytest.mark.parametrize("rest", [1e-2, 1e-4, 1e-6, 1e-9])
def test_nearly_certain_tokens_keep_their_gradients(rest: float) -> None:
    """d loss / d z_y = -(1 - p): its digits are lost where it is computed as p - 1."""
    v = 64
    margin = float(torch.log(torch.tensor((1 - rest) * (v - 1) / rest, dtype=torch.float64)))
    hidden = torch.zeros(1, 4, v)
    hidden[0, torch.arange(4), torch.arange(4)] = 1.0
    hidden.requires_grad_()
    weight = (margin * torch.eye(v)).requires_grad_()
    context(torch.arange(4)[None], chunk_size=2).forward(hidden, weight).loss.backward()
    exact_hidden, exact_weight = (part.detach().double().requires_grad_() for part in (hidden, weight))
    F.cross_entropy((exact_hidden @ exact_weight.T)[0], torch.arange(4)).backward()
    for mine, true in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert mine is not None
        assert true is not None
        # The rounding of the logits themselves is a relative error of margin * 2^-24 in exp(-margin).
        assert ((mine - true).abs() <= 1e-5 * true.abs() + 1e-30).all()


@pytest.mark.parametrize("margin", [0.0, 5.0, 20.0, 60.0, 86.0, 88.0, 120.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_and_gradients_of_certain_tokens(margin: float, dtype: torch.dtype) -> None:
    """exp(88) has no room in float32: the label's own exponential overflows, the numbers of the row do not."""
    hidden = torch.eye(3, dtype=dtype)[None].requires_grad_()
    weight = torch.cat([margin * torch.eye(3), torch.tensor([[0.5, -0.5, 0.1], [0.0, 0.3, -0.7]])]).to(dtype)
    labels = torch.tensor([[0, 1, 4]])
    data = {"shifted_labels": labels, "advantages": torch.ones(1, 3), "old_logprobs": torch.full((1, 3), -1.0)}
    config = GRPOLossConfig(mode="chunk", chunk_size=2, entropy_coef=0.3)
    ready = config.loss_ctx_cls.build_batches([config.build(data)])[0]
    weight.requires_grad_()
    output = ready.forward(hidden, weight)
    found = torch.autograd.grad(output.loss, (hidden, weight))
    logits = (hidden.detach().double()[0] @ weight.detach().double().T).requires_grad_()
    log_p = logits.log_softmax(-1)
    ratio = (log_p.gather(1, labels[0][:, None]).squeeze(1) + 1.0).exp()
    spread = -(log_p.exp() * log_p).sum(-1)
    loss = (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)) - 0.3 * spread).mean()
    (slope,) = torch.autograd.grad(loss, logits)
    true = (slope @ weight.detach().double(), slope.T @ hidden.detach().double()[0])
    assert float(output.loss) == pytest.approx(float(loss), rel=1e-6)
    for mine, theirs in zip(found, true, strict=True):
        # Automatic differentiation itself has no digits below 1e-17 here.
        assert (mine.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max() + 1e-17


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("words", [1, 4])
def test_a_single_word_that_is_allowed(mode: Any, words: int) -> None:
    """A vocabulary of one, or all words but the label at -inf: log-prob and entropy are 0, and so is every gradient."""
    hidden, weight, labels = tensors(3, 2, words)
    labels = torch.zeros_like(labels)
    bias = torch.full((words,), -torch.inf).index_fill_(0, torch.tensor([0]), 0.5).requires_grad_()
    data = {"shifted_labels": labels, "advantages": torch.ones(1, 3), "old_logprobs": torch.zeros(1, 3)}
    config = GRPOLossConfig(mode=mode, chunk_size=2, entropy_coef=0.3)
    ready = config.loss_ctx_cls.build_batches([config.build(data)])[0]
    output = ready.forward(hidden, weight, bias)
    assert float(output.loss) == -1.0
    for gradient in torch.autograd.grad(output.loss, (hidden, weight, bias)):
        assert gradient.eq(0).all()


@pytest.mark.parametrize("batch", ["ce", "grpo with entropy"])
def test_two_oracles(batch: str) -> None:
    """Against float64 the fused path is no worse than plain operations of the same dtype."""
    hidden, weight, labels = tensors(256, 32, 500)
    errors: dict[str, float] = {}
    data: dict[str, Any] = {"shifted_labels": labels}
    cls: Any = CELossConfig
    fields: dict[str, Any] = {}
    if batch != "ce":
        make = torch.Generator().manual_seed(3)
        old = -torch.rand(1, 256, generator=make) - 6.0
        data |= {"advantages": torch.randn(1, 256, generator=make), "old_logprobs": old}
        cls, fields = GRPOLossConfig, {"entropy_coef": 0.1}

    def gradient(mode: str, dtype: torch.dtype) -> Tensor:
        config = cls(mode=mode, chunk_size=64, **fields)
        one = config.loss_ctx_cls.build_batches([config.build(data)])[0]
        leaves = [part.detach().to(dtype).requires_grad_() for part in (hidden, weight)]
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(one.forward(*leaves).loss, leaves)])

    true = gradient("eager", torch.float64)
    errors = {mode: float((gradient(mode, torch.float32) - true).norm() / true.norm()) for mode in ("eager", "chunk")}
    assert errors["chunk"] <= 1.2 * errors["eager"]
    assert errors["chunk"] < 1e-6


def test_the_head_chooses_a_chunk_size() -> None:
    hidden, weight, labels = tensors(300, 4, 9)
    whole = torch.autograd.grad(context(labels, chunk_size=512).forward(hidden, weight).loss, weight)[0]
    chosen = torch.autograd.grad(context(labels, chunk_size=None).forward(hidden, weight).loss, weight)[0]
    torch.testing.assert_close(chosen, whole, rtol=1e-6, atol=1e-8)
    from rlloss.heads.sweep import choose_chunk_size

    assert [choose_chunk_size(v, 4) for v in (32000, 151936, 2_000_000)] == [2048, 384, 128]


@steps.every_mode
def test_e26_per_token_log_probs_have_their_shape(head: dict[str, Any]) -> None:
    hidden, weight, labels = tensors(6, 4, 9)
    expected = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).detach()
    labels[0, 2], expected[0, 2] = IGNORED, 0.0
    found = LogProbConfig(**head).build({"shifted_labels": labels}).forward(hidden, weight).loss
    assert found.shape == labels.shape
    assert found[0, 2] == 0.0
    torch.testing.assert_close(found.detach(), expected, rtol=1e-6, atol=1e-6)


# Liger mode refuses -inf by name.
WAYS = [(way, far) for way in (*steps.HEADS, "chunk with entropy") for far in (-2e4, -torch.inf)]
WAYS.remove(("liger", -torch.inf))


@pytest.mark.parametrize(("way", "far"), WAYS)
def test_a_label_of_probability_zero_is_one_number_in_every_mode(way: str, far: float) -> None:
    """`log p` ends at -1e4; its gradient is that of log-softmax, `1[j = y] - p_j`, in every mode and chunk size."""
    head = steps.HEADS.get(way, {"mode": "chunk", "chunk_size": 2, "entropy_metric": True})
    hidden = torch.tensor([[[1.0, 0.5], [-0.3, 2.0], [0.2, -1.0]]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.3, -0.2], [1.1, 0.4], [-0.5, 0.9], [0.7, 0.1]], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, far, 0.4, -0.1], dtype=torch.float64, requires_grad=True)
    words = [1, 2, 1]
    config = CELossConfig(loss_reduction="sum", **head)
    ready = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([words])})])[0]
    loss = ready.forward(hidden, weight, bias).loss
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    expected, tolerance = 0.0, 1e-12 if head["mode"] != "liger" else 1e-5
    slopes = torch.zeros(3, 4, dtype=torch.float64)
    for row, word in enumerate(words):
        logits = [
            sum(float(hidden[0, row, k]) * float(weight[j, k]) for k in range(2)) + float(bias[j]) for j in range(4)
        ]
        total = math.fsum(math.exp(z) for z in logits)
        expected -= max(logits[word] - math.log(total), -1e4)
        for j in range(4):
            slopes[row, j] = math.exp(logits[j]) / total - (j == word)
    assert float(loss) == pytest.approx(expected, rel=tolerance)
    plain = hidden.detach()[0], weight.detach()
    for mine, theirs in zip(found, (slopes @ plain[1], slopes.T @ plain[0], slopes.sum(0)), strict=True):
        torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk_size", [1, 1024])
def test_other_words_of_probability_zero_are_one_number_in_both_modes(chunk_size: int) -> None:
    make = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(1, 3, 2, generator=make).double(), torch.randn(5, 2, generator=make).double()
    bias = torch.tensor([0.0, -torch.inf, 0.4, -2e4, 0.2], dtype=torch.float64)
    ids = torch.tensor([[[1, 0], [3, 1], [2, 2]]])
    data = {"shifted_labels": torch.tensor([[0, 2, 4]]), "teacher_topk_ids": ids}
    data["teacher_topk_logprobs"] = torch.full((1, 3, 2), -1.5)
    found = []
    for mode in ("eager", "chunk"):
        leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
        config = DistillLossConfig(mode=mode, chunk_size=chunk_size, loss_reduction="sum", clamp_negative=False)
        loss = config.loss_ctx_cls.build_batches([config.build(data)])[0].forward(*leaves).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for eager, chunk in zip(*found, strict=True):
        torch.testing.assert_close(chunk, eager, rtol=1e-12, atol=1e-12)
    mass = math.exp(-1.5)
    logits = (hidden[0] @ weight.T + bias).log_softmax(-1)
    chosen = torch.stack([logits[row, ids[0, row]] for row in range(3)]).clamp(min=-1e4)
    assert float(found[0][0]) == pytest.approx(float((mass * (-1.5 - chosen)).sum()), rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_logits_of_an_ignored_token_have_no_gradient(garbage: float) -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0], [garbage] * 3]).requires_grad_()
    log_probs = gather_logprobs(logits, torch.tensor([2, IGNORED]), temperature=2.0)
    log_probs.sum().backward()  # type: ignore[no-untyped-call]
    p = (torch.tensor([0.5, -1.0, 2.0]) / 2.0).softmax(-1)
    torch.testing.assert_close(log_probs, torch.stack([p[2].log(), torch.tensor(0.0)]))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.stack([(torch.tensor([0.0, 0.0, 1.0]) - p) / 2.0, torch.zeros(3)]))
