"""Test that files are written completely under safe names, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from errors import refuses
from stratarec.config.validate import check_directory
from stratarec.errors import ConfigError, StorageError
from stratarec.io.atomic import check_output, storage_error, write_json, write_text
from stratarec.io.names import file_name, visible
from stratarec.io.tensors import read_tensors, write_tensors

TENSORS = {
    "z": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.arange(3, dtype=torch.uint8),
    "m": torch.tensor(7, dtype=torch.int64),
    "b": torch.zeros(0, 4),
}


def test_files_match_those_of_the_library(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    tensors = read_tensors(tmp_path / "ours")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1.0, float("-inf")]}])
def test_json_with_nan_is_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with refuses(ValueError, "JSON"):
        write_json(tmp_path / "a.json", value)
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "a.json", {"a": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None}


@pytest.mark.parametrize("name", ["", ".", "..", "folder", "folder/.."])
def test_a_directory_is_refused_as_a_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for check in (check_output, lambda path: write_text(path, "x")):
        with refuses(StorageError, "directory"):
            check(Path(name))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("name", "message"), [("file/below/a", "directory"), ("a" * 300, "name"), ("a\0b", "null")]
)
def test_an_impossible_path_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    with refuses(StorageError, message):
        check_output(tmp_path / name)


@pytest.mark.parametrize("path", [".", "./", "..", "a/..", "/", "//", "a\0b"])
def test_a_directory_of_other_origin_is_refused(path: str) -> None:
    with refuses(ConfigError, "data.path directory"):
        check_directory(path, "data.path")


NAMES = st.text(max_size=300)


@given(st.lists(NAMES, unique=True, max_size=20))
def test_any_names_become_distinct_path_components(names: list[str]) -> None:
    for components in (
        [file_name(name) for name in names],
        [file_name(name, i) for i, name in enumerate(names)],
    ):
        assert len(set(components)) == len(names)
        for part in components:
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,60}", part)
            assert os.path.basename(part) == part


@pytest.mark.parametrize(
    ("name", "alone", "numbered"),
    [
        ("demo", "demo", "0003-demo"),
        ("item_id", "item_id", "0003-item_id"),
        ("item category", r"item-category-[0-9a-f]{8}", "0003-item-category"),
        ("../../../evil", r"evil-[0-9a-f]{8}", "0003-evil"),
        ("café", r"cafe-[0-9a-f]{8}", "0003-cafe"),
        ("C*", r"C-[0-9a-f]{8}", "0003-C"),
        ("[", r"[0-9a-f]{8}", "0003"),
        ("-x", r"x-[0-9a-f]{8}", "0003-x"),
        ("x" * 200, "x{40}-[0-9a-f]{8}", "0003-x{40}"),
        ("", "[0-9a-f]{8}", "0003"),
    ],
)
def test_valid_file_names_stay_the_same(name: str, alone: str, numbered: str) -> None:
    assert re.fullmatch(alone, file_name(name))
    assert re.fullmatch(numbered, file_name(name, 3))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, café 汉 [red]", "plain, café 汉 [red]"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\rb\nc\td\0", r"a\rb\nc\td\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("evil\u202etxt.exe", r"evil\u202etxt.exe"),
        ("\u2066a\u2069 \u2028", r"\u2066a\u2069 \u2028"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_terminal_control_sequences_are_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters()))
def test_shown_text_has_no_control_characters(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", visible(text))
    assert visible(visible(text)) == visible(text)


def test_a_full_directory_of_temporary_files_names_its_variable(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "TMPDIR" in str(storage_error(Path(tempfile.gettempdir()), full))
    assert "TMPDIR" not in str(storage_error(tmp_path, full))
