"""Input paths: every file once, whatever names it is reached by, and one line for what cannot be read."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("path", "message"), [("nope://x/y", "nope"), ("zip://a.tsv::none.zip", "No such file"), ("s3://bucket/x", "s3")]
)
def test_places_that_cannot_be_reached_are_one_line(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        expand((path,))
    assert "check data.source.paths" in str(caught.value)
    assert "\n" not in str(caught.value)
