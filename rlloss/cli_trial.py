"""Small random sequences, and a loss evaluated on them in many ways, for `rlloss check`."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.grpo import GRPOLossConfig
from rlloss.losses.ppo import ActorCriticLossConfig
from rlloss.losses.rl import BaseRLLossConfig
from rlloss.losses.value import ValueLossConfig

LENGTHS = (5, 3, 6, 1, 4)
VOCABULARY, WIDTH, TEACHER_WORDS = 11, 5, 3
EXACT = 1e-10
Batch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of one step; hidden gradients joined in the order of the sequences."""

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor

    def distance(self, other: "Outcome") -> float:
        """Largest difference, relative to the largest entry of each tensor."""
        pairs = ((self.loss, other.loss), (self.grad_hidden, other.grad_hidden), (self.grad_weight, other.grad_weight))
        return max(_relative(mine, theirs) for mine, theirs in pairs)


class Trial:
    """Random sequences, and the loss evaluated on them in many ways."""

    def __init__(self, config: BaseLossConfig, seed: int) -> None:
        self.config = config.model_copy(update={"mode": "eager"})
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
        self.value_weight = torch.randn(1, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = self.value_weight if isinstance(config, ValueLossConfig) else self.vocabulary
        self.sequences = [self._sequence(length, generator) for length in LENGTHS]

    def level(self) -> tuple[bool | None, str]:
        """A token-level loss must be the sum of what it gives for each token alone."""
        if self._declared_level() != "token":
            return None, f"declared level {self._declared_level()!r}: evaluated on whole sequences"
        apart = self._run(mode="chunk", chunk_size=1)
        gap = apart.distance(self._run())
        if gap <= EXACT:
            return True, "token-level: the sum over single tokens is the loss of the batch"
        return False, (
            f"declared level 'token', but token by token the result differs by {gap:.1e}: the loss looks across "
            "tokens. Declare level='sequence' (or ask for `segments`)."
        )

    def chunks(self) -> tuple[bool | None, str]:
        """Chunk mode must equal eager mode for every chunk size."""
        gaps = {size: self._run(mode="chunk", chunk_size=size).distance(self._run()) for size in (1, 3, 7, 100)}
        worst = max(gaps, key=lambda size: gaps[size])
        return gaps[worst] <= EXACT, f"largest difference from eager {gaps[worst]:.1e} (chunk_size={worst})"

    def liger(self) -> tuple[bool | None, str]:
        """Liger mode must equal eager mode to float32 rounding, where the loss can run in it."""
        try:
            gap = self._run(mode="liger").distance(self._run())
        except (ConfigError, ImportError) as error:
            return None, f"not offered: {error}"
        return gap <= 1e-5, f"largest difference from eager {gap:.1e} (float32)"

    def splits(self) -> tuple[bool | None, str]:
        """Any cut into micro-batches, padded or packed, must add up to the same step."""
        whole, worst, where = self._run(), 0.0, "1 micro-batch"
        for parts in (1, 2, 3, 5):
            for packed in (False, True):
                gap = self._run(parts=parts, packed=packed).distance(whole)
                if not gap <= worst:
                    worst, where = gap, f"{parts} micro-batches, {'packed' if packed else 'padded'}"
        if worst <= EXACT:
            return True, f"1, 2, 3 and 5 micro-batches, padded and packed, agree to {worst:.1e}"
        return False, (
            f"{where} differ from one batch by {worst:.1e}: a denominator is counted inside a micro-batch, or tokens "
            "of different sequences are mixed."
        )

    def gradient(self) -> tuple[bool | None, str]:
        """The gradient must be the slope of the loss."""
        exact, step = self._run(), 1e-6
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(self.weight.shape, generator=generator, dtype=torch.float64)
        slope = (self._moved(step * direction) - self._moved(-step * direction)) / (2 * step)
        expected = (exact.grad_weight * direction).sum()
        gap = float((slope - expected).abs() / max(float(expected.abs()), 1e-3))
        if gap <= 1e-4:
            return True, f"finite differences agree to {gap:.1e}"
        if self._is_surrogate():
            return None, "the loss declares a stop-gradient: its gradient is not the slope of its value"
        return False, (
            f"finite differences differ by {gap:.1e}: a detach makes the gradient another one. If the paper wants it "
            "so, register the loss with surrogate=True."
        )

    def garbage(self) -> tuple[bool | None, str]:
        """NaN at ignored positions must not change a bit."""
        dirty, clean = self._run(garbage=float("nan")), self._run()
        same = torch.equal(dirty.loss, clean.loss) and torch.equal(dirty.grad_weight, clean.grad_weight)
        return same, "NaN there changes nothing" if same else "NaN there reaches the loss or the head gradient"

    def extremes(self) -> tuple[bool | None, str]:
        """Old log-probs that are far off must give finite numbers."""
        if not isinstance(self.config, BaseRLLossConfig):
            return None, "no ratio in this loss"
        worst = [self._run(shift=shift) for shift in (-100.0, 100.0)]
        finite = all(bool(part.isfinite().all()) for outcome in worst for part in (outcome.loss, outcome.grad_weight))
        return finite, "log-ratios of +-100 stay finite" if finite else (
            "log-ratios of +-100 give inf or NaN: clamp the log-ratio before exp"
        )

    def direction(self) -> tuple[bool | None, str]:
        """On policy, the loss must fall where the log-prob of a token with positive advantage rises."""
        looks = isinstance(self.config, BaseRLLossConfig) and not isinstance(self.config, ActorCriticLossConfig)
        if not looks or self.config.loss_ctx_cls.loss_fn is not BaseLossContext.loss_fn:
            return None, "no log-prob gradient to look at"
        batch, _ = self._lay(self.sequences, packed=True, garbage=0.0)
        leaf = batch["old_logprobs"].clone().requires_grad_()
        batch["ref_logprobs"] = leaf.detach()
        (context,) = self.config.loss_ctx_cls.build_batches([self.config.build(batch)])
        entropy = leaf.detach().abs() if self.config.head_options().entropy == "gradient" else None
        torch.autograd.backward(context.forward_log_probs(leaf, entropy).loss)
        assert leaf.grad is not None
        counted = batch["shifted_labels"] != self.config.ignore_idx
        wrong = int(((leaf.grad * batch["advantages"] > 1e-12) & counted).sum())
        if wrong:
            return False, f"at {wrong} of {int(counted.sum())} tokens the gradient points against the advantage"
        return True, "every token's gradient points where its advantage says"

    def _is_surrogate(self) -> bool:
        config = self.config
        if isinstance(config, BaseRLLossConfig) and config.use_kl_loss and (config.kl_loss_type or "").endswith("+"):
            return True
        return isinstance(config, GRPOLossConfig) and config.policy_loss.surrogate

    def _declared_level(self) -> str:
        return self.config.loss_ctx_cls.level or self.config.level()

    def _sequence(self, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        hidden = normal(length, WIDTH)
        labels = torch.randint(0, VOCABULARY, (length,), generator=generator)
        log_prob = (hidden @ self.vocabulary.T).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        labels = labels.masked_fill(torch.arange(length) < length // 3, self.config.ignore_idx)
        return {
            "hidden": hidden,
            "shifted_labels": labels,
            "advantages": (normal(1) + 0.5).expand(length),
            "old_logprobs": log_prob + 0.15 * normal(length),
            "ref_logprobs": log_prob + 0.3 * normal(length),
            "values": normal(length),
            "returns": normal(length),
            "teacher_logprobs": log_prob + 0.3 * normal(length),
            "teacher_topk_ids": torch.arange(TEACHER_WORDS).expand(length, -1),
            "teacher_topk_logprobs": normal(length, TEACHER_WORDS).log_softmax(-1),
            "part_ids": torch.full((length,), length % len(getattr(self.config, "parts", "x"))),
        }

    def _lay(self, sequences: list[dict[str, Tensor]], packed: bool, garbage: float) -> Batch:
        lengths = [len(sequence["hidden"]) for sequence in sequences]
        ignored = [sequence["shifted_labels"] == self.config.ignore_idx for sequence in sequences]
        rows: dict[str, Tensor] = {}
        for name in sequences[0]:
            whole = not sequences[0][name].is_floating_point()
            fill = self.config.ignore_idx if name == "shifted_labels" else 0 if whole else garbage
            parts = [
                sequence[name].masked_fill(mask[:, None] if sequence[name].ndim == 2 else mask, fill)
                for sequence, mask in zip(sequences, ignored, strict=True)
            ]
            if packed:
                rows[name] = torch.cat(parts)[None]
            else:
                rows[name] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)
        hidden = rows.pop("hidden")
        return {**rows, "num_tokens": torch.tensor(lengths)} if packed else rows, hidden

    def _run(
        self,
        parts: int = 1,
        packed: bool = True,
        garbage: float = 0.0,
        shift: float = 0.0,
        weight: Tensor | None = None,
        **fields: Any,
    ) -> Outcome:
        config = type(self.config)(**{**dict(self.config), **fields}) if fields else self.config
        sequences = [{**seq, "old_logprobs": seq["old_logprobs"] + shift} for seq in self.sequences]
        bounds = [round(index * len(sequences) / parts) for index in range(parts + 1)]
        groups = [sequences[start:stop] for start, stop in itertools.pairwise(bounds)]
        laid = [self._lay(group, packed, garbage) for group in groups]
        contexts = [config.build(batch) for batch, _ in laid]
        contexts = type(contexts[0]).build_batches(contexts)
        head = (self.weight if weight is None else weight).clone().requires_grad_()
        total, gradients = head.new_zeros(()), []
        for context, (_, states), group in zip(contexts, laid, groups, strict=True):
            hidden = states.clone().requires_grad_()
            loss = context.forward(hidden, head, **self._more()).loss
            torch.autograd.backward(loss)
            total = total + loss.detach()
            assert hidden.grad is not None
            lengths = [len(sequence["hidden"]) for sequence in group]
            rows = torch.split(hidden.grad[0], lengths) if packed else hidden.grad.unbind()
            gradients += [row[:length] for row, length in zip(rows, lengths, strict=True)]
        assert head.grad is not None
        return Outcome(total, torch.cat(gradients), head.grad)

    def _more(self) -> dict[str, Any]:
        return {"value_weight": self.value_weight} if isinstance(self.config, ActorCriticLossConfig) else {}

    def _moved(self, change: Tensor) -> Tensor:
        return self._run(weight=self.weight + change).loss


def _relative(mine: Tensor, theirs: Tensor) -> float:
    scale = float(theirs.abs().max())
    gap = float((mine - theirs).abs().max())
    return gap / scale if scale > 0 else gap
