"""Items to balanced clusters: interactions as distances, distances as points, and points to clusters of bounded size.

The last is k-means whose assignment step is an integer program.

Shapes: n items or points, K clusters, R resources of which every cluster has least and most, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from stratarec.config.units import readable
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.tower_config import tied
from stratarec.planning.candidates import TableSpec
from stratarec.planning.solve import quiet

Floats: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

_STEPS, _RATE = 500, 0.05
# Of the points. In two or three, clusters that are all equally far from each other have no room: planted blocks were
# missed in six cases of eight, in eight dimensions in one of four.
_DIMENSIONS = 8
_SECONDS = 10
# An assignment this much dearer than the best one will do: what it is for goes on from there anyway.
_GAP = 1e-4
_ROUNDS = 30
_STARTS = 6
# Pairs of more items are too many to try.
_MOST_IMPROVED = 100


def embed(wanted: Floats, seed: int) -> Floats:
    """Points ``[F, d]`` whose distances come near to `wanted`: least squared errors, by gradient descent (Adam)."""
    given = torch.from_numpy(wanted)
    points = torch.randn(len(wanted), _DIMENSIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    points = (points * 0.1).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        # The square root has no slope at 0, where the diagonal lies.
        found = ((points[:, None] - points[None]).square().sum(2) + 1e-12).sqrt()
        (found - given).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return points.detach().cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What items take, and what a cluster may take of it.

    Parameters
    ----------
    weights : ndarray
        ``[n, R]``.
    least, most : ndarray
        ``[R]``; infinities for no bound.
    """

    weights: Floats
    least: Floats
    most: Floats

    def hold(self, labels: Labels, clusters: int) -> bool:
        """Whether every cluster keeps within the bounds."""
        taken = np.stack([np.bincount(labels, column, clusters) for column in self.weights.T], axis=1)
        return bool((taken <= self.most * (1 + 1e-9)).all() and (taken >= self.least * (1 - 1e-9)).all())


def assign(costs: Floats, limits: Limits) -> Labels | None:
    """The cluster of each item at the least cost ``[n, K]`` within `limits`; None where there is none.

    None, too, where HiGHS finds none in ten seconds.
    """
    items, clusters = costs.shape
    variables = np.arange(items * clusters).reshape(items, clusters)
    ones = np.ones(items * clusters)
    each = csr_array((ones, (np.repeat(np.arange(items), clusters), variables.ravel())))
    constraints = [LinearConstraint(each, 1, 1)]
    for weight, least, most in zip(limits.weights.T, limits.least, limits.most, strict=True):
        # Bytes are up to 10^15: as shares, their coefficients are of one size with the others.
        scale = max(float(weight.max()), 1e-300)
        taken = csr_array(
            (np.repeat(weight / scale, clusters), (np.tile(np.arange(clusters), items), variables.ravel()))
        )
        constraints.append(LinearConstraint(taken, least / scale, most / scale))
    spread = max(float(costs.max() - costs.min()), 1e-300)
    with quiet():
        found = milp(
            (costs.ravel() - costs.min()) / spread,
            integrality=ones,
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
    return None if found.x is None else found.x.reshape(items, clusters).argmax(1)


def balanced_clusters(points: Floats, sizes: Floats, clusters: int, limits: Limits, seed: int) -> Labels | None:
    """The clusters ``[n]`` of points ``[n, d]`` with a small sum of squared distances to their means, within `limits`.

    The best of several local optima; None where `limits` cannot be met.

    Parameters
    ----------
    sizes : ndarray
        ``[n]``: what a point weighs in sums and means.
    """
    draws = np.random.default_rng(seed)
    best, least = None, np.inf
    for _ in range(_STARTS):
        found = _from(_first_centers(points, sizes, clusters, draws), points, sizes, limits)
        if found is None:
            return None
        if len(points) <= _MOST_IMPROVED:
            found = _improved(found, points, sizes, clusters, limits)
        cost = spread(points, sizes, found, clusters)
        if cost < least * (1 - 1e-9):
            best, least = found, cost
    return best


def spread(points: Floats, sizes: Floats, labels: Labels, clusters: int) -> float:
    """The sum of squared distances to the means of clusters, weighed by `sizes`."""
    centers = _centers(points, sizes, labels, clusters)
    return float((sizes * np.square(points - centers[labels]).sum(1)).sum())


def _from(centers: Floats, points: Floats, sizes: Floats, limits: Limits) -> Labels | None:
    """Lloyd's steps from `centers` until no item moves."""
    labels: Labels | None = None
    for _ in range(_ROUNDS):
        found = assign(sizes[:, None] * _squares(points, centers), limits)
        if found is None or (labels is not None and (found == labels).all()):
            return found
        labels, centers = found, _centers(points, sizes, found, len(centers))
    return labels


def _improved(labels: Labels, points: Floats, sizes: Floats, clusters: int, limits: Limits) -> Labels:
    """Single items move, and pairs change places, as long as that makes the clusters tighter."""
    labels, cost = labels.copy(), spread(points, sizes, labels, clusters)
    for _ in range(_ROUNDS):
        before = cost
        for item in range(len(labels)):
            for trial in _neighbours(labels, item, clusters):
                now = spread(points, sizes, trial, clusters)
                if now < cost * (1 - 1e-9) and limits.hold(trial, clusters):
                    labels, cost = trial, now
        if cost == before:
            break
    return labels


def _neighbours(labels: Labels, item: int, clusters: int) -> list[Labels]:
    """The item in another cluster; the item and a later one in each other's."""
    found = []
    for cluster in range(clusters):
        if cluster != labels[item]:
            trial = labels.copy()
            trial[item] = cluster
            found.append(trial)
    for other in range(item + 1, len(labels)):
        if labels[other] != labels[item]:
            trial = labels.copy()
            trial[[item, other]] = labels[[other, item]]
            found.append(trial)
    return found


def _first_centers(points: Floats, sizes: Floats, clusters: int, draws: np.random.Generator) -> Floats:
    """k-means++ (Arthur and Vassilvitskii 2007): each next one by its squared distance to those before."""
    chosen = [int(draws.integers(len(points)))]
    while len(chosen) < clusters:
        nearest = sizes * _squares(points, points[chosen]).min(1)
        total = nearest.sum()
        chosen.append(int(draws.choice(len(points), p=nearest / total if total > 0 else None)))
    return points[chosen]


def _centers(points: Floats, sizes: Floats, labels: Labels, clusters: int) -> Floats:
    weight = np.bincount(labels, sizes, clusters)
    sums = np.stack([np.bincount(labels, sizes * column, clusters) for column in points.T], axis=1)
    return sums / np.maximum(weight, 1e-300)[:, None]


def _squares(points: Floats, centers: Floats) -> Floats:
    """``[n, K]`` squared distances."""
    found: Floats = np.square(points[:, None] - centers[None]).sum(2)
    return found


@dataclass(frozen=True, kw_only=True)
class Item:
    """Features that must share a tower, and what they cost its host."""

    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int
    """float32 rows and their optimizer state."""
    lookups: float
    """Ids of a batch."""


def tied_items(schema: Schema, tables: Sequence[TableSpec]) -> list[Item]:
    """The items of a schema, in its order; `tables` has the spec of every vocabulary."""
    specs, vocabulary = {spec.name: spec for spec in tables}, {each.name: each.vocabulary for each in schema.sparse}
    found = []
    for features in tied(schema):
        names = tuple(dict.fromkeys(vocabulary[name] for name in features))
        rows = sum(specs[name].rows * specs[name].shape.slot_bytes for name in names)
        lookups = sum(specs[name].lookups for name in names)
        found.append(Item(features=features, tables=names, bytes=rows, lookups=lookups))
    return found


# Lookups are kept as even as items allow: bounds of so much more, one after the other, until there is a partition.
_WIDER = 1.25


@dataclass(frozen=True, kw_only=True)
class TowerBounds:
    """Limits of each tower."""

    towers: int
    ratio: float = 1.5
    """Features of a tower: at most so many times the mean, and at least the mean over it."""
    dram: int | None = None
    """Bytes for tables in each process, as `MemoryConfig.dram`; None for no limit."""
    ranks: int = 1
    """Processes of the host of a tower."""

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
        """The fewest and the most features of a tower, of `count` in all."""
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


def check_bounds(items: Sequence[Item], bounds: TowerBounds) -> None:
    """Refuse bounds that no partition can meet, as far as that can be seen at once.

    Raises
    ------
    ConfigError
        Naming the feature or table that is too much, or too few.
    """
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
            f"{readable(heaviest.bytes)} with its optimizer state, more than memory.dram of the host of a tower, which "
            f"is {readable(bounds.dram)}{processes}: raise memory.dram or --ranks"
        )
    if total > bounds.bytes * bounds.towers:
        raise ConfigError(
            f"the tables take {readable(total)} with their optimizer state, more than memory.dram of {bounds.towers} "
            f"hosts, which is {readable(bounds.dram)}{processes} of a host (the largest table is "
            f"{heaviest.tables[0]!r}, {readable(heaviest.bytes)}): ask for more towers, or raise memory.dram or --ranks"
        )


def tightest(items: Sequence[Item], bounds: TowerBounds, labels: Callable[[Limits], Labels | None]) -> Labels:
    """What `labels` gives within the bounds, with lookups spread over towers as evenly as that leaves room for."""
    heaviest = max(item.lookups for item in items)
    total = sum(item.lookups for item in items)
    most = _WIDER * max(heaviest, total / bounds.towers)
    while True:
        found = labels(_limits(items, bounds, most))
        if found is not None:
            return found
        if most >= total:
            heavy = max(items, key=lambda item: item.bytes)
            raise ConfigError(
                f"no {bounds.towers} towers keep within a balance of {bounds.ratio:g} and the memory of a host (the "
                f"largest table is {heavy.tables[0]!r}, {readable(heavy.bytes)}): ask for fewer towers or a larger "
                "--balance, or raise memory.dram"
            )
        most *= _WIDER


def _limits(items: Sequence[Item], bounds: TowerBounds, lookups: float) -> Limits:
    weights = np.array([(len(item.features), item.bytes, item.lookups) for item in items], dtype=float)
    fewest, most = bounds.features(int(weights[:, 0].sum()))
    host = np.inf if bounds.bytes is None else float(bounds.bytes)
    return Limits(weights=weights, least=np.array([fewest, 0.0, 0.0]), most=np.array([most, host, lookups]))


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
