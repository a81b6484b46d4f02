"""Logs in CSV, TSV and JSON lines, with any columns by a schema in the recipe.

Text has no types, so types follow from the schema: the label, dense columns and times are numbers
(or words and dates), and a category is text unless the schema says integer. Types are not guessed
from values, because a column with numbers in the first gigabyte may have other text in the last.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import polars as pl

from stratarec.config.units import parse_bytes
from stratarec.data.columns.converter import BadRows, Converter, OnBadRow, check_present
from stratarec.data.schema import LabelRule
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare, RowsConfig, Size, View, chunk_index
from stratarec.data.sources.files import (
    STANDARD_INPUT,
    InputFile,
    expand,
    fingerprint,
    no_rows,
    with_constants,
)
from stratarec.data.sources.formats import JSON_SUFFIXES, TSV_SUFFIXES, bare_name
from stratarec.data.sources.text import (
    BOM,
    CHUNK_BYTES,
    Delimited,
    JsonLines,
    TextChunk,
    check_json_lines,
    estimate_rows,
    first_json_fields,
    first_records,
    read_chunks,
    read_header,
)
from stratarec.errors import ConfigError, DataError

Format = Literal["auto", "csv", "tsv", "jsonl"]

# Delimiters that are tried if the recipe's delimiter yields none of the schema's names.
_DELIMITERS = "\t;|,"
# Number of bytes that are searched for the names of columns.
_FRONT_BYTES = 1 << 20
# Number of chunks that are parsed in parallel, and of parsed chunks that wait for the consumer. All
# are in memory.
_WORKERS, _AHEAD = 2, 2


@dataclass(frozen=True, kw_only=True)
class CsvConfig(RowsConfig):
    """Paths, format and columns of a log in text files."""

    kind: Literal["csv"] = "csv"
    format: Format = "auto"
    """``auto`` chooses by the name of each file: tsv for .tsv and .tab, json lines for .jsonl,
    .ndjson and .json, else csv."""
    delimiter: str = ""
    """Character between fields; empty for a comma, or a tab in tsv."""
    quote: str = '"'
    """Quotation character around fields that contain a delimiter or a line end, doubled inside
    them; empty for none.
    """
    columns: tuple[str, ...] = ()
    """Names of all fields in order, for files without a header; empty if the first line of each
    file has them.
    """
    nulls: tuple[str, ...] = ()
    """Texts that mean a missing value, such as NA, in addition to an empty field."""
    encoding: str = "utf-8"
    """Encoding of the text, such as latin-1, cp1252 or utf-16."""
    max_line_bytes: Annotated[int, Size("data.source.max_line_bytes")] = 16 << 20
    """Longest line: memory holds a line."""

    def __post_init__(self) -> None:
        size = parse_bytes(self.max_line_bytes, "data.source.max_line_bytes")
        object.__setattr__(self, "max_line_bytes", size)
        for name, text in (("delimiter", self.delimiter), ("quote", self.quote)):
            if len(text) > 1 or not text.isascii() or text in ("\n", "\r"):
                raise ConfigError(
                    f"data.source.{name} is {text!r}, expected one ASCII character, or nothing"
                )
        try:
            object.__setattr__(self, "encoding", codecs.lookup(self.encoding).name)
            "".encode(self.encoding)  # raises LookupError for a codec from bytes to bytes, such as base64
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"data.source.encoding is {self.encoding!r}, expected one such as utf-8, "
                "latin-1, cp1252 or utf-16"
            ) from error
        if self.quote and self.quote == self.delimiter:
            raise ConfigError(f"data.source.quote is {self.quote!r}, which is also the delimiter")


class CsvSource:
    """Rows of text files in file order; the number of a row is the line on which it begins."""

    divisible = True

    def __init__(
        self,
        config: CsvConfig,
        on_bad_row: OnBadRow | None,
        chunk_bytes: int = CHUNK_BYTES,
        view: View | None = None,
    ) -> None:
        self._view = view or View(schema=config.schema, is_scored=False)
        self.schema = self._view.schema
        self._config = config
        self._on_bad_row = on_bad_row
        self._chunk_bytes = chunk_bytes
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self._names = self._view.names
        self._types = dict(_column_types(self._view))
        self._integers = {f.name for f in self.schema.sparse if self._types.get(f.name) == pl.Int64}

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first file that is not empty."""
        file, content = self._front()
        if _is_json(self._config, file):
            names = list(first_json_fields(content, self._names))
            return [*names, *file.directory_columns(names)]
        names = self._header(file, content).names
        if not set(names) & set(self._names):
            check_present(names, self._names[-1:], file.path, self._advice())
        return [*names, *file.directory_columns(names)]

    def _front(self) -> tuple[InputFile, bytes]:
        """Return the first file that is not empty, and its first bytes."""
        for file in self._files:
            content = next(self._text_chunks(file, _FRONT_BYTES)).content.removeprefix(BOM)
            if content.strip():
                return file, content
        raise no_rows(self._files[0])

    def _header(self, file: InputFile, content: bytes) -> _Header:
        """Return the delimiter and the field names of a file, found in its first bytes.

        A log to score may have another format than the log of the recipe. If the recipe's delimiter
        yields none of the schema's names, other delimiters are tried, and a header is recognized
        even if the recipe says that there is none. A log to score may also lack the labels: then no
        record has all fields, and some have all others."""
        config, names = self._config, set(self._names) - file.directory_columns(self._config.columns).keys()
        default = _delimiter(config, file)
        if default == config.quote:
            raise ConfigError(
                f"data.source.quote is {config.quote!r}, which separates the fields of {file.path}"
            )
        may_have_header = not config.columns or names <= set(config.columns)
        for delimiter in dict.fromkeys([default, *_DELIMITERS] if may_have_header else []):
            with suppress(DataError):
                header = _Header(delimiter, *read_header(content, file.path, delimiter, config.quote))
                if names <= set(header.names) if config.columns else names & set(header.names):
                    return header
        if not config.columns:
            return _Header(default, *read_header(content, file.path, default, config.quote))
        columns = list(config.columns)
        if self._view.is_scored:
            fields = set(map(len, first_records(content, default, config.quote)))
            unlabelled = [name for name in columns if name not in self.schema.label_columns]
            columns = unlabelled if len(columns) not in fields and len(unlabelled) in fields else columns
        return _Header(default, columns, 0, 0)

    def _text_chunks(self, file: InputFile, chunk_bytes: int) -> Iterator[TextChunk]:
        config = self._config
        quote = b"" if _is_json(config, file) else config.quote.encode()
        return read_chunks(file, chunk_bytes, config.max_line_bytes, quote, config.encoding)

    def estimate_rows(self) -> int:
        return estimate_rows(self._files, self._config.max_line_bytes, self._config.encoding)

    def fingerprint(self) -> dict[str, object]:
        return {
            "kind": "csv",
            "files": fingerprint(self._files, self._names),
            "block_bytes": self._chunk_bytes,
        }

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        """Yield the chunks of the share. The text of other chunks is read but not parsed."""
        return in_order(self._tasks(share), self._chunk)

    def _tasks(self, share: ChunkShare) -> Iterator[_Task]:
        bytes_before = 0
        for number, file in enumerate(self._files):
            if share.has_file(number):
                yield from self._file_tasks(share, number, file, bytes_before)
            bytes_before += file.size

    def _file_tasks(
        self, share: ChunkShare, number: int, file: InputFile, bytes_before: int
    ) -> Iterator[_Task]:
        """Yield the chunks of a file, without its header."""
        reader: Delimited | JsonLines | None = None
        given: Mapping[str, str | None] = {}
        has_rows = False
        for piece, chunk in enumerate(self._text_chunks(file, self._chunk_bytes)):
            content, numbers = chunk.content, range(chunk.first_line, chunk.first_line + chunk.lines)
            if reader is None:
                content = content.removeprefix(BOM)
                if not content.strip():
                    continue
                reader, given, header_bytes, header_lines = self._reader(file, content)
                content, numbers = content[header_bytes:], numbers[header_lines:]
            has_rows = has_rows or not (content == b"" or content.isspace())
            index = chunk_index(number, piece)
            if share.has(index, number, piece):
                bytes_done = bytes_before + chunk.bytes_done
                yield _Task(index, number, reader, given, content, numbers, bytes_done)
        if not has_rows and len(self._files) == 1:
            raise no_rows(file)

    def _reader(
        self, file: InputFile, content: bytes
    ) -> tuple[Delimited | JsonLines, Mapping[str, str | None], int, int]:
        """Return a reader for a file that begins with `content`, the columns that its directories
        give, and the length of its header in bytes and in lines.
        """
        config = self._config
        if _is_json(config, file):
            check_json_lines(content, file.path)
            fields = first_json_fields(content, self._names)
            given = self._given(file, list(fields))
            repeated = [name for name, field in fields.items() if field.is_repeated]
            check_present([*fields, *given, *repeated], self._names if fields else (), file.path)
            # A JSON file may also have lists as text with separators, if the schema was written for
            # delimited text.
            features = [f for f in self.schema.sparse if f.traits.lists and not f.traits.derived]
            lists = frozenset(
                name
                for feature in features
                for name in (feature.name, feature.weights)
                if name
                and ((name in fields and isinstance(fields[name].value, list)) or not feature.separator)
            )
            paths = {name: field.path for name, field in fields.items() if len(field.path) > 1}
            reader = JsonLines(path=file.path, lists=lists, nulls=config.nulls, paths=paths)
            return reader, given, 0, 0
        header = self._header(file, content)
        given = self._given(file, header.names)
        has_none = not set(header.names) & set(self._names)
        check_present([*header.names, *given], self._names, file.path, self._advice() if has_none else "")
        delimited = Delimited(
            path=file.path,
            names=tuple(header.names),
            delimiter=header.delimiter,
            quote=config.quote,
            nulls=config.nulls,
        )
        return delimited, given, header.bytes, header.lines

    def _given(self, file: InputFile, own: Sequence[str]) -> dict[str, str | None]:
        """Return the columns to read that the file itself does not have, but its directories."""
        columns = file.directory_columns(own)
        return {name: columns[name] for name in self._names if name in columns}

    def _advice(self) -> str:
        """Return the advice at the end of an error about a header that has none of the schema's
        columns.
        """
        if self._config.columns:
            return ""
        return (
            "; if the first line is a row, write a header before it, or name the fields in "
            "data.source.columns of the recipe"
        )

    def _chunk(self, task: _Task) -> Chunk:
        bad, reader, given = BadRows(self._on_bad_row), task.reader, task.given
        if isinstance(reader, JsonLines):
            names = tuple(name for name in self._names if name not in given)
            frame, lines = reader.parse(task.content, task.numbers, names, bad)
            frame = with_constants(frame, given)
            values = reader.with_lists(frame)
        else:
            self._check_integers(reader, task.content)
            types = {name: kind for name, kind in self._types.items() if name not in given}
            frame, lines = reader.parse(task.content, task.numbers, types, bad)
            frame = values = with_constants(frame, given)
        converter = Converter(
            reader.path,
            lines,
            bad,
            from_text=True,
            optional_user=self._view.optional_user,
            optional_label=self._view.optional_label,
        )
        columns = converter.good_rows(pl.DataFrame(converter.columns(values, self.schema)))
        if not bad.count:
            self._learn_types(frame)
        return Chunk(
            index=task.chunk,
            file=task.file,
            frame=columns,
            rows=converter.rows,
            bytes_done=task.bytes_done,
            bad_rows=bad.count,
            bad_examples=tuple(bad.examples),
            passed_through=converter.passed_through(frame, self._view.pass_through),
        )

    def _check_integers(self, reader: Delimited, content: bytes) -> None:
        """If a field has leading zeros, read integers as text from this chunk on: Polars would read
        007 as 7.

        Integers are not always read as text, because that takes longer: 54 instead of 47 ms for a
        chunk of 16 MiB.
        """
        if self._integers and reader.has_leading_zeros(content):
            self._types.update(dict.fromkeys(self._integers, pl.String))
            self._integers = set()

    def _learn_types(self, frame: pl.DataFrame) -> None:
        """Change a column's type to text if values of this chunk, such as dates, do not fit it.

        Later chunks are then parsed once instead of twice.
        """
        for name, type in list(self._types.items()):
            text = frame[name]
            if text.dtype == pl.String and text.cast(type, strict=False).null_count() > text.null_count():
                self._types[name] = pl.String


class _Header(NamedTuple):
    """Delimiter of a file, and the names of its fields."""

    delimiter: str
    names: list[str]
    bytes: int
    """Number of bytes of the header; 0 if the file has none."""
    lines: int


class _Task(NamedTuple):
    """A text chunk to be parsed."""

    chunk: int
    """Index of the chunk."""
    file: int
    reader: Delimited | JsonLines
    given: Mapping[str, str | None]
    """Columns that the directories of the file give."""
    content: bytes
    """Bytes of the chunk, which are whole lines."""
    numbers: range
    """Line numbers of the chunk in the file."""
    bytes_done: int


def in_order(tasks: Iterator[_Task], run: Callable[[_Task], Chunk]) -> Iterator[Chunk]:
    """Run tasks on threads and yield the results in the order of the tasks.

    A `DataError` that the iterator `tasks` raises is raised again after the results of all earlier
    tasks.
    """
    fault: DataError | None = None
    with ThreadPoolExecutor(_WORKERS, "parse") as pool:
        pending: deque[Future[Chunk]] = deque()
        try:
            while True:
                try:
                    pending.append(pool.submit(run, next(tasks)))
                except (StopIteration, DataError) as error:
                    fault = error if isinstance(error, DataError) else None
                    break
                if len(pending) > _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
    if fault is not None:
        raise fault


def _column_types(view: View) -> Iterator[tuple[str, pl.DataType | type[pl.DataType]]]:
    """Yield the name of each column, and the type with which it is read first.

    The type is text if a column has several roles that need different types.
    """
    schema = view.schema
    # Integers are parsed faster than text.
    roles: list[tuple[str, type[pl.DataType]]] = [
        (name, _label_type(rule, has_several=bool(schema.labels)))
        for name, rule in zip(schema.label_columns, schema.label_rules, strict=True)
    ]
    roles += [(feature.source, pl.String if feature.decimal else pl.Float64) for feature in schema.dense]
    roles += [(schema.weight, pl.Float64)]
    roles += [
        (f.name, pl.Int64 if f.type == "integer" and not f.traits.lists else pl.String)
        for f in schema.sparse
    ]
    roles += [(f.weights, pl.String) for f in schema.weighted]
    types = dict(roles)
    roles += [(name, types.get(name, pl.String)) for name in (schema.user, schema.session)]
    roles += [(schema.time, pl.String if schema.time_format else pl.Int64)]
    roles += [(name, pl.String) for name in view.pass_through]
    for name in view.names:
        role_types = {type for role, type in roles if role == name}
        if role_types == {pl.Int64, pl.Float64}:  # the column is a category and a number
            role_types.remove(pl.Float64)
        yield name, role_types.pop() if len(role_types) == 1 else pl.String


def _label_type(rule: str | LabelRule, *, has_several: bool) -> type[pl.DataType]:
    if isinstance(rule, LabelRule) and rule.equals:
        return pl.String
    return pl.UInt8 if isinstance(rule, str) and not has_several else pl.Float64


def _is_json(config: CsvConfig, file: InputFile) -> bool:
    if config.format != "auto" or bare_name(file.path).endswith(JSON_SUFFIXES):
        return config.format in ("auto", "jsonl")
    # Neither standard input nor the member of an archive has a suffix.
    is_unnamed = file.path == STANDARD_INPUT or file.path.lower().endswith(".zip")
    return (
        is_unnamed
        and next(read_chunks(file, _FRONT_BYTES, config.max_line_bytes)).content.lstrip()[:1] == b"{"
    )


def _delimiter(config: CsvConfig, file: InputFile) -> str:
    is_tsv = config.format == "tsv" or (
        config.format == "auto" and bare_name(file.path).endswith(TSV_SUFFIXES)
    )
    return config.delimiter or ("\t" if is_tsv else ",")
