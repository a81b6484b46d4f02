"""Input paths: every file once, whatever names it is reached by, and one line for what cannot be read."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from stratarec.data.sources.files import expand
from stratarec.errors import DataError


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, another name of the first, and the working directory beside them."""
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "a.tsv")
    os.link(tmp_path / "a.tsv", tmp_path / "hard")
    (tmp_path / "folder").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_globs_and_names_come_in_the_order_they_are_given(logs: Path) -> None:
    found = expand((str(logs / "b.tsv"), "file://" + str(logs / "[a].tsv")))
    assert [file.path for file in found] == [str(logs / "b.tsv"), str(logs / "a.tsv")]


@pytest.mark.parametrize("first", ["a.tsv", "*.tsv"])
@pytest.mark.parametrize("again", ["a.tsv", "./a.tsv", "folder/a.tsv", "link", "hard", "[a].tsv", "?.tsv", "file://{}"])
def test_a_file_that_is_named_twice_is_refused(logs: Path, first: str, again: str) -> None:
    with pytest.raises(DataError, match=r"named twice; let data\.source\.paths name each file once") as caught:
        expand((first, again.format(logs / "a.tsv")))
    assert str(logs / "a.tsv") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_brackets_in_its_name_is_that_file(logs: Path) -> None:
    (logs / "[ab].tsv").write_text("c")
    assert [file.path for file in expand((str(logs / "[ab].tsv"),))] == [str(logs / "[ab].tsv")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nope://x/y", "nope"),
        ("zip://a.tsv::none.zip", "No such file"),
        ("s3://bucket/x", "s3"),
        ("", "an empty name"),
        ("a\0b", "null byte"),
    ],
)
def test_places_that_cannot_be_reached_are_one_line(path: str, message: str) -> None:
    if path.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("the library for s3 is installed here")
    with pytest.raises(DataError, match=message) as caught:
        expand((path,))
    assert "check data.source.paths" in str(caught.value)
    assert "\n" not in str(caught.value)
