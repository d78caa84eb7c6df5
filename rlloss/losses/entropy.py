"""An entropy coefficient that keeps the entropy of the policy near a target."""

from typing import Any

from rlloss.errors import ConfigError


class AdaptiveEntropyCoef:
    """Raises the entropy coefficient while the entropy is at or below its target, lowers it while it is above.

    After each optimiser step with entropy H: `c <- min(c + delta, maximum)` if `H <= target`, else
    `c <- max(c - delta, minimum)`. The coefficient that applies to the next step is c if `H <= target`, else 0; before
    the first update it is 0.

    Example:
        >>> from rlloss import AdaptiveEntropyCoef
        >>> control = AdaptiveEntropyCoef(coef=0.0, target=0.2)
        >>> control.update(0.1)
        >>> control.value
        0.005

    Args:
        coef: Coefficient c at the start.
        target: Entropy, nats for each token.
        delta: Step of c, above 0.
        minimum: Smallest c.
        maximum: Largest c.

    Raises:
        ConfigError: A number is out of range.

    Source:
        Skywork-OR1, arXiv:2505.22312, section 4; the same updates as TRL 1.16.
    """

    def __init__(
        self, coef: float, target: float, delta: float = 0.005, minimum: float = 0.0, maximum: float = 1.0
    ) -> None:
        if not (0.0 <= minimum <= coef <= maximum and delta > 0.0):
            raise ConfigError(
                f"AdaptiveEntropyCoef: coef={coef}, delta={delta}, minimum={minimum}, maximum={maximum}; expected "
                f"0 <= minimum <= coef <= maximum and delta > 0."
            )
        self.coef, self.target, self.delta, self.minimum, self.maximum = coef, target, delta, minimum, maximum
        self.entropy = float("inf")

    @property
    def value(self) -> float:
        """The coefficient for the next step: assign it to `loss_cfg.entropy_coef` before the contexts are built."""
        return self.coef if self.entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Takes the mean entropy of a finished step (`extra["entropy"]` merged over micro-batches and ranks)."""
        self.entropy = float(entropy)
        if self.entropy <= self.target:
            self.coef = min(self.coef + self.delta, self.maximum)
        else:
            self.coef = max(self.coef - self.delta, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""
        return {"coef": self.coef, "entropy": self.entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self.coef, self.entropy = float(state["coef"]), float(state["entropy"])
