"""Recognize the format and the compression of a file by its first bytes, whatever its name is."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from typing import IO, Any

import pyarrow as pa

from stratarec.errors import DataError
from stratarec.io.names import shell_word

CODECS = {
    ".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4",
    ".zip": "zip",
}  # fmt: skip
"""Suffix of a compressed file -> its compression."""
TSV_SUFFIXES, JSON_SUFFIXES = (".tsv", ".tab"), (".jsonl", ".ndjson", ".json")
"""Suffixes of text files whose format is not CSV. The suffix of a compression may follow."""
FRONT_BYTES = 512
"""Number of bytes from which a format is recognized."""
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *(
        (b"BZh%d%s" % (level, mark), "bz2")
        for level in range(1, 10)
        for mark in (b"1AY&SY", b"\x17rE8P\x90")
    ),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
)
_TABLES = ((b"PAR1", "Parquet"), (b"ARROW1\0\0", "Arrow"))
_EXTRACT, _SAVE = "extract the log from it", "write the log as CSV or Parquet"
# Offset and first bytes of formats that are not read, their names, and what to do.
_FOREIGN = (
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _EXTRACT),
    (0, b"Rar!\x1a\x07", "a RAR archive", _EXTRACT),
    (257, b"ustar", "a tar archive", _EXTRACT),
    (
        0,
        b"\xff\xff\xff\xff",
        "an Arrow stream",
        "write it as an Arrow file (pyarrow.ipc.new_file) or as Parquet",
    ),
    (0, b"FEA1", "a Feather file of version 1", "write it as Feather of version 2 or as Parquet"),
    (0, b"ORC", "an ORC file", _SAVE),
    (0, b"Obj\x01", "an Avro file", _SAVE),
    (0, b"SQLite format 3\0", "an SQLite database", _SAVE),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _SAVE),
    (0, b"\x93NUMPY", "a NumPy array", _SAVE),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel workbook", "save the sheet as CSV in UTF-8"),
    *((0, bytes([0x80, version]), "a Python pickle", _SAVE) for version in (2, 3, 4, 5)),
    *(
        (0, mark, "an HTML page", "download the log itself")
        for mark in (b"<!DOCTYPE html", b"<!doctype html", b"<html")
    ),
)
_SUPPORTED = "expected CSV, TSV, JSON lines, Parquet or Arrow"
DAMAGE = (
    OSError,
    EOFError,
    RuntimeError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    pa.ArrowException,
    zlib.error,
    # From Python 3.14 on, an archive may be compressed by zstd.
    *([zipfile.zstd.ZstdError] if getattr(zipfile, "zstd", None) else []),  # type: ignore[attr-defined]
)
"""Exceptions of `decompressed_stream` and of its stream for damaged or truncated content."""
# Maximum number of files of an archive that a message names.
_NAMED = 3


def compression_of(front: bytes, path: str) -> str:
    """Return the compression of a file that begins with `front`; empty if it is not compressed.

    A file whose name has the suffix of a compression is compressed, unless it begins as text.
    """
    compression = next((name for mark, name in _COMPRESSED if front.startswith(mark)), "")
    named = next((name for ending, name in CODECS.items() if path.lower().endswith(ending)), "")
    return compression or ("" if is_text(front) else named)


def table_format(front: bytes) -> str:
    """Return ``Parquet`` or ``Arrow`` if a file that begins with `front` is such a file, else an
    empty string.
    """
    return next((name for mark, name in _TABLES if front.startswith(mark)), "")


def is_text(front: bytes) -> bool:
    """Whether a file that begins with `front` is printable text."""
    words = front[:FRONT_BYTES].decode("utf-8-sig", errors="ignore").split()
    return bool(words) and "".join(words).isprintable()


def bare_name(path: str) -> str:
    """Return a path in lower case, without the suffix of a compression."""
    name = path.lower()
    return next((name.removesuffix(ending) for ending in CODECS if name.endswith(ending)), name)


def refuse_foreign(front: bytes, path: str) -> None:
    """Raise `DataError` if the first bytes belong to a format that is not read as a log."""
    for offset, mark, name, advice in _FOREIGN:
        if front.startswith(mark, offset) and (mark.startswith(b"<") or not is_text(front)):
            raise DataError(f"{path}: {name}, {_SUPPORTED}; {advice}")


def refuse_packed(front: bytes, path: str, codec: str) -> None:
    """Raise `DataError` if content that was decompressed by `codec`, and begins with `front`, is
    not text.
    """
    if inner := table_format(front) or compression_of(front, ""):
        packed = f" in {_article(codec)} file" if codec else ""
        advice = (
            f"; {'extract' if codec == 'zip' else 'decompress'} it" if codec else ", as the first file is"
        )
        raise DataError(f"{path}: {_article(inner)} file{packed}, expected text{advice}")
    refuse_foreign(front, path)


def _article(name: str) -> str:
    return f"{'an' if name in ('Arrow', 'xz') else 'a'} {name}"


def decompressed_stream(raw: IO[bytes], path: str, codec: str) -> Any:
    """Return a stream of the decompressed content of `raw`, an open file; an archive must have one
    file.
    """
    if codec == "zip":
        return _only_member(zipfile.ZipFile(raw), path)
    if codec == "xz":
        return lzma.LZMAFile(raw)
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec) if codec else raw


def _only_member(archive: zipfile.ZipFile, path: str) -> IO[bytes]:
    members = [
        member
        for member in archive.infolist()
        if not (member.is_dir() or member.filename.startswith("__MACOSX/") or "/." in f"/{member.filename}")
    ]
    names = [member.filename for member in members]
    if "[Content_Types].xml" in names:
        raise DataError(f"{path}: an Excel workbook, {_SUPPORTED}; save the sheet as CSV in UTF-8")
    if len(members) != 1:
        shown = f" ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})" if names else ""
        raise DataError(
            f"{path}: a zip archive of {len(names)} files{shown}, expected one file; "
            f"extract it and name the files of the log: unzip {shell_word(path)}"
        )
    if members[0].flag_bits & 1:
        raise DataError(f"{path}: a zip archive with a password; extract it: unzip {shell_word(path)}")
    return archive.open(members[0])
