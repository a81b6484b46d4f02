"""Interface of the sources of raw logs: a schema, and rows as a deterministic sequence of frames.

A frame is a polars DataFrame with these columns; a column has one type in all frames of a source.

- Label: UInt8, 0 or 1; null for a positive event that is no sample and only enters histories. With several labels, each
  is 0, 1 or `UNKNOWN`.
- Weight of the sample, if the schema names one: Float64.
- Dense features: Float32 or Float64, null where missing.
- Sparse features: String, Int64, UInt64, or a List of these, null where missing. The weights of a feature's values are
  a List of Float32 with the name `weights_of`. ``history`` features are missing: `prepare` derives them.
- Time (Int64), session and user (String, Int64 or UInt64), if the schema names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BeforeValidator

from stratarec.config.units import parse_bytes
from stratarec.data.schema import Schema

LIMITS = ("max_line_bytes", "max_row_group_bytes")
"""Options that decide whether a log is read, but not what is read."""


def Size(field: str) -> BeforeValidator:
    """Return a validator that converts text such as ``16MiB`` in a recipe to bytes."""
    return BeforeValidator(partial(parse_bytes, field=field))


def set_size(config: object, name: str, field: str) -> None:
    """Convert a size to bytes in a configuration that was made in Python."""
    object.__setattr__(config, name, parse_bytes(getattr(config, name), field))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One frame of raw samples, with at most a few hundred thousand rows."""

    index: int
    """Place in the sequence of the source: rises, with gaps between files. A chunk with the same index has the same
    rows whenever the same files are read."""
    file: int | NDArray[np.int32]
    """Index of the input file, for splits by file, 0 if there is none; ``[N]`` if the rows come from several files."""
    frame: pl.DataFrame
    rows: NDArray[np.int64] | None = None
    """``[N]`` row of the file that each sample was made of, strictly rising, counted from 1 as in messages. None if
    samples are not rows of a file, and are counted in the order of the source."""
    bytes_done: int
    """Input bytes (or rows, for generated data) read up to the end of this chunk, of `Source.total_bytes`."""
    bad_rows: int = 0
    """Rows that `on_bad_row: skip` left out."""
    bad_examples: tuple[str, ...] = ()
    """Some error messages of these rows: file, row, field, what was expected."""
    note: str = ""
    """Message about the rows up to this chunk, to be shown to the user."""
    passed_through: pl.DataFrame | None = None
    """Columns of `View.pass_through`, as the file has them."""


# Largest number of chunks in a file: text is cut into blocks of 16 MiB.
_FILE_CHUNKS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ChunkShare:
    """The chunks of a source that a reader needs: those of some files, or every n-th piece, without completed ones."""

    files: range | None = None
    """Indexes of the files; None for all."""
    stripe: int = 0
    stripes: int = 1
    """The share has the pieces of a file whose number leaves the remainder `stripe` when divided by `stripes`."""
    done: frozenset[int] = frozenset()
    """Indexes of completed chunks."""

    def has_file(self, file: int) -> bool:
        """Whether the share has any chunk of a file."""
        return self.files is None or file in self.files

    def has(self, index: int, file: int, piece: int) -> bool:
        """Whether the share has a chunk, which is in a piece of a file."""
        return self.has_file(file) and piece % self.stripes == self.stripe and index not in self.done


ALL_CHUNKS = ChunkShare()


def chunk_index(file: int, piece: int) -> int:
    """Return the index of a piece of a file; it does not depend on the number of pieces of earlier files."""
    return file * _FILE_CHUNKS + piece


class Source(Protocol):
    """Raw logs of one format.

    `chunks` raises `DataError` for the first bad row, unless the source was made with ``on_bad_row="skip"``.
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
        """Whether chunks can be made without the chunks before them, and rows are numbered within their file."""
        ...

    def estimate_rows(self) -> int:
        """Estimate the number of samples within a factor of about two; decides the number of shards."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """Return JSON that changes with the content of the input or its configuration, for a resumed `prepare`."""
        ...

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        """Yield the chunks of a share in order; if the source is not divisible, the share must have all files.

        A source may write temporary files into `workspace`, a directory that survives an interruption of `prepare`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class View:
    """The columns of a log to read, if they are not exactly those of its schema."""

    schema: Schema
    label: bool = True
    """Whether the log has a label."""
    pass_through: tuple[str, ...] = ()
    """Columns to return as they are in the file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns to read, each once."""
        schema, label = self.schema, self.schema.label_columns if self.label else ()
        features = [feature.name for feature in schema.dense]
        features += [feature.name for feature in schema.sparse if not feature.traits.derived]
        features += [feature.weights for feature in schema.weighted]
        keys = [name for name in (schema.weight, schema.time, schema.session, schema.user) if name]
        return tuple(dict.fromkeys((*label, *features, *keys, *self.pass_through)))
