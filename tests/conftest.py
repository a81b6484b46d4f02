"""Fixtures for the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

SHARED_DATA = Path(os.environ.get("STRATAREC_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of real logs; tests that need it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real logs at {SHARED_DATA} (set STRATAREC_TEST_DATA)")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """`torch.empty` gives NaN (and the largest integers), so that output left unwritten shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
