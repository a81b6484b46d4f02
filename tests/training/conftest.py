"""What tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import tiny
from stratarec.data.prepare.prepare import prepare
from stratarec.recipe import Recipe


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared data set, which nothing changes."""
    root = tmp_path_factory.mktemp("tiny")
    prepare(Recipe.from_dict(tiny(root)).data)
    return root
