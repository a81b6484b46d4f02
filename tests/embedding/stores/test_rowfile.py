"""Files of checkpoints are kept by links or copies, and neither goes over what is there or through what was planted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from errors import refuses
from stratarec.embedding.stores.row_files import link_or_copy
from stratarec.errors import StorageError


def refuse(*_: object, **__: object) -> NoReturn:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_nothing_that_is_there_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"rows")
    target.write_bytes(b"mine")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with refuses(StorageError, f"{target}"):
        link_or_copy(source, target)
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("links", [True, False])
def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    source.write_bytes(b"rows")
    target.symlink_to(elsewhere)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with refuses(StorageError, f"{target}"):
        link_or_copy(source, target)
    assert not elsewhere.exists()


def test_a_source_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "source").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="cannot keep"):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_copy_is_whole_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"rows" * 1000)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(RuntimeWarning, match="hard links"):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"rows" * 1000
