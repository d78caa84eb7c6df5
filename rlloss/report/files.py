"""The files of a run, read with care: what a kill leaves at an end is passed over, what a hand changed is named."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rlloss.errors import ConfigError

LARGEST = 1e300
"""Beyond it a number is shown as not finite, and as 0 below its inverse: an axis needs room on both sides."""
LARGEST_COUNT = 2**63
"""Beyond it a step or a count cannot be meant."""

Found = Mapping[str, Any]
Test = Callable[[Any], bool]


@dataclass(frozen=True)
class Place:
    """A JSON object and where it stands, so that a mistake in it can be named.

    Attributes:
        where: File, and line where the file has one object a line.
        found: The object.
        inside: Names of the fields that it lies in, each with a dot.
    """

    where: str
    found: Found
    inside: str = ""

    def need(self, field: str, test: Test, expected: str) -> Any:
        """Returns a field that has to be there, and right."""
        if field not in self.found or not test(self.found[field]):
            raise self.wrong(field, expected)
        return self.found[field]

    def wrong(self, field: str, expected: str) -> ConfigError:
        """Returns the error of a field."""
        given = f"is {_short(self.found[field])}" if field in self.found else "is missing"
        return ConfigError(
            f'{self.where}: "{self.inside}{field}" {given}, expected {expected}. '
            f"Put back what the run wrote, or remove it."
        )

    def allow(self, field: str, test: Test, expected: str) -> Any:
        """Returns a field that may be missing, or null; None then."""
        return None if self.found.get(field) is None else self.need(field, test, expected)

    def part(self, field: str) -> "Place":
        """Returns the object in a field, an empty one where there is none."""
        found = self.allow(field, lambda value: isinstance(value, dict), "an object")
        return Place(self.where, found or {}, f"{self.inside}{field}.")


def read_objects(path: Path) -> list[Place]:
    """Reads a file of one JSON object a line; one that is missing is empty.

    A run that was killed, or that is writing now, leaves an end that cannot be read; it is passed over. A line that
    cannot be read with others behind it was changed afterwards, since a resumed run cuts the end off first.

    Raises:
        ConfigError: Such a line, by its number.
    """
    whole = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    read = [(number, _object(text)) for number, text in enumerate(whole.split("\n"), 1) if text.strip()]
    while read and read[-1][1] is None:
        read.pop()
    places = []
    for number, found in read:
        if found is None:
            raise _unreadable(f"{path}, line {number}", "lines that are follow")
        places.append(Place(f"{path}, line {number}", found))
    return places


def read_object(path: Path) -> Place:
    """Reads a file of one JSON object; one that is missing, or still empty, is `{}`.

    Raises:
        ConfigError: It is no JSON object; the line is named.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    try:
        found = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise _unreadable(f"{path}, line {error.lineno}", error.msg) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(path), str(error)) from None
    if not isinstance(found, dict):
        raise _unreadable(f"{path}, line 1", f"it is {_short(found)}")
    return Place(str(path), found)


def is_text(value: Any) -> bool:
    """Whether JSON has a text here."""
    return isinstance(value, str)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether JSON has a number here, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_number_or_null(value: Any) -> bool:
    """Whether JSON has a number here, or null, which stands for one that was not finite."""
    return value is None or is_number(value)


def is_count(value: Any) -> bool:
    """Whether JSON has a number of something here."""
    return is_number(value) and isinstance(value, int) and 0 <= value <= LARGEST_COUNT


def each(test: Test) -> Test:
    """Returns the test of a list whose entries all pass one."""
    return lambda value: isinstance(value, list) and all(map(test, value))


def finite(value: Any) -> float | None:
    """Returns a number as a picture can hold it; None where it is not finite, or none."""
    if not is_number(value) or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= 1 / LARGEST else 0.0


def _object(text: str) -> Found | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _unreadable(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: this is no JSON object: {why}. Put back what the run wrote, or remove it.")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 40 else f"{text[:37]}..."
