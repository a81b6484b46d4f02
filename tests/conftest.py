"""Fixtures for the whole suite."""

from __future__ import annotations

import os

# Set before torch loads its threads: with two test processes on two cores, threads that spin steal each other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
