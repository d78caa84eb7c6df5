"""Checks of the numbers: gradients, ignored positions, extreme ratios, and where the gradient points."""

import math

import torch

from rlloss.doctor.diagnosis import explain
from rlloss.doctor.sequences import Sequence, head_of, ignored_sequence, log_probs
from rlloss.doctor.step import How, Outcome, step
from rlloss.doctor.verdict import EXACT, Verdict, distance_line, listed, same
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.grpo import GRPOLossConfig
from rlloss.losses.rl import BaseRLLossConfig

EXTREME = 100.0


def gradient(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """The gradient must be there, and be the slope of the loss."""
    outcome = step(config, sequences)
    if not bool(outcome.grad_hidden.any()) and _pulls(config, sequences):
        return Verdict(
            False,
            "the loss has a value but its gradient is exactly 0 for every token: a detach(), sign, round or comparison "
            "stands between it and log_prob.",
            "zero",
            f"assert step(loss_cfg, {listed(sequences)}).grad_hidden.any()",
        )
    gap = slope_gap(config, sequences)
    if gap <= 1e-4:
        return Verdict(True, f"finite differences agree to {gap:.1e}")
    if _is_surrogate(config):
        return Verdict(None, "the loss declares a stop-gradient: its gradient is not the slope of its value")
    return Verdict(
        False,
        f"finite differences differ by {gap:.1e}: a detach makes the gradient another one. If the paper wants it "
        "so, register the loss with surrogate=True.",
        "slope",
        f"assert slope_gap(loss_cfg, {listed(sequences)}) < 1e-4",
    )


def slope_gap(config: BaseLossConfig, sequences: list[Sequence]) -> float:
    """Relative difference of the head's gradient and the slope of the loss by finite differences."""
    size = 1e-6
    weight, _ = head_of(config, sequences[0]["logits"].shape[1])
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    up, down = (step(config, sequences, how=How(moved=sign * size * direction)).loss for sign in (1.0, -1.0))
    expected = (step(config, sequences).grad_weight * direction).sum()
    return float(((up - down) / (2 * size) - expected).abs() / max(float(expected.abs()), 1e-3))


def ignored(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """What stands at ignored positions must not change a bit, and they have no gradient."""
    clean = step(config, sequences)
    counted = torch.cat([columns["counted"] for columns in sequences])
    if bool(clean.grad_hidden[~counted].any()):
        detail = "the hidden states of ignored positions get a gradient: their numbers take part in the loss."
        own = listed(sequences)
        rows = f"rows = step(loss_cfg, {own}).grad_hidden; ignored = ~torch.cat([s['counted'] for s in {own}])"
        replay = f"{rows}; assert not rows[ignored].any()"
        return Verdict(False, detail, "own gradient", replay)
    for garbage, name in ((1e3, "1000"), (math.nan, "nan")):
        dirty = step(config, sequences, how=How(garbage=garbage))
        if not same(dirty, clean):
            return _leak(name, not torch.equal(dirty.loss, clean.loss), sequences)
    return _empty(config, sequences, clean)


def _leak(name: str, in_value: bool, sequences: list[Sequence]) -> Verdict:
    own = listed(sequences)
    replay = f"assert step(loss_cfg, {own}, how=How(garbage=float({name!r}))).distance(step(loss_cfg, {own})) == 0"
    shown = "NaN" if name == "nan" else name
    if in_value:
        return Verdict(
            False,
            f"{shown} at ignored positions reaches the loss: they are summed, or multiplied by 0 (0 * NaN is NaN). "
            "Select the tokens that count before any arithmetic.",
            f"value {name}",
            replay,
        )
    return Verdict(
        False,
        f"{shown} at ignored positions reaches the gradient, though not the loss: torch.where on the result comes too "
        "late, 0 times a NaN derivative is NaN. Replace the inputs before any arithmetic.",
        f"gradient {name}",
        replay,
    )


def _empty(config: BaseLossConfig, sequences: list[Sequence], clean: Outcome) -> Verdict:
    nobody = ignored_sequence(sequences[0])
    try:
        beside = step(config, sequences, [nobody])
    except Exception as error:
        kind, detail = explain(error)
        gap, detail = math.inf, f"a micro-batch whose tokens are all ignored: {detail}"
    else:
        gap, kind = beside.distance(clean), "nobody"
        detail = (
            f"a micro-batch whose tokens are all ignored changes the step by {gap:.1e}: a mean over no token is 0/0, "
            "or its sequences are counted."
        )
    if gap <= EXACT:
        return Verdict(True, "garbage there changes nothing, nor does a sequence that is ignored as a whole")
    replay = distance_line(f"{listed(sequences)}, [ignored_sequence(a)]", listed(sequences))
    return Verdict(False, detail, kind, replay)


def extremes(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """Old and reference log-probs that are far off must give finite numbers, in float32 as in training."""
    others = [name for name in ("old_logprobs", "ref_logprobs") if name in sequences[0]]
    if not isinstance(config, BaseRLLossConfig) or not others:
        return Verdict(None, "no ratio in this loss")
    for shift in (-EXTREME, EXTREME):
        for name in others:
            far = [{**columns, name: log_probs(columns) + shift} for columns in sequences]
            outcome = step(config, far, how=How(dtype=torch.float32))
            if not outcome.finite:
                where = "loss" if not bool(outcome.loss.isfinite()) else "gradient"
                return Verdict(
                    False,
                    f"a log-ratio of {-shift:+.0f} to {name} gives a {where} of inf or NaN: clamp the log-ratio before "
                    "exp (a torch.where after it leaves NaN in the gradient).",
                    f"{name} {where}",
                    f"assert step(loss_cfg, {listed(far)}, how=How(dtype=torch.float32)).finite",
                    far,
                )
    return Verdict(True, "log-ratios of +-100 stay finite in value and gradient")


def direction(config: BaseLossConfig, sequences: list[Sequence]) -> Verdict:
    """On policy, the loss must fall where the log-prob of a token with positive advantage rises."""
    if not isinstance(config, BaseRLLossConfig) or "advantages" not in sequences[0]:
        return Verdict(None, "no advantages in this loss")
    same = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    now = [{**seq, **{name: log_probs(seq) for name in same if name in seq}} for seq in sequences]
    wrong, tokens = against(config, now), sum(int(columns["counted"].sum()) for columns in now)
    if not wrong:
        return Verdict(True, "every token's gradient points where its advantage says")
    return Verdict(
        False,
        f"on policy, at {wrong} of {tokens} tokens the gradient points against the advantage: a step would make a good "
        "token rarer, or a bad one more frequent.",
        replay=f"assert not against(loss_cfg, {listed(now)})",
        shown=now,
    )


def against(config: BaseLossConfig, sequences: list[Sequence]) -> int:
    """Number of tokens whose log-prob the policy loss, without KL and entropy, moves against their advantage."""
    alone = config.model_copy(update={"use_kl_loss": False, "entropy_coef": 0.0})
    outcome = step(alone, sequences)
    words = torch.cat([columns["labels"] for columns in sequences])
    slope = outcome.grad_hidden.gather(1, words[:, None]).squeeze(1)
    counted = torch.cat([columns["counted"] for columns in sequences])
    advantages = torch.cat([columns["advantages"] for columns in sequences])
    return int(((slope * advantages > 1e-12) & counted).sum())


def _is_surrogate(config: BaseLossConfig) -> bool:
    if isinstance(config, BaseRLLossConfig) and config.use_kl_loss and (config.kl_loss_type or "").endswith("+"):
        return True
    return isinstance(config, GRPOLossConfig) and config.policy_loss.surrogate


def _pulls(config: BaseLossConfig, sequences: list[Sequence]) -> bool:
    """Whether a token counts that a loss on a policy should move."""
    if not any(bool(columns["counted"].any()) for columns in sequences):
        return False
    advantages = [columns["advantages"][columns["counted"]] for columns in sequences if "advantages" in columns]
    return not isinstance(config, BaseRLLossConfig) or any(bool(part.any()) for part in advantages)
