"""The network of a model with towers: each tower by itself, then what all of them told.

Shapes: B samples, D width, W_t columns that tower t tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.base import Network, Score, VectorsConfig
from stratarec.models.history import History
from stratarec.models.runs import Runs, chosen
from stratarec.models.towers.modules import Plain, TowerModule
from stratarec.models.towers.tower_config import TowersConfig, check_plan

Build: TypeAlias = Callable[[TowersConfig, int, int], TowerModule]


class Tower(Network):
    """The features of one tower: a network whose score is a `TowerModule`, ``[B, W_t]``."""

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
        """W_t."""
        return self.score.columns


class TowerNetwork(Network):
    """A network over what towers tell; see `Network` for what it is given and gives.

    Parameters
    ----------
    config : VectorsConfig
        With towers.
    schema : Schema
    pooled_keys : tuple of str
        Of all towers.
    build : callable
        Makes the module of a tower of this model.
    score : callable
        As that of `Network`, from dense, vectors and, of towers with modules, numbers.
    """

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
        found = [key for tower in self.each for key in tower.sequence_keys]
        self.sequence_keys = tuple(feature.name for feature in schema.histories if feature.name in found)
        self.targets = tuple((pooled_keys.index(f.of),) for f in schema.histories if f.name in found)
        self.event_columns = tuple((name,) for name in self.sequence_keys)
        self._pooled = [[pooled_keys.index(key) for key in tower.pooled_keys] for tower in self.each]
        self._sequences = [[self.sequence_keys.index(key) for key in tower.sequence_keys] for tower in self.each]
        self._order = self._places(len(pooled_keys)) if plan.plain else None
        self.openings = nn.ModuleDict({
            str(number): nn.Linear(tower.columns, self.width)
            for number, tower in enumerate(self.each) if tower.score.opened
        })  # fmt: skip
        vectors = sum(tower.score.vectors for tower in self.each) + len(self.openings)
        numbers = sum(tower.columns - tower.score.vectors * self.width for tower in self.each)
        self.score = score(len(schema.dense), vectors, *([numbers] if numbers else []))

    @property
    def each(self) -> list[Tower]:
        """The towers, in the order of the plan."""
        return list(self.towers)  # type: ignore[arg-type]

    def _places(self, pooled: int) -> list[int]:
        """Where each vector of a model without towers is among those of all towers one after another."""
        told = [
            place
            for mine, sequences in zip(self._pooled, self._sequences, strict=True)
            for place in (*mine, *(pooled + sequence for sequence in sequences))
        ]
        return sorted(range(len(told)), key=told.__getitem__)

    def forward(
        self, dense: Tensor, pooled: Tensor, histories: Sequence[History] = (), runs: Runs | None = None
    ) -> Tensor:
        """See `Network.forward`."""
        vectors = pooled.view(len(pooled), -1, self.width)
        vectors = vectors if runs is None else runs.expand(vectors)
        told = [
            tower(dense, chosen(vectors, mine).flatten(1), [histories[place] for place in sequences])
            for tower, mine, sequences in zip(self.each, self._pooled, self._sequences, strict=True)
        ]
        return self.combined(dense, told)

    def padded(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        """See `Network.padded`."""
        vectors = pooled.view(pooled.shape[0], -1, self.width)
        told = [
            tower.padded(dense, chosen(vectors, mine).flatten(1), *_both(sequences, places))
            for tower, mine, places in zip(self.each, self._pooled, self._sequences, strict=True)
        ]
        return self.combined(dense, told)

    def combined(self, dense: Tensor, told: Sequence[Tensor]) -> Tensor:
        """``[B]`` logits from what each tower told, ``[B, W_t]``."""
        vectors, numbers = [], []
        for number, (tower, columns) in enumerate(zip(self.each, told, strict=True)):
            count = tower.score.vectors
            if tower.score.opened:
                vectors.append(self.openings[str(number)](columns).unsqueeze(1).to(columns.dtype))
            if count:
                vectors.append(columns[:, : count * self.width].reshape(columns.shape[0], count, self.width))
            if columns.shape[1] > count * self.width:
                numbers.append(columns[:, count * self.width :])
        joined = torch.cat(vectors, dim=1) if vectors else told[0].new_empty(told[0].shape[0], 0, self.width)
        if self._order is not None:
            joined = chosen(joined, self._order)
        logits: Tensor = self.score(dense, joined, None, *([torch.cat(numbers, dim=1)] if numbers else []))
        return self._corrected(logits)


def _check_plain(config: VectorsConfig, schema: Schema) -> None:
    """Refuse what towers do not take."""
    if config.embedding_dims:
        raise ConfigError("model.embedding_dims is of models without model.towers; leave one of them out")
    if schema.sequences and config.history.pooling != "mean":
        name = next(iter(schema.sequences))
        raise ConfigError(
            f"model.towers takes sequences such as {name!r} with model.history.pooling mean alone, which is "
            f"{config.history.pooling}; change it, or leave model.towers out"
        )


def _part(schema: Schema, pooled_keys: Sequence[str], features: Sequence[str]) -> tuple[Schema, tuple[str, ...]]:
    """A schema of some features, and those of them that are pooled, in the order of `pooled_keys`."""
    sparse = tuple(feature for feature in schema.sparse if feature.name in features)
    return replace(schema, dense=(), sparse=sparse), tuple(key for key in pooled_keys if key in features)


def _both(sequences: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Rows and mask of the histories at `places`."""
    return [sequences[2 * place + part] for place in places for part in (0, 1)]
