"""Measurements in small: the same engine on fewer and smaller tables, in a tenth of the time."""

from __future__ import annotations

import pytest

from stratarec.planning import machine


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((2, 4, 16, 4), (2, 4, 64, 4), (6, 4, 16, 4), (6, 8, 64, 2), (2, 8, 64, 12))
    monkeypatch.setattr(machine, "SHAPES", shapes)
    monkeypatch.setattr(machine, "_TABLE_BYTES", 1 << 18)
    monkeypatch.setattr(machine, "_WARM_SAMPLES", 256)
