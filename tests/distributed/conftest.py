"""Fixture for ranks that all tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.ranks import Ranks, running


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with running() as running_ranks:
        yield running_ranks
