"""A split of a data set in arrays, as much of it as memory is meant to hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.progress import Progress

_BATCH = 1 << 16


class Bags(NamedTuple):
    """The ids of a feature."""

    ids: NDArray[np.int64]
    """Of all samples, one after another."""
    lengths: NDArray[np.int64]
    """``[N]`` how many each sample has."""

    @property
    def single(self) -> bool:
        """Whether every sample has one."""
        return bool((self.lengths == 1).all())


class Arrays(NamedTuple):
    """N samples."""

    label: NDArray[np.float32]
    """``[N]``."""
    weight: NDArray[np.float32] | None
    """``[N]``, where samples have some."""
    dense: NDArray[np.float32]
    """``[N, F]``."""
    bags: dict[str, Bags]

    @property
    def values(self) -> int:
        """Ids and numbers in all."""
        return self.dense.size + sum(len(bag.ids) for bag in self.bags.values())


def read(dataset: Dataset, split: str, most: int, seed: int, progress: Progress) -> Arrays:
    """A split, or samples of it: of row groups at random so many that they have `most` values."""
    parts, values = [], 0
    for part in blocks(dataset, split, progress, seed=seed):
        parts.append(part)
        values += part.values
        if values >= most:
            break
    return _joined(parts)


def blocks(dataset: Dataset, split: str, progress: Progress, *, seed: int | None = None) -> Iterator[Arrays]:
    """A split in parts: in the order of storage, or with a seed in an order at random."""
    config = LoaderConfig(batch_size=_BATCH, shuffle=seed is not None, seed=seed or 0, unit="sample", expand=True)
    loader = Loader(dataset, split, config)
    progress.start(f"read {split}", loader.samples, "samples")
    try:
        for batch in loader.epoch(0):
            yield _arrays(batch)
            progress.advance(batch.size)
    finally:
        progress.finish()


def _arrays(batch: Batch) -> Arrays:
    bags = {key: batch.sparse[key] for key in batch.sparse.keys}
    return Arrays(
        label=batch.label.cpu().numpy(),
        weight=None if batch.weight is None else batch.weight.cpu().numpy(),
        dense=batch.dense.cpu().numpy(),
        bags={key: Bags(bag.values.cpu().numpy(), bag.lengths().cpu().numpy()) for key, bag in bags.items()},
    )


def _joined(parts: list[Arrays]) -> Arrays:
    weights = [part.weight for part in parts if part.weight is not None]
    return Arrays(
        label=np.concatenate([part.label for part in parts]),
        weight=np.concatenate(weights) if weights else None,
        dense=np.concatenate([part.dense for part in parts]),
        bags={
            key: Bags(*(np.concatenate(column) for column in zip(*(part.bags[key] for part in parts), strict=True)))
            for key in parts[0].bags
        },
    )
