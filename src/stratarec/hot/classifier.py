"""How many inputs of a split are hot, row group by row group: all of them are looked at, none by sampling.

Whether an input is hot follows from its ids and a hot profile, so it is told again wherever it is read; what is kept
are counts, from which the length of an epoch follows. They are written shard by shard, and an interrupted call goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

import numpy as np

from stratarec.artifacts import Count, Hash, Model, digest, read_sealed, write_sealed
from stratarec.data.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.hot.needs import NeedsReader, are_hot
from stratarec.hot.parts import Counts, Part
from stratarec.progress import Progress, SilentProgress


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
    parts: Sequence[Part],
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
    rows = [[part.table, part.first, int(number)] for part, number in zip(parts, hot, strict=True)]
    key = digest({"data": dataset.fingerprint, "split": split, "hot": rows})
    found = _begun(path, key)
    shards = dataset.shards(split)
    left = [number for number, shard in enumerate(shards) if shard.path not in found]
    told = progress or SilentProgress()
    known = sum(shard.samples for shard in shards if shard.path in found)
    told.start(f"classify {split}", dataset.samples(split), "samples", known)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="stratarec-hot") as threads:
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


def _counts(dataset: Dataset, parts: Sequence[Part], hot: Counts, split: str, number: int) -> tuple[int, ...]:
    reader = NeedsReader(dataset, parts)
    with dataset.reader(split, unused=False) as files:
        groups = range(len(dataset.shards(split)[number].row_groups))
        return tuple(int(np.count_nonzero(are_hot(reader.of(files.read(number, group)), hot))) for group in groups)
