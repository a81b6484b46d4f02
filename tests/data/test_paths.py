"""Input paths: every file once, whatever names it is reached by, and one line for what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
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
    ("url", "message"),
    [
        ("foo://bucket/log.gz", r"'foo://bucket/log\.gz': cannot be read: Protocol not known: foo"),
        ("foo://bucket/*.gz", r"Protocol not known: foo"),
        ("none.parquet", r"none\.parquet: no such file; check data\.source\.paths"),
        ("none-*.parquet", r"none-\*\.parquet: no file matches"),
        ("ftp://127.0.0.1:9/log", r"'ftp://127\.0\.0\.1:9/log': cannot be read: Connection refused"),
        ("a\0b", r"'a\\x00b': cannot be read: embedded null byte"),
        ("data:text/plain,hi", r"cannot be read: list index out of range"),
        (".", r"is a directory, expected a file; a glob such as "),
        ("zip://a.tsv::none.zip", r"zip://a\.tsv::none\.zip: no such file"),
        ("", r"'': an empty name; check data\.source\.paths"),
    ],
)
def test_a_path_that_cannot_be_read_is_one_line(url: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        expand((url,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3://bucket/log.gz", "s3fs"),
        ("gs://bucket/log.gz", "gcsfs"),
        ("abfs://bucket/*.gz", "adlfs"),
        ("simplecache::s3://bucket/log.gz", "s3fs"),
        ("https://example.org/log.gz", '"fsspec[http]"'),
        ("sftp://example.org/log.gz", '"fsspec[sftp]"'),
    ],
)
def test_a_url_without_its_library_names_the_package(url: str, package: str) -> None:
    protocol = url.rpartition("::")[2].partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        pass
    else:
        pytest.skip(f"the library for {protocol}:// is installed here")
    with pytest.raises(DataError) as caught:
        expand((url,))
    assert f"{url}: {protocol}:// needs a library that is not installed; pip install {package} (" in str(caught.value)


def test_a_file_that_is_gone_when_it_is_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x")
    (file,) = expand((str(tmp_path / "log"),))
    (tmp_path / "log").unlink()
    with pytest.raises(DataError, match=r"log: no such file"):
        file.open()
