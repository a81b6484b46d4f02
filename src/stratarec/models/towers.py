"""Networks of models with towers: a module for each tower, and a network that combines the outputs of all towers.

Shapes: B samples, F vectors of a tower (its pooled features, then its histories), D width, W_t output columns of tower
t, which are F D / c for a compression of c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.base import Network, Score
from stratarec.models.config import VectorsConfig
from stratarec.models.history import History
from stratarec.models.layers import Cross
from stratarec.models.request import Runs, chosen
from stratarec.models.tower_config import TowersConfig, check_plan


class TowerModule(nn.Module):
    """Module of a tower, in place of a `Score`: it maps the vectors ``[B, F, D]`` to output columns ``[B, columns]``.

    The columns are `vectors` vectors, which interact with vectors of other towers. If `vectors` is 0, they are numbers
    that are used only in the last layers. Dense features are not inputs of towers.
    """

    columns: int
    vectors: int

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """Return ``[B, columns]`` float32."""
        return self.summarize(vectors if runs is None else runs.expand(vectors)).float()

    def summarize(self, vectors: Tensor) -> Tensor:
        """Return ``[B, columns]`` from vectors that are expanded to samples."""
        raise NotImplementedError


class Plain(TowerModule):
    """Tower without a module: its output columns are its vectors."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.columns, self.vectors = count * width, count

    def summarize(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class DotTower(TowerModule):
    """Tower of a DLRM: a linear map of all F D numbers to F vectors of w = D / c numbers (section 4.2).

    If the compression c is larger than D, there are fewer vectors, of one number. The network over all towers maps the
    vectors to D numbers again, so that they interact with vectors of any tower and with dense features.

    At first the map selects the first w numbers of each vector, so that training starts from a DLRM with vectors of w
    numbers. From random weights, every output would be a mixture of all features, and the products of outputs would
    have to be unlearned: 0.945 instead of 0.952 AUC on frappe_x1 after one pass.
    """

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        narrow = config.vector_width(width)
        self.vectors = min(config.columns(count, width) // narrow, count)
        self.columns = self.vectors * narrow
        weight = torch.zeros(self.vectors, narrow, count, width)
        for place in range(self.vectors):
            # With this factor, products of the narrow vectors are on average as large as those of the vectors.
            weight[place, :, place, :narrow] = torch.eye(narrow) * math.sqrt(width / narrow)
        self.weight = nn.Parameter(weight.view(self.columns, count * width))
        self.bias = nn.Parameter(torch.zeros(self.columns))

    def summarize(self, vectors: Tensor) -> Tensor:
        return functional.linear(vectors.flatten(1), self.weight, self.bias)


class CrossTower(TowerModule):
    """Tower of a DCN V2: cross layers over its vectors, projected to W_t columns (section 4.2)."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.vectors, self.columns = 0, config.columns(count, width)
        self.cross = Cross(count * width, config.cross_layers, 0)
        self.projection = nn.Linear(count * width, self.columns)

    def summarize(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.cross(vectors.flatten(1)))
        return projected


Build: TypeAlias = Callable[[TowersConfig, int, int], TowerModule]


class Tower(Network):
    """Network of one tower's features. Its score is a `TowerModule`, so it returns columns ``[B, W_t]``."""

    score: TowerModule

    def __init__(
        self, config: VectorsConfig, towers: TowersConfig, schema: Schema, pooled_keys: tuple[str, ...], build: Build
    ) -> None:  # fmt: skip
        super().__init__(
            config, schema, pooled_keys, lambda _, count: build(towers, count, config.vector_width)
        )  # fmt: skip
        self.pooled_keys = pooled_keys

    @property
    def columns(self) -> int:
        """Number of output columns, W_t."""
        return self.score.columns


class TowerNetwork(Network):
    """Network with towers. It has the inputs and outputs of a `Network`.

    Parameters
    ----------
    config : VectorsConfig
        Model configuration that has towers.
    schema : Schema
    pooled_keys : tuple of str
        Pooled features of all towers.
    build : callable
        Builds the module of a tower of this model.
    score : callable
        Builds the score over all towers. Its arguments are how many dense features, vectors and, with tower modules,
        numbers the score has as inputs.
    """

    captured = False

    def __init__(
        self, config: VectorsConfig, schema: Schema, pooled_keys: tuple[str, ...], build: Build,
        score: Callable[..., Score],
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        plan = config.towers
        assert plan is not None
        check_plan(plan, schema)
        _check_plain(config, schema)
        self.width, self.correction, self.calibration = config.vector_width, (), None
        module = Plain if plan.plain else build
        parts = [_part(schema, pooled_keys, features) for features in plan.plan]
        self.towers = nn.ModuleList(Tower(config, plan, part, keys, module) for part, keys in parts)
        keys = [key for tower in self.all_towers for key in tower.sequence_keys]
        self.sequence_keys = tuple(feature.name for feature in schema.histories if feature.name in keys)
        self.targets = tuple((pooled_keys.index(f.of),) for f in schema.histories if f.name in keys)
        self.event_columns = tuple((name,) for name in self.sequence_keys)
        self._pooled = [[pooled_keys.index(key) for key in tower.pooled_keys] for tower in self.all_towers]
        self._sequences = [[self.sequence_keys.index(key) for key in tower.sequence_keys] for tower in self.all_towers]
        self._order = self._places(len(pooled_keys)) if plan.plain else None
        vectors, columns = (
            sum(getattr(tower.score, name) for tower in self.all_towers) for name in ("vectors", "columns")
        )
        narrow = columns // vectors if vectors else self.width
        self.expansion = nn.Parameter(torch.eye(narrow, self.width)) if narrow < self.width else None
        self.score = score(len(schema.dense), vectors, *([] if vectors else [columns]))

    @property
    def all_towers(self) -> list[Tower]:
        """All towers, in the order of the plan."""
        return list(self.towers)  # type: ignore[arg-type]

    def _places(self, pooled: int) -> list[int]:
        """Return, for each vector of a model without towers, its position among the vectors of all towers."""
        order = [
            place
            for mine, sequences in zip(self._pooled, self._sequences, strict=True)
            for place in (*mine, *(pooled + sequence for sequence in sequences))
        ]
        return sorted(range(len(order)), key=order.__getitem__)

    def forward(
        self, dense: Tensor, pooled: Tensor, histories: Sequence[History] = (), runs: Runs | None = None
    ) -> Tensor:
        vectors = pooled.view(len(pooled), -1, self.width)
        vectors = vectors if runs is None else runs.expand(vectors)
        outputs = [
            tower(dense, chosen(vectors, mine).flatten(1), [histories[place] for place in sequences])
            for tower, mine, sequences in zip(self.all_towers, self._pooled, self._sequences, strict=True)
        ]
        return self.combine(dense, outputs)

    def padded(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        vectors = pooled.view(pooled.shape[0], -1, self.width)
        outputs = [
            tower.padded(dense, chosen(vectors, mine).flatten(1), *_rows_and_masks(sequences, places))
            for tower, mine, places in zip(self.all_towers, self._pooled, self._sequences, strict=True)
        ]
        return self.combine(dense, outputs)

    def combine(self, dense: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Return ``[B]`` logits from the columns ``[B, W_t]`` of each tower."""
        joined, count = torch.cat(list(outputs), dim=1), sum(tower.score.vectors for tower in self.all_towers)
        if not count:
            no_vectors = joined.new_empty(joined.shape[0], 0, self.width)
            return self._corrected(self.score(dense, no_vectors, None, joined))
        vectors = joined.view(joined.shape[0], count, -1)
        if self.expansion is not None:
            vectors = vectors @ self.expansion
        if self._order is not None:
            vectors = chosen(vectors, self._order)
        return self._corrected(self.score(dense, vectors, None))


def _check_plain(config: VectorsConfig, schema: Schema) -> None:
    """Raise `ConfigError` for settings that towers do not support."""
    if config.embedding_dims:
        raise ConfigError("model.towers does not support model.embedding_dims; remove one of them")
    if schema.sequences and config.history.pooling != "mean":
        name = next(iter(schema.sequences))
        raise ConfigError(
            f"model.towers supports sequences such as {name!r} only with model.history.pooling mean; got "
            f"{config.history.pooling}. Change it, or remove model.towers"
        )


def _part(schema: Schema, pooled_keys: Sequence[str], features: Sequence[str]) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema of only `features`, and the pooled ones of `features` in the order of `pooled_keys`."""
    sparse = tuple(feature for feature in schema.sparse if feature.name in features)
    return replace(schema, dense=(), sparse=sparse), tuple(key for key in pooled_keys if key in features)


def _rows_and_masks(sequences: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return the rows and masks of the histories at `places`."""
    return [sequences[2 * place + part] for place in places for part in (0, 1)]
