"""What a source of raw logs gives: its schema, and its rows as a deterministic sequence of frames.

A frame is a polars DataFrame with the label (UInt8, 0 or 1; null for a positive event that is no sample and only enters
histories; where there are several, each 0, 1 or `UNKNOWN`), the weight (Float64) where the schema names one, dense
columns (Float32 or Float64, null where missing), sparse columns (String, Int64 or UInt64, or a List of those; null
where missing), the weights of a feature's values (a List of Float32, by `weights_of` its name), and the time (Int64),
session and user columns (String, Int64 or UInt64) that the schema names; a column has one type in all frames of a
source. ``history`` features are not in it: `prepare` derives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BeforeValidator

from stratarec.config.units import parse_bytes
from stratarec.data.schema import Schema

LIMITS = ("max_line_bytes", "max_row_group_bytes")
"""They say whether a log is read, and nothing of what it becomes."""


def Size(field: str) -> BeforeValidator:
    """What makes text such as ``16MiB`` the bytes of `field`, where a recipe is read."""
    return BeforeValidator(partial(parse_bytes, field=field))


def set_size(config: object, name: str, field: str) -> None:
    """The same where the configuration is made in Python."""
    object.__setattr__(config, name, parse_bytes(getattr(config, name), field))


OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One frame of raw samples, a few hundred thousand rows at most."""

    index: int
    """Place in the source's sequence: rises, with gaps between files, and means the same rows at every run over the
    same files."""
    file: int | NDArray[np.int32]
    """Index of the input file that the rows came from, for splits by file; 0 when there are none. ``[N]`` where rows
    come from several."""
    frame: pl.DataFrame
    rows: NDArray[np.int64] | None = None
    """``[N]`` row of the file that each sample was made of, strictly rising, counted from 1 as in messages; None where
    samples are not one a row of a file, and are then counted in the order of the source."""
    bytes_done: int
    """Input bytes (or rows, for generated data) consumed up to the end of this chunk; of `Source.total_bytes`."""
    bad_rows: int = 0
    """Rows that `on_bad_row: skip` left out."""
    bad_examples: tuple[str, ...] = ()
    """A few of their messages: file, row, field, what was expected."""
    note: str = ""
    """What people should hear of the rows up to here."""
    kept: pl.DataFrame | None = None
    """Columns that are passed through, as the file has them; see `View`."""


# Chunks that a file has at most: text is cut into blocks of 16 MiB.
_FILE_CHUNKS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ChunkShare:
    """Which chunks of a source are wanted: those of some files, or every so manieth of these, and not those that are
    there already."""

    files: range | None = None
    """Indexes of the files; None for all."""
    stripe: int = 0
    stripes: int = 1
    """Of a file's pieces 0, 1, ... those are wanted that leave the remainder `stripe`."""
    done: frozenset[int] = frozenset()
    """Indexes of chunks that are not wanted."""

    def has_file(self, file: int) -> bool:
        """Whether any chunk of a file is wanted."""
        return self.files is None or file in self.files

    def has(self, index: int, file: int, piece: int) -> bool:
        """Whether a chunk is wanted, which lies in a piece of a file."""
        return self.has_file(file) and piece % self.stripes == self.stripe and index not in self.done


WHOLE = ChunkShare()


def chunk_index(file: int, piece: int) -> int:
    """Place of a piece of a file, without counting those of the files before it."""
    return file * _FILE_CHUNKS + piece


class Source(Protocol):
    """Raw logs of one format.

    Raises `DataError` from `chunks` at the first bad row unless the source was made with ``on_bad_row="skip"``.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def files(self) -> tuple[str, ...]:
        """Input files; empty for generated data."""
        ...

    @property
    def total_bytes(self) -> int:
        """For progress only; compressed size where the input is compressed."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether `chunks` of a file can be made without those before it, and rows are numbered within their file."""
        ...

    def estimate_rows(self) -> int:
        """Samples this source will give, to within a factor of two or so; sizes the shards."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """JSON that changes when the content of the input or its configuration does; a resumed `prepare` compares
        it."""
        ...

    def chunks(self, workspace: Path, share: ChunkShare = WHOLE) -> Iterator[Chunk]:
        """The chunks of a share in order; where the source is not divisible, a share of all files. A source may spool
        into `workspace`, its own directory, which survives an interruption and is removed when `prepare` is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class View:
    """Which columns of a log are read, where that is not all that a schema names and nothing else."""

    schema: Schema
    label: bool = True
    """Whether the log has a label."""
    keep: tuple[str, ...] = ()
    """Columns to pass through."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read, each once."""
        schema, label = self.schema, self.schema.label_columns if self.label else ()
        features = [feature.name for feature in schema.dense]
        features += [feature.name for feature in schema.sparse if not feature.traits.derived]
        features += [feature.weights for feature in schema.weighted]
        keys = [name for name in (schema.weight, schema.time, schema.session, schema.user) if name]
        return tuple(dict.fromkeys((*label, *features, *keys, *self.keep)))
