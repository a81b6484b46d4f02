"""Fixtures that tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import prepared, tiny
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which silent progress appends its messages."""
    messages: list[str] = []
    monkeypatch.setattr(SilentProgress, "say", lambda self, message: messages.append(message))
    return messages


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set, which tests must not change."""
    root = tmp_path_factory.mktemp("tiny")
    prepared(Recipe.from_dict(tiny(root)).data)
    return root
