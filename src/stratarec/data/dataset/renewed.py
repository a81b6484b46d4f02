"""A data set without samples, as what is carried of another: values, counts and events, some of them changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from stratarec.data.click_memory import ClickMemory
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import DATASET, LabelCount
from stratarec.data.dataset.writer import write_clicks, write_counts, write_events, write_vocabulary
from stratarec.data.splits import SPLITS
from stratarec.data.vocabulary import Vocabulary
from stratarec.io.atomic import make_directory
from stratarec.io.owned_directory import mark


@dataclass(frozen=True, kw_only=True)
class Carrying:
    """What a data set that goes on from another one needs of it, read into memory."""

    vocabularies: dict[str, Vocabulary]
    counts: dict[str, pl.DataFrame]
    """Of vocabularies by count: see `Dataset.carried_counts`."""
    events: pl.DataFrame | None
    clicks: ClickMemory | None

    @classmethod
    def of(cls, dataset: Dataset) -> Carrying:
        """All of it."""
        found = dataset.manifest.vocabularies.items()
        return cls(
            vocabularies={name: dataset.vocabulary(name) for name, _ in found},
            counts={name: dataset.carried_counts(name) for name, info in found if info.kind == "count"},
            events=dataset.events(),
            clicks=dataset.clicks(),
        )


def write_without_samples(before: Dataset, folder: Path, carried: Carrying) -> Dataset:
    """Write a data set into `folder` that is as `before` but for its samples, which are left out, and `carried`.

    Raises
    ------
    StorageError
        When it cannot be written.
    """
    for part in ("vocabulary", "carried"):
        make_directory(folder / part)
    old = before.manifest
    places = {name: place for place, name in enumerate(old.columns.vocabularies())}
    events = [] if carried.events is None else [write_events(folder, 0, carried.events)]
    clicks = None if carried.clicks is None else write_clicks(folder, carried.clicks)
    counts = {name: write_counts(folder, places[name], name, found) for name, found in carried.counts.items()}
    no_labels: Mapping[str, LabelCount] = {
        name: LabelCount(known=0, positives=0) for name in old.columns.label_columns if old.columns.labels
    }
    manifest = old.model_copy(
        update={
            "splits": dict.fromkeys(SPLITS, ()),
            "positives": dict.fromkeys(SPLITS, 0),
            "labels": {split: dict(no_labels) for split in SPLITS} if no_labels else {},
            "vocabularies": {
                name: write_vocabulary(folder, places[name], name, vocabulary)
                for name, vocabulary in carried.vocabularies.items()
            },
            "carried": old.carried.model_copy(update={"counts": counts, "events": tuple(events), "clicks": clicks}),
        }
    )
    manifest.write(folder)
    mark(folder, DATASET)
    return Dataset.open(folder, verify="used")
