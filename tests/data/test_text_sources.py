"""Test delimited logs: exact lines in errors, exact rows when skipping, and only `DataError` for
any bytes.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import stratarec
from errors import missing, refuses
from stratarec.data.columns.converter import OnBadRow
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources import text
from stratarec.data.sources.base import ChunkShare, View
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.files import expand
from stratarec.errors import DataError
from stratarec.recipe import Recipe

# Public logs: the first is tab-separated without a header, the second has a header and a column of
# hours.
RECIPES = Path(stratarec.__file__).parent / "recipes"
CRITEO, AVAZU = (
    Recipe.load(RECIPES / f"{name}.yaml", ["data.source.max_line_bytes=1048576"]).data.source
    for name in ("criteo", "avazu")
)
assert isinstance(CRITEO, CsvConfig)
assert isinstance(AVAZU, CsvConfig)
AVAZU_CATEGORIES = [name for name in AVAZU.schema.names if not name.startswith("hour.")]


def line(label: str = "1", dense: str = "5", sparse: str = "a9", fields: int = 40) -> bytes:
    return "\t".join([label, *[dense] * 13, *[sparse] * 26][:fields]).encode()


def source(path: Path, on_bad_row: OnBadRow = "error", chunk_bytes: int = 1 << 20) -> CsvSource:
    return CsvSource(CRITEO.of_file(str(path)), on_bad_row, chunk_bytes)


def read(source: CsvSource) -> pl.DataFrame:
    return pl.concat([chunk.frame for chunk in source.chunks(Path())])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(fields=12), "line 3 12 fields 40"),
        (line() + b"\tmore", "line 3 41 fields 40"),
        (line(label="2"), "line 3 label 2 0 1"),
        (line(label=""), "line 3 label 0 1"),
        (line(dense="x7"), "line 3 'I1' 'x7'"),
        (line(dense="inf"), "line 3 'I1' inf"),
        (line().replace(b"a9", b"\xff", 1), "line 3 byte 29 0xff UTF-8"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "log.tsv"
    path.write_bytes(b"\n".join([line(), line("0"), bad, line()]) + b"\n")
    with refuses(DataError, message):
        read(source(path))
    (chunk,) = source(path, "skip").chunks(Path())
    assert chunk.frame["label"].to_list() == [1, 0, 1]
    assert chunk.bad_rows == 1
    assert not missing(message, chunk.bad_examples[0])


def test_a_log_to_score_without_a_header_may_lack_the_label(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_bytes(line() + b"\n" + line("0") + b"\n")
    (tmp_path / "bare.tsv").write_bytes(line().partition(b"\t")[2] + b"\n")
    for name, labelled in ((path.name, True), ("bare.tsv", False)):
        scored = CsvSource(
            CRITEO.of_file(str(tmp_path / name)), "error", view=View(schema=CRITEO.schema, label=labelled)
        )
        assert ("label" in scored.column_names()) == labelled
        assert read(scored)["C26"].unique().to_list() == ["a9"]
    with refuses(DataError, "39 fields 40"):
        read(source(tmp_path / "bare.tsv"))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("has_header", [True, False])
def test_a_short_line_of_a_log_to_score_is_a_bad_row(tmp_path: Path, place: int, has_header: bool) -> None:
    """In a log without a header, too, also if it is the first line."""
    config = CsvConfig(
        columns=() if has_header else ("label", "user", "city"),
        schema=Schema(label="label", sparse=(SparseFeature(name="user"), SparseFeature(name="city"))),
    )
    lines = ["1,u1,Oslo", "0,u2,Rome"]
    lines.insert(place, "1,u3")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,user,city"] * has_header + lines) + "\n")
    for on_bad_row in ("error", "skip"):
        scored = CsvSource(
            config.of_file(str(path)), on_bad_row, view=View(schema=config.schema, label=True)
        )
        if on_bad_row == "error":
            with refuses(DataError, f"line {place + 1 + has_header} 2 fields 3"):
                read(scored)
        else:
            assert read(scored)["user"].to_list() == ["u1", "u2"]


def test_hours_are_two_features_and_the_time(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(LONG)
    frame = read(avazu(tmp_path / "log.csv"))
    hours = [number % 24 for number in range(400)]
    assert frame["hour.hour"].to_list() == hours
    assert set(frame["hour.weekday"]) == {2}  # 2014-10-21 is a Tuesday
    assert frame["hour"].to_list() == [1413849600 + 3600 * hour for hour in hours]


@settings(deadline=None, max_examples=75)
@given(
    st.lists(
        st.one_of(st.just(line()), st.just(line("0", "")), st.binary(max_size=60)), min_size=1, max_size=12
    )
)
def test_any_bytes_give_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    content = b"\n".join([line(), *lines]) + b"\n"
    path = tmp_path_factory.mktemp("fuzz") / "log.tsv"
    path.write_bytes(content)
    good = bad = 0
    for chunk in source(path, "skip", chunk_bytes=100).chunks(Path()):
        good, bad = good + chunk.frame.height, bad + chunk.bad_rows
    assert good + bad == sum(text not in (b"", b"\r") for text in content.split(b"\n"))
    assert good >= sum(text in (line(), line("0", "")) for text in content.split(b"\n"))


def avazu(path: Path, on_bad_row: OnBadRow = "error", chunk_bytes: int = 1 << 20) -> CsvSource:
    return CsvSource(AVAZU.of_file(str(path)), on_bad_row, chunk_bytes)


AVAZU_HEADER = ",".join(["id", "click", "hour", *AVAZU_CATEGORIES]).encode()


def avazu_line(number: int = 0) -> bytes:
    return ",".join(
        [str(number), str(number % 2), f"141021{number % 24:02}", *["x"] * len(AVAZU_CATEGORIES)]
    ).encode()


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=1, max_size=300), st.sampled_from(["csv", "csv.gz", "csv.zst", "csv.bz2"]))
def test_any_bytes_as_a_file_are_a_data_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, ending: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"log.{ending}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=path.name):
        read(avazu(path, "skip"))


PACKED = {
    "gz": gzip.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    "bz2": bz2.compress,
}
LONG = b"\n".join([AVAZU_HEADER, *(avazu_line(i) for i in range(400))]) + b"\n"


@pytest.mark.parametrize("ending", ["", *PACKED])
def test_logs_resume_at_any_chunk(tmp_path: Path, ending: str) -> None:
    (tmp_path / "whole.csv").write_bytes(LONG)
    path = tmp_path / f"log.csv.{ending}".rstrip(".")
    path.write_bytes(PACKED[ending](LONG) if ending else LONG)
    frame = read(avazu(tmp_path / "whole.csv"))
    chunks = list(avazu(path, chunk_bytes=3000).chunks(Path()))
    assert len(chunks) > 6
    assert_frame_equal(pl.concat([chunk.frame for chunk in chunks]), frame)
    assert chunks[-1].bytes_done == path.stat().st_size
    for start in range(1, len(chunks)):
        later = list(avazu(path, chunk_bytes=3000).chunks(Path(), ChunkShare(done=frozenset(range(start)))))
        assert [chunk.index for chunk in later] == list(range(start, len(chunks)))
        assert [chunk.rows.tolist() for chunk in later] == [chunk.rows.tolist() for chunk in chunks[start:]]
        assert_frame_equal(later[0].frame, chunks[start].frame)
    assert not list(
        avazu(path, chunk_bytes=3000).chunks(Path(), ChunkShare(done=frozenset(range(len(chunks)))))
    )


@pytest.mark.parametrize("ending", PACKED)
def test_a_stream_cut_anywhere_is_refused(tmp_path: Path, ending: str) -> None:
    compressed = PACKED[ending](LONG)
    path = tmp_path / f"log.csv.{ending}"
    for cut in [*range(1, 40), *range(40, len(compressed), 97), len(compressed) - 1]:
        path.write_bytes(compressed[:cut])
        with refuses(DataError, f"{path.name}"):
            read(avazu(path, "skip", chunk_bytes=3000))


def compress(content: bytes, codec: str, repeats: int = 1) -> bytes:
    """Return the content repeated `repeats` times and compressed in pieces.

    Pieces of these formats may be concatenated.
    """
    return pa.compress(content, codec=codec, asbytes=True) * repeats if codec else content * repeats


@pytest.mark.parametrize(("ending", "codec"), [(".gz", "gzip"), (".zst", "zstd"), ("", "")])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_an_end_is_refused_before_it_is_read(
    tmp_path: Path, ending: str, codec: str, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"log.tsv{ending}"
    size = 64 << 20
    path.write_bytes(
        compress(b"0" * size, codec, 64 if codec == "zstd" else 1) + (compress(end, codec) if end else b"")
    )
    decompressed_bytes = 0

    def count(*arguments: Any) -> Iterator[bytes]:
        nonlocal decompressed_bytes
        for piece in decompressed(*arguments):
            decompressed_bytes += len(piece)
            yield piece

    decompressed = text._decompressed
    monkeypatch.setattr(text, "_decompressed", count)
    began = time.monotonic()
    for use in (lambda source: source.estimate_rows(), lambda source: list(source.chunks(tmp_path))):
        with refuses(DataError, "line 1 1,048,576 data.source.max_line_bytes"):
            use(CsvSource(CRITEO.of_file(str(path)), "error"))
    assert time.monotonic() - began < 10
    assert decompressed_bytes <= 2 * text.CHUNK_BYTES + (4 << 20)


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("1" + "\t" * 39)
    source = CsvSource(CRITEO.of_file(str(tmp_path / "log.tsv")), "error")
    (tmp_path / "log.tsv").unlink()
    os.mkfifo(tmp_path / "log.tsv")
    for use in (lambda: list(source.chunks(tmp_path)), source.fingerprint):
        with refuses(DataError, "pipe"):
            use()


@settings(deadline=None, max_examples=50)
@given(
    lines=st.lists(
        st.sampled_from([b"", b"a", b'"b\n"', b"cc" * 9, b'"d"', b'e"\n\nf"']), min_size=1, max_size=12
    ),
    size=st.integers(1, 40),
    ended=st.booleans(),
)
def test_blocks_of_a_file_match_those_of_its_compressed_copy(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, ended: bool
) -> None:
    content = b"\n".join(lines) + (b"\n" if ended else b"x")
    folder = tmp_path_factory.mktemp("chunks")
    (folder / "log").write_bytes(content)
    (folder / "log.gz").write_bytes(gzip.compress(content))
    chunks = []
    for name in ("log", "log.gz"):
        (file,) = expand((str(folder / name),))
        with contextlib.suppress(DataError):  # a quote that is not closed
            chunks.append(
                [(b.content, b.first_line, b.lines) for b in text.read_chunks(file, size, 1000, b'"')]
            )
    assert len(chunks) != 1
    for one, other in zip(*[iter(chunks)] * 2, strict=False):
        assert one == other
        assert b"".join(chunk for chunk, _, _ in one) == content + (b"" if ended else b"\n")
