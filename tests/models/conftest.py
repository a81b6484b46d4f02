"""Batches of tests are small: groups are pooled once for each distinct value all the same."""

from __future__ import annotations

import pytest

from stratarec.models import request


@pytest.fixture(autouse=True)
def few_ids_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_LEAST_SAVED", float("-inf"))
