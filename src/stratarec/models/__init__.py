"""Models: a batch -> logits. A recipe names one by its `kind`.

Each is a file of `zoo/` and an entry of `registry.SCORES`; its config is imported from its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stratarec.data.schema import Schema
from stratarec.embedding import (
    EmbeddingBagConfig,
    EmbeddingCollection,
    RowOptimizerConfig,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.tiers import TierConfig
from stratarec.models.base import CTRModel, Network, Score, VectorsConfig, build_tables
from stratarec.models.heads import HeadsConfig, last_biases
from stratarec.models.layers import MLP, initialize
from stratarec.models.registry import ModelConfig, score_of, tower_of
from stratarec.models.regularization import dropouts, seed_dropout
from stratarec.models.runs import Runs
from stratarec.models.sequence import HistoryConfig
from stratarec.models.towers.network import TowerNetwork
from stratarec.models.towers.tower_config import TowersConfig
from stratarec.models.zoo.dlrm import DLRMConfig
from stratarec.models.zoo.fields import Fields, Terms

__all__ = [
    "MLP",
    "CTRModel",
    "DLRMConfig",
    "Fields",
    "HeadsConfig",
    "HistoryConfig",
    "ModelConfig",
    "Network",
    "Runs",
    "Score",
    "Terms",
    "TowersConfig",
    "VectorsConfig",
    "build_model",
    "build_network",
]


def build_model(
    config: ModelConfig,
    schema: Schema,
    table_rows: Mapping[str, int],
    first_rows: Mapping[str, int] | None = None,
    *,
    optimizer: RowOptimizerConfig | None = None,
    seed: int = 0,
    click_rates: Sequence[float] = (),
    tiers: TierConfig | None = None,
    collection: Callable[[Sequence[EmbeddingBagConfig]], EmbeddingCollection[Any]] | None = None,
) -> CTRModel:
    """The model that `config` describes; its weights are a function of `seed` alone.

    Parameters
    ----------
    schema : Schema
        Features of the data set.
    table_rows : mapping of str to int
        Vocabulary -> rows, as `Dataset.table_rows` gives.
    first_rows : mapping of str to int
        The same of the first data set that vocabularies are of; see `build_tables`.
    optimizer : RowOptimizerConfig
        For the embedding tables.
    click_rates : sequence of float
        Share of positives of each label; the model starts at their log-odds, unless `config` says otherwise.
    tiers : TierConfig
        Tables whose rows are at home outside level 0; by default none.
    collection : callable
        Makes the embeddings of tables, where they are not all in this process; then it has optimizer, seed and tiers.
    """
    # torch's layers draw initial weights of their own before ours replace them.
    with torch.random.fork_rng(devices=[]):
        tables = build_tables(config, schema, table_rows, first_rows)
        if collection is None:
            collection = partial(TieredEmbeddingBagCollection, optimizer=optimizer, seed=seed, tiers=tiers)
        embeddings = collection(tables)
        # Of all tables; a collection may look up those of its own host alone.
        network = build_network(config, schema, tuple(key for table in tables for key in table.feature_names))
        initialize(network, seed, config.initialization)
        seed_dropout(dropouts(network), seed)
    assert isinstance(network.score, Score)
    with torch.no_grad():
        for rate, bias in zip(click_rates, last_biases(network.score.out), strict=False):
            if config.initial_logit == "zero":
                bias.zero_()
            elif 0 < rate < 1:
                bias.fill_(math.log(rate / (1 - rate)))
    return CTRModel(embeddings, network)


def build_network(config: ModelConfig, schema: Schema, pooled_keys: tuple[str, ...]) -> Network:
    """The part of a model that a dense optimizer trains; its weights are torch's own draws."""
    score = partial(score_of(config.kind), config)
    if config.towers is None:
        network = Network(config, schema, pooled_keys, score)
    else:
        network = TowerNetwork(config, schema, pooled_keys, tower_of(config), score)
    assert isinstance(network.score, Score)
    if config.towers is None or config.towers.plain:
        network.score.take_features((*pooled_keys, *(columns[0] for columns in network.event_columns)))
    network.take_labels(schema.label_columns, config)
    network.take_weighted(schema, config)
    return network
