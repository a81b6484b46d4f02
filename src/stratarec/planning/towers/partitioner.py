"""Which sparse features share a tower (Disaggregated Multi-Tower, arXiv 2403.00877, its partitioner).

Items that interact strongly come into one tower: interactions become distances, distances points, and points balanced
clusters. Bounds on features, bytes and lookups hold at once, lookups as even as the tightest of a series of bounds that
can be met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.planning.towers.bounds import Item, TowerBounds, check_bounds, tightest
from stratarec.planning.towers.clustering import Floats, balanced_clusters, embed


@dataclass(frozen=True, kw_only=True)
class PlannedTower:
    """The features of a tower, and what they cost its host."""

    features: tuple[str, ...]
    bytes: int
    lookups: float


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """Towers, in the order of their first features in the schema, and how their features interact."""

    towers: tuple[PlannedTower, ...]
    features: tuple[str, ...]
    """In the order of `interaction`."""
    interaction: tuple[tuple[float, ...], ...]
    """``[F, F]``, 0 to 1."""
    batch_size: int

    @property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """As `model.towers.plan` of a recipe has it."""
        return tuple(tower.features for tower in self.towers)

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


def partition(
    items: Sequence[Item], matrix: Floats, bounds: TowerBounds, *, batch_size: int, seed: int = 0
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
    joined = _of_items(matrix, sizes.astype(int))
    wanted = 1 - joined
    np.fill_diagonal(wanted, 0)
    points = embed(wanted, seed)
    labels = tightest(items, bounds, lambda limits: balanced_clusters(points, sizes, bounds.towers, limits, seed))
    members = [[item for item, label in zip(items, labels, strict=True) if label == k] for k in range(bounds.towers)]
    order = {item.features[0]: place for place, item in enumerate(items)}
    towers = (
        PlannedTower(
            features=tuple(name for item in member for name in item.features),
            bytes=sum(item.bytes for item in member),
            lookups=sum(item.lookups for item in member),
        )
        for member in sorted(members, key=lambda member: order[member[0].features[0]])
    )
    return TowerPlan(
        towers=tuple(towers),
        features=tuple(name for item in items for name in item.features),
        interaction=tuple(tuple(row) for row in matrix.tolist()),
        batch_size=batch_size,
    )


def _of_items(matrix: Floats, sizes: NDArray[np.int64]) -> Floats:
    """``[items, items]``: the mean over the pairs of their features."""
    member = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    found: Floats = (member @ matrix @ member.T) / np.outer(sizes, sizes)
    np.fill_diagonal(found, 0)
    return found
