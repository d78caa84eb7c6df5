"""Tiles of few words, so that small problems have several."""

from __future__ import annotations

import pytest

from rlloss.heads import passes, tiles


def cut_into_tiles(monkeypatch: pytest.MonkeyPatch, elements: int, strip: int = 4) -> None:
    """Cuts chunks into tiles of about `elements` numbers, whole strips of `strip` words each."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(passes, "STRIP_WORDS", strip)
