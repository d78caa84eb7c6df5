"""The statistics of a PPO step under the names of TRL's PPOTrainer."""

from collections.abc import Mapping

from torch import Tensor

from rlloss.functional.masked import masked_mean, masked_sum
from rlloss.functional.ppo_rewards import TokenRewards
from rlloss.metrics import ExplainedVariance, Mean, Metric, Moments


def rollout_statistics(rewards: TokenRewards, old_logprobs: Tensor, mask: Tensor, scores: Tensor) -> dict[str, float]:
    """Describes a rollout before anything is updated.

    Args:
        rewards: Rewards of its tokens.
        old_logprobs: `[B, T]`, policy that sampled, nats.
        mask: `[B, T]`, tokens of the responses.
        scores: `[B]`, as they went into the rewards.

    Returns:
        Mean KL and sampled entropy of a response (nats), mean penalty of a token, mean and deviation of the scores,
        lengths of the responses.
    """
    lengths = mask.sum(1).double()
    return {
        "objective/kl": float(masked_sum(rewards.kl, mask, 1).mean()),
        "objective/entropy": float(masked_sum(-old_logprobs, mask, 1).mean()),
        "ppo/mean_non_score_reward": float(masked_mean(rewards.penalties, mask)),
        "ppo/mean_scores": float(scores.mean()),
        "ppo/std_scores": _std(scores),
        "tokens/responses_len_mean": float(lengths.mean()),
        "tokens/responses_len_std": _std(lengths),
    }


def update_statistics(metrics: Mapping[str, Metric], vf_coef: float = 1.0) -> dict[str, float]:
    """Describes one minibatch, or several merged ones, of actor and critic.

    Args:
        metrics: The metrics of `ActorCriticLossContext`, or of a PPO and a value context together.
        vf_coef: The factor that `value_loss` contains.

    Returns:
        TRL's names. Fractions and means are over tokens; `loss/*` is summed over what was merged.
    """
    policy = float(metrics["policy_loss"])
    value = float(metrics["value_loss"]) / vf_coef if vf_coef else 0.0
    names = {
        "policy/approxkl": "approx_kl_k2",
        "policy/policykl": "approx_kl_k1",
        "policy/ratio_mean": "ratio_mean",
        "policy/entropy": "entropy",
        "returns/mean": "returns_mean",
        "val/vpred": "value_mean",
        "val/error": "value_error",
        "val/clipfrac": "value_clip_frac",
        "val/mean": "old_values_mean",
    }
    found = {name: float(metrics[ours]) for name, ours in names.items() if ours in metrics}
    variances = {"returns/var": "returns_std", "val/var": "old_values_std"}
    for name, ours in variances.items():
        moments = metrics.get(ours)
        if isinstance(moments, Moments):
            found[name] = float(moments.variance())
    clipped = float(metrics["clip_frac_low"]) + float(metrics["clip_frac_high"])
    losses = {"loss/policy": policy, "loss/value": value, "loss/total": policy + vf_coef * value}
    return {**losses, **found, "policy/clipfrac": clipped, "val/var_explained": _explained(metrics)}


def _explained(metrics: Mapping[str, Metric]) -> float:
    """TRL's `1 - mean squared error / variance of the returns`, which a constant offset of the critic lowers."""
    error, whole = metrics.get("value_error"), metrics.get("explained_variance")
    assert isinstance(error, Mean) and isinstance(whole, ExplainedVariance)
    variance = float(Moments(whole.count, whole.target, whole.target_sq).variance())
    return 1.0 - float(error) / variance if variance > 0 else 0.0


def _std(values: Tensor) -> float:
    return float(values.double().std()) if values.numel() > 1 else 0.0
