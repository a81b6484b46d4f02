"""Choose which sparse features share a tower (Disaggregated Multi-Tower, arXiv 2403.00877).

Bounds on features and bytes hold for each tower, and lookups are spread as evenly as these allow. Features that share a
table, or are a history of one another, form one item and cannot be separated. Which other features share a tower made
no measured difference: towers by the interactions of features had the AUC of random ones (docs/log.md).

Shapes: n items, K towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, kron

from stratarec.config.units import format_bytes
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.tower_config import tied
from stratarec.planning.candidates import TableSpec
from stratarec.planning.solve import quiet

Labels: TypeAlias = NDArray[np.int64]

_SECONDS = 10
# Relative distance from the most even spread at which the solver may stop.
_GAP = 0.01


@dataclass(frozen=True, kw_only=True)
class Item:
    """Features that must share a tower, with their bytes and lookups."""

    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int
    """float32 rows and their optimizer state."""
    lookups: float
    """Ids of a batch."""


def tied_items(schema: Schema, tables: Sequence[TableSpec]) -> list[Item]:
    """Return the items of a schema, in its order; `tables` has the spec of every vocabulary."""
    specs, vocabulary = {spec.name: spec for spec in tables}, {each.name: each.vocabulary for each in schema.sparse}
    items = []
    for features in tied(schema):
        names = tuple(dict.fromkeys(vocabulary[name] for name in features))
        rows = sum(specs[name].rows * specs[name].shape.slot_bytes for name in names)
        lookups = sum(specs[name].lookups for name in names)
        items.append(Item(features=features, tables=names, bytes=rows, lookups=lookups))
    return items


@dataclass(frozen=True, kw_only=True)
class TowerBounds:
    """Limits of each tower."""

    towers: int
    ratio: float = 1.5
    """Features of a tower: at most this many times the mean, and at least the mean divided by it."""
    dram: int | None = None
    """Bytes for tables in each process, as `MemoryConfig.dram`; None for no limit."""
    ranks: int = 1
    """Processes on the host of a tower."""

    def __post_init__(self) -> None:
        if self.towers < 2:
            raise ConfigError(f"--towers is {self.towers}, expected at least 2: one tower is the model itself")
        if not 1 <= self.ratio <= 1000:
            raise ConfigError(f"--balance is {self.ratio:g}, expected 1 to 1000")

    @property
    def bytes(self) -> int | None:
        """Bytes for tables on the host of a tower; None for no limit."""
        return None if self.dram is None else self.dram * self.ranks

    def features(self, count: int) -> tuple[int, int]:
        """Return the fewest and the most features of a tower, of `count` in total."""
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


def check_bounds(items: Sequence[Item], bounds: TowerBounds) -> None:
    """Refuse bounds that obviously no partition can meet, and name the feature or table in the way."""
    count = sum(len(item.features) for item in items)
    if count < bounds.towers:
        raise ConfigError(f"{bounds.towers} towers of {count} sparse features: expected at most as many towers")
    largest = max(items, key=lambda item: len(item.features))
    if len(items) < bounds.towers:
        raise ConfigError(
            f"{bounds.towers} towers, but only {len(items)} sets of features can be apart: "
            f"{', '.join(largest.features)} share a table or are a history of one another"
        )
    _, most = bounds.features(count)
    if len(largest.features) > most:
        raise ConfigError(
            f"{', '.join(largest.features)} must be in one tower (they share a table or are a history of one another), "
            f"which may have at most {most} of the {count} features: ask for fewer towers or a larger --balance"
        )
    _check_bytes(items, bounds)


def _check_bytes(items: Sequence[Item], bounds: TowerBounds) -> None:
    if bounds.bytes is None or bounds.dram is None:
        return
    processes = f" in each of {bounds.ranks} processes" if bounds.ranks > 1 else ""
    heaviest, total = max(items, key=lambda item: item.bytes), sum(item.bytes for item in items)
    if heaviest.bytes > bounds.bytes:
        raise ConfigError(
            f"table {' and '.join(map(repr, heaviest.tables))} of {', '.join(heaviest.features)} takes "
            f"{format_bytes(heaviest.bytes)} with its optimizer state, more than memory.dram of the host of a tower, "
            "which "
            f"is {format_bytes(bounds.dram)}{processes}: raise memory.dram or --ranks"
        )
    if total > bounds.bytes * bounds.towers:
        raise ConfigError(
            f"the tables take {format_bytes(total)} with their optimizer state, more than memory.dram of "
            f"{bounds.towers} "
            f"hosts, which is {format_bytes(bounds.dram)}{processes} of a host (the largest table is "
            f"{heaviest.tables[0]!r}, {format_bytes(heaviest.bytes)}): ask for more towers, or raise memory.dram or "
            "--ranks"
        )


def assign(items: Sequence[Item], bounds: TowerBounds) -> Labels | None:
    """Return the tower of each item, such that the most lookups of any tower are least within the bounds.

    None if no towers keep within the bounds, or HiGHS finds none in ten seconds.
    """
    count, towers = len(items), bounds.towers
    sizes = np.array([len(item.features) for item in items], dtype=float)
    # Bytes are up to 10^15: as shares of all, their coefficients are of one size with the others.
    rows, lookups = (
        column / max(column.sum(), 1e-300)
        for column in np.array([(item.bytes, item.lookups) for item in items], dtype=float).T
    )
    fewest, most = bounds.features(int(sizes.sum()))
    host = np.inf if bounds.bytes is None else bounds.bytes / max(sum(item.bytes for item in items), 1)

    def of_towers(weights: NDArray[np.float64], last: float = 0.0) -> csr_array:
        """Return the sums over the items of each tower, plus `last` times the last variable."""
        sums = kron(weights[None], eye_array(towers))
        return csr_array(np.hstack([sums.toarray(), np.full((towers, 1), last)]))

    one_each = np.hstack([np.kron(np.eye(count), np.ones(towers)), np.zeros((count, 1))])
    # Variables: whether item i is in tower k, tower after tower of each item, then the most lookups of any tower.
    least = np.zeros(count * towers + 1)
    least[-1] = max(lookups.max(), 1 / towers)
    with quiet():
        solution = milp(
            np.append(np.zeros(count * towers), 1.0),
            integrality=np.append(np.ones(count * towers), 0),
            bounds=Bounds(least, 1),
            constraints=[
                LinearConstraint(csr_array(one_each), 1, 1),
                LinearConstraint(of_towers(sizes), fewest, most),
                LinearConstraint(of_towers(rows), -np.inf, host),
                LinearConstraint(of_towers(lookups, -1.0), -np.inf, 0),
            ],
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
    return None if solution.x is None else solution.x[:-1].reshape(count, towers).argmax(1)


@dataclass(frozen=True, kw_only=True)
class PlannedTower:
    """Features of a tower, with their bytes and lookups."""

    features: tuple[str, ...]
    bytes: int
    lookups: float


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """Towers in the order of their first features in the schema."""

    towers: tuple[PlannedTower, ...]

    @property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """Lists of features, as in `model.towers.plan` of a recipe."""
        return tuple(tower.features for tower in self.towers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "plan": self.plan}


def partition(items: Sequence[Item], bounds: TowerBounds) -> TowerPlan:
    """Partition items from `tied_items` into towers.

    Raises
    ------
    ConfigError
        When the bounds cannot be met; names the reason.
    """
    check_bounds(items, bounds)
    labels = assign(items, bounds)
    if labels is None:
        heavy = max(items, key=lambda item: item.bytes)
        raise ConfigError(
            f"no {bounds.towers} towers keep within a balance of {bounds.ratio:g} and the memory of a host (the "
            f"largest table is {heavy.tables[0]!r}, {format_bytes(heavy.bytes)}): ask for fewer towers or a larger "
            "--balance, or raise memory.dram"
        )
    towers = []
    for label in dict.fromkeys(labels.tolist()):
        members = [item for item, mine in zip(items, labels, strict=True) if mine == label]
        towers.append(
            PlannedTower(
                features=tuple(name for item in members for name in item.features),
                bytes=sum(item.bytes for item in members),
                lookups=sum(item.lookups for item in members),
            )
        )
    return TowerPlan(towers=tuple(towers))
