"""Counts of an optimiser step that the caller knows already."""

from dataclasses import dataclass

from rlloss.errors import ConfigError
from rlloss.losses.terms import Reduction


@dataclass(frozen=True)
class Totals:
    """Counts of the whole step that are known; a given one is not counted.

    Attributes:
        tokens: Tokens that count (verl's batch_num_tokens, TRL's num_items_in_batch).
        sequences: Sequences (verl's global_batch_size: a constant, which fully masked rows do not shrink).
        prompts: Prompts.
        world: Ranks whose gradients are combined (verl's dp_size).
    """

    tokens: float | None = None
    sequences: float | None = None
    prompts: float | None = None
    world: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "prompts", "world"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Totals({name}={value}): expected a number above 0, or None to count.")

    def counts(self, reduction: Reduction) -> bool:
        """Tells whether a reduction has to be counted over ranks because its total is not given."""
        given: dict[Reduction, float | None] = {"token": self.tokens, "sum": 1.0}
        given |= dict.fromkeys(("sample", "sequence_sum", "constant"), self.sequences)
        return given.get(reduction) is None
