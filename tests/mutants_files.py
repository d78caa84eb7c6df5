"""The files with formulas, which of their functions have any, and the tests that pin their numbers.

A test is a file under `tests/`, or `file::text&text` for those whose name contains the texts; the quickest come first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Formulas:
    """What to break in a file, and what must find it; no functions means all."""

    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()


_POLICY = (
    "test_policy_losses.py",
    "test_selection.py",
    "test_policy_properties.py::test_a_total_below_one",
    "test_policy_properties.py::test_prompts",
    "test_golden.py::verl-cases-policy&-log_probs",
    "test_golden.py::verl-cases-kl_penalty&-log_probs",
    "test_golden.py::trl-&-log_probs",
    "test_policy_properties.py::[vanilla",
    "test_policy_properties.py::[gmpo",
    "test_policy_properties.py::[kl_cov",
)
_PPO = (
    "test_ppo_functional.py",
    "test_reported_4.py::integers",
    "test_reported_4.py::16_bit",
    "test_reported_4.py::coefficient_of_kl",
    "test_golden.py::value_loss",
    "test_golden.py::stats",
)
_ADVANTAGES = ("test_advantages.py", "test_golden.py::adv")
_ROLLOUT = ("test_rollout.py", "test_reported_rollout.py", "test_golden.py::rollout", "test_golden.py::bypass")

FILES: dict[str, Formulas] = {
    "rlloss/functional/bounds.py": Formulas(_POLICY),
    "rlloss/functional/kl.py": Formulas(_POLICY),
    "rlloss/functional/opd.py": Formulas(_POLICY),
    "rlloss/functional/policy.py": Formulas(_POLICY),
    "rlloss/functional/policy_quadratic.py": Formulas(_POLICY),
    "rlloss/functional/policy_score.py": Formulas(_POLICY),
    "rlloss/functional/distill.py": Formulas(("test_distill.py", "test_golden.py::distill")),
    "rlloss/functional/masked.py": Formulas((*_PPO, "test_advantages.py")),
    "rlloss/functional/moments.py": Formulas(_PPO),
    "rlloss/functional/controllers.py": Formulas((*_PPO, "test_golden.py::kl_controller")),
    "rlloss/functional/value.py": Formulas((*_PPO, "test_ppo_losses.py")),
    "rlloss/functional/gae.py": Formulas((*_PPO, *_ADVANTAGES)),
    "rlloss/functional/ppo_rewards.py": Formulas(_PPO),
    "rlloss/functional/rewards.py": Formulas(
        (*_ADVANTAGES, "test_reported_4.py::repetition", "test_reported_4.py::integers", "test_golden.py::reward")
    ),
    "rlloss/functional/advantages.py": Formulas(_ADVANTAGES),
    "rlloss/functional/groups.py": Formulas(_ADVANTAGES),
    "rlloss/functional/outcome_advantages.py": Formulas(_ADVANTAGES),
    "rlloss/functional/token_advantages.py": Formulas(_ADVANTAGES),
    "rlloss/functional/rollout.py": Formulas(_ROLLOUT),
    "rlloss/losses/rollout_is.py": Formulas(
        _ROLLOUT,
        ("RolloutImportanceSampling._sort", "RolloutImportanceSampling._check", "RolloutImportanceSampling.compiled"),
    ),
    "rlloss/losses/rollout_step.py": Formulas(_ROLLOUT, ("rollout_outcome", "normalize_step")),
    "rlloss/losses/verl_rollout.py": Formulas(_ROLLOUT),
    "rlloss/losses/calibration.py": Formulas(
        _POLICY, ("_counts_of", "_prompt_tokens", "_with_totals", "_inverse_denominator", "_inverse")
    ),
    "rlloss/losses/policy_covariance.py": Formulas(_POLICY),
    "rlloss/losses/agreement.py": Formulas(("test_agreement.py",), ("facts_of", "check_facts", "_mark")),
    "rlloss/heads/softmax.py": Formulas(
        (
            "test_row_gradients.py",
            "test_extra_words.py",
            "test_head_tiles.py",
            "test_head_limits.py",
            "test_losses_against_oracles.py",
        ),
    ),
    "rlloss/heads/words.py": Formulas(("test_extra_words.py", "test_head_tiles.py")),
}
