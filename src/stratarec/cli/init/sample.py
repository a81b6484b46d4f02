"""Some rows of a log, and how its files are written: by their beginning, and their end where that is near."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.data.sources.blocks import CODECS, blocks, check_utf8, estimate_rows, is_utf8
from stratarec.data.sources.delimited import read_header
from stratarec.data.sources.files import InputFile, expand
from stratarec.data.sources.parquet import count_rows, open_parquet, without_notes
from stratarec.errors import DataError

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 1 << 20
_ROWS = 200_000
_LONGEST_LINE = 4 << 20
_MARKS = ("\t", ",", ";", "|")
_JSON = (".jsonl", ".ndjson", ".json")
CODEC_NAMES = frozenset({*CODECS, *_JSON, ".csv", ".tsv", ".tab", ".txt", ".parquet", ".pq", ".dat", ".log"})
"""Ends of file names that say how a log is written."""


@dataclass(frozen=True, kw_only=True)
class LogSample:
    """What was looked at."""

    paths: tuple[str, ...]
    kind: str
    """Of source that reads the log."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the source that are not as by default, but paths and schema."""
    frame: pl.DataFrame
    """Rows with the types that their values have."""
    total: int
    """Rows of the log, estimated for text."""

    @property
    def whole(self) -> bool:
        """Whether all rows were looked at."""
        return self.frame.height >= self.total


def read_sample(paths: tuple[str, ...]) -> LogSample:
    """Rows of the log in `paths`.

    Raises
    ------
    DataError
        Where a file cannot be read, or is neither Parquet nor text.
    """
    files = expand(paths)
    with files[0].open() as raw:
        magic = raw.read(4)
    sample = _parquet(paths, files) if magic == b"PAR1" else _text(paths, files)
    if not sample.frame.height:
        raise DataError(f"{files[0].path}: the file has no rows, expected at least one")
    return sample


def _parquet(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    frames, total = [], count_rows(files)
    for file in dict.fromkeys((files[0], files[-1])):
        with file.open() as raw:
            reader = open_parquet(raw, file)
            for group in dict.fromkeys((0, reader.metadata.num_row_groups - 1)):
                frames += _first_rows(reader, group, file)
    frame = pl.concat(frames, how="vertical_relaxed") if frames else pl.DataFrame()  # type: ignore[type-var]
    return LogSample(paths=paths, kind="parquet", frame=frame, total=max(total, 0))  # type: ignore[arg-type]


def _first_rows(reader: pq.ParquetFile, group: int, file: InputFile) -> list[pl.DataFrame]:
    """Of a row group; none where it is empty."""
    try:
        batches = list(islice(reader.iter_batches(_ROWS, row_groups=[group]), 1))
        for batch in batches:
            batch.validate(full=True)  # bytes that are no text go into Polars unseen
        return [pl.DataFrame(without_notes(pa.Table.from_batches([batch]))) for batch in batches]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}, row group {group}: damaged ({error})") from error


def _text(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    file = files[0]
    block = next(blocks(files[:1], _HEAD_BYTES, _LONGEST_LINE))
    head = block.content.removeprefix(b"\xef\xbb\xbf")
    check_utf8(head, file.path)
    whole = len(files) == 1 and block.bytes_done >= file.size
    name = _bare(file)
    options: dict[str, Any] = {}
    if head.lstrip().startswith(b"{"):
        options = {} if name.endswith(_JSON) else {"format": "jsonl"}
        frame = _json(head, file)
    else:
        mark = _delimiter(head)
        tabbed = name.endswith((".tsv", ".tab"))
        if mark != ("\t" if tabbed else ","):
            options["delimiter"] = mark
        names, skipped, _ = read_header(head, file.path, mark, '"')
        if not _is_header(names):
            options["columns"] = [f"column_{place}" for place in range(1, len(names) + 1)]
            skipped = 0
        columns = options.get("columns", names)
        tail = b"" if whole else _tail(files[-1])
        frame = _delimited([head[skipped:], tail], columns, mark, file)
    total = frame.height if whole else max(estimate_rows(files, _LONGEST_LINE), frame.height)
    return LogSample(paths=paths, kind="csv", options=options, frame=frame, total=total)


def _bare(file: InputFile) -> str:
    name = file.path.lower()
    return next((name.removesuffix(ending) for ending in CODECS if name.endswith(ending)), name)


def _delimiter(head: bytes) -> str:
    """The mark that divides the first lines into the most fields, as many in each."""
    lines = head[: 1 << 16].decode("utf-8", "replace").splitlines()[:20]
    found = {}
    for mark in _MARKS:
        counts = [len(row) for row in csv.reader(lines[:-1] or lines, delimiter=mark)]
        found[mark] = (len(set(counts)) == 1 and counts[0] > 1, min(counts, default=0))
    best = max(_MARKS, key=lambda mark: found[mark])
    return best if found[best][1] > 1 else ","


def _is_header(names: list[str]) -> bool:
    """Whether a first record names columns: no numbers, none of them empty or twice."""
    return len(set(names)) == len(names) and all(name.strip() and not _is_number(name) for name in names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json(head: bytes, file: InputFile) -> pl.DataFrame:
    try:
        return pl.read_ndjson(io.BytesIO(head), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{file.path}: no JSON lines, or not all alike ({' '.join(str(error).split())})") from error


def _delimited(pieces: list[bytes], columns: list[str], mark: str, file: InputFile) -> pl.DataFrame:
    frames: list[pl.DataFrame] = []
    for piece in filter(None, pieces):
        try:
            frame = pl.read_csv(
                piece, has_header=False, separator=mark, infer_schema=False, truncate_ragged_lines=True,
                schema={f"column_{place}": pl.String for place in range(1, len(columns) + 1)},
            )  # fmt: skip
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            if frames:  # a tail may begin inside a quoted field
                break
            raise DataError(f"{file.path}: no text in columns ({' '.join(str(error).split())[:200]})") from error
        frames.append(frame.rename(dict(zip(frame.columns, columns, strict=True))))
    whole = pl.concat(frames) if frames else pl.DataFrame()
    return whole.select(_typed(column) for column in whole.iter_columns())


def _typed(text: pl.Series) -> pl.Series:
    """Text as the numbers or truth values that all of it is."""
    bare = text.str.strip_chars()
    for kind in (pl.Int64, pl.Float64):
        value = bare.cast(kind, strict=False)
        if value.null_count() == text.null_count():
            return value if value.null_count() < len(value) else text
    words = bare.str.to_lowercase()
    if words.drop_nulls().is_in(["true", "false"]).all():
        return (words == "true").alias(text.name)
    return text


def _tail(file: InputFile) -> bytes:
    """The last lines of a local file that is not compressed."""
    if "://" in file.path or file.path.lower().endswith(tuple(CODECS)):
        return b""
    with file.open() as raw:
        raw.seek(max(file.size - _TAIL_BYTES, 0))
        content = raw.read()
    content = content[content.find(b"\n") + 1 :]
    return content if is_utf8(content) else b""


def growth(values: pl.Series, rows: int, total: int) -> int:
    """How many distinct values `total` rows may have, of which `rows` were looked at: as they grew over the sample."""
    found = values.n_unique() - bool(values.null_count())
    half = values.head(len(values) // 2)
    before = half.n_unique() - bool(half.null_count())
    if not found or not before or total <= rows:
        return found
    power = min(max(float(np.log2(found / before)), 0.0), 1.0)
    return int(found * (total / rows) ** power)
