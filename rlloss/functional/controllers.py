"""Controllers of the KL coefficient. Both answer `value`, `update`, `state_dict` and `load_state_dict`."""

from typing import Protocol

from rlloss.errors import ConfigError


class KLController(Protocol):
    """Anything that holds a KL coefficient and may change it once for each step."""

    value: float

    def update(self, current: float, n_steps: int) -> None:
        """Takes notice of the KL of a step."""

    def state_dict(self) -> dict[str, float]:
        """Returns what a checkpoint must keep."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned."""


class FixedKLController:
    """A constant coefficient.

    Args:
        value: The coefficient.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        """Returns the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the coefficient."""
        self.value = float(state["value"])


class AdaptiveKLController:
    """Drives the KL towards a target by a proportional rule.

    `value <- value (1 + clip(current / target - 1, -0.2, 0.2) n_steps / horizon)`.

    Args:
        value: Coefficient to start with.
        target: KL to aim at, nats, in the unit of `current` (TRL: of a whole response; verl: of a token).
        horizon: Samples over which the coefficient may change by a fifth.
        bound: Largest relative error that counts.

    Raises:
        ConfigError: Target or horizon is not positive.

    Source:
        arXiv:1909.08593, section 2.2.
    """

    def __init__(self, value: float, target: float, horizon: float, bound: float = 0.2) -> None:
        if not (target > 0 and horizon > 0):
            raise ConfigError(
                f"AdaptiveKLController(target={target}, horizon={horizon}): expected two numbers above 0. For a "
                f"constant coefficient use FixedKLController."
            )
        self.value, self.target, self.horizon, self.bound = value, target, horizon, bound

    def update(self, current: float, n_steps: int) -> None:
        """Changes the coefficient.

        Args:
            current: KL of the step, nats; a NaN is left alone, it would stay for ever.
            n_steps: Samples of the step over all ranks.

        Raises:
            ConfigError: The step has so many samples that the coefficient could change its sign.
        """
        if self.bound * n_steps >= self.horizon:
            raise ConfigError(
                f"AdaptiveKLController: a step of n_steps={n_steps} samples with horizon={self.horizon} and "
                f"bound={self.bound} could make the coefficient 0 or negative, a reward for leaving the reference. The "
                f"horizon counts samples, not steps: give one above {self.bound * n_steps:g}, such as {20 * n_steps}."
            )
        if current != current:
            return
        error = min(max(current / self.target - 1.0, -self.bound), self.bound)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Returns the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the coefficient."""
        self.value = float(state["value"])
