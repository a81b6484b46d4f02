"""Which sparse features share a tower (Disaggregated Multi-Tower, arXiv 2403.00877, its partitioner).

Features that read one table, and a history and the feature that it is of, are one *item*. `coherent` puts items that
interact strongly into one tower, `diverse` into different ones: interactions become distances, distances points, and
points balanced clusters. `random` and `round_robin` are there to compare with. All keep the same bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.planning.candidates import TableSpec
from stratarec.planning.clusters import Labels, Limits, assign, balanced_clusters
from stratarec.planning.distances import Goal, distances, embed
from stratarec.sizes import readable

Method: TypeAlias = Literal["coherent", "diverse", "random", "round_robin"]
METHODS: tuple[Method, ...] = get_args(Method)
Floats: TypeAlias = NDArray[np.float64]

# Lookups are kept as even as items allow: bounds of so much more, one after the other, until there is a partition.
_WIDER = 1.25


@dataclass(frozen=True, kw_only=True)
class Item:
    """Features that must share a tower, and what they cost its host."""

    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int
    """float32 rows and their optimizer state."""
    lookups: float
    """Ids of a batch."""


@dataclass(frozen=True, kw_only=True)
class TowerBounds:
    """What a tower may be."""

    towers: int
    ratio: float = 1.5
    """Features of a tower: at most so many times the mean, and at least the mean over it."""
    bytes: int | None = None
    """Memory for tables of a tower's host; None for no limit."""

    def __post_init__(self) -> None:
        if self.towers < 2:
            raise ConfigError(f"{self.towers} towers, expected at least 2: a model of one tower is the model itself")
        if not 1 <= self.ratio <= 1000:
            raise ConfigError(f"a balance of {self.ratio:g}, expected 1 to 1000")

    def features(self, count: int) -> tuple[int, int]:
        """The fewest and the most features of a tower, of `count` in all."""
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The features of a tower, and what they cost its host."""

    features: tuple[str, ...]
    bytes: int
    lookups: float


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """Towers, in the order of their first features in the schema, and how their features interact."""

    method: Method
    towers: tuple[Tower, ...]
    features: tuple[str, ...]
    """In the order of `interaction`."""
    interaction: tuple[tuple[float, ...], ...]
    """``[F, F]``, 0 to 1."""
    batch_size: int

    @property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """As `model.towers.plan` of a recipe has it."""
        return tuple(tower.features for tower in self.towers)

    def between(self) -> Floats:
        """``[T, T]`` mean interaction of the pairs of a tower's features with another's, or its own; NaN for no pair."""
        matrix = np.array(self.interaction)
        member = np.array([[name in tower.features for name in self.features] for tower in self.towers], dtype=float)
        sums = member @ matrix @ member.T
        sizes = member.sum(1)
        pairs = np.outer(sizes, sizes) - np.diag(sizes)
        found: Floats = np.divide(sums, pairs, out=np.full_like(sums, np.nan), where=pairs > 0)
        return found

    @property
    def inside_and_between(self) -> tuple[float, float]:
        """Mean interaction of pairs that share a tower, and of those that do not; NaN for no pair."""
        tower = {name: number for number, each in enumerate(self.towers) for name in each.features}
        labels = np.array([tower[name] for name in self.features])
        same, matrix = labels[:, None] == labels[None], np.array(self.interaction)
        inside = same & ~np.eye(len(labels), dtype=bool)
        return _mean(matrix[inside]), _mean(matrix[~same])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        inside, between = (None if np.isnan(value) else value for value in self.inside_and_between)
        return {**asdict(self), "plan": self.plan, "inside": inside, "between": between}


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def tied_items(schema: Schema, tables: Sequence[TableSpec]) -> list[Item]:
    """The items of a schema, in its order; `tables` has the spec of every vocabulary."""
    leader = {feature.name: feature.name for feature in schema.sparse}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    first: dict[str, str] = {}
    for feature in schema.sparse:
        for other in filter(None, (feature.of, first.setdefault(feature.vocabulary, feature.name))):
            leader[find(feature.name)] = find(other)
    members: dict[str, list[str]] = {}
    for feature in schema.sparse:
        members.setdefault(find(feature.name), []).append(feature.name)
    specs, vocabulary = {spec.name: spec for spec in tables}, {each.name: each.vocabulary for each in schema.sparse}
    return [_item(names, {vocabulary[name]: specs[vocabulary[name]] for name in names}) for names in members.values()]


def _item(features: Sequence[str], tables: Mapping[str, TableSpec]) -> Item:
    return Item(
        features=tuple(features),
        tables=tuple(tables),
        bytes=sum(spec.rows * spec.shape.slot_bytes for spec in tables.values()),
        lookups=sum(spec.lookups for spec in tables.values()),
    )


def partition(
    items: Sequence[Item], matrix: Floats, bounds: TowerBounds, method: Method, *, batch_size: int, seed: int = 0
) -> TowerPlan:
    """Towers of `items`.

    Parameters
    ----------
    items : sequence of Item
        As `tied_items` gives.
    matrix : ndarray
        ``[F, F]`` interactions from 0 to 1 of the features, in the order of the items.

    Raises
    ------
    ConfigError
        When the bounds cannot be met; names what stands in the way.
    """
    check_bounds(items, bounds)
    sizes = np.array([len(item.features) for item in items], dtype=float)
    labels = _within(items, bounds, lambda limits: _labels(_of_items(matrix, sizes), sizes, bounds, method, limits, seed))
    towers = [[item for item, label in zip(items, labels, strict=True) if label == tower] for tower in range(bounds.towers)]
    order = {item.features[0]: place for place, item in enumerate(items)}
    made = (
        Tower(
            features=tuple(name for item in tower for name in item.features),
            bytes=sum(item.bytes for item in tower),
            lookups=sum(item.lookups for item in tower),
        )
        for tower in sorted(towers, key=lambda tower: order[tower[0].features[0]])
    )
    names = tuple(name for item in items for name in item.features)
    rows = tuple(tuple(row) for row in matrix.tolist())
    return TowerPlan(method=method, towers=tuple(made), features=names, interaction=rows, batch_size=batch_size)
