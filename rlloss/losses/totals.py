"""Counts of an optimiser step that the caller knows already."""

import math
from dataclasses import dataclass

from rlloss.errors import BatchError, ConfigError, as_number, named_arguments
from rlloss.losses.terms import Reduction, Term


@named_arguments
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
            if value is not None and not 0 < as_number(value) < math.inf:
                raise ConfigError(f"Totals({name}={value!r}): expected a finite number above 0, or None to count.")
        if self.world is not None and not as_number(self.world).is_integer():
            raise ConfigError(f"Totals(world={self.world!r}): expected a number of ranks, or None to take the group's.")

    @property
    def gives_nothing(self) -> bool:
        """Whether no count is given."""
        return self.tokens is None and self.sequences is None and self.prompts is None

    def counts(self, reduction: Reduction) -> bool:
        """Tells whether a reduction has to be counted over ranks because its total is not given."""
        # The tokens of each prompt are counted in any case.
        field = None if reduction == "prompt" else _DIVIDES_BY[reduction]
        return reduction != "sum" and (field is None or getattr(self, field) is None)

    def check(self, term: Term) -> None:
        """Refuses a total of all tokens for a term that is about some of them.

        Raises:
            BatchError: It would divide by the total.
        """
        field = _DIVIDES_BY[term.reduction]
        if term.mask is not None and field is not None and getattr(self, field) is not None:
            raise BatchError(
                f"Totals({field}={getattr(self, field)}) counts the whole step, but the term {term.name!r} is about "
                f"some of its tokens only and divides by their own number. Leave {field} out, and calibrate all "
                f"micro-batches of the step in one call of build_batches."
            )


_DIVIDES_BY: dict[Reduction, str | None] = {
    "token": "tokens",
    "sample": "sequences",
    "sequence_sum": "sequences",
    "constant": "sequences",
    "prompt": "prompts",
    "square": None,
    "sum": None,
}
