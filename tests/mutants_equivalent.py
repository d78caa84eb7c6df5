"""Mutants that no test can find, because they change no number, each with the reason.

A key is (function, "before -> after") as `tests/mutants.py` writes it.
"""

EQUIVALENT: dict[tuple[str, str], str] = {}
