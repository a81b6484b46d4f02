"""Shorten the measurements in all tests of plans."""

from __future__ import annotations

import pytest

from recipes import measure_briefly


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_briefly(monkeypatch)
