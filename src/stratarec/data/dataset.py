"""A prepared data set on disk: it describes itself, and is checked by hash when it is opened.

    stratarec.json                      says that this is a data set of StrataRec's making
    dataset.json                        schema, counts, splits, groups, vocabulary sizes, hashes, format version
    vocabulary/<name>.parquet           value, id, count
    <split>/shard-00000.parquet         @label, dense (float32), ids (int32, or lists of int32), @time, @row
    <split>/shard-00000.tables.parquet  the tables that pointers point into: one row a row group of the samples, a
                                        column ``<table>/<column>`` holding the whole column as one list

Without groups there are no tables: histories are lists, and @user and @session columns of the samples. Only this
module and `blocks` know the layout; `prepare` writes and the loader reads through them. What begins with @ is in
`names`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.blocks import Block, Encoded
from stratarec.data.names import LABEL, ROW, SESSION, TIME, USER
from stratarec.data.reading import BlockReader
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SPLITS
from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import DatasetError
from stratarec.files import file_hash, read_json, reading, write_atomic, write_json
from stratarec.hashes import file_hashes
from stratarec.ownership import MARKER, Kind, kind_of

FORMAT = 4
ROW_GROUP = 1 << 16
MANIFEST = "dataset.json"
DATASET = Kind(name="data set", field="data.path", content=(MANIFEST, "vocabulary", *SPLITS))
LEVEL = 1
"""Of zstd."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file and what it must be."""

    path: str
    """Relative to the data set."""
    bytes: int
    hash: str
    """xxh3_128 of the file."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Samples, and the tables that they point into."""

    path: str
    """Relative to the data set."""
    samples: int
    row_groups: tuple[int, ...]
    """Samples of each row group."""
    bytes: int
    hash: str
    """xxh3_128 of the file."""
    tables: StoredFile | None = None
    """Only where the data set has groups."""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Shard:
        tables = content.get("tables")
        changes = {"row_groups": tuple(content["row_groups"]), "tables": StoredFile(**tables) if tables else None}
        return cls(**{**content, **changes})


@dataclass(frozen=True, kw_only=True)
class VocabularyInfo:
    """One vocabulary and its file."""

    rows: int
    """Rows that a table needs: values and tail buckets."""
    values: int
    tail_buckets: int
    digest: str
    """xxh3_128 of the values in order of id."""
    path: str
    bytes: int
    hash: str


def write_shard(root: Path, split: str, number: int, encoded: Encoded) -> Shard:
    """Write encoded samples and their tables as shard `number` of `split`."""
    blocks = list(encoded.blocks(ROW_GROUP))
    name = f"{split}/shard-{number:05d}"
    samples = _store(root, f"{name}.parquet", [block.samples for block in blocks])
    tables = None
    if any(block.tables for block in blocks):
        tables = _store(root, f"{name}.tables.parquet", [_one_row(block) for block in blocks])
    groups = tuple(block.samples.num_rows for block in blocks)
    return Shard(**vars(samples), samples=sum(groups), row_groups=groups, tables=tables)


def _store(root: Path, relative: str, parts: Sequence[pa.Table]) -> StoredFile:
    """Write each part as one row group."""
    path = root / relative

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, parts[0].schema, **parquet_options(parts[0])) as writer:
            for part in parts:
                writer.write_table(part, row_group_size=max(part.num_rows, 1))

    write_atomic(path, write)
    return StoredFile(path=relative, bytes=path.stat().st_size, hash=file_hash(path))


def parquet_options(sample: pa.Table) -> dict[str, Any]:
    """Codec, level, and for each column the encoding that is the smallest on `sample`.

    Dictionary indices are packed by the bit, which hides from zstd what repeats by the byte, so which one is smaller is
    a matter of the column: pointers go as differences, precise numbers plain, categories by dictionary.
    """
    chosen: dict[str, str | None] = {}
    for name, path in _leaves(sample.schema):
        # A feature may be called what Parquet calls the values of another one's lists: a dictionary suits any type.
        chosen[path] = None if path in chosen else _smallest(sample.select([name]), path)
    return {
        "compression": "zstd",
        "compression_level": LEVEL,
        "use_dictionary": [path for path, encoding in chosen.items() if encoding is None],
        "column_encoding": {path: encoding for path, encoding in chosen.items() if encoding is not None},
    }


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Column and the path of what it holds, lists unfolded."""
    for column in schema:
        kind, path = column.type, column.name
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind, path = kind.value_type, f"{path}.list.element"
        yield column.name, path


def _smallest(column: pa.Table, path: str) -> str | None:
    """The encoding of the smallest file, ties by order; None for a dictionary."""
    sizes: dict[str | None, int] = {}
    for encoding in (None, "PLAIN", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"):
        options: dict[str, Any] = {"use_dictionary": True}
        if encoding is not None:
            options = {"use_dictionary": False, "column_encoding": {path: encoding}}
        buffer = pa.BufferOutputStream()
        try:
            pq.write_table(column, buffer, compression="zstd", compression_level=LEVEL, **options)
        except (pa.ArrowException, OSError):  # an encoding that this type has not
            continue
        sizes[encoding] = buffer.getvalue().size
    return min(sizes, key=lambda encoding: sizes[encoding])


def _one_row(block: Block) -> pa.Table:
    columns = {}
    for table, content in block.tables.items():
        for name in content.column_names:
            values = content[name].combine_chunks()
            offsets = pa.array([0, len(values)], pa.int32())
            columns[f"{table}/{name}"] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


def write_vocabulary(root: Path, name: str, vocabulary: Vocabulary) -> VocabularyInfo:
    """Write a vocabulary's table."""
    relative = f"vocabulary/{name}.parquet"
    table = vocabulary.frame().to_arrow()
    write_atomic(root / relative, lambda file: pq.write_table(table, file, compression="zstd"))
    return VocabularyInfo(
        rows=vocabulary.rows,
        values=len(vocabulary.values),
        tail_buckets=vocabulary.tail_buckets,
        digest=vocabulary.digest,
        path=relative,
        bytes=(root / relative).stat().st_size,
        hash=file_hash(root / relative),
    )


def write_manifest(
    root: Path,
    *,
    name: str,
    schema: Schema,
    groups: Mapping[str, Sequence[str]] | None,
    splits: Mapping[str, Sequence[Shard]],
    positives: Mapping[str, int],
    vocabularies: Mapping[str, VocabularyInfo],
    about: Mapping[str, Any],
) -> None:
    """Write ``dataset.json``, last of all. `about` says how the data set was made."""
    content = {
        "format": FORMAT,
        "name": name,
        "schema": asdict(schema),
        "groups": None if groups is None else {group: list(names) for group, names in groups.items()},
        "splits": {split: [asdict(shard) for shard in shards] for split, shards in splits.items()},
        "positives": dict(positives),
        "vocabularies": {key: asdict(info) for key, info in vocabularies.items()},
        "about": dict(about),
    }
    content["hash"] = _manifest_hash(content)
    write_json(root / MANIFEST, content)


def _manifest_hash(content: Mapping[str, Any], without: Sequence[str] = ("hash",)) -> str:
    bare = {key: value for key, value in content.items() if key not in without}
    return hashlib.blake2b(json.dumps(bare, sort_keys=True).encode(), digest_size=16).hexdigest()


class Dataset:
    """A prepared data set, open for reading.

    Use `Dataset.open`.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.name: str = content["name"]
        self.schema = _schema(content["schema"])
        self.deduplicated = content["groups"] is not None
        self.groups: dict[str, tuple[str, ...]] = {
            name: tuple(features) for name, features in (content["groups"] or {}).items()
        }
        self.splits = {split: tuple(Shard.from_dict(shard) for shard in content["splits"][split]) for split in SPLITS}
        self.positives: dict[str, int] = content["positives"]
        self.vocabularies = {key: VocabularyInfo(**info) for key, info in content["vocabularies"].items()}
        self.about: dict[str, Any] = content["about"]
        self.fingerprint = _manifest_hash(content, ("hash", "name", "about"))
        """Hash of what the data set holds: equal for data sets whose every file is equal, however they were made."""

    @classmethod
    def open(cls, path: str | Path, *, verify: Literal["full", "changed", "sizes"] = "changed") -> Dataset:
        """Open and check a prepared data set.

        Parameters
        ----------
        verify : {"full", "changed", "sizes"}
            ``full`` reads and hashes every file; ``changed`` those alone whose size, times or inode are not what they
            were when this user last hashed them; ``sizes`` checks sizes alone.

        Raises
        ------
        DatasetError
            When it is missing, of another format, or a file is not what was written; the message names the file.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            what = "it does not exist"
            if path.exists():
                what = f"it is a {kind_of(path)}" if kind_of(path) else f"it has no {MANIFEST}"
            raise DatasetError(f"{path} is no prepared data set: {what}; run `stratarec prepare` first")
        content = read_json(path / MANIFEST)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else "none"
            raise DatasetError(f"{path / MANIFEST}: format {found}, expected {FORMAT}; prepare the data again")
        if content.get("hash") != _manifest_hash(content):
            raise DatasetError(f"{path / MANIFEST} was changed after it was written: its hash does not match")
        if kind_of(path) != DATASET.name:
            raise DatasetError(f"{path / MARKER} is missing or damaged; prepare the data again")
        dataset = cls(path, content)
        dataset._verify(verify)
        return dataset

    def _verify(self, how: str) -> None:
        shards = [shard for shards in self.splits.values() for shard in shards]
        files: list[Shard | StoredFile | VocabularyInfo] = [*shards, *(s.tables for s in shards if s.tables)]
        files += self.vocabularies.values()
        for entry in files:
            file = self.path / entry.path
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                found = "is missing" if size is None else f"has {size} bytes, expected {entry.bytes}"
                raise DatasetError(f"{file} {found}; prepare the data again")
        if how == "sizes":
            return
        with reading(self.path):
            hashes = file_hashes([self.path / entry.path for entry in files], fresh=how == "full")
        for entry, digest in zip(files, hashes, strict=True):
            if digest != entry.hash:
                raise DatasetError(f"{self.path / entry.path} is damaged: its hash does not match")

    def inputs(self) -> dict[str, Any]:
        """What ids and dense values of a batch mean, as JSON: a model is of use with equal inputs alone.

        Features in order, the values of each vocabulary (not their counts), mean and deviation of standardised columns.
        """
        kept = ("name", "kind", "vocabulary", "of", "max_length")
        return {
            "sparse": [{key: getattr(feature, key) for key in kept} for feature in self.schema.sparse],
            "dense": [self._dense_input(feature) for feature in self.schema.dense],
            "vocabularies": {
                name: {"values": info.values, "tail_buckets": info.tail_buckets, "digest": info.digest}
                for name, info in self.vocabularies.items()
            },
        }

    def _dense_input(self, feature: DenseFeature) -> dict[str, Any]:
        kept = ("name", "transform", "standardize")
        found = {key: getattr(feature, key) for key in kept}
        if feature.standardize:
            moments = self.about["moments"][feature.name]
            found |= {"mean": moments["mean"], "deviation": moments["deviation"]}
        return found

    def samples(self, split: str) -> int:
        """Samples of a split."""
        return sum(shard.samples for shard in self.shards(split))

    def shards(self, split: str) -> tuple[Shard, ...]:
        """Shards of a split."""
        if split not in self.splits:
            raise DatasetError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    def table_rows(self) -> dict[str, int]:
        """Vocabulary -> rows that its table needs."""
        return {name: info.rows for name, info in self.vocabularies.items()}

    def access_counts(self, vocabulary: str) -> NDArray[np.int64]:
        """``[rows]`` training lookups of each id."""
        table = pq.read_table(self.path / self.vocabularies[vocabulary].path, columns=["count"])
        counts: NDArray[np.int64] = table["count"].to_numpy()
        return counts

    def row_numbers(self, split: str) -> Iterator[NDArray[np.int64]]:
        """Which row of the log each sample came from, row group by row group in the order of storage; see `split_rows`.

        Raises
        ------
        DatasetError
            Where the data set was prepared without.
        """
        if not self.about["rows"]["kept"]:
            raise DatasetError(f"{self.path} does not know rows of the log; prepare it with data.keep_rows")
        with self.reader(split) as reader:
            for number, shard in enumerate(self.shards(split)):
                for group in range(len(shard.row_groups)):
                    yield reader.row_numbers(number, group)

    @property
    def windows(self) -> tuple[str, ...]:
        """The histories that are stored as windows."""
        return tuple(feature.name for feature in self.schema.histories) if self.deduplicated else ()

    def reader(self, split: str, *, unused: bool = True) -> BlockReader:
        """Reads row groups of a split; to be closed.

        Parameters
        ----------
        unused : bool
            Read what training makes no use of too: times, and sessions of samples.
        """
        files = [(shard.path, shard.tables.path if shard.tables else None) for shard in self.shards(split)]
        return BlockReader(self.path, files, tuple(self.groups), self.windows, unused=unused)

    def read_block(self, split: str, shard: int, group: int) -> Block:
        """One row group with its tables; see `BlockReader.read`."""
        with self.reader(split) as reader:
            return reader.read(shard, group)

    def read_row_group(self, split: str, shard: int, group: int) -> pa.Table:
        """One row group with a column for every feature, nothing deduplicated."""
        columns = self.read_block(split, shard, group).expand(self.groups, self.windows)
        names = [LABEL, *self.schema.names]
        names += [name for name in (TIME, USER, SESSION, ROW) if name in columns]
        return pa.table({name: columns[name] for name in names})


def _schema(content: Mapping[str, Any]) -> Schema:
    dense = tuple(DenseFeature(**feature) for feature in content["dense"])
    sparse = tuple(SparseFeature(**feature) for feature in content["sparse"])
    return Schema(**{**content, "dense": dense, "sparse": sparse})
