"""What a batch of a data set asks of each table, from the vocabularies' access counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.schema import SparseFeature
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.planning.bytes import RowShape
from stratarec.planning.candidates import TableSpec
from stratarec.planning.popularity import Popularity


def describe_tables(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    *,
    batch_size: int,
    hot: Mapping[str, int] | None = None,
) -> list[TableSpec]:
    """The tables of a model on `dataset`, with the counts of its training split, and of those that it goes on from.

    `hot` are tables whose so many first rows no cache is asked for.

    A table's name is its vocabulary's. Where a vocabulary has no counts (ids that came from outside), every row is
    taken to be as popular as the next, and a bag to be as long as it may be.
    """
    samples = dataset.manifest.carried.samples
    features = dataset.schema.vocabularies()
    found = []
    for table in tables:
        counts = dataset.access_counts(table.name)
        total = int(counts.sum())
        each = total / samples if total else float(sum(_longest(feature) for feature in features[table.name]))
        # Counts do not tell histories from the other features of their vocabulary: at most, all are of histories.
        unpooled = batch_size * each if table.sequence_features else 0.0
        found.append(
            TableSpec(
                name=table.name,
                rows=table.num_embeddings,
                shape=RowShape.of(table.embedding_dim, optimizer),
                lookups=batch_size * each,
                popularity=cold_popularity(counts, (hot or {}).get(table.name, 0)),
                outputs=table.embedding_dim * (batch_size * len(table.feature_names) + unpooled),
            )
        )
    return found


def cold_popularity(counts: NDArray[np.int64], hot: int) -> Popularity:
    """Of the rows behind the first, as shares of all lookups."""
    if not hot:
        return Popularity.from_counts(counts)
    cold = counts.copy()
    cold[:hot] = 0
    return Popularity.from_counts(cold).times(float(cold.sum() / max(counts.sum(), 1)))


def _longest(feature: SparseFeature) -> int:
    return 1 if feature.kind == "single" else feature.max_length
