"""Read a sample of a log, and detect the format of its files.

The sample is the beginning of the log, which is all of a small log, also of many files. If it ends
before the log does, a part of the last file is added, so that the sample shows when the log ends.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from stratarec.cli.init.numbers import MISSING_WORDS, WrittenNumbers, typed, written_numbers
from stratarec.cli.init.words import is_code
from stratarec.data.columns.converter import BadRows
from stratarec.data.columns.frames import flattened
from stratarec.data.columns.text_values import integers_from_numbers, numbers_from_text
from stratarec.data.sources.files import DATE, DATE_PARTS, InputFile, expand, no_rows, with_constants
from stratarec.data.sources.formats import (
    CODECS,
    JSON_SUFFIXES,
    TSV_SUFFIXES,
    bare_name,
    compression_of,
    refuse_foreign,
    table_format,
)
from stratarec.data.sources.parquet import column_types, count_rows, to_frame
from stratarec.data.sources.table_files import DAMAGE, TableFile, open_table
from stratarec.data.sources.text import (
    BOM,
    Delimited,
    JsonField,
    JsonLines,
    TextChunk,
    add_json_fields,
    check_json_lines,
    check_utf8,
    estimate_rows,
    first_json_fields,
    first_records,
    narrow_encoding,
    read_chunks,
    read_header,
    wide_encoding,
    without_objects,
)
from stratarec.errors import DataError
from stratarec.io.names import shell_word

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 1 << 20
_FRONT_BYTES = 1 << 16
# Name of the column for a field behind the last one, which no column of a log can have.
_REST = "\n"
_ROWS = 200_000
# Maximum number of files whose columns are compared, and of columns that a message names.
_FILES, _SHOWN = 100, 6
_MAX_LINE_BYTES = 4 << 20
# Maximum number of levels of objects and lists in a line of JSON.
_LEVELS = 64
_LEVEL_STEPS = np.zeros(256, dtype=np.int8)
"""Change of the level at a byte of JSON."""
_LEVEL_STEPS[[*b"{["]], _LEVEL_STEPS[[*b"}]"]] = 1, -1
# Lines before a header: comments, and the delimiter.
_PREAMBLE, _SHOWN_BYTES = re.compile(rb"#|sep=.\s*$"), 40
_HASH = re.compile("(?i)(?=.*[0-9])[0-9a-f]{8,}")
# Delimiters of fields. Hive writes the first control character.
_MARKS = ("\t", ",", ";", "|", "\x01", "\x1f", "\x1e", "^", "~")
# Encodings in which each line ends with the byte of a line feed.
_NARROW = ("utf-8", "cp1252", "latin-1")
CODEC_NAMES = frozenset(
    {*CODECS, *JSON_SUFFIXES, *TSV_SUFFIXES}
    | {".csv", ".txt", ".parquet", ".pq", ".arrow", ".feather", ".ipc", ".dat", ".log"}
)
"""File name extensions of log formats and compressions."""


@dataclass(frozen=True, kw_only=True)
class LogSample:
    """Some rows of a log, and its format."""

    paths: tuple[str, ...]
    kind: str
    """Kind of the source that reads the log."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the source that differ from their defaults, except paths and schema."""
    frame: pl.DataFrame
    """Sampled rows, with typed columns."""
    total: int
    """Number of rows of the log, estimated for text."""
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a column of numbers -> words in it that mean a missing value, in addition to an empty
    field.
    """
    written: dict[str, WrittenNumbers] = field(default_factory=dict)
    """Name of a column of numbers -> how they are written, if they are text that is no plain
    number.
    """
    incomplete: dict[str, str] = field(default_factory=dict)
    """Name of a column that is not in every file -> a file without it. `frame` does not have these
    columns.
    """
    unnamed: frozenset[str] = frozenset()
    """Columns of `frame` without a usable name in the log."""
    skipped_lines: dict[str, int] = field(default_factory=dict)
    """Reason why lines are not in `frame` -> number of these lines. `prepare` skips them, too."""

    @property
    def incomplete_note(self) -> str:
        """Text at the end of an error message that names the columns in `incomplete`; empty if
        there are none.
        """
        shown = [f"{name!r} (not in {path})" for name, path in sorted(self.incomplete.items())]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return (
            f"; ignored because not every file has them: {', '.join(shown[:_SHOWN])}{more}" if shown else ""
        )

    @property
    def is_complete(self) -> bool:
        """Whether the sample has all rows of the log."""
        return self.frame.height + sum(self.skipped_lines.values()) >= self.total


def read_sample(paths: tuple[str, ...]) -> LogSample:
    """Read a sample of the log in `paths`.

    Raises
    ------
    DataError
        If a file cannot be read, or is neither Parquet nor text.
    """
    files = expand(paths)
    recipe = next((file.path for file in files if file.path.lower().endswith((".yaml", ".yml"))), "")
    if recipe:
        raise DataError(
            f"{recipe} is a YAML file, expected a log; if it is a recipe, run: stratarec "
            f"prepare {shell_word(recipe)}"
        )
    sample = _table(paths, files) if _is_table(files) else _text(paths, files)
    if not sample.frame.height:
        raise no_rows(files[0])
    # A directory above the log may have the form of a column, too.
    given = {name for file in files for name in file.directory_columns(())}
    same = {name for name in given & {*sample.frame.columns} if sample.frame[name].n_unique() == 1}
    if DATE in given - same:  # the parts grow with time, so they say nothing of later rows
        same |= given & {*DATE_PARTS} & {*sample.frame.columns}
    texts = pl.col(pl.String)  # an empty text is missing, as in `Converter.category`
    frame = sample.frame.drop(same).with_columns(pl.when(texts != "").then(texts))
    return replace(sample, frame=frame)


def _with_written_numbers(sample: LogSample, delimiter: str) -> LogSample:
    """Convert columns of numbers as people write them. Ids with separators, such as 1,234, stay
    text.
    """
    texts = [
        text for text in sample.frame.iter_columns() if text.dtype == pl.String and not is_code(text.name)
    ]
    written = {text.name: form for text in texts if (form := written_numbers(text, delimiter=delimiter))}
    numbers = [numbers_from_text(sample.frame[name], form.decimal) for name, form in written.items()]
    missing = {name: form.missing for name, form in written.items() if form.missing}
    return replace(
        sample,
        frame=sample.frame.with_columns(numbers),
        written=written,
        missing={**sample.missing, **missing},
    )


def _is_table(files: tuple[InputFile, ...]) -> bool:
    """Whether the files are Parquet or Arrow files; `DataError` if some are and others are not."""
    formats = []
    for file in files[:_FILES]:
        front = file.front()
        refuse_foreign(front, file.path)
        formats.append(table_format(front))
        if bool(formats[-1]) != bool(formats[0]):
            one, other = (file, files[0]) if formats[-1] else (files[0], file)
            kind = formats[-1] or formats[0]
            raise DataError(
                f"{one.path} is {kind} and {other.path} is not; all files must have the same format"
            )
    return bool(formats[0])


def _incomplete(
    files: tuple[InputFile, ...], names_of: Callable[[InputFile], Sequence[str]]
) -> dict[str, str]:
    """Return the columns that not every file has, each with a file that lacks it.

    Raises
    ------
    DataError
        If a file has no column that all earlier files have.
    """
    common, lacking = set(names_of(files[0])), dict[str, str]()
    for number, file in enumerate(files[1:_FILES], 1):
        names = set(names_of(file))
        if not names:  # an empty file
            continue
        if not names & common:
            raise DataError(
                f"{file.path} and {files[0].path} have no column in common; name files of one log, or run "
                "`init` on each separately"
            )
        lacking |= dict.fromkeys(common - names, file.path)
        lacking |= {name: files[number - 1].path for name in names - common if name not in lacking}
        common &= names
    return lacking


def _table(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    counts = {file: count_rows((file,)) for file in files}
    # Files without rows may have any columns of any type. They are ignored, as in `prepare`.
    if not any(counts.values()):
        raise no_rows(files[0])
    files = tuple(file for file in files if counts[file])
    frames, origins, total = list[pl.DataFrame](), list[str](), sum(counts.values())
    lacking = _incomplete(files, _table_names)
    schemas = [(file.path, _table_schema(file)) for file in files[:_FILES]]
    column_types([name for name in schemas[0][1].names if name not in lacking], schemas)
    is_small = total <= _ROWS and len(files) <= _FILES
    for file in files if is_small else dict.fromkeys((files[0], files[-1])):
        with file.open() as raw:
            reader = open_table(raw, file)
            groups = len(reader.group_rows)
            for group in range(groups) if is_small else dict.fromkeys((0, groups - 1)):
                frames += _first_rows(reader, group, file)
                origins += [file.path] * (len(frames) - len(origins))
    try:
        frame = pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        kinds = dict[str, tuple[pl.DataType, str]]()
        for path, frame in zip(origins, frames, strict=True):
            for name, kind in frame.schema.items():
                first, origin = kinds.setdefault(name, (kind, path))
                if kind != first:
                    what = f"column {name!r} is {first} in {origin} and {kind} in {path}"
                    raise DataError(f"{what}; convert one of them") from error
        raise
    frame = frame.with_columns(_without_decimals(column) for column in frame.iter_columns())
    unnamed = _unnamed(_table_names(files[0]))
    sample = LogSample(
        paths=paths,
        kind="parquet",
        frame=frame.drop(lacking, strict=False),
        total=max(total, 0),
        incomplete=lacking,
        unnamed=unnamed,
    )
    return _with_written_numbers(sample, "")


def _without_decimals(column: pl.Series) -> pl.Series:
    """Convert decimals to whole numbers if all are whole, else to floats. Numbers beyond 64 bits
    stay decimals.
    """
    is_list = column.dtype.base_type() == pl.List
    flat = column.explode() if is_list else column
    if not flat.dtype.is_decimal():
        return column
    fits_integer = integers_from_numbers(flat).null_count() == flat.null_count()
    if not fits_integer and (flat == flat.round()).all():
        return column
    kind = pl.Int64 if fits_integer else pl.Float64
    return column.cast(pl.List(kind) if is_list else kind)


def _first_rows(reader: TableFile, group: int, file: InputFile) -> list[pl.DataFrame]:
    """Read the first rows of a row group; an empty list if it has none."""
    try:
        batches = list(islice(reader.batches(_ROWS, [group]), 1))
        for batch in batches:
            batch.validate(full=True)  # Polars does not check that text is UTF-8
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        return [
            to_frame(table.rename_columns(_column_names(table.column_names)), {}, file.path)
            for table in tables
        ]
    except DAMAGE as error:
        raise DataError(f"{file.path}, row group {group}: damaged ({error})") from error


def _table_schema(file: InputFile) -> pa.Schema:
    with file.open() as raw:
        return open_table(raw, file).schema


def _table_names(file: InputFile) -> list[str]:
    names: list[str] = _table_schema(file).names
    twice = next((name for name in names if name and names.count(name) > 1), "")
    if twice:
        raise _repeated(file, twice, names.count(twice))
    return names


def _text(paths: tuple[str, ...], files: tuple[InputFile, ...]) -> LogSample:
    for file in (*files, files[0]):
        chunk, encoding = _head(file)
        head = chunk.content.removeprefix(BOM)
        check_utf8(head, file.path)
        if b"\n" in head.strip():
            break  # a file of one line may be a header alone
    files = (file, *(other for other in files if other is not file))
    heads, is_complete, encoding = _heads(files, encoding)
    tail = b"" if is_complete else _tail(files[-1], len(heads.get(files[-1], b"")), encoding)
    if not is_complete and not tail and files[-1] not in heads:
        heads[files[-1]] = _front(files[-1], _TAIL_BYTES, encoding)
    if bare_name(file.path).endswith(JSON_SUFFIXES):
        check_json_lines(head, file.path)
    if head.lstrip().startswith(b"{"):
        options = {} if bare_name(file.path).endswith(JSON_SUFFIXES) else {"format": "jsonl"}
        frame = _json(heads, tail, files[-1])
        lacking = _incomplete(files, partial(_json_names, columns=frame.columns, encoding=encoding))
        unnamed = _unnamed(frame.columns)
        frame.columns = _column_names(frame.columns)
        sample = LogSample(
            paths=paths,
            kind="csv",
            options=options,
            frame=frame.drop(lacking, strict=False),
            total=0,
            incomplete=lacking,
            unnamed=unnamed,
        )
        sample = _with_written_numbers(sample, "")
    else:
        sample = _delimited(paths, files, heads, tail, encoding)
    rows = sample.frame.height
    sample = (
        sample if encoding == "utf-8" else replace(sample, options={**sample.options, "encoding": encoding})
    )
    return replace(
        sample, total=rows if is_complete else max(estimate_rows(files, _MAX_LINE_BYTES, encoding), rows)
    )


def _head(file: InputFile) -> tuple[TextChunk, str]:
    """Read the first lines of a file, and guess its encoding if they are not UTF-8."""
    try:
        chunk = next(read_chunks(file, _HEAD_BYTES, _MAX_LINE_BYTES))
    except DataError:
        encoding = wide_encoding(file)
        if not encoding:
            raise
        return next(read_chunks(file, _HEAD_BYTES, _MAX_LINE_BYTES, encoding=encoding)), encoding
    encoding = narrow_encoding(chunk.content)
    if encoding == "utf-8":
        return chunk, encoding
    return replace(chunk, content=chunk.content.decode(encoding).encode()), encoding


def _heads(files: tuple[InputFile, ...], encoding: str) -> tuple[dict[InputFile, bytes], bool, str]:
    """Return the beginning of the log as UTF-8, by file, whether it is the whole log, and the log's
    encoding.

    If the first file has only ASCII characters, a later file may show another encoding than UTF-8.
    """
    # Chunks end at line ends, so a full one leaves some bytes of room.
    heads, room, least = dict[InputFile, bytes](), _HEAD_BYTES, _HEAD_BYTES // 100
    for file in files[:_FILES]:
        heads[file] = b""
        for chunk in read_chunks(file, _HEAD_BYTES, _MAX_LINE_BYTES, encoding=encoding):
            heads[file] += chunk.content
            room -= len(chunk.content)
            if room < least:
                break
        heads[file] = heads[file].removeprefix(BOM)
        narrow = narrow_encoding(heads[file])
        if encoding == "utf-8" and narrow != encoding and all(map(bytes.isascii, [*heads.values()][:-1])):
            return _heads(files, narrow)
        check_utf8(heads[file], file.path)
        if room < least:
            return heads, False, encoding
    return heads, len(files) <= _FILES, encoding


def _delimited(
    paths: tuple[str, ...],
    files: tuple[InputFile, ...],
    heads: dict[InputFile, bytes],
    tail: bytes,
    encoding: str,
) -> LogSample:
    file, head, options = files[0], heads[files[0]], dict[str, Any]()
    _refuse_preamble(head, file)
    mark = _delimiter(head, file)
    if mark != ("\t" if bare_name(file.path).endswith(TSV_SUFFIXES) else ","):
        options["delimiter"] = mark
    names, skipped, _ = read_header(head, file.path, mark, '"')
    last, lacking, rows = names, dict[str, str](), list[pl.DataFrame]()
    has_header = _is_header(names, first_records(head[skipped:], mark), file)
    if has_header:
        _refuse_closing_delimiters(names, first_records(head[skipped:], mark), mark, file)
        lacking = _incomplete(files, lambda file: _with_directories(_header(file, mark, encoding), file))
        last = _header(files[-1], mark, encoding)
    else:
        names = last = options["columns"] = [f"column_{place}" for place in range(1, len(names) + 1)]
    for each, content in heads.items():
        fields, skipped, lines = (
            read_header(content, each.path, mark, '"') if has_header and content else (names, 0, 0)
        )
        frame = _read(content[skipped:], fields, mark, each, lines + 1)
        rows.append(with_constants(frame, each.directory_columns(fields)))
    frame = with_constants(_read(tail, last, mark, None), files[-1].directory_columns(last))
    text = pl.concat([*rows, frame], how="diagonal")
    # Files with headers may have been concatenated, and an unquoted delimiter moves the fields
    # behind it.
    equal = [(text[name] == name).fill_null(False).to_numpy() for name in _column_names(names)]
    faults = {
        "that repeat the header": np.logical_and.reduce(equal) & has_header,
        "with more fields than the first line": text[_REST].is_not_null().to_numpy(),
    }
    counts = {what: int(rows.sum()) for what, rows in faults.items() if rows.any()}
    if len(text) and faults["with more fields than the first line"].all():
        what = f"has more fields than the {len(names)} names in the first line, which must name all columns"
        raise DataError(
            f"{file.path}: every line {what}: name the first column if it numbers "
            "the rows, as R writes them"
        )
    text = text.filter(~np.logical_or.reduce(list(faults.values()))).drop(_REST)
    columns, missing = [], {}
    for column in text.drop(lacking, strict=False).iter_columns():
        converted, words = typed(column)
        columns.append(converted)
        missing.update({column.name: words} if words else {})
    sample = LogSample(
        paths=paths,
        kind="csv",
        options=options,
        frame=pl.DataFrame(columns),
        total=0,
        missing=missing,
        unnamed=_unnamed(names),
        incomplete=lacking,
        skipped_lines=counts,
    )
    return _with_written_numbers(sample, mark)


def _json_names(file: InputFile, columns: Sequence[str], encoding: str) -> list[str]:
    return _with_directories(list(first_json_fields(_front(file, 1 << 20, encoding), columns)), file)


def _with_directories(names: list[str], file: InputFile) -> list[str]:
    return [*names, *file.directory_columns(names)] if names else []


def _front(file: InputFile, size: int, encoding: str) -> bytes:
    """Read about `size` bytes at the beginning of a file, as UTF-8."""
    return next(read_chunks(file, size, _MAX_LINE_BYTES, encoding=encoding)).content.removeprefix(BOM)


def _header(file: InputFile, mark: str, encoding: str) -> list[str]:
    front = _front(file, _FRONT_BYTES, encoding)
    if not front.strip():
        return []
    return read_header(front, file.path, mark, '"')[0]


def _refuse_preamble(head: bytes, file: InputFile) -> None:
    """Raise `DataError` if lines before the header are comments, or name the delimiter, as
    spreadsheets write it.
    """
    lines = head[:_FRONT_BYTES].splitlines(keepends=True)
    count = next(
        (place for place, line in enumerate(lines) if line.strip() and not _PREAMBLE.match(line)), 0
    )
    rest = b"".join(lines[count:])
    mark = _delimiter(rest, file)
    # A header may begin with #, too.
    if count and len(first_records(lines[0], mark)[0]) != len(first_records(rest, mark)[0]):
        raise DataError(
            f"{file.path}, line 1: {lines[0].decode('utf-8', 'replace').strip()[:_SHOWN_BYTES]!r} is no "
            f"header; remove the lines before line {count + 1}: tail -n "
            f"+{count + 1} {shell_word(file.path)}"
        )


def _refuse_closing_delimiters(
    names: list[str], records: list[list[str]], mark: str, file: InputFile
) -> None:
    if not records or any(len(record) != len(names) + 1 or record[-1] for record in records):
        return
    path = shell_word(file.path)
    raise DataError(
        f"{file.path}: lines end with the delimiter {mark!r}, and the first line does not; add it there: "
        f"sed '1s/$/{mark}/' {path} > {shell_word('with-' + file.path.rpartition('/')[2])}"
    )


def _delimiter(head: bytes, file: InputFile) -> str:
    """Return the delimiter that splits the first lines into the most fields, the same number in
    each line.
    """
    lines = head[: 1 << 16].decode("utf-8", "replace").splitlines()[:20]
    lines = lines[:-1] or lines
    scores = {}
    for mark in _MARKS:
        counts = [len(row) for row in csv.reader(lines, delimiter=mark)]
        scores[mark] = (len(set(counts)) == 1 and counts[0] > 1, min(counts, default=0))
    best = max(_MARKS, key=lambda mark: scores[mark])
    for pair in ("::", "||", ";;", "~~"):
        doubled = {line.count(pair) for line in lines}
        is_single = pair[0] in _MARKS and any(line.count(pair[0]) != 2 * line.count(pair) for line in lines)
        most = 1 if best == pair[0] else max(scores[best][1], 1)
        if len(doubled) == 1 and not is_single and max(doubled) >= most:
            output = f"{file.path.rpartition('/')[2].rpartition('.')[0] or 'log'}.tsv"
            raise DataError(
                f"{file.path}: the delimiter {pair!r} has two characters; it must be one character, such "
                f"as a tab: sed 's/{pair}/\\t/g' {shell_word(file.path)} > {shell_word(output)}"
            )
    if scores[best][1] > 1:
        return best
    # Text has spaces, too. They separate columns only if no other character does.
    counts = [len(row) for row in csv.reader(lines, delimiter=" ")]
    return " " if len(lines) > 1 and len(set(counts)) == 1 and counts[0] > 1 else ","


def _is_header(names: list[str], records: list[list[str]], file: InputFile) -> bool:
    """Whether the first record is a header, which names the columns.

    `names` are the fields of the first record, and `records` the records after it. Names are words
    above columns of numbers. Without such a column, a record is data if it has numbers, if half of
    its words occur again in their columns, or if a field is repeated. If a name is empty, the
    second record must have a number.
    """
    if not any(names) or any(name == "\\N" or "\x02" in name for name in names):
        return False
    # Files with headers may have been concatenated.
    records = [record for record in records if record != names]
    words = {place for place, name in enumerate(names) if _is_word(name)}
    below = {place: [record[place] for record in records if place < len(record)] for place in words}
    repeated = {place for place in words if names[place] in below[place]}
    is_header = any(_are_numbers(below[place]) for place in words - repeated)
    duplicates = sorted({name for name in names if name and names.count(name) > 1})
    if is_header and duplicates:
        raise _repeated(file, duplicates[0], names.count(duplicates[0]))
    if is_header or duplicates or any(map(_is_number, names)) or 2 * len(repeated) >= len(words):
        return is_header
    return "" not in names or any(map(_is_number, records[0] if records else ()))


def _is_word(name: str) -> bool:
    """Whether a field of the first record may be a name. Digits of a hash, such as 68fd1e64, are
    data.
    """
    return bool(name) and not (_is_number(name) or name.lower() in MISSING_WORDS or _HASH.fullmatch(name))


def _are_numbers(fields: list[str]) -> bool:
    """Whether most of the fields that are not missing are numbers."""
    present = [field for field in fields if field and field.lower() not in MISSING_WORDS]
    return 2 * sum(map(_is_number, present)) > len(present)


def _column_names(names: Sequence[str]) -> list[str]:
    """Return names in which columns are numbered that have no name, or a name that Polars would
    read as a pattern.
    """
    word = "column"
    while any(name.startswith(f"({word} ") for name in names):
        word = f"unnamed {word}"
    usable = [bool(name) and not (name.startswith("^") and name.endswith("$")) for name in names]
    return [name if usable[index] else f"({word} {index + 1})" for index, name in enumerate(names)]


def _unnamed(names: Sequence[str]) -> frozenset[str]:
    """Return the names that `_column_names` made up."""
    return frozenset(_column_names(names)) - frozenset(names)


def _repeated(file: InputFile, name: str, times: int) -> DataError:
    return DataError(f"{file.path}: {times} columns are named {name!r}; rename all but one of them")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json(heads: dict[InputFile, bytes], tail: bytes, last: InputFile) -> pl.DataFrame:
    """Read the beginnings of files, and the end of the file `last`."""
    parts = [*heads.items(), (last, tail)]
    for file, part in parts:
        _check_levels(part, file, is_head=part is not tail)
    try:
        frame = pl.read_ndjson(io.BytesIO(b"".join(part for _, part in parts)), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        for file, head in heads.items():
            _check_json(head, file)
        path = next(iter(heads)).path
        raise DataError(f"{path}: the lines are not JSON objects with consistent types") from error
    frame = flattened(frame, last.path)
    given = [file.directory_columns(frame.columns) for file, _ in parts]
    if any(given):
        rows = [sum(bool(line.strip()) for line in part.split(b"\n")) for _, part in parts]
        ends = np.cumsum([0, *rows]).tolist()
        slices = [frame.slice(start, count) for start, count in zip(ends, rows, strict=False)]
        frame = pl.concat(map(with_constants, slices, given), how="diagonal")
    # `prepare` also reads whole numbers beyond 64 bits as text.
    return frame.with_columns(
        column.cast(pl.String) for column in frame.iter_columns() if column.dtype == pl.Int128
    )


def _check_levels(part: bytes, file: InputFile, *, is_head: bool) -> None:
    """Raise `DataError` for a line with too many levels of objects and lists: the time in which
    Polars finds their type is cubic in the levels.
    """
    content = np.frombuffer(part + b"\n", dtype=np.uint8)
    steps = _LEVEL_STEPS[content]
    levels, ends = np.cumsum(steps, dtype=np.int32), np.flatnonzero(content == ord("\n"))
    starts = np.append(0, ends[:-1] + 1)
    most = np.maximum.reduceat(levels, starts) - levels[starts] + steps[starts]
    deep = np.flatnonzero(most > _LEVELS)
    if len(deep):
        place = f"line {deep[0] + 1}" if is_head else "one of the last lines"
        raise DataError(
            f"{file.path}, {place}: objects and lists in {most[deep[0]]} levels, expected at most {_LEVELS}"
        )


def _check_json(head: bytes, file: InputFile) -> None:
    """Raise an error for the first line that is not an object, or has a list where other lines have
    single values.
    """
    fields: dict[str, JsonField] = {}
    for text in head.split(b"\n"):
        add_json_fields(fields, text)
    fields = without_objects(fields)
    lists = frozenset(name for name, field in fields.items() if isinstance(field.value, list))
    paths = {name: field.path for name, field in fields.items()}
    reader = JsonLines(path=file.path, lists=lists, nulls=(), paths=paths)
    reader.parse(head, range(1, head.count(b"\n") + 1), tuple(fields), BadRows(None))


def _read(
    content: bytes, names: Sequence[str], mark: str, file: InputFile | None, first_line: int = 1
) -> pl.DataFrame:
    """Read rows as text.

    If `file` is None, errors give an empty frame, because the tail of a file may begin inside a
    quoted field.
    """
    columns = _column_names(names)
    # A field behind the last name shows that a line has too many. Polars counts the fields of the
    # first line.
    columns += [_REST]
    first = mark.encode() * (len(columns) - 1) + b"\n"
    schema = {f"column_{place}": pl.String for place in range(1, len(columns) + 1)}
    try:
        frame = pl.read_csv(
            first + content,
            has_header=False,
            separator=mark,
            infer_schema=False,
            truncate_ragged_lines=True,
            schema=schema,
        ).slice(1)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if file is not None and content:
            # The parser of `prepare` raises an error that names the line.
            reader = Delimited(
                path=file.path, names=tuple(columns[:-1]), delimiter=mark, quote='"', nulls=()
            )
            numbers = range(first_line, first_line + content.count(b"\n"))
            reader.parse(content, numbers, dict.fromkeys(columns[:-1], pl.String()), BadRows(None))
            raise DataError(f"{file.path}: the lines cannot be read as delimited text") from error
        frame = pl.DataFrame(schema=schema)
    return frame.rename(dict(zip(frame.columns, columns, strict=True)))


def _tail(file: InputFile, known: int, encoding: str) -> bytes:
    """Read the last lines of a local, uncompressed file, as UTF-8. The sample has its first `known`
    bytes already.
    """
    if "://" in file.path or compression_of(file.front(), file.path) or encoding not in _NARROW:
        return b""
    with file.open() as raw:
        # One byte more, because a partial line is left out: at `known`, a line begins.
        raw.seek(max(file.size - _TAIL_BYTES, known - 1, 0))
        content = raw.read()
    content = content[content.find(b"\n") + 1 :].decode(encoding, "replace").encode()
    return b"" if b"\xef\xbf\xbd" in content else content


def growth(values: pl.Series, rows: int, total: int) -> int:
    """Estimate the number of distinct values in `total` rows, from its growth over a sample of
    `rows` rows.
    """
    distinct = values.n_unique() - bool(values.null_count())
    half = values.head(len(values) // 2)
    before = half.n_unique() - bool(half.null_count())
    if not distinct or not before or total <= rows:
        return distinct
    power = min(max(float(np.log2(distinct / before)), 0.0), 1.0)
    return int(distinct * (total / rows) ** power)
