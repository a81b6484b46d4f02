"""Networks of models with towers: a module for each tower, and a network that combines the outputs
of all towers.

Shapes: B samples, F vectors of a tower (its pooled features, then its histories), D width, W_t
output columns of tower t, which are F D / c for a compression of c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.kernels.interaction import dot_interaction
from stratarec.models.base import Network, Score
from stratarec.models.config import VectorsConfig
from stratarec.models.history import History
from stratarec.models.layers import Cross
from stratarec.models.request import Segments, chosen
from stratarec.models.tower_config import TowersConfig, check_plan


class TowerModule(nn.Module):
    """Module of a tower, in place of a `Score`: it maps the vectors ``[B, F, D]`` to output columns
    ``[B, columns]``.

    The first columns are `vectors` vectors, which interact with vectors of other towers. The other
    columns are numbers that are used only in the last layers. If `expanded`, the network over all
    towers computes one more vector from the columns by a linear map. Dense features are not inputs
    of towers.
    """

    columns: int
    vectors: int
    expanded = False

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        """Return ``[B, columns]`` float32."""
        return self.summarize(vectors if segments is None else segments.expand(vectors)).float()

    def summarize(self, vectors: Tensor) -> Tensor:
        """Return ``[B, columns]`` from vectors that are expanded to samples."""
        raise NotImplementedError


class Plain(TowerModule):
    """Tower without a module: its output columns are its vectors."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.columns = count * width
        self.vectors = count

    def summarize(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class DotTower(TowerModule):
    """Tower of a DLRM. Its outputs are the products of pairs of its vectors, and V vectors for
    pairs with other towers.

    E ``[F, D]`` are the vectors of the tower, and z are the P = F (F - 1) / 2 products of its
    pairs. The columns are ::

        vectors = A E + a, a linear map of all F D numbers in E
        numbers = z if they fit in the columns, else C z + c

    V is the number of vectors that fit next to the numbers, but at least one if a vector fits at
    all. If none fits, the columns are a linear map of E and z, and the tower is `expanded`. A map
    that only mixes complete vectors would need fewer products than A, but with it some seeds ended
    0.03 to 0.06 AUC below the others.
    """

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        columns, self.pairs = config.columns(count, width), count * (count - 1) // 2
        self.vectors = max((columns - self.pairs) // width, int(columns >= width))
        self.expanded = not self.vectors
        self.numbers = columns if self.expanded else min(columns - self.vectors * width, self.pairs)
        self.columns = self.vectors * width + self.numbers
        self.map = nn.Linear(count * width, self.vectors * width) if self.vectors else None
        inputs = count * width + self.pairs if self.expanded else self.pairs
        exact = not self.expanded and self.numbers in (0, self.pairs)
        self.selection = None if exact else nn.Linear(inputs, self.numbers)

    def summarize(self, vectors: Tensor) -> Tensor:
        flat = vectors.flatten(1)
        products = [dot_interaction(None, vectors.contiguous())[:, : self.pairs]] if self.pairs else []
        parts = [] if self.map is None else [self.map(flat)]
        if self.selection is not None:
            inputs = [*products, flat] if self.expanded else products
            parts.append(self.selection(torch.cat([part.to(vectors.dtype) for part in inputs], dim=1)))
        elif self.numbers:
            parts += products
        return torch.cat([part.float() for part in parts], dim=1)


class CrossTower(TowerModule):
    """Tower of a DCN V2: cross layers over its vectors, projected to W_t columns (section 4.2)."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.vectors = 0
        self.columns = config.columns(count, width)
        self.cross = Cross(count * width, config.cross_layers, 0)
        self.projection = nn.Linear(count * width, self.columns)

    def summarize(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.cross(vectors.flatten(1)))
        return projected


Build: TypeAlias = Callable[[TowersConfig, int, int], TowerModule]


class Tower(Network):
    """Network of one tower's features. Its score is a `TowerModule`, so it returns columns ``[B,
    W_t]``.
    """

    score: TowerModule

    def __init__(
        self,
        config: VectorsConfig,
        towers: TowersConfig,
        schema: Schema,
        pooled_keys: tuple[str, ...],
        build: Build,
    ) -> None:
        super().__init__(
            config, schema, pooled_keys, lambda _, count: build(towers, count, config.vector_width)
        )
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
        Columns of a batch.
    pooled_keys : tuple of str
        Pooled features of all towers.
    build : callable
        Builds the module of a tower of this model.
    score : callable
        Builds the score over all towers. Its arguments are how many dense features, vectors and,
        with tower modules, numbers the score has as inputs.
    """

    captured = False

    def __init__(
        self,
        config: VectorsConfig,
        schema: Schema,
        pooled_keys: tuple[str, ...],
        build: Build,
        score: Callable[..., Score],
    ) -> None:
        nn.Module.__init__(self)
        plan = config.towers
        assert plan is not None
        check_plan(plan, schema)
        _check_plain(config, schema)
        self.width = config.vector_width
        self.correction = ()
        self.calibration = None
        module = Plain if plan.plain else build
        parts = [_part(schema, pooled_keys, features) for features in plan.plan]
        self.towers = nn.ModuleList(Tower(config, plan, part, keys, module) for part, keys in parts)
        keys = [key for tower in self.all_towers for key in tower.sequence_keys]
        self.sequence_keys = tuple(feature.name for feature in schema.histories if feature.name in keys)
        self.targets = tuple((pooled_keys.index(f.of),) for f in schema.histories if f.name in keys)
        self.event_columns = tuple((name,) for name in self.sequence_keys)
        self._pooled = [[pooled_keys.index(key) for key in tower.pooled_keys] for tower in self.all_towers]
        self._sequences = [
            [self.sequence_keys.index(key) for key in tower.sequence_keys] for tower in self.all_towers
        ]
        self._order = self._places(len(pooled_keys)) if plan.plain else None
        self.expansions = nn.ModuleDict(
            {
                str(number): nn.Linear(tower.columns, self.width)
                for number, tower in enumerate(self.all_towers)
                if tower.score.expanded
            }
        )
        vectors = sum(tower.score.vectors for tower in self.all_towers) + len(self.expansions)
        numbers = sum(tower.columns - tower.score.vectors * self.width for tower in self.all_towers)
        self.score = score(len(schema.dense), vectors, *([numbers] if numbers else []))

    @property
    def all_towers(self) -> list[Tower]:
        """All towers, in the order of the plan."""
        return list(self.towers)  # type: ignore[arg-type]

    @property
    def behaviours(self) -> list[tuple[tuple[str, ...], Any]]:
        poolings = {columns: pooling for tower in self.all_towers for columns, pooling in tower.behaviours}
        return [(columns, poolings[columns]) for columns in self.event_columns]

    def _places(self, pooled: int) -> list[int]:
        """Return, for each vector of a model without towers, its position among the vectors of all
        towers.
        """
        order = [
            place
            for mine, sequences in zip(self._pooled, self._sequences, strict=True)
            for place in (*mine, *(pooled + sequence for sequence in sequences))
        ]
        return sorted(range(len(order)), key=order.__getitem__)

    def forward(
        self,
        dense: Tensor,
        pooled: Tensor,
        histories: Sequence[History] = (),
        segments: Segments | None = None,
    ) -> Tensor:
        vectors = pooled.view(len(pooled), -1, self.width)
        vectors = vectors if segments is None else segments.expand(vectors)
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
        vectors, numbers = [], []
        for number, (tower, columns) in enumerate(zip(self.all_towers, outputs, strict=True)):
            count = tower.score.vectors
            if tower.score.expanded:
                vectors.append(self.expansions[str(number)](columns).unsqueeze(1).to(columns.dtype))
            if count:
                vectors.append(
                    columns[:, : count * self.width].reshape(columns.shape[0], count, self.width)
                )
            if columns.shape[1] > count * self.width:
                numbers.append(columns[:, count * self.width :])
        joined = (
            torch.cat(vectors, dim=1)
            if vectors
            else outputs[0].new_empty(outputs[0].shape[0], 0, self.width)
        )
        if self._order is not None:
            joined = chosen(joined, self._order)
        logits: Tensor = self.score(dense, joined, None, *([torch.cat(numbers, dim=1)] if numbers else []))
        return self._corrected(logits)


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


def _part(
    schema: Schema, pooled_keys: Sequence[str], features: Sequence[str]
) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema of only `features`, and the pooled ones of `features` in the order of
    `pooled_keys`.
    """
    sparse = tuple(feature for feature in schema.sparse if feature.name in features)
    return replace(schema, dense=(), dates=(), sparse=sparse), tuple(
        key for key in pooled_keys if key in features
    )


def _rows_and_masks(sequences: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return the rows and masks of the histories at `places`."""
    return [sequences[2 * place + part] for place in places for part in (0, 1)]
