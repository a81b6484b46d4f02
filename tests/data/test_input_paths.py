"""Input paths and URLs: whatever is wrong with one is a line that names it and what to do."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from stratarec.data.sources.files import expand
from stratarec.errors import DataError


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
        ("", r"is a directory, expected a file; a glob such as "),
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


def test_files_of_fsspec_are_still_found_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(b"x")
    found = expand((str(tmp_path / "*"), f"file://{tmp_path / 'b'}"))
    assert [file.path for file in found] == [str(tmp_path / name) for name in ("a", "b", "b")]


def test_a_file_that_is_gone_when_it_is_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x")
    (file,) = expand((str(tmp_path / "log"),))
    (tmp_path / "log").unlink()
    with pytest.raises(DataError, match=r"log: no such file"):
        file.open()
