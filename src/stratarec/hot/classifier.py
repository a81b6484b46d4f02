"""Which inputs are hot, and how many of a split.

``needs[i, p]`` is the number of first rows of part p among which all lookups of sample i lie: 0 where it looks up none,
at least all tail buckets else. A sample is hot when no part has fewer hot rows than it needs. A bag
that several samples share is looked at once.

Whether an input is hot follows from its ids and a hot profile, so it is told again wherever it is read; what is kept
are counts of row groups, from which the length of an epoch follows: of all inputs, none by sampling. They are written
shard by shard, and an interrupted call goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import events
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import RowGroup
from stratarec.errors import ConfigError
from stratarec.hot.table_parts import Counts, RowRange
from stratarec.io.sealed import Count, Hash, Model, digest, read_sealed, write_sealed
from stratarec.kernels.runtime.cores import cores
from stratarec.progress import Progress, SilentProgress

Needs = NDArray[np.int32]


class NeedsReader:
    """Reads what the samples of a data set need.

    Parameters
    ----------
    dataset : Dataset
    parts : sequence of Part
        Of its tables.
    """

    def __init__(self, dataset: Dataset, parts: Sequence[RowRange]) -> None:
        self._parts, self._windows = parts, dataset.windows
        self._tables = {feature.name: feature.vocabulary for feature in dataset.schema.sparse}
        self._groups = {name: group for group, names in dataset.groups.items() for name in names}

    def of(self, row_group: RowGroup) -> Needs:
        """``[samples, parts]`` of a row group, in the order of storage."""
        found = np.zeros((row_group.samples.num_rows, len(self._parts)), dtype=np.int32)
        for feature, table in self._tables.items():
            for place, needed in self._feature(row_group, feature, table):
                np.maximum(found[:, place], needed, out=found[:, place])
        return found

    def _feature(self, row_group: RowGroup, feature: str, table: str) -> Iterator[tuple[int, Needs]]:
        """What the samples need of each part of a feature's table."""
        holder = feature if feature in self._windows else self._groups.get(feature)
        values, start, length = _bags(row_group, feature, holder)
        pointers = None if holder is None else row_group.pointers(holder)
        for place, part in enumerate(self._parts):
            if part.table == table:
                needed = bag_needs(values, start, length, part)
                yield place, needed if pointers is None else needed[pointers]


def bag_needs(
    values: NDArray[np.int32], start: NDArray[np.int64] | None, length: NDArray[np.int64] | None, part: RowRange
) -> Needs:
    """What each bag ``values[start[i]:start[i] + length[i]]`` needs of a part; bags may overlap.

    Parameters
    ----------
    start, length : ndarray or None
        None where every value is a bag of its own, and none if it is negative.
    """
    each: Needs = np.where(values >= 0, np.maximum(values + np.int32(1), np.int32(part.tail)), np.int32(0))
    if start is None or length is None:
        return each
    # Every other piece is the one from the end of a bag to the next: it is left out again. The zero is for bags that
    # end where the values do.
    bounds = np.stack([start, start + length], axis=1).ravel()
    found = np.maximum.reduceat(np.append(each, np.int32(0)), bounds)[::2] if len(bounds) else each[:0]
    return np.where(length > 0, found, np.int32(0))


def are_hot(needs: Needs, hot: Counts) -> NDArray[np.bool_]:
    """``[N]`` which samples need none but the first ``hot[p]`` rows of each part."""
    found: NDArray[np.bool_] = np.all(needs <= hot.astype(np.int32), axis=1)
    return found


def _bags(
    row_group: RowGroup, feature: str, holder: str | None
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Values, starts and lengths of a feature's distinct bags; of a feature of one id the values alone."""
    if holder == feature and feature in row_group.tables:
        windows, values = row_group.tables[feature], row_group.tables[events(feature)]["id"].to_numpy()
        return values, *(windows[name].to_numpy().astype(np.int64) for name in ("start", "length"))
    column = (row_group.samples if holder is None else row_group.tables[holder])[feature]
    if not pa.types.is_list(column.type):
        return column.to_numpy(), None, None
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    offsets = whole.offsets.to_numpy().astype(np.int64)
    return whole.values.to_numpy(), offsets[:-1], np.diff(offsets)


class Classification(Model):
    """Hot inputs of a split."""

    format: Literal[1] = 1
    key: Hash
    """Of the data set, the split and the hot rows that these counts are of."""
    shards: dict[str, tuple[Count, ...]]
    """Path of a shard -> hot inputs of each of its row groups."""

    @property
    def inputs(self) -> int:
        """Hot inputs."""
        return sum(sum(counts) for counts in self.shards.values())


def classify(
    dataset: Dataset,
    parts: Sequence[RowRange],
    hot: Counts,
    split: str,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Classification:
    """Count the hot inputs of a split.

    Parameters
    ----------
    hot : ndarray
        ``[parts]`` first rows of each part that are hot.
    path : Path
        Where counts are kept; those of the same data set, split and hot rows that stand there are gone on from.

    Notes
    -----
    Reads the whole split, as many shards at a time as there are cores.
    """
    rows = [[part.table, int(number)] for part, number in zip(parts, hot, strict=True)]
    key = digest({"data": dataset.fingerprint, "split": split, "hot": rows})
    found = _begun(path, key)
    shards = dataset.shards(split)
    left = [number for number, shard in enumerate(shards) if shard.path not in found]
    told = progress or SilentProgress()
    known = sum(shard.samples for shard in shards if shard.path in found)
    told.start(f"classify {split}", dataset.samples(split), "samples", known)
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        done = {threads.submit(_counts, dataset, parts, hot, split, number): shards[number] for number in left}
        for future in as_completed(done):
            shard = done[future]
            found[shard.path] = future.result()
            told.advance(shard.samples)
            if path is not None:
                write_sealed(path, Classification(key=key, shards=found).to_dict())
    told.finish()
    return Classification(key=key, shards={shard.path: found[shard.path] for shard in shards})


def beside(dataset: Dataset, split: str) -> Path:
    """Where the counts of a data set's split are kept: by ``profile --classify``, and by runs that count."""
    place = dataset.path.resolve()
    return place.with_name(f"{place.name}-profile.hot-{split}.json")


def _begun(path: Path | None, key: str) -> dict[str, tuple[int, ...]]:
    if path is None or not path.exists():
        return {}
    kept = read_sealed(path, Classification, "remove it", ConfigError)
    return dict(kept.shards) if kept.key == key else {}


def _counts(dataset: Dataset, parts: Sequence[RowRange], hot: Counts, split: str, number: int) -> tuple[int, ...]:
    reader = NeedsReader(dataset, parts)
    with dataset.reader(split, unused=False) as files:
        groups = range(len(dataset.shards(split)[number].row_groups))
        return tuple(int(np.count_nonzero(are_hot(reader.of(files.read(number, group)), hot))) for group in groups)
