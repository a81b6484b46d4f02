"""CSV, TSV and JSON lines with any columns, by a schema in the recipe.

Text knows no types, so the schema says them: the label, dense columns and times are numbers (or words and dates that
stand for some), and a category is text, unless the schema calls it integer: what looks like a number in the first
gigabyte may not be one in the last.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import polars as pl

from stratarec.data.schema import LabelRule, Schema
from stratarec.data.sources.base import WHOLE, Chunk, ChunkShare, OnBadRow, Size, View, chunk_index, set_size
from stratarec.data.sources.blocks import BLOCK_BYTES, CODECS, BadRows, Block, blocks, estimate_rows
from stratarec.data.sources.columns import check_there
from stratarec.data.sources.delimited import Delimited, Parsed, read_header
from stratarec.data.sources.files import InputFile, expand, fingerprint, no_rows
from stratarec.data.sources.json_lines import JsonLines, check_lines, first_values
from stratarec.data.sources.typed import Converter, TextConverter
from stratarec.errors import ConfigError, DataError

Format = Literal["auto", "csv", "tsv", "jsonl"]

_TABS, _JSON = (".tsv", ".tab"), (".jsonl", ".ndjson", ".json")
# Delimiters that are tried where the recipe's gives none of the wanted names.
_DELIMITERS = "\t;|,"
# Bytes that are looked at for the names of columns.
_FRONT = 1 << 20
_BOM = b"\xef\xbb\xbf"
# Blocks that are parsed at a time, and ahead of what is asked for: memory holds so many.
_WORKERS, _AHEAD = 2, 2


@dataclass(frozen=True, kw_only=True)
class CsvConfig:
    """Where the log lies, how it is written, and what its columns are."""

    kind: Literal["csv"] = "csv"
    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs; .gz, .zst and .bz2 are decompressed."""
    schema: Schema = field(default_factory=Schema)
    """The columns to use; others are not read."""
    format: Format = "auto"
    """``auto`` goes by the name of each file: .tsv and .tab, .jsonl, .ndjson and .json, else csv."""
    delimiter: str = ""
    """Between fields; empty for a comma, and a tab in tsv."""
    quote: str = '"'
    """Around fields that hold a delimiter or a line end, doubled inside of them; empty where nothing is quoted."""
    columns: tuple[str, ...] = ()
    """Names of all fields in order, for files without a header; empty where the first line of each file has them."""
    nulls: tuple[str, ...] = ()
    """What stands for a missing value, such as NA, besides an empty field."""
    encoding: str = "utf-8"
    """Of the text, such as latin-1, cp1252 or utf-16."""
    max_line_bytes: Annotated[int, Size("data.source.max_line_bytes")] = 16 << 20
    """Longest line: memory holds a line."""

    def __post_init__(self) -> None:
        set_size(self, "max_line_bytes", "data.source.max_line_bytes")
        for name, text in (("delimiter", self.delimiter), ("quote", self.quote)):
            if len(text) > 1 or not text.isascii() or text in ("\n", "\r"):
                raise ConfigError(f"data.source.{name} is {text!r}, expected one ASCII character, or nothing")
        try:
            object.__setattr__(self, "encoding", codecs.lookup(self.encoding).name)
            "".encode(self.encoding)  # others turn bytes into bytes
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"data.source.encoding is {self.encoding!r}, expected one such as utf-8, latin-1, cp1252 or utf-16"
            ) from error
        if self.quote and self.quote == self.delimiter:
            raise ConfigError(f"data.source.quote is {self.quote!r}, which is the delimiter, too")


class CsvSource:
    """Rows of text files in file order; a row is known by the line on which it begins."""

    divisible = True
    kind = "csv"

    def __init__(
        self, config: CsvConfig, on_bad_row: OnBadRow, block_bytes: int = BLOCK_BYTES, view: View | None = None
    ) -> None:
        self._view = view or View(schema=config.schema)
        self.schema, self._config = self._view.schema, config
        self._on_bad_row, self._block_bytes = on_bad_row, block_bytes
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self._names = self._view.names
        self._kinds = dict(_kinds(self._view))

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first file that is not empty."""
        file, content = self._front()
        if _is_json(self._config, file):
            return list(first_values(content))
        header = self._header(file, content)
        if self.kind == "csv" and not set(header.names) & set(self._names):
            check_there(header.names, self._names[-1], file.path, self._advice())
        return header.names

    def _front(self) -> tuple[InputFile, bytes]:
        """Return the first file that is not empty, and its beginning."""
        for file in self._files:
            content = next(self._blocks(file, _FRONT)).content.removeprefix(_BOM)
            if content.strip():
                return file, content
        raise no_rows(self._files[0])

    def _header(self, file: InputFile, content: bytes) -> _Header:
        """Return the names of the fields of a file by its beginning.

        A file may be written otherwise than the recipe says, such as a log to score: another delimiter is used where
        the recipe's gives none of the names, and a header is read where the recipe says that there is none.
        """
        config, wanted = self._config, set(self._names)
        usual = _delimiter(config, file)
        if usual == config.quote:
            raise ConfigError(f"data.source.quote is {config.quote!r}, which divides the fields of {file.path}")
        tried = dict.fromkeys([usual, *_DELIMITERS] if not config.columns or wanted <= set(config.columns) else [])
        for delimiter in tried:
            with suppress(DataError):
                header = _Header(delimiter, *read_header(content, file.path, delimiter, config.quote))
                names = set(header.names)
                if wanted <= names if config.columns else wanted & names:
                    return header
        if config.columns:
            return _Header(usual, list(config.columns), 0, 0)
        return _Header(usual, *read_header(content, file.path, usual, config.quote))

    def _blocks(self, file: InputFile, block_bytes: int) -> Iterator[Block]:
        config = self._config
        quote = b"" if _is_json(config, file) else config.quote.encode()
        return blocks((file,), block_bytes, config.max_line_bytes, quote, config.encoding)

    def estimate_rows(self) -> int:
        return estimate_rows(self._files, self._config.max_line_bytes, self._config.encoding)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": self.kind, "files": fingerprint(self._files), "block_bytes": self._block_bytes}

    def chunks(self, workspace: Path, share: ChunkShare = WHOLE) -> Iterator[Chunk]:
        """A chunk a block; of files in the share, blocks that are not wanted are read but not parsed."""
        return in_order(self._tasks(share), self._chunk)

    def _tasks(self, share: ChunkShare) -> Iterator[_Task]:
        before = 0
        for number, file in enumerate(self._files):
            if share.has_file(number):
                yield from self._tasks_of(share, number, file, before)
            before += file.size

    def _tasks_of(self, share: ChunkShare, number: int, file: InputFile, before: int) -> Iterator[_Task]:
        """Blocks of a file, without its header."""
        reader: Delimited | JsonLines | None = None
        rows = False
        for piece, block in enumerate(self._blocks(file, self._block_bytes)):
            content, numbers = block.content, range(block.first_line, block.first_line + block.lines)
            if reader is None:
                content = content.removeprefix(_BOM)
                if not content.strip():
                    continue
                reader, skipped, lines = self._reader(file, content)
                content, numbers = content[skipped:], numbers[lines:]
            rows = rows or not (content == b"" or content.isspace())
            index = chunk_index(number, piece)
            if share.has(index, number, piece):
                done = before + block.bytes_done
                yield _Task(index=index, reader=reader, content=content, numbers=numbers, bytes_done=done)
        if not rows and len(self._files) == 1:
            raise no_rows(file)

    def _reader(self, file: InputFile, content: bytes) -> tuple[Delimited | JsonLines, int, int]:
        """How to read a file, by its beginning; and the bytes and lines of its header."""
        config = self._config
        if _is_json(config, file):
            check_lines(content, file.path)
            values = first_values(content)
            for name in self._names if values else ():
                check_there(list(values), name, file.path)
            # Lists may be text that is split, as in the text files that the schema was written for.
            of_lists = [f for f in self.schema.sparse if f.traits.lists and not f.traits.derived]
            lists = frozenset(
                name
                for feature in of_lists
                for name in (feature.name, feature.weights)
                if name and (isinstance(values.get(name), list) or not feature.separator)
            )
            return JsonLines(path=file.path, lists=lists, nulls=config.nulls), 0, 0
        header = self._header(file, content)
        none = not set(header.names) & set(self._names)
        for name in self._names:
            check_there(header.names, name, file.path, self._advice() if none else "")
        names, delimiter = tuple(header.names), header.delimiter
        return (
            Delimited(path=file.path, names=names, delimiter=delimiter, quote=config.quote, nulls=config.nulls),
            header.bytes,
            header.lines,
        )

    def _advice(self) -> str:
        """Return what to do about a header without any wanted column."""
        if self.kind != "csv" or self._config.columns:
            return ""
        return (
            "; if the first line is a row, write a header before it, or name the fields in data.source.columns of the "
            "recipe"
        )

    def _chunk(self, task: _Task) -> Chunk:
        bad = BadRows(self._on_bad_row)
        frame, lines = self._parse(task, bad)
        converter = TextConverter(task.reader.path, lines, bad)
        typed = task.reader.with_lists(frame) if isinstance(task.reader, JsonLines) else frame
        converted = converter.good(self._columns(typed, converter))
        if not bad.count:
            self._learn(frame)
        return Chunk(
            index=task.index,
            file=self.files.index(task.reader.path),
            frame=converted,
            rows=converter.rows,
            bytes_done=task.bytes_done,
            bad_rows=bad.count,
            bad_examples=tuple(bad.examples),
            kept=converter.kept(frame, self._view.keep) if self._view.keep else None,
        )

    def _columns(self, frame: pl.DataFrame, converter: Converter) -> dict[str, pl.Series]:
        """Columns as `Source` promises them, the bad rows among them."""
        return converter.columns(frame, self.schema)

    def _parse(self, task: _Task, bad: BadRows) -> Parsed:
        if isinstance(task.reader, JsonLines):
            return task.reader.parse(task.content, task.numbers, self._names, bad)
        return task.reader.parse(task.content, task.numbers, dict(self._kinds), bad)

    def _learn(self, frame: pl.DataFrame) -> None:
        """Columns that had to be read as text, and are fine as that, such as dates, are read as text from now on."""
        for name, kind in list(self._kinds.items()):
            text = frame[name]
            if text.dtype == pl.String and text.cast(kind, strict=False).null_count() > text.null_count():
                self._kinds[name] = pl.String


class _Header(NamedTuple):
    """Names of the fields of a file, and what divides them."""

    delimiter: str
    names: list[str]
    bytes: int
    """Size of the header; 0 where there is none."""
    lines: int


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A block to be parsed."""

    index: int
    reader: Delimited | JsonLines
    content: bytes
    """Whole lines."""
    numbers: range
    """Of the lines in the file."""
    bytes_done: int


def in_order(tasks: Iterator[_Task], run: Callable[[_Task], Chunk]) -> Iterator[Chunk]:
    """`run` of each task on threads, in the order of the tasks; a fault of theirs comes behind those before it."""
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


def _kinds(view: View) -> Iterator[tuple[str, pl.DataType | type[pl.DataType]]]:
    """What each column is read as at first: text, where it stands in several places of the schema that differ."""
    schema = view.schema
    # Whole numbers are parsed faster; others are read as text first.
    roles: list[tuple[str, type[pl.DataType]]] = [
        (name, _label_kind(rule, many=bool(schema.labels)))
        for name, rule in zip(schema.label_columns, schema.label_rules, strict=True)
    ]
    roles += [(feature.name, pl.Float64) for feature in schema.dense]
    roles += [(schema.weight, pl.Float64)]
    roles += [(feature.name, pl.String) for feature in schema.sparse]  # as integers 007 would be 7
    roles += [(f.weights, pl.String) for f in schema.weighted]
    kinds = dict(roles)
    roles += [(name, kinds.get(name, pl.String)) for name in (schema.user, schema.session)]
    roles += [(schema.time, pl.String if schema.time_format else pl.Int64)]
    roles += [(name, pl.String) for name in view.keep]
    for name in view.names:
        found = {kind for role, kind in roles if role == name}
        yield name, found.pop() if len(found) == 1 else pl.String


def _label_kind(rule: str | LabelRule, *, many: bool) -> type[pl.DataType]:
    if isinstance(rule, LabelRule) and rule.equals:
        return pl.String
    return pl.UInt8 if isinstance(rule, str) and not many else pl.Float64


def _is_json(config: CsvConfig, file: InputFile) -> bool:
    return config.format == "jsonl" or (config.format == "auto" and _bare(file).endswith(_JSON))


def _delimiter(config: CsvConfig, file: InputFile) -> str:
    tabbed = config.format == "tsv" or (config.format == "auto" and _bare(file).endswith(_TABS))
    return config.delimiter or ("\t" if tabbed else ",")


def _bare(file: InputFile) -> str:
    """The name without what says how it is compressed."""
    name = file.path.lower()
    return next((name.removesuffix(ending) for ending in CODECS if name.endswith(ending)), name)
