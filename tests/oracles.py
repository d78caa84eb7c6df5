"""Reference values as plain loops over Python floats (float64), from the formulas; nothing of rlloss is imported.

The head (log-probs, entropy and their gradients), KL estimators, and reductions stand here, policy losses in
`oracles_policy.py`. Every gradient is analytic; `test_oracles.py` checks each against central differences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Vector = list[float]
Matrix = list[Vector]


@dataclass
class Head:
    """A linear head: `v = cap*tanh(scale*(W h + b)/cap)`, `z = v / temperature`, and log-softmax of z over V words."""

    weight: Matrix
    bias: Vector | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Vector, temperature: float) -> tuple[Vector, Vector]:
        """Logits z of one row, and the factor `dz_j / d(W h + b)_j` of each."""
        logits, slopes = [], []
        for word, row in enumerate(self.weight):
            u = self.scale * (dot(row, hidden) + (self.bias[word] if self.bias else 0.0))
            v = u if self.softcap is None else self.softcap * math.tanh(u / self.softcap)
            bend = 1.0 if self.softcap is None else 1.0 - (v / self.softcap) ** 2
            logits.append(v / temperature)
            slopes.append(self.scale * bend / temperature)
        return logits, slopes


@dataclass
class HeadGrads:
    """Gradients of a scalar in hidden rows `[N][H]`, weight `[V][H]` and bias `[V]`."""

    hidden: Matrix = field(default_factory=list)
    weight: Matrix = field(default_factory=list)
    bias: Vector = field(default_factory=list)


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def log_softmax(logits: Vector) -> Vector:
    """`z_j - log sum_k exp(z_k)`."""
    top = max(logits)
    log_sum = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    return [z - log_sum for z in logits]


def entropy(logits: Vector) -> float:
    """`-sum_j p_j log p_j` in nats; a word of probability 0 adds nothing."""
    return -math.fsum(math.exp(lp) * lp for lp in log_softmax(logits) if lp > -math.inf)


def head_forward(head: Head, hidden: Matrix, labels: list[int], temperature: Vector) -> tuple[Vector, Vector]:
    """Log-prob of the label and entropy of each row."""
    rows = [head.logits(h, t)[0] for h, t in zip(hidden, temperature, strict=True)]
    return [log_softmax(z)[y] for z, y in zip(rows, labels, strict=True)], [entropy(z) for z in rows]


def head_backward(
    head: Head, hidden: Matrix, labels: list[int], temperature: Vector, grad_log_prob: Vector, grad_entropy: Vector
) -> HeadGrads:
    """Gradients of `sum_n g_n log_prob_n + e_n H_n`: `dz_j = g (1[j=y] - p_j) - e p_j (log p_j + H)`."""
    width = len(hidden[0]) if hidden else len(head.weight[0])
    grads = HeadGrads([], [[0.0] * width for _ in head.weight], [0.0] * len(head.weight))
    for n, row in enumerate(hidden):
        logits, slopes = head.logits(row, temperature[n])
        log_probs, spread = log_softmax(logits), entropy(logits)
        grad_row = [0.0] * width
        for j, lp in enumerate(log_probs):
            p = math.exp(lp)
            dz = grad_log_prob[n] * ((j == labels[n]) - p)
            if p > 0.0:
                dz -= grad_entropy[n] * p * (lp + spread)
            du = dz * slopes[j]
            grads.bias[j] += du
            for k in range(width):
                grad_row[k] += du * head.weight[j][k]
                grads.weight[j][k] += du * row[k]
        grads.hidden.append(grad_row)
    return grads


def kl(log_prob: float, ref: float, kind: str, cap: float | None = 10.0) -> tuple[float, float]:
    """Value and gradient in `log_prob` of a KL estimator; `d = log_prob - ref`.

    k1 `d`, abs `|d|`, k2 `d^2/2`, k3 `exp(-d) + d - 1` (Schulman 2020), -d clamped to +-20 and the value to +-cap. A
    trailing "+" takes the gradient of k2.
    """
    d = log_prob - ref
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.rstrip("+"), kind.rstrip("+"))
    if name == "k1":
        value, grad = d, 1.0
    elif name == "abs":
        value, grad = abs(d), float((d > 0) - (d < 0))
    elif name == "k2":
        value, grad = 0.5 * d * d, d
    elif name == "k3":
        x = min(max(-d, -20.0), 20.0)
        value, grad = math.expm1(x) - x, (1.0 - math.exp(x) if -20.0 <= -d <= 20.0 else 0.0)
        if cap is not None and value > cap:
            value, grad = cap, 0.0
    else:
        raise ValueError(kind)
    return value, (d if kind.endswith("+") else grad)


def reduction_weights(
    lengths: list[int], reduction: str, prompts: list[int] | None = None, loss_length: float | None = None
) -> Vector:
    """The weight of every token of sequence i under a reduction; sequences without valid tokens are no sequences.

    N valid tokens, S sequences, n_i tokens of a sequence, n_p of a prompt, P prompts: token 1/N; sample 1/(S n_i);
    square n_i^-1/2 / sum_j n_j^1/2; sequence_sum 1/S; constant 1/(S loss_length); prompt 1/(P n_p); sum 1.
    """
    total = sum(lengths)
    sequences = sum(1 for n in lengths if n > 0)
    roots = math.fsum(math.sqrt(n) for n in lengths)
    per_prompt: dict[int, int] = {}
    for i, n in enumerate(lengths):
        if prompts is not None and n > 0:
            per_prompt[prompts[i]] = per_prompt.get(prompts[i], 0) + n
    weights = []
    for i, n in enumerate(lengths):
        if n == 0:
            weights.append(0.0)
        elif reduction == "token":
            weights.append(1.0 / total)
        elif reduction == "sample":
            weights.append(1.0 / (sequences * n))
        elif reduction == "square":
            weights.append(n**-0.5 / roots)
        elif reduction == "sequence_sum":
            weights.append(1.0 / sequences)
        elif reduction == "constant":
            assert loss_length is not None
            weights.append(1.0 / (sequences * loss_length))
        elif reduction == "prompt":
            assert prompts is not None
            weights.append(1.0 / (len(per_prompt) * per_prompt[prompts[i]]))
        elif reduction == "sum":
            weights.append(1.0)
        else:
            raise ValueError(reduction)
    return weights
