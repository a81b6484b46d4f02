"""Pool groups by distinct value even though the batches of tests are small."""

from __future__ import annotations

import pytest

from stratarec.models import request


@pytest.fixture(autouse=True)
def few_ids_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_LEAST_SAVED", float("-inf"))
