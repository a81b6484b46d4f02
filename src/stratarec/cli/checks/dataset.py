"""Verify every file of a data set. Torch is not loaded, because that takes longer than reading a
small data set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.column_names import label_names
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE, BASELINE_SCORES, DATASET, MANIFEST
from stratarec.data.schema import UNKNOWN
from stratarec.errors import DatasetError
from stratarec.io.owned_directory import MARKER, check_marker, kind_of

# Number of unknown files whose names are printed.
_SHOWN_FILES = 5


def is_dataset(path: Path) -> bool:
    """Whether there is a data set at `path`."""
    return kind_of(path) == DATASET.name or (path / MANIFEST).exists()


def check(path: Path) -> Iterator[str]:
    """Verify a data set. Yield one line for each valid part, and a last line if there are unknown
    files.
    """
    read: set[Path] = set()
    yield from check_dataset(path, read)
    yield from unknown_files(path, read)


def unknown_files(path: Path, read: set[Path]) -> Iterator[str]:
    """Yield a line that names the files that were not read, if there are any."""
    unknown = [str(file.relative_to(path)) for file in _files(path) if file not in read]
    if unknown:
        more = f" and {len(unknown) - _SHOWN_FILES:,} more" if len(unknown) > _SHOWN_FILES else ""
        yield f"unknown files, not read: {', '.join(unknown[:_SHOWN_FILES])}{more}"


def _files(path: Path) -> list[Path]:
    """Return all files and links below a directory."""
    paths = (Path(folder, name) for folder, folders, names in os.walk(path) for name in (*folders, *names))
    return sorted(place for place in paths if place.is_symlink() or not place.is_dir())


def check_dataset(path: Path, read: set[Path]) -> Iterator[str]:
    """Verify the files of a data set, and add them to `read`."""
    dataset = Dataset.open(path, verify="full")
    check_marker(path, DATASET)
    read |= {path / MARKER, path / MANIFEST, *(path / file.path for file in dataset.manifest.files())}
    with dataset.locked():
        yield f"files: {len(dataset.manifest.files())} have the hashes in {MANIFEST}"
        yield from _check_content(path, dataset)
        if (path / BASELINE).exists():
            yield _check_baselines(dataset)
            read |= {path / BASELINE, path / BASELINE_SCORES}


def _check_baselines(dataset: Dataset) -> str:
    from stratarec.training.baseline.baselines import read_baselines, read_scores  # which loads torch

    baselines = read_baselines(dataset)
    assert baselines is not None
    read_scores(dataset, baselines)
    return f"baseline: {len(baselines.methods)} methods, fitted on this data set"


def _check_content(path: Path, dataset: Dataset) -> Iterator[str]:
    for name, info in dataset.vocabularies.items():
        counted = dataset.carried_counts(name)["value"] if info.kind == "count" else pl.Series([])
        rare = (~counted.is_in(dataset.vocabulary(name).values.implode())).sum() if len(counted) else 0
        more = f", and {rare:,} without a row" if rare else ""
        more += f"; {info.holes:,} rows of removed values" if info.holes else ""
        yield f"vocabulary {name}: {info.values - info.holes:,} distinct values{more}"
    events = dataset.events()
    if events is not None:
        yield f"events: the last {len(events):,} of all users"
    clicks = dataset.clicks()
    if clicks is not None:
        yield f"clicks: {len(clicks.recent):,} for later look-back, {len(clicks.waiting):,} not yet samples"
    for split in dataset.splits:
        totals = np.zeros((len(dataset.schema.label_columns), 2), dtype=np.int64)
        for number in range(len(dataset.shards(split))):
            totals += _check_shard(dataset, split, number)
        for (label, count), (labelled, positives) in zip(
            dataset.label_counts(split).items(), totals.tolist(), strict=True
        ):
            if (labelled, positives) != (count.known, count.positives):
                of = f" of {count.known} with {label!r}" if dataset.schema.labels else ""
                have = f"{positives} of {labelled}" if dataset.schema.labels else str(positives)
                raise DatasetError(
                    f"{path / MANIFEST} names {count.positives} positive samples{of} in {split}, but its "
                    f"files have {have}; prepare the data again"
                )
        yield f"{split}: {dataset.samples(split):,} samples, every value within its range"


def _check_shard(dataset: Dataset, split: str, number: int) -> NDArray[np.int64]:
    """Read a complete shard. Return for each label the numbers of known and of positive samples,
    ``[labels, 2]``.
    """
    names = label_names(len(dataset.schema.label_columns))
    totals = np.zeros((len(names), 2), dtype=np.int64)
    rows, shard = [], dataset.shards(split)[number]
    with dataset.reader(split) as reader:
        for group in range(len(shard.row_groups)):
            samples = reader.read(number, group).samples
            for index, name in enumerate(names):
                label = samples[name].to_numpy()
                totals[index] += (np.count_nonzero(label != UNKNOWN), np.count_nonzero(label == 1))
            if dataset.about.rows.kept:
                rows.append(reader.row_numbers(number, group))
    if rows and len(np.unique(np.concatenate(rows))) != shard.samples:
        raise DatasetError(
            f"{dataset.path / shard.path} has duplicate rows of the log; prepare the data again"
        )
    return totals
