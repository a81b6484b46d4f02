"""Some rows of a log, and how its files are written: by their beginning, and their end where that is near."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.cli.init.numbers import typed
from stratarec.data.sources.blocks import CODECS, BadRows, blocks, check_utf8, estimate_rows, is_utf8
from stratarec.data.sources.columns import ColumnTypes
from stratarec.data.sources.delimited import Delimited, read_header
from stratarec.data.sources.files import InputFile, expand, no_rows
from stratarec.data.sources.json_lines import JsonLines, check_lines, first_values
from stratarec.data.sources.parquet import count_rows, open_parquet, without_notes
from stratarec.data.sources.parse import from_floats
from stratarec.errors import DataError
from stratarec.io.names import shell_word

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 1 << 20
_FRONT_BYTES = 1 << 16
_ROWS = 200_000
# Files whose columns are compared, and columns that a message names.
_FILES, _SHOWN = 100, 6
_BOM = b"\xef\xbb\xbf"
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
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Column of numbers -> what stands there for nothing, besides an empty field."""
    incomplete: dict[str, str] = field(default_factory=dict)
    """Column that is not in every file -> a file without it. `frame` does not have these columns."""
    unnamed: frozenset[str] = frozenset()
    """Columns of `frame` that have no usable name in the log."""

    @property
    def incomplete_note(self) -> str:
        """End of an error message that names the columns of `incomplete`, if there are any."""
        shown = [f"{name!r} (not in {path})" for name, path in sorted(self.incomplete.items())]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"; left out as not every file has them: {', '.join(shown[:_SHOWN])}{more}" if shown else ""

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
    recipe = next((file.path for file in files if file.path.lower().endswith((".yaml", ".yml"))), "")
    if recipe:
        raise DataError(
            f"{recipe}: a YAML file, expected a log; if it is a recipe, run: stratarec prepare {shell_word(recipe)}"
        )
    sample = _parquet(paths, files) if _is_parquet(files) else _text(paths, files)
    if not sample.frame.height:
        raise no_rows(files[0])
    return sample


def _is_parquet(files: tuple[InputFile, ...]) -> bool:
    found = []
    for file in files[:_FILES]:
        with file.open() as raw:
            found.append(raw.read(4) == b"PAR1")
        if found[-1] != found[0]:
            one, other = (file, files[0]) if found[-1] else (files[0], file)
            raise DataError(f"{one.path} is Parquet and {other.path} is not; expected files of one format")
    return found[0]


def _incomplete(files: tuple[InputFile, ...], names_of: Callable[[InputFile], Sequence[str]]) -> dict[str, str]:
    """Return the columns that not every file has, each with a file that lacks it.

    Raises
    ------
    DataError
        If a file has no column in common with those before it.
    """
    common, lacking = set(names_of(files[0])), dict[str, str]()
    for number, file in enumerate(files[1:_FILES], 1):
        names = set(names_of(file))
        if not names:  # an empty file
            continue
        if not names & common:
            raise DataError(
                f"files of different columns: {file.path} and {files[0].path} have none in common; name files of one "
                "log, or `init` each by itself"
            )
        lacking |= dict.fromkeys(common - names, file.path)
        lacking |= {name: files[number - 1].path for name in names - common if name not in lacking}
        common &= names
    return lacking


def _parquet(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    counts = {file: count_rows((file,)) for file in files}
    # Files without rows may have any columns, of any type; `prepare` does not look at them either.
    files = tuple(file for file in files if counts[file]) or files
    frames, total = [], sum(counts.values())
    lacking = _incomplete(files, _parquet_names)
    schemas = [(file.path, _parquet_schema(file)) for file in files[:_FILES]]
    types = ColumnTypes([name for name in schemas[0][1].names if name not in lacking], lambda number: schemas[number:])
    for number, (path, schema) in enumerate(schemas):
        types.check(number, path, schema)
    for file in dict.fromkeys((files[0], files[-1])):
        with file.open() as raw:
            reader = open_parquet(raw, file)
            for group in dict.fromkeys((0, reader.metadata.num_row_groups - 1)):
                frames += _first_rows(reader, group, file)
    try:
        frame = pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        first, last = frames[0].schema, frames[-1].schema
        name = next((name for name in first if last.get(name, first[name]) != first[name]), "")
        raise DataError(
            f"column {name!r} is {first.get(name)} in {files[0].path} and {last.get(name)} in {files[-1].path}; "
            "convert one of them"
        ) from error
    frame = frame.with_columns(_without_decimals(column) for column in frame.iter_columns())
    unnamed = _unnamed(_parquet_names(files[0]))
    return LogSample(
        paths=paths, kind="parquet", frame=frame.drop(lacking, strict=False), total=max(total, 0), incomplete=lacking,
        unnamed=unnamed,
    )  # fmt: skip


def _without_decimals(column: pl.Series) -> pl.Series:
    """Decimals as whole numbers where all of them are, else as floats; left where they are wider than 64 bits."""
    lists = column.dtype.base_type() == pl.List
    flat = column.explode() if lists else column
    if not flat.dtype.is_decimal():
        return column
    whole = from_floats(flat).null_count() == flat.null_count()
    if not whole and (flat == flat.round()).all():
        return column
    kind = pl.Int64 if whole else pl.Float64
    return column.cast(pl.List(kind) if lists else kind)


def _first_rows(reader: pq.ParquetFile, group: int, file: InputFile) -> list[pl.DataFrame]:
    """Of a row group; none where it is empty."""
    try:
        batches = list(islice(reader.iter_batches(_ROWS, row_groups=[group]), 1))
        for batch in batches:
            batch.validate(full=True)  # bytes that are no text go into Polars unseen
        tables = [without_notes(pa.Table.from_batches([batch])) for batch in batches]
        return [pl.DataFrame(table.rename_columns(_called(table.column_names))) for table in tables]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}, row group {group}: damaged ({error})") from error


def _parquet_schema(file: InputFile) -> pa.Schema:
    with file.open() as raw:
        return open_parquet(raw, file).schema_arrow


def _parquet_names(file: InputFile) -> list[str]:
    names: list[str] = _parquet_schema(file).names
    twice = next((name for name in names if name and names.count(name) > 1), "")
    if twice:
        raise _repeated(file, twice, names.count(twice))
    return names


def _text(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    for file in (*files, files[0]):
        block = next(blocks((file,), _HEAD_BYTES, _LONGEST_LINE))
        head = block.content.removeprefix(_BOM)
        check_utf8(head, file.path)
        if b"\n" in head.strip():
            break  # a file of one line may be a header alone
    files = (file, *(each for each in files if each is not file))
    whole = len(files) == 1 and block.bytes_done >= file.size
    if _bare(file).endswith(_JSON):
        check_lines(head, file.path)
    if head.lstrip().startswith(b"{"):
        options = {} if _bare(file).endswith(_JSON) else {"format": "jsonl"}
        lacking = _incomplete(files, _json_names)
        frame = _json(head, file).drop(lacking, strict=False)
        sample = LogSample(paths=paths, kind="csv", options=options, frame=frame, total=0, incomplete=lacking)
    else:
        sample = _delimited(paths, files, head, b"" if whole else _tail(files[-1]))
    rows = sample.frame.height
    return replace(sample, total=rows if whole else max(estimate_rows(files, _LONGEST_LINE), rows))


def _delimited(paths: tuple[str, ...], files: tuple[InputFile, ...], head: bytes, tail: bytes) -> LogSample:
    file, options = files[0], dict[str, Any]()
    mark = _delimiter(head, file)
    if mark != ("\t" if _bare(file).endswith((".tsv", ".tab")) else ","):
        options["delimiter"] = mark
    names, skipped, header_lines = read_header(head, file.path, mark, '"')
    second = read_header(head[skipped:], file.path, mark, '"')[0] if head[skipped:].strip() else []
    last, lacking = names, dict[str, str]()
    if _is_header(names, second, file):
        lacking = _incomplete(files, partial(_header, mark=mark))
        last = _header(files[-1], mark)
    else:
        names = last = options["columns"] = [f"column_{place}" for place in range(1, len(names) + 1)]
        skipped = header_lines = 0
    rows = _read(head[skipped:], names, mark, file, header_lines + 1)
    text = pl.concat([rows, _read(tail, last, mark, None)], how="diagonal")
    columns, missing = [], {}
    for column in text.drop(lacking, strict=False).iter_columns():
        found, words = typed(column)
        columns.append(found)
        missing.update({column.name: words} if words else {})
    return LogSample(
        paths=paths, kind="csv", options=options, frame=pl.DataFrame(columns), total=0, missing=missing,
        unnamed=_unnamed(names), incomplete=lacking,
    )  # fmt: skip


def _json_names(file: InputFile) -> list[str]:
    return list(first_values(next(blocks((file,), 1 << 20, _LONGEST_LINE)).content.removeprefix(_BOM)))


def _header(file: InputFile, mark: str) -> list[str]:
    front = next(blocks((file,), _FRONT_BYTES, _LONGEST_LINE)).content.removeprefix(_BOM)
    if not front.strip():
        return []
    return read_header(front, file.path, mark, '"')[0]


def _bare(file: InputFile) -> str:
    name = file.path.lower()
    return next((name.removesuffix(ending) for ending in CODECS if name.endswith(ending)), name)


def _delimiter(head: bytes, file: InputFile) -> str:
    """The mark that divides the first lines into the most fields, as many in each."""
    lines = head[: 1 << 16].decode("utf-8", "replace").splitlines()[:20]
    lines = lines[:-1] or lines
    found = {}
    for mark in _MARKS:
        counts = [len(row) for row in csv.reader(lines, delimiter=mark)]
        found[mark] = (len(set(counts)) == 1 and counts[0] > 1, min(counts, default=0))
    best = max(_MARKS, key=lambda mark: found[mark])
    doubled = {line.count("::") for line in lines}
    if len(doubled) == 1 and max(doubled) >= max(found[best][1], 1):
        output = f"{file.path.rpartition('/')[2].rpartition('.')[0] or 'log'}.tsv"
        raise DataError(
            f"{file.path}: fields are divided by two characters, '::', expected one, such as a tab: "
            f"sed 's/::/\\t/g' {shell_word(file.path)} > {shell_word(output)}"
        )
    return best if found[best][1] > 1 else ","


def _is_header(names: list[str], second: list[str], file: InputFile) -> bool:
    """Whether a first record names columns: it has no numbers, and where a name is empty or twice the next has some."""
    if any(map(_is_number, names)) or not any(names):
        return False
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if not (twice or "" in names):
        return True
    named = any(map(_is_number, second))
    if twice and named:
        raise _repeated(file, twice[0], names.count(twice[0]))
    return named


def _called(names: Sequence[str]) -> list[str]:
    """Name by their place the columns that have no name, or one that Polars takes for a pattern."""
    what = "column"
    while any(name.startswith(f"({what} ") for name in names):
        what = f"unnamed {what}"
    usable = [bool(name) and not (name.startswith("^") and name.endswith("$")) for name in names]
    return [name if usable[place] else f"({what} {place + 1})" for place, name in enumerate(names)]


def _unnamed(names: Sequence[str]) -> frozenset[str]:
    """Return the names of `_called` that the log does not have."""
    return frozenset(_called(names)) - frozenset(names)


def _repeated(file: InputFile, name: str, times: int) -> DataError:
    return DataError(f"{file.path}: {times} columns are called {name!r}; rename all but one of them")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json(head: bytes, file: InputFile) -> pl.DataFrame:
    try:
        frame = pl.read_ndjson(io.BytesIO(head), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        _check_json(head, file)
        raise DataError(f"{file.path}: the lines cannot be read as JSON objects of one form") from error
    # Whole numbers beyond 64 bits are read as text by `prepare`, too.
    return frame.with_columns(column.cast(pl.String) for column in frame.iter_columns() if column.dtype == pl.Int128)


def _check_json(head: bytes, file: InputFile) -> None:
    """Refuse the first line that is no object, or in which a column is a list although it is not elsewhere."""
    forms: dict[str, bool] = {}
    for text in head.split(b"\n"):
        with suppress(ValueError, RecursionError):
            row = json.loads(text)
            cells = row.items() if isinstance(row, dict) else ()
            forms = {name: isinstance(cell, list) for name, cell in cells if cell is not None} | forms
    lists = frozenset(name for name, is_list in forms.items() if is_list)
    reader = JsonLines(path=file.path, lists=lists, nulls=())
    reader.parse(head, range(1, head.count(b"\n") + 1), tuple(forms), BadRows(None))


def _read(content: bytes, names: Sequence[str], mark: str, file: InputFile | None, first_line: int = 1) -> pl.DataFrame:
    """Read rows as text. Without `file`, rows that cannot be read give none: a tail may begin inside a quoted field."""
    called = _called(names)
    schema = {f"column_{place}": pl.String for place in range(1, len(called) + 1)}
    try:
        frame = pl.read_csv(
            content, has_header=False, separator=mark, infer_schema=False, truncate_ragged_lines=True, schema=schema
        )
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if file is not None and content:
            # The parser of `prepare` names the line.
            reader = Delimited(path=file.path, names=tuple(called), delimiter=mark, quote='"', nulls=())
            numbers = range(first_line, first_line + content.count(b"\n"))
            reader.parse(content, numbers, dict.fromkeys(called, pl.String()), BadRows(None))
            raise DataError(f"{file.path}: the lines cannot be read as delimited text") from error
        frame = pl.DataFrame(schema=schema)
    return frame.rename(dict(zip(frame.columns, called, strict=True)))


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
