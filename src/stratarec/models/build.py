"""Build a model from its settings, with its initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from stratarec.data.schema import Schema
from stratarec.embedding.collection import EmbeddingCollection, TieredEmbeddingBagCollection
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig
from stratarec.models.base import CTRModel, Network, Score, build_tables
from stratarec.models.config import Initialization
from stratarec.models.heads import last_biases
from stratarec.models.layers import dropouts, seed_dropout
from stratarec.models.registry import ModelConfig, score_of, tower_of
from stratarec.models.towers import TowerNetwork


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
    """Build the model that `config` describes; its initial weights depend on `seed` only.

    Parameters
    ----------
    schema : Schema
        Schema of the data set.
    table_rows : mapping of str to int
        Vocabulary -> number of rows of its table, from `Dataset.table_rows`.
    first_rows : mapping of str to int
        Vocabulary -> number of rows in its first data set; see `build_tables`.
    optimizer : RowOptimizerConfig
        Optimizer of the embedding tables.
    click_rates : sequence of float
        Share of positive samples of each label. The initial biases are the log-odds, unless
        `config` sets them to zero.
    tiers : TierConfig
        Homes and caches of tables outside level 0; by default all tables are in level 0.
    collection : callable
        Builds the embedding collection if tables are sharded over processes; `optimizer` and
        `tiers` are then not used.
    """
    # torch's layers draw initial weights from the global generator; ours replace them afterwards.
    with torch.random.fork_rng(devices=[]):
        tables = build_tables(config, schema, table_rows, first_rows)
        if collection is None:
            collection = partial(TieredEmbeddingBagCollection, optimizer=optimizer, seed=seed, tiers=tiers)
        embeddings = collection(tables)
        # Features of all tables are included, although a collection may look up only the features
        # of its host.
        network = build_network(
            config, schema, tuple(key for table in tables for key in table.feature_names)
        )
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
    """Build the part of a model that a dense optimizer trains, with torch's initial weights."""
    score = partial(score_of(config.kind), config)
    if config.towers is None:
        network = Network(config, schema, pooled_keys, score)
    else:
        network = TowerNetwork(config, schema, pooled_keys, tower_of(config), score)
    assert isinstance(network.score, Score)
    if config.towers is None or config.towers.plain:
        network.score.set_features((*pooled_keys, *(columns[0] for columns in network.event_columns)))
    if network.trees is not None:
        features = tuple((feature.name, feature.kind != "single") for feature in schema.sparse)
        network.trees.set_features(features, len(schema.dense))
    network.set_labels(schema.label_columns, config)
    network.set_weighted(schema, config)
    return network


@runtime_checkable
class Drawn(Protocol):
    """Module that sets its initial weights itself."""

    def draw(self, generator: torch.Generator) -> None: ...


def initialize(module: nn.Module, seed: int, kind: Initialization = "dlrm") -> None:
    """Set the weights of all linear and `Drawn` layers. They depend on `seed` and the order of the
    layers only.

    Weights are normal with variance 2 / (in + out) (Glorot and Bengio 2010). Biases are normal with
    variance 1 / out, as in DLRM's reference implementation (``dlrm``), or 0 (``xavier``).
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                layer.weight.normal_(0, math.sqrt(2 / (rows + columns)), generator=generator)
                if layer.bias is not None and kind == "xavier":
                    layer.bias.zero_()
                elif layer.bias is not None:
                    layer.bias.normal_(0, math.sqrt(1 / rows), generator=generator)
            elif isinstance(layer, Drawn):
                layer.draw(generator)
