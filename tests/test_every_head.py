"""Every head that people train, in every mode: values and gradients against the loops of `oracles.py`.

The loss is `sum g log_prob + e H` with fixed g and e, whose derivatives by the head's outputs are g and e themselves.
What else a head must survive stands in `test_cases_head.py` (kinds E and F), `test_head_limits.py` (memory, digits,
checkpointing), `test_extra_words.py` (more words per token), `test_head_accuracy.py` (16 bits), `compat/test_peft.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oracles
from rlloss import BaseLossConfig, BaseLossContext, BaseLossKwargs, CELossConfig, LogProbConfig, PerToken, Term
from rlloss.errors import ConfigError
from rlloss.heads.words import WordPlaces
from small_tiles import cut_into_tiles

IGNORED = -100
WIDTH, WORDS = 4, 11
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "chunk1": {"mode": "chunk", "chunk_size": 1},
    "chunk3": {"mode": "chunk", "chunk_size": 3},
    "chunk": {"mode": "chunk", "chunk_size": None},
    "two sweeps": {"mode": "chunk", "chunk_size": 3, "joint": True},
    "all rows": {"mode": "chunk", "chunk_size": 3, "skip_zero_rows": False},
    "liger": {"mode": "liger"},
}
every_engine = pytest.mark.parametrize("engine", ENGINES)


class LinearKwargs(BaseLossKwargs):
    g_log_prob: Annotated[Tensor, PerToken()]
    g_entropy: Annotated[Tensor, PerToken()]


class LinearContext(BaseLossContext):
    """`sum g log_prob + e H`, evaluated one chunk at a time."""


class JointContext(BaseLossContext):
    """The same as if it looked across tokens: log-probs first, gradients in a second sweep."""

    level: ClassVar[Any] = "sequence"


class LinearConfig(BaseLossConfig):
    with_entropy: bool = False
    joint: bool = False

    @property
    def loss_ctx_cls(self) -> type[BaseLossContext]:
        return JointContext if self.joint else LinearContext

    @property
    def _loss_kwargs_cls(self) -> type[LinearKwargs]:
        return LinearKwargs

    def terms(self) -> tuple[Term, ...]:
        def linear(stats: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
            spread = stats.entropy if self.with_entropy else 0.0
            return kwargs.g_log_prob * stats.log_prob + kwargs.g_entropy * spread, {}

        return (Term("linear", linear, reduction="sum", needs_entropy=self.with_entropy, weight_field="loss_weight"),)


@dataclass
class Problem:
    """Two padded rows, some labels ignored; numbers as the loops of `oracles.py` read them."""

    hidden: list[oracles.Matrix]
    labels: list[list[int]]
    temperature: list[list[float]]
    g: list[list[float]]
    e: list[list[float]]
    head: oracles.Head


def problem(words: int = WORDS, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None) -> Problem:
    rng = random.Random(words)

    def normal(*shape: int) -> Any:
        return rng.gauss(0.0, 1.0) if not shape else [normal(*shape[1:]) for _ in range(shape[0])]

    ignored = {(0, 0), (0, 3), (1, 4)}
    labels = [[IGNORED if (b, t) in ignored else rng.randrange(words) for t in range(5)] for b in range(2)]
    g = normal(2, 5)
    # A token without any gradient, which chunk mode leaves out.
    g[1][1] = 0.0
    temperature = [[rng.uniform(0.5, 1.8) for _ in range(5)] for _ in range(2)]
    e = [[0.0 if (b, t) == (1, 1) else rng.gauss(0.0, 0.5) for t in range(5)] for b in range(2)]
    head = oracles.Head(normal(words, WIDTH), normal(words) if bias else None, scale, softcap)
    return Problem(normal(2, 5, WIDTH), labels, temperature, g, e, head)


def expected(given: Problem, temperature: list[list[float]], entropy: bool) -> list[Tensor]:
    """Loss and gradients in hidden states, weight and bias, by loops over rows."""
    loss, hidden, rows = 0.0, torch.zeros(2, 5, WIDTH, dtype=torch.float64), []
    places = [(b, t) for b in range(2) for t in range(5) if given.labels[b][t] != IGNORED]
    rows = [given.hidden[b][t] for b, t in places]
    labels, warm = [given.labels[b][t] for b, t in places], [temperature[b][t] for b, t in places]
    g, e = [given.g[b][t] for b, t in places], [given.e[b][t] * entropy for b, t in places]
    log_probs, spreads = oracles.head_forward(given.head, rows, labels, warm)
    loss = sum(a * lp + c * h for a, lp, c, h in zip(g, log_probs, e, spreads, strict=True))
    grads = oracles.head_backward(given.head, rows, labels, warm, g, e)
    for place, gradient in zip(places, grads.hidden, strict=True):
        hidden[place] = torch.tensor(gradient, dtype=torch.float64)
    weight, bias = (torch.tensor(part, dtype=torch.float64) for part in (grads.weight, grads.bias))
    return [torch.tensor(loss, dtype=torch.float64), hidden, weight, bias]


def leaves_of(given: Problem, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    parts = [given.hidden, given.head.weight, *([] if given.head.bias is None else [given.head.bias])]
    return [torch.tensor(part, dtype=dtype).requires_grad_() for part in parts]


def ready(given: Problem, engine: str, of_tokens: Any = None, **fields: Any) -> Any:
    config = LinearConfig(**ENGINES[engine], **fields)
    numbers = {"g_log_prob": given.g, "g_entropy": given.e}
    if of_tokens is not None:
        numbers["temperature"] = of_tokens
    data = {name: torch.tensor(part, dtype=torch.float64) for name, part in numbers.items()}
    context = config.build({"shifted_labels": torch.tensor(given.labels), **data})
    return config.loss_ctx_cls.build_batches([context])[0]


def run(context: Any, leaves: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    loss = context.forward(*leaves).loss
    return [loss.detach(), *torch.autograd.grad(factor * loss, leaves)]


def assert_close(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    for mine, theirs in zip(found, wanted, strict=False):
        assert (mine.double() - theirs).abs().max() <= bound * theirs.abs().max() + 1e-14


def bound_of(engine: str) -> float:
    return 3e-6 if engine == "liger" else 1e-12


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "a temperature": {"temperature": 0.6},
    "a temperature of each token": {"temperature": "tokens"},
    "a logit scale that multiplies": {"scale": 0.25},
    "a logit scale that divides": {"scale": 1 / 8},
    "a soft cap": {"softcap": 1.5},
    "entropy": {"entropy": True},
    "entropy and bias at a temperature of each token": {"entropy": True, "bias": True, "temperature": "tokens"},
    "everything": {"bias": True, "temperature": "tokens", "scale": 0.7, "softcap": 2.0, "entropy": True},
}
LIGER_REFUSES = {
    "a temperature of each token": "temperature for each token",
    "a logit scale that multiplies": "logit_scale",
    "a logit scale that divides": "logit_scale",
    "a soft cap": "logit_softcap",
    "entropy": "entropy",
    "entropy and bias at a temperature of each token": "entropy",
    "everything": "logit_scale|logit_softcap",
}


def settings(name: str) -> tuple[Problem, Any, dict[str, Any], list[list[float]]]:
    """Problem, temperature in the batch, fields of the config, and the temperature of each token."""
    options = HEADS[name]
    given = problem(**{key: options[key] for key in ("bias", "scale", "softcap") if key in options})
    fields = {"logit_scale": given.head.scale, "logit_softcap": given.head.softcap}
    fields |= {"with_entropy": options.get("entropy", False)}
    temperature = options.get("temperature", 1.0)
    if temperature == "tokens":
        return given, given.temperature, fields, given.temperature
    return given, None, {**fields, "temperature": temperature}, [[temperature] * 5] * 2


@every_engine
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_the_loops(name: str, engine: str) -> None:
    given, temperature, fields, warm = settings(name)
    leaves = leaves_of(given)
    if engine == "liger" and name in LIGER_REFUSES:
        with pytest.raises(ConfigError, match=LIGER_REFUSES[name]):
            ready(given, engine, temperature, **fields).forward(*leaves)
        return
    wanted = expected(given, warm, fields["with_entropy"])
    assert_close(run(ready(given, engine, temperature, **fields), leaves), wanted, bound_of(engine))


@every_engine
@pytest.mark.parametrize("words", [1, 2, 3, 31, 65, 129])
def test_vocabularies_that_are_no_multiple_of_anything(words: int, engine: str, monkeypatch: Any) -> None:
    cut_into_tiles(monkeypatch, 64)
    given = problem(words, bias=True)
    wanted = expected(given, [[1.0] * 5] * 2, entropy=False)
    assert_close(run(ready(given, engine), leaves_of(given)), wanted, bound_of(engine))


@every_engine
def test_strides_of_any_kind(engine: str) -> None:
    """A weight stored transposed, hidden states that are every other column of something wider, labels of a slice."""
    given = problem(bias=True)
    wanted = run(ready(given, engine), leaves_of(given))
    hidden, weight, bias = (part.detach() for part in leaves_of(given))
    wide = hidden.repeat_interleave(2, dim=-1).transpose(0, 1).contiguous().requires_grad_()
    stored, doubled = weight.T.contiguous().requires_grad_(), bias.repeat_interleave(3).requires_grad_()
    context = ready(given, engine)
    strided = torch.full((2, 10), 7)
    strided[:, ::2] = context.loss_kwargs.shifted_labels
    context.loss_kwargs.shifted_labels = strided[:, ::2]
    loss = context.forward(wide.transpose(0, 1)[..., ::2], stored.T, doubled[::3]).loss
    grads = torch.autograd.grad(loss, (wide, stored, doubled))
    found = [loss.detach(), grads[0].transpose(0, 1)[..., ::2], grads[1].T, grads[2][::3]]
    assert_close(found, wanted, bound_of(engine))
    assert grads[0][..., 1::2].eq(0).all()


@every_engine
def test_tied_embeddings_get_the_sum_of_both_gradients(engine: str) -> None:
    given = problem()
    table = leaves_of(given)[1]
    tokens = torch.arange(10).reshape(2, 5)
    context = ready(given, engine)
    (found,) = torch.autograd.grad(context.forward(F.embedding(tokens, table), table).loss, table)
    hidden, weight = (part.detach().requires_grad_() for part in (F.embedding(tokens, table), table))
    _, of_hidden, of_weight = run(ready(given, "eager"), [hidden, weight])
    assert_close([found], [of_weight.index_add(0, tokens.flatten(), of_hidden.flatten(0, 1))], bound_of(engine))


@every_engine
@pytest.mark.parametrize("frozen", [(True, False), (False, True)], ids=["hidden", "head"])
def test_frozen_hidden_states_or_a_frozen_head(frozen: tuple[bool, bool], engine: str) -> None:
    given = problem(bias=True)
    wanted = run(ready(given, engine), leaves_of(given))
    leaves = leaves_of(given)
    for leaf, still in zip(leaves, (frozen[0], frozen[1], frozen[1]), strict=True):
        leaf.requires_grad_(not still)
    ready(given, engine).forward(*leaves).loss.backward()
    for leaf, gradient in zip(leaves, wanted[1:], strict=True):
        if leaf.requires_grad:
            assert leaf.grad is not None
            assert_close([leaf.grad], [gradient], bound_of(engine))
        else:
            assert leaf.grad is None


@every_engine
@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_mixed_dtypes_are_multiplied_in_the_wider_one(
    hidden_dtype: torch.dtype, head_dtype: torch.dtype, engine: str
) -> None:
    """No digit is lost but those of the gradients' own dtypes; under autocast both are 16-bit."""
    given = problem(bias=True)
    parts = leaves_of(given)
    dtypes = (hidden_dtype, head_dtype, head_dtype)
    narrow = [part.detach().to(dtype).requires_grad_() for part, dtype in zip(parts, dtypes, strict=True)]
    exact = [part.detach().double().requires_grad_() for part in narrow]
    wanted = run(ready(given, "eager"), exact)
    found = run(ready(given, engine), narrow)
    for mine, theirs, own in zip(found, wanted, (torch.float32, *dtypes), strict=True):
        assert mine.dtype in (own, torch.float64)
        assert (mine.double() - theirs).abs().max() <= max(2 * torch.finfo(own).eps, 2e-6) * theirs.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(ready(given, engine), narrow)
    for mine, theirs, own in zip(cast, wanted, (torch.float32, *dtypes), strict=True):
        assert mine.dtype in (own, torch.float64)
        assert (mine.double() - theirs).abs().max() <= 4e-2 * theirs.abs().max()


@every_engine
@pytest.mark.parametrize("factor", [0.0, -3.0, 65536.0])
def test_any_upstream_gradient(factor: float, engine: str) -> None:
    given = problem(bias=True)
    plain = run(ready(given, engine), leaves_of(given))
    scaled = run(ready(given, engine), leaves_of(given), factor)
    assert_close(scaled[1:], [factor * part for part in plain[1:]], 1e-6 if engine == "liger" else 1e-12)


@every_engine
def test_a_second_backward_through_the_same_loss(engine: str) -> None:
    given, leaves = problem(bias=True), leaves_of(problem(bias=True))
    loss = ready(given, engine).forward(*leaves).loss
    for number in (1.0, 2.0):
        loss.backward(torch.tensor(number, dtype=loss.dtype), retain_graph=True)
    once = run(ready(given, engine), leaves_of(given))
    assert_close([leaf.grad for leaf in leaves if leaf.grad is not None], [3.0 * part for part in once[1:]], 1e-6)


@every_engine
def test_under_a_gradient_scaler(engine: str) -> None:
    """Scaled, unscaled and stepped as without one; a step with an infinite gradient is left out."""
    given = problem(bias=True)
    leaves = leaves_of(given, torch.float32)
    plain = run(ready(given, engine), leaves)
    optimizer = torch.optim.SGD(leaves, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = [leaf.detach().clone() for leaf in leaves]
    scaler.scale(ready(given, engine).forward(*leaves).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    for leaf, old, gradient in zip(leaves, before, plain[1:], strict=True):
        torch.testing.assert_close(leaf.detach(), old - 0.5 * gradient, rtol=1e-5, atol=1e-6)
    stepped = [leaf.detach().clone() for leaf in leaves]
    optimizer.zero_grad()
    scaler.scale(float("inf") * ready(given, engine).forward(*leaves).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(leaf.equal(old) for leaf, old in zip(leaves, stepped, strict=True))
    assert scaler.get_scale() == 2.0**11


class OnLogits(BaseLossContext):
    """A loss on logits, which chunk mode differentiates one chunk at a time."""

    def loss_fn(self, hidden_states: Any, head_weight: Any, head_bias: Any, loss_kwargs: Any) -> Any:
        return (hidden_states @ head_weight.T).square().sum(), (None, {})


class OnLogitsConfig(CELossConfig):
    @property
    def loss_ctx_cls(self) -> Any:
        return OnLogits


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "eager"])
@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_a_graph_of_the_gradients_is_refused(engine: str, leaf: int) -> None:
    given, mode = problem(bias=True), ENGINES[engine]["mode"]
    leaves = leaves_of(given, torch.float32)
    loss = ready(given, engine).forward(*leaves).loss
    with pytest.raises(RuntimeError, match=f"{mode}.*mode='eager'"):
        torch.autograd.grad(loss, leaves[leaf], create_graph=True)


@pytest.mark.parametrize("config", [LogProbConfig, OnLogitsConfig], ids=["log-probs", "a loss on logits"])
def test_a_graph_of_other_gradients_is_refused(config: Any) -> None:
    given = problem()
    leaves = leaves_of(given)
    made = config(mode="chunk", chunk_size=2)
    context = made.loss_ctx_cls.build_batches([made.build({"shifted_labels": torch.tensor(given.labels)})])[0]
    with pytest.raises(RuntimeError, match=r"chunk.*mode='eager'"):
        torch.autograd.grad(context.forward(*leaves).loss.sum(), leaves, create_graph=True)


def test_eager_mode_has_gradients_of_gradients() -> None:
    given = problem(bias=True)
    leaves = leaves_of(given)

    def loss(*parts: Tensor) -> Tensor:
        return ready(given, "eager").forward(*parts).loss  # type: ignore[no-any-return]

    assert torch.autograd.gradgradcheck(loss, leaves)


def test_places_of_words_beyond_an_int32() -> None:
    """5,000 rows of a million words are 5.2e9 numbers; the last label's place is counted without wrapping."""
    vocabulary, rows = 2**20, 5000
    words = [vocabulary - 1 - row * 7 for row in range(rows)]
    ids = torch.tensor(words)[:, None]
    whole = WordPlaces(ids, 1, vocabulary)
    assert whole.of(0).tolist() == [word * rows + row for row, word in enumerate(words)]
    assert int(whole.of(0).max()) > 2**32
    width = vocabulary - 2**14
    tiles = WordPlaces(ids, 2, width)
    for tile in (0, 1):
        chosen = [row for row in range(rows) if words[row] // width == tile]
        assert chosen
        assert tiles.of(tile).tolist() == [words[row] % width * rows + row for row in chosen]
    read = [places.double() + tile * width * rows for tile, places in enumerate((tiles.of(0), tiles.of(1)))]
    assert tiles.gather(read).tolist() == whole.of(0).tolist()


@pytest.mark.slow
def test_e22_more_numbers_than_an_int32_counts() -> None:
    """16,400 tokens of 131,072 words: log-prob and gradients of the last row are those of that row alone."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 16400, 8, generator=make).bfloat16().requires_grad_()
    weight = torch.randn(131072, 8, generator=make).bfloat16().requires_grad_()
    labels = torch.randint(0, 131072, (1, 16400), generator=make)
    found = []
    for part in (slice(None), slice(-1, None)):
        context = LogProbConfig(mode="chunk").build({"shifted_labels": labels[:, part]})
        log_prob = context.forward(hidden[:, part], weight).loss[0, -1]
        grad_hidden, grad_weight = torch.autograd.grad(log_prob, (hidden, weight))
        assert grad_hidden[0, :-1].eq(0).all()
        found.append([log_prob.detach(), grad_hidden[0, -1], grad_weight])
    for whole, alone in zip(*found, strict=True):
        torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)
