"""Which curves a report has: the panels by section, each only where the run has the metric."""

from dataclasses import dataclass

from rlloss.report.data import RL_PHASES


@dataclass(frozen=True)
class Chart:
    """One panel.

    Attributes:
        title: What it shows.
        unit: What is counted.
        series: Name of a metric -> its label; those without a value are left out.
        phases: Phases that it is about; none is all.
        fraction: Whether the values are fractions, written as percent.
        logarithmic: Whether the axis is logarithmic (values of 0 are left out).
        zero: Whether the axis begins at 0.
    """

    title: str
    unit: str
    series: dict[str, str]
    phases: tuple[str, ...] = ()
    fraction: bool = False
    logarithmic: bool = False
    zero: bool = False


@dataclass(frozen=True)
class Section:
    """Panels that share the axis of steps."""

    title: str
    charts: list[Chart]
    note: str = ""
    phases: tuple[str, ...] = ()


RL = RL_PHASES
SECTIONS = [
    Section(
        "Progress",
        [
            Chart("Held-out exact match", "greedy answers", {"heldout_exact": "exact"}, fraction=True, zero=True),
            Chart("Reward", "mean of the responses", {"reward_mean": "reward"}, RL),
            Chart("Supervised loss", "nats per token", {"loss": "loss"}, ("supervised",)),
        ],
        "over all steps; the grey line is where a phase begins",
    ),
    Section(
        "Policy",
        [
            Chart("Loss", "per update", {"loss": "loss", "policy_loss": "policy", "kl_loss": "KL"}, RL),
            Chart("KL from the old policy", "nats per token, k3", {"approx_kl_k3": "k3"}, RL, zero=True),
            Chart(
                "KL from the reference",
                "nats",
                {"kl": "per token", "objective/kl": "per response"},
                RL,
                zero=True,
            ),
            Chart(
                "Clip fractions",
                "tokens where a clip binds",
                {"clip_frac_low": "low", "clip_frac_high": "high", "clip_frac_dual": "dual"},
                RL,
                fraction=True,
                zero=True,
            ),
            Chart("Entropy", "nats per token", {"entropy": "entropy"}, RL),
            Chart("Effective sample size", "of the ratios", {"ess": "ESS"}, RL, fraction=True),
            Chart("Response length", "tokens", {"response_tokens": "tokens"}, RL, zero=True),
            Chart(
                "Groups with mixed rewards", "of all groups", {"groups_mixed": "mixed"}, RL, fraction=True, zero=True
            ),
            Chart("KL coefficient", "of the penalty", {"objective/kl_coef": "coefficient"}, RL),
            Chart("Value loss", "per update", {"value_loss": "value loss"}, RL, zero=True),
            Chart("Explained variance", "of the returns", {"explained_variance": "critic"}, RL),
        ],
        "over the steps of reinforcement learning",
        RL,
    ),
    Section(
        "Optimisation and engine",
        [
            Chart("Gradient norm", "before it is clipped", {"grad_norm": "policy", "critic_grad_norm": "critic"}),
            Chart("Learning rate", "", {"lr": "policy", "critic_lr": "critic"}, zero=True),
            Chart(
                "Train-inference mismatch",
                "|log-prob difference|, nats",
                {"rollout_logprob_gap": "largest", "rollout_logprob_gap_mean": "mean"},
                RL,
                logarithmic=True,
            ),
            Chart(
                "Step time",
                "seconds",
                {
                    "seconds_rollout": "rollout",
                    "seconds_update": "update",
                    "time/ppo/rollout": "rollout",
                    "time/ppo/optimize_step": "update",
                },
                zero=True,
            ),
        ],
        "over all steps",
    ),
]
