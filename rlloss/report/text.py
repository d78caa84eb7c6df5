"""Texts and numbers that are safe and readable in a page, whatever a model wrote."""

import html
import json
import unicodedata
from typing import Any

MINUS = "−"
NOTHING = "–"


def escaped(text: str) -> str:
    """Returns a text for the inside of an element or of an attribute; what has no shape of its own becomes visible.

    Control characters, unpaired surrogates and the marks that turn the direction of writing around are shown by their
    code, so that they cannot reorder the page around them.
    """
    return html.escape("".join(_visible(character) for character in text), quote=True)


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and code != 0x200D:
        return f"⟨{code:04X}⟩"
    return character


def as_json(value: Any) -> str:
    """Returns JSON for the inside of a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def number(value: float | None, digits: int = 3) -> str:
    """Writes a number with some significant digits, thousands set apart; None is a dash."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
        trimmed = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{trimmed}e{int(exponent)}"
    elif size >= 10 ** (digits - 1):
        text = f"{size:,.0f}"
    else:
        text = f"{size:.{digits}g}"
        text = f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text
    return (MINUS if value < 0 else "") + text.replace("e-", f"e{MINUS}")


def percent(value: float | None, digits: int = 1) -> str:
    """Writes a fraction as percent."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float) -> str:
    """Writes seconds as a person says them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
