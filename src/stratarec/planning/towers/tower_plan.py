"""What the partitioner gives: towers, what they cost their hosts, and how their features interact."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


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
