"""What all losses on a policy share: old, reference and rollout log-probs, and the terms KL and entropy."""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import Group
from rlloss.errors import BatchError
from rlloss.functional.kl import ignores_reference, kl_penalty
from rlloss.functional.policy import RatioKind, bounded_ratio, log_ratio_of
from rlloss.heads import TokenStats
from rlloss.losses.batch import check_field, offsets_of, refuse_nan
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.rl_kwargs import BaseRLLossKwargs
from rlloss.losses.rollout_is import RolloutImportanceSampling
from rlloss.losses.rollout_step import RolloutOutcome, check_policy, is_current, normalize_step, rollout_outcome
from rlloss.losses.terms import Reduction, Term
from rlloss.metrics import Metric, mean_of


class BaseRLLossConfig(BaseLossConfig):
    """Fields of losses on a policy. It does not look inside `policy_loss_cfg`; `GRPOLossConfig` does."""

    policy_loss_cfg: Any = Field(default_factory=dict)
    """The policy loss and its parameters, as a dict with a `loss_type` or as a typed config."""
    use_kl_loss: bool = False
    """Add the KL divergence from a reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    """Factor of the KL term."""
    kl_loss_type: str | None = None
    """Estimator: k1 (kl), abs, k2 (mse), k3 (low_var_kl); a trailing + takes the gradient of k2. None is k3."""
    kl_value_cap: float | None = Field(default=10.0, gt=0.0)
    """Bound of k3, nats; None removes it."""
    kl_importance: RatioKind | None = None
    """Multiply the KL of each token by this ratio to the old policy, with its gradient (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1; TRL's use_bias_correction_kl at its two levels). None: no factor."""
    rollout_is: RolloutImportanceSampling = Field(default_factory=RolloutImportanceSampling)
    """Correction for log-probs of the sampling engine that differ from the trainer's."""
    entropy_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Entropy bonus: entropy_coef * mean entropy is subtracted from the loss."""
    entropy_reduction: Reduction | None = None
    """Denominator of the entropy term; None is loss_reduction. TRL divides it by tokens whatever the loss type."""
    on_policy: bool = False
    """Without old log-probs take the current ones: ratio 1, gradient -A."""
    loss_reduction: Reduction = "token"
    """Denominator of every term; see `rlloss.losses.calibration`."""
    loss_length: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Constant length L for loss_reduction="constant" (Dr.GRPO)."""

    _liger_refuses: ClassVar[tuple[str, ...]] = (*BaseLossConfig._liger_refuses, "entropy_coef")

    @model_validator(mode="after")
    def _check_rl(self) -> "BaseRLLossConfig":
        name = type(self).__name__
        if self.kl_loss_type is not None and ignores_reference(self.kl_loss_type) and self.use_kl_loss:
            warnings.warn(
                f"{name}: the gradient of kl_loss_type={self.kl_loss_type!r} as a loss does not depend on the "
                "reference policy. Use 'k3', or 'k1+' for the unbiased gradient.",
                stacklevel=2,
            )
        return self

    def old_of(self, loss_kwargs: Any) -> Tensor | None:
        """Returns the log-probs that the ratio is taken against; None: those of the current policy."""
        missing = loss_kwargs.old_logprobs is None and self.rollout_is.policy == "current"
        return loss_kwargs.rollout_logprobs if missing else loss_kwargs.old_logprobs  # type: ignore[no-any-return]

    def shared_terms(self) -> tuple[Term, ...]:
        """The terms KL and entropy, where they are switched on."""
        terms = []
        if self.use_kl_loss and self.kl_loss_coef:
            terms.append(self._kl_term())
        if self.entropy_coef:
            terms.append(self._entropy_term())
        return tuple(terms)

    def _kl_term(self) -> Term:
        return Term(
            "kl",
            self._kl,
            level="token" if self.kl_importance in (None, "token") else "sequence",
            reduction=self.loss_reduction,
            coef=self.kl_loss_coef,
            loss_length=self.loss_length,
        )

    def _entropy_term(self) -> Term:
        return Term(
            "entropy",
            _entropy,
            reduction=self.entropy_reduction or self.loss_reduction,
            coef=-self.entropy_coef,
            needs_entropy=True,
            loss_length=self.loss_length,
        )

    def _kl(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        kl = kl_penalty(stats.log_prob, loss_kwargs.ref_logprobs, self.kl_loss_type or "k3", self.kl_value_cap)
        if self.kl_importance is not None:
            old = self.old_of(loss_kwargs)
            old = stats.log_prob.detach() if old is None else old
            kl = kl * bounded_ratio(log_ratio_of(stats.log_prob, old, stats.segments, self.kl_importance))
        return kl, {"kl": mean_of(kl)}


def _entropy(stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
    assert stats.entropy is not None
    return stats.entropy, {}


_LOG_PROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "selection_logprobs")


class BaseRLLossContext(BaseLossContext):
    """Context of a loss on a policy."""

    loss_cfg: BaseRLLossConfig
    loss_kwargs: BaseRLLossKwargs

    def __init__(self, loss_cfg: Any, loss_kwargs: Any) -> None:
        super().__init__(loss_cfg, loss_kwargs)
        self._rollout: RolloutOutcome | None = None

    def needed(self) -> tuple[str, ...]:
        """Names of the log-probs that the loss cannot do without."""
        names = ["old_logprobs"] if self._has_ratio() and not self.loss_cfg.on_policy else []
        return (*names, "ref_logprobs") if self._has_kl() else tuple(names)

    def _has_kl(self) -> bool:
        return any(term.name == "kl" for term in self.loss_cfg.terms())

    def _has_ratio(self) -> bool:
        """Whether a term reads the old log-probs, where there are any."""
        return self.loss_cfg.kl_importance is not None and self._has_kl()

    def check(self) -> None:
        """Checks tensors that may have been set after `build`.

        Raises:
            BatchError: A tensor is missing, has another shape, or is NaN while `check_finite` is on.
        """
        kwargs = self.loss_kwargs
        present = {**dict(kwargs), "old_logprobs": self.loss_cfg.old_of(kwargs)}
        missing = [name for name in self.needed() if present[name] is None]
        if missing:
            raise BatchError(
                f"{type(self.loss_cfg).__name__} needs {', '.join(missing)}. Put it into the batch, or set it on "
                f"ctx.loss_kwargs before build_batches" + self._way_out(missing) + "."
            )
        if self._corrects():
            check_policy(self)
        used = self._used()
        for name in (*used, "advantages", "is_weights"):
            check_field(kwargs, name)
        if self.loss_cfg.check_finite:
            refuse_nan(kwargs, (*used, "advantages"), self.loss_cfg.ignore_idx)

    def prepare(self) -> Tensor | None:
        """Tokens with an infinite log-prob leave the step, and those that the rollout correction rejects."""
        leaves = None
        for name in self._used():
            infinite = torch.isinf(getattr(self.loss_kwargs, name))
            leaves = infinite if leaves is None else leaves | infinite
        return self._correct_rollout(leaves)

    def _used(self) -> list[str]:
        return [name for name in _LOG_PROBS if getattr(self.loss_kwargs, name) is not None and self._uses(name)]

    @property
    def selects_step(self) -> bool:
        """Whether rollout weights are divided by their mean over the step."""
        return self.loss_cfg.rollout_is.normalize_weights

    def select_step(self, contexts: Sequence[Any], group: Group) -> None:
        """Divides rollout weights by their mean over the step, where the config asks for it."""
        if self.loss_cfg.rollout_is.normalize_weights:
            normalize_step(contexts, self.loss_kwargs.advantages, group)

    def compute_rollout_is(
        self, sp_mesh: DeviceMesh | None = None, num_tokens: Tensor | None = None
    ) -> tuple[dict[str, Metric], dict[str, Metric]]:
        """Computes the rollout correction now; `build_batches` takes the result instead of repeating it.

        Args:
            sp_mesh: XTuner's argument; not looked at, the context knows the mesh that it was built with.
            num_tokens: `[S]`, lengths of packed sequences, where the batch did not hold them.

        Returns:
            Metrics of the two policies' distance, and of weights and rejection.

        Raises:
            BatchError: `rollout_logprobs` or the trainer's log-probs are missing.
        """
        kwargs = self.loss_kwargs
        if kwargs.rollout_logprobs is None:
            raise BatchError("compute_rollout_is needs rollout_logprobs. Put them into the batch.")
        if num_tokens is not None and kwargs.cu_seq_lens is None and kwargs.shifted_labels.shape[0] == 1:
            kwargs.cu_seq_lens = offsets_of(num_tokens, kwargs.shifted_labels.device)
        kwargs.is_weights = None
        self.check()
        self.prepare()
        if self._rollout is None:
            self._rollout = rollout_outcome(self, None)
        return self._rollout.mismatch, self._rollout.metrics

    def token_numbers(self, stats: TokenStats, loss_kwargs: Any) -> dict[str, Tensor]:
        """Log-probs of every policy, ratio, advantage and KL."""
        old, cfg = self.loss_cfg.old_of(loss_kwargs), self.loss_cfg
        log_ratio = torch.zeros_like(stats.log_prob) if old is None else stats.log_prob - old
        kind, cap, ref = cfg.kl_loss_type or "k3", cfg.kl_value_cap, loss_kwargs.ref_logprobs
        found = {
            "old_log_prob": old,
            "ref_log_prob": ref,
            "rollout_log_prob": loss_kwargs.rollout_logprobs,
            "log_ratio": log_ratio,
            "ratio": bounded_ratio(log_ratio),
            "advantage": loss_kwargs.advantages,
            "kl": None if ref is None else kl_penalty(stats.log_prob, ref, kind, cap),
        }
        given = {name: value.to(stats.log_prob.dtype) for name, value in found.items() if value is not None}
        return {**super().token_numbers(stats, loss_kwargs), **given}

    def _corrects(self) -> bool:
        """Whether the rules are to be applied: there are some, and numbers for them, and no weights were given."""
        kwargs = self.loss_kwargs
        given = kwargs.given("is_weights") is not None
        return bool(self.loss_cfg.rollout_is.compiled()) and kwargs.rollout_logprobs is not None and not given

    def _correct_rollout(self, leaves: Tensor | None) -> Tensor | None:
        kwargs = self.loss_kwargs
        if not self._corrects():
            kwargs.is_weights = kwargs.given("is_weights")
            self._warn_uncorrected()
            self._rollout, self._step_metrics = None, {}
            return leaves
        if not is_current(self._rollout, self):
            self._rollout = rollout_outcome(self, leaves)
        assert self._rollout is not None
        kwargs.set_computed("is_weights", self._rollout.weights)
        self._step_metrics = {**self._rollout.mismatch, **self._rollout.metrics}
        return self._rollout.rejected if leaves is None else leaves | self._rollout.rejected

    def _warn_uncorrected(self) -> None:
        missing = self.loss_kwargs.rollout_logprobs is None and self.loss_kwargs.is_weights is None
        if missing and self.loss_cfg.rollout_is.compiled():
            warnings.warn("rollout_is has rules, but the batch has no rollout_logprobs: none applies.", stacklevel=2)

    def _uses(self, name: str) -> bool:
        current = self.loss_cfg.rollout_is.policy == "current"
        corrected = ("rollout_logprobs", "selection_logprobs" if current else "old_logprobs")
        return name in self.needed() or name == self._ratio_field() or (self._corrects() and name in corrected)

    def _ratio_field(self) -> str | None:
        """The field that `old_of` reads where a term has a ratio, needed or not."""
        if not self._has_ratio():
            return None
        stands_in = self.loss_kwargs.old_logprobs is None and self.loss_cfg.rollout_is.policy == "current"
        return "rollout_logprobs" if stands_in else "old_logprobs"

    def _way_out(self, missing: list[str]) -> str:
        return ", or set on_policy=True" if "old_logprobs" in missing else ""
