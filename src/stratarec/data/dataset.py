"""A prepared data set on disk: it describes itself, and is checked by hash when it is opened.

    dataset.json                 schema, counts, splits, vocabulary sizes, hashes, format version
    vocabulary/<name>.parquet    value, id, count
    <split>/shard-00000.parquet  label, dense (float32), ids (int32, or lists of int32), __time, __group, __session

Only this module knows the layout; `prepare` writes and the loader reads through it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SPLITS
from stratarec.errors import DatasetError
from stratarec.files import file_hash, read_json, write_atomic, write_json

FORMAT = 1
ROW_GROUP = 1 << 16
MANIFEST = "dataset.json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of samples."""

    path: str
    """Relative to the data set."""
    samples: int
    row_groups: tuple[int, ...]
    """Samples of each row group."""
    bytes: int
    hash: str
    """xxh3_128 of the file."""


@dataclass(frozen=True, kw_only=True)
class VocabularyInfo:
    """One vocabulary and its file."""

    rows: int
    """Rows that a table needs: values and tail buckets."""
    values: int
    tail_buckets: int
    path: str
    bytes: int
    hash: str


def write_shard(root: Path, split: str, number: int, table: pa.Table) -> Shard:
    """Write a table of encoded samples as shard `number` of `split`."""
    relative = f"{split}/shard-{number:05d}.parquet"
    path = root / relative

    def write(temporary: Path) -> None:
        pq.write_table(table, temporary, compression="zstd", compression_level=1, row_group_size=ROW_GROUP)

    write_atomic(path, write)
    groups = tuple(min(ROW_GROUP, table.num_rows - first) for first in range(0, table.num_rows, ROW_GROUP))
    return Shard(
        path=relative, samples=table.num_rows, row_groups=groups, bytes=path.stat().st_size, hash=file_hash(path)
    )


def write_vocabulary(root: Path, name: str, table: pa.Table, values: int) -> VocabularyInfo:
    """Write a vocabulary's table."""
    relative = f"vocabulary/{name}.parquet"
    write_atomic(root / relative, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
    return VocabularyInfo(
        rows=table.num_rows,
        values=values,
        tail_buckets=table.num_rows - values,
        path=relative,
        bytes=(root / relative).stat().st_size,
        hash=file_hash(root / relative),
    )


def write_manifest(
    root: Path,
    *,
    name: str,
    schema: Schema,
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
        "splits": {split: [asdict(shard) for shard in shards] for split, shards in splits.items()},
        "positives": dict(positives),
        "vocabularies": {key: asdict(info) for key, info in vocabularies.items()},
        "about": dict(about),
    }
    content["hash"] = _manifest_hash(content)
    write_json(root / MANIFEST, content)


def _manifest_hash(content: Mapping[str, Any]) -> str:
    bare = {key: value for key, value in content.items() if key != "hash"}
    return hashlib.blake2b(json.dumps(bare, sort_keys=True).encode(), digest_size=16).hexdigest()


class Dataset:
    """A prepared data set, open for reading.

    Use `Dataset.open`.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.name: str = content["name"]
        self.schema = _schema(content["schema"])
        self.splits = {
            split: tuple(
                Shard(**{**shard, "row_groups": tuple(shard["row_groups"])}) for shard in content["splits"][split]
            )
            for split in SPLITS
        }
        self.positives: dict[str, int] = content["positives"]
        self.vocabularies = {key: VocabularyInfo(**info) for key, info in content["vocabularies"].items()}
        self.about: dict[str, Any] = content["about"]
        self.fingerprint: str = content["hash"]

    @classmethod
    def open(cls, path: str | Path, *, verify: Literal["full", "sizes"] = "full") -> Dataset:
        """Open and check a prepared data set.

        Parameters
        ----------
        verify : {"full", "sizes"}
            ``full`` reads and hashes every file; ``sizes`` checks sizes alone.

        Raises
        ------
        DatasetError
            When it is missing, of another format, or a file is not what was written; the message names the file.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise DatasetError(f"{path} is no prepared data set: it has no {MANIFEST}; run `stratarec prepare` first")
        content = read_json(path / MANIFEST)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else "none"
            raise DatasetError(f"{path / MANIFEST}: format {found}, expected {FORMAT}; prepare the data again")
        if content.get("hash") != _manifest_hash(content):
            raise DatasetError(f"{path / MANIFEST} was changed after it was written: its hash does not match")
        dataset = cls(path, content)
        dataset._verify(verify)
        return dataset

    def _verify(self, how: str) -> None:
        files: list[Shard | VocabularyInfo] = [shard for shards in self.splits.values() for shard in shards]
        files += self.vocabularies.values()
        for entry in files:
            file = self.path / entry.path
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                found = "is missing" if size is None else f"has {size} bytes, expected {entry.bytes}"
                raise DatasetError(f"{file} {found}; prepare the data again")
        if how == "full":
            with ThreadPoolExecutor(2) as pool:
                for entry, found in zip(files, pool.map(lambda e: file_hash(self.path / e.path), files), strict=True):
                    if found != entry.hash:
                        raise DatasetError(f"{self.path / entry.path} is damaged: its hash does not match")

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

    def read_row_group(self, split: str, shard: int, group: int) -> pa.Table:
        """One row group as written; `DatasetError` naming the file when it cannot be read."""
        path = self.path / self.shards(split)[shard].path
        try:
            with pq.ParquetFile(path) as file:
                return file.read_row_group(group, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{path}, row group {group}: damaged ({error})") from error


def _schema(content: Mapping[str, Any]) -> Schema:
    dense = tuple(DenseFeature(**feature) for feature in content["dense"])
    sparse = tuple(SparseFeature(**feature) for feature in content["sparse"])
    return Schema(**{**content, "dense": dense, "sparse": sparse})
