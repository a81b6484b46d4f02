"""Interface of the sources of raw logs. A source has a schema and yields its rows as frames, always
in the same order.

A frame is a polars DataFrame with these columns; a column has one type in all frames of a source.

- Label: UInt8, 0 or 1. Null marks a positive event that is not a sample and is only used in
  histories. With several labels, each is 0, 1 or `UNKNOWN`.
- Weight of the sample, if the schema names one: Float64.
- Dense features: Float32 or Float64, null where missing.
- Sparse features: String, Int64, UInt64, or a List of these, null where missing. The weights of a
  feature's values are a List of Float32 with the name `weights_of`. ``history`` features are
  missing: `prepare` derives them.
- Time (Int64), session and user (String, Int64 or UInt64), if the schema names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BeforeValidator

from stratarec.config.units import parse_bytes
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError

LIMITS = ("max_line_bytes",)
"""Options that limit what may be read, but do not change the result."""


def Size(field: str) -> BeforeValidator:
    """Return a validator that converts text such as ``16MiB`` in a recipe to bytes."""
    return BeforeValidator(partial(parse_bytes, field=field))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of a source, to which each kind adds its own."""

    kind: str

    def of_file(self, file: str) -> LogConfig:
        """Return the settings for the log of the next period; `ConfigError` if samples do not come
        from logs.
        """
        raise ConfigError(
            f"{file} cannot continue a run whose data.source.kind is {self.kind}: its "
            "samples do not come from logs"
        )


@dataclass(frozen=True, kw_only=True)
class RowsConfig(LogConfig):
    """Settings of a source whose samples are rows of files, so that rows of other files can be
    scored.
    """

    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs; gzip, zstd, bz2, xz, lz4 and zip are decompressed. A
    directory such as ``day=2024-03-01`` gives the column ``day`` of the files in it, unless they
    have this column."""
    schema: Schema = field(default_factory=Schema)
    """Columns to use, and the role of each. Other columns are not read."""

    def of_file(self, file: str) -> RowsConfig:
        return replace(self, paths=(file,))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One frame of raw samples, with at most a few hundred thousand rows."""

    index: int
    """Index of the chunk in its source. Indexes increase, with gaps between files. The chunk with
    an index has the same rows whenever the same files are read."""
    file: int | NDArray[np.int32]
    """Index of the input file, used for splits by file; 0 if there are no files. If rows come from
    several files, ``[N]`` indexes."""
    frame: pl.DataFrame
    rows: NDArray[np.int64] | None = None
    """``[N]`` row number of each sample in its file, counted from 1 as in messages, strictly
    increasing. None if samples are not rows of a file; they are then numbered in the order of the
    source."""
    bytes_done: int
    """Input bytes (or rows of generated data) up to the end of this chunk. In the last chunk,
    `Source.total_bytes`.
    """
    bad_rows: int = 0
    """Rows that `on_bad_row: skip` left out."""
    bad_examples: tuple[str, ...] = ()
    """Error messages for some of the bad rows. Each names file, row, field and the expected
    value.
    """
    note: str = ""
    """Message about the rows up to this chunk, to be shown to the user."""
    passed_through: pl.DataFrame | None = None
    """The columns that `View.pass_through` names, with the values and types of the file."""


# Maximum number of chunks in a file. A chunk of text has 16 MiB.
_FILE_CHUNKS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ChunkShare:
    """Selection of a source's chunks: some files, every n-th piece (`stripes`) of each, and no
    completed chunks.
    """

    files: range | None = None
    """Indexes of the files; None for all."""
    stripe: int = 0
    stripes: int = 1
    """The share includes piece p of a file if ``p % stripes == stripe``."""
    done: frozenset[int] = frozenset()
    """Indexes of completed chunks."""

    def has_file(self, file: int) -> bool:
        """Whether the share includes chunks of the file with index `file`."""
        return self.files is None or file in self.files

    def has(self, index: int, file: int, piece: int) -> bool:
        """Whether the share includes the chunk `index`, which is piece `piece` of file `file`."""
        return self.has_file(file) and piece % self.stripes == self.stripe and index not in self.done


ALL_CHUNKS = ChunkShare()


def chunk_index(file: int, piece: int) -> int:
    """Return the chunk index of a piece of a file. It does not depend on the number of pieces of
    earlier files.
    """
    return file * _FILE_CHUNKS + piece


class Source(Protocol):
    """Raw logs of one format.

    `chunks` raises `DataError` for the first bad row, unless the source was made with
    ``on_bad_row="skip"``.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def files(self) -> tuple[str, ...]:
        """Input files; empty for generated data."""
        ...

    @property
    def total_bytes(self) -> int:
        """Size of the input, for progress only; the compressed size if the input is compressed."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether a chunk can be read without the chunks before it. If so, rows are numbered within
        their file.
        """
        ...

    def estimate_rows(self) -> int:
        """Estimate the number of samples within a factor of about two, from which the number of
        shards is chosen.
        """
        ...

    def fingerprint(self) -> dict[str, object]:
        """Return JSON that identifies the input's content and configuration. `prepare` resumes only
        with equal JSON.
        """
        ...

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        """Yield the chunks of a share in order. If the source is not divisible, the share must have
        all files.

        A source may write temporary files to `workspace`, a directory that remains when `prepare`
        is interrupted.
        """
        ...


class RowsSource(Source, Protocol):
    """Source whose samples are rows of files. It reads the columns of a `View`, or those of its
    settings.
    """

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first file with rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class View:
    """Selection of the columns to read from a log: a schema's columns, with or without labels, and
    further columns.
    """

    schema: Schema
    label: bool = True
    """Whether the label is read."""
    pass_through: tuple[str, ...] = ()
    """Additional columns, which are returned unchanged."""
    is_scored: bool = True
    """Whether the rows are to be scored, not prepared. Such a log may have another text format than
    the recipe.
    """
    optional_user: bool = False
    """Whether a row without a user is a good row, as in a log of visitors of whom some are not
    logged in.
    """
    optional_label: bool = False
    """Whether a row without a label is a good row. The label is then `UNKNOWN`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns to read, each once."""
        schema, label = self.schema, self.schema.label_columns if self.label else ()
        histories = {feature.name for feature in schema.histories}
        features = [name for name in schema.scored_columns if name not in histories]
        keys = [name for name in (schema.weight, schema.time, schema.session, schema.user) if name]
        return tuple(dict.fromkeys((*label, *features, *keys, *self.pass_through)))
