"""Outputs: whole or absent, refused before the work where they cannot be, and JSON that any reader takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from errors import refuses
from stratarec.config.validate import check_directory
from stratarec.errors import ConfigError, StorageError
from stratarec.io.atomic import check_output, write_json, write_text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1.0, float("-inf")]}])
def test_json_without_a_number_is_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with refuses(ValueError, "JSON"):
        write_json(tmp_path / "a.json", value)
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "a.json", {"a": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None}


@pytest.mark.parametrize("name", ["", ".", "..", "folder", "folder/.."])
def test_a_directory_is_refused_as_a_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for check in (check_output, lambda path: write_text(path, "x")):
        with refuses(StorageError, "directory"):
            check(Path(name))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/below/a", "directory"),
        ("a" * 300, "name"),
        ("a\0b", "null"),
    ],
)
def test_an_impossible_path_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    with refuses(StorageError, message):
        check_output(tmp_path / name)


@pytest.mark.parametrize("path", [".", "./", "..", "a/..", "/", "//", "a\0b"])
def test_a_directory_that_is_not_our_own_is_refused(path: str) -> None:
    with refuses(ConfigError, "data.path directory"):
        check_directory(path, "data.path")
