"""Files are recognized by their first bytes: compressions, zip archives, Arrow files, and formats
that are not read.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pytest
from polars.testing import assert_frame_equal

from errors import refuses
from stratarec.cli.init.sample import read_sample
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources import open_rows, parquet
from stratarec.data.sources.base import ChunkShare
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.errors import DataError

SCHEMA = Schema(
    label="label",
    dense=(DenseFeature(name="price"),),
    sparse=(SparseFeature(name="item"), SparseFeature(name="words", kind="multi", separator="|")),
)
LOG = pl.DataFrame(
    {
        "item": [f"i{row % 7}" for row in range(3000)],
        "words": [None if row % 11 == 0 else f"a|b{row % 5}" for row in range(3000)],
        "price": [None if row % 13 == 0 else row / 8 for row in range(3000)],
        "label": [row % 2 for row in range(3000)],
    }
)
TEXT = LOG.write_csv().encode()


def pack(*members: tuple[str, bytes]) -> bytes:
    """Return a zip archive of `members`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda content: pa.compress(content, "zstd", asbytes=True),
    "lz4": lambda content: pa.compress(content, "lz4", asbytes=True),
    "zip": lambda content: pack(
        ("__MACOSX/._log.csv", b"x"), ("data/log.csv", content), ("data/.DS_Store", b"y")
    ),
}


def read(path: Path, schema: Schema = SCHEMA) -> pl.DataFrame:
    chunks = open_rows(CsvConfig(paths=(str(path),), schema=schema), "error").chunks(path.parent)
    return pl.concat([chunk.frame for chunk in chunks])


@pytest.mark.parametrize("name", ["log", "log.csv", "log.csv.gz", "log.zip"])
@pytest.mark.parametrize("codec", PACKED)
def test_compressed_text_is_read_whatever_its_name(tmp_path: Path, codec: str, name: str) -> None:
    (tmp_path / "plain.csv").write_bytes(TEXT)
    (tmp_path / name).write_bytes(PACKED[codec](TEXT))
    assert_frame_equal(read(tmp_path / name), read(tmp_path / "plain.csv"))
    sample = read_sample((str(tmp_path / name),))
    assert_frame_equal(sample.frame, LOG)
    assert sample.total == len(LOG)


@pytest.mark.parametrize("suffix", ["gz", "xz", "zip"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_plain_text_with_the_suffix_of_a_compression_is_read(
    tmp_path: Path, suffix: str, mark: bytes
) -> None:
    path = tmp_path / f"log.csv.{suffix}"
    path.write_bytes(mark + TEXT)
    assert read(path).height == len(LOG)


@pytest.mark.parametrize("codec", PACKED)
def test_truncated_content_is_an_error(tmp_path: Path, codec: str) -> None:
    noise = "".join(map(str, np.random.default_rng(0).integers(0, 1 << 60, 5000).tolist())).encode()
    whole = PACKED[codec](TEXT + b"i1,a,1.0," + noise + b"\n")
    for cut in (len(whole) // 2, len(whole) - 3):
        (tmp_path / "log.csv").write_bytes(whole[:cut])
        with refuses(DataError, f"log.csv {codec} damaged"):
            read(tmp_path / "log.csv")


@pytest.mark.parametrize("codec", PACKED)
def test_each_damaged_byte_is_an_error_or_changes_nothing(tmp_path: Path, codec: str) -> None:
    whole = bytearray(PACKED[codec](LOG[:20].write_csv().encode()))
    for place in range(0, len(whole), 5):
        damaged = whole.copy()
        damaged[place] ^= 0x55
        (tmp_path / "log.csv").write_bytes(damaged)
        try:
            frame = read(tmp_path / "log.csv")
        except DataError:
            continue
        assert frame.height == 20 or codec in ("zstd", "lz4")  # which are written without a checksum


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("log.csv")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT))
    return buffer.getvalue()


def stream() -> bytes:
    buffer = io.BytesIO()
    LOG.write_ipc_stream(buffer)
    return buffer.getvalue()


def database() -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        with sqlite3.connect(file.name) as connection:
            connection.execute("create table log (item)")
        connection.close()
        return file.read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar, "tar archive extract"),
        (lambda: gzip.compress(tar()), "tar archive extract"),
        (lambda: pack(("a.csv", TEXT), ("b.csv", TEXT)), "zip 2 files a.csv b.csv unzip"),
        (pack, "zip 0 files"),
        (lambda: pack(("[Content_Types].xml", b"<"), ("xl/workbook.xml", b"<")), "Excel CSV"),
        (lambda: pack(("log.csv.gz", gzip.compress(TEXT))), "gzip zip extract"),
        (lambda: pack(("log.parquet", b"PAR1....")), "Parquet zip extract"),
        (lambda: gzip.compress(b"ARROW1\0\0"), "Arrow gzip decompress"),
        (lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500), "Excel CSV"),
        (lambda: b"7z\xbc\xaf\x27\x1c" + bytes(500), "7-Zip extract"),
        (lambda: b"FEA1" + bytes(500), "Feather version 2"),
        (lambda: pickle.dumps({"a": 1}), "pickle Parquet"),
        (stream, "Arrow stream Parquet"),
        (database, "SQLite CSV"),
        (lambda: b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "HTML download"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, content: Callable[[], bytes], message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content())
    for opened in (read, lambda path: read_sample((str(path),))):
        with refuses(DataError, f"log.csv {message}"):
            opened(path)


def test_text_that_begins_like_another_format_is_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    # Only the first bytes must be printable.
    path.write_text("ORC,label\n" + "1,0\n" * 200 + "\x02,1\n")
    log = read(path, Schema(label="label", sparse=(SparseFeature(name="ORC"),)))
    assert log["label"].to_list() == [0] * 200 + [1]


ARROW: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "plain": lambda frame, path: frame.write_ipc(path),
    "lz4": lambda frame, path: frame.write_ipc(path, compression="lz4"),
    "old types": lambda frame, path: frame.write_ipc(path, compat_level=pl.CompatLevel.oldest()),
    "feather": lambda frame, path: pyarrow.feather.write_feather(
        frame.to_arrow(), str(path), "zstd", chunksize=700
    ),
}


@pytest.mark.parametrize("kind", ARROW)
@pytest.mark.parametrize("is_category", [False, True])
def test_arrow_files_are_read_as_parquet_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_category: bool
) -> None:
    monkeypatch.setattr(parquet, "_CHUNK_ROWS", 1000)
    frame = LOG.with_columns(pl.col("item").cast(pl.Categorical)) if is_category else LOG
    ARROW[kind](frame, tmp_path / "log.any")
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=700 if kind == "feather" else len(frame))
    arrow, table = (
        open_rows(ParquetConfig(paths=(str(tmp_path / name),), schema=SCHEMA), "error")
        for name in ("log.any", "log.parquet")
    )
    assert arrow.estimate_rows() == len(LOG)
    pieces = [
        [(chunk.index, chunk.rows.tolist()) for chunk in one.chunks(tmp_path)] for one in (arrow, table)
    ]
    assert pieces[0] == pieces[1]
    whole, other = (pl.concat([chunk.frame for chunk in one.chunks(tmp_path)]) for one in (arrow, table))
    assert_frame_equal(whole, other)
    rest = [chunk.frame for chunk in arrow.chunks(tmp_path, ChunkShare(done=frozenset({0})))]
    assert_frame_equal(pl.concat(rest), pl.concat([chunk.frame for chunk in table.chunks(tmp_path)][1:]))
    assert_frame_equal(read(tmp_path / "log.any"), whole)
    samples = [read_sample((str(tmp_path / name),)) for name in ("log.any", "log.parquet")]
    assert_frame_equal(samples[0].frame, samples[1].frame, categorical_as_str=True)
    assert [sample.total for sample in samples] == [len(LOG)] * 2


def test_damaged_arrow_files_are_errors(tmp_path: Path) -> None:
    """Arrow does not check offsets: unchecked, text would be read from other memory."""
    path = tmp_path / "log.arrow"
    LOG[:50].select("item", "label").write_ipc(path, compat_level=pl.CompatLevel.oldest())
    schema, whole = Schema(label="label", sparse=(SparseFeature(name="item"),)), path.read_bytes()
    expected, refused = read(path, schema), 0
    for place in range(8, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            frame = read(path, schema)
        except DataError:
            refused += 1
            continue
        assert frame.height in range(1, len(expected) + 1)
    assert refused > 50
    path.write_bytes(whole[: len(whole) // 2])
    with refuses(DataError, "log.arrow Arrow damaged"):
        read(path, schema)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_file_of_columns_without_rows_is_named(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"log.{form}"
    getattr(LOG[:0], {"parquet": "write_parquet", "arrow": "write_ipc"}[form])(path)
    for opened in (read, lambda path: read_sample((str(path),))):
        with refuses(DataError, f"log.{form} no rows"):
            opened(path)
