"""Choose which sparse features share a tower, as the partitioner of Disaggregated Multi-Tower (arXiv 2403.00877).

Features that interact strongly share a tower. Interactions are converted to distances, distances to points, and points
to clusters of bounded size, by k-means with an integer program as its assignment step. The bounds on features, bytes
and lookups hold at the same time. To spread lookups evenly, their bound is first tight and is then raised step by step
until a partition exists. Features that share a table, or of which one is a history of another, form one *item*, which
is not divided.

Shapes: n items or points, K clusters, R resources with bounds in every cluster, d dimensions.
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

from stratarec.config.units import format_bytes
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.tower_config import tied
from stratarec.planning.candidates import TableSpec
from stratarec.planning.solve import quiet

Floats: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

_STEPS, _RATE = 500, 0.05
# Dimensions of the points. In two or three dimensions, clusters cannot all be equally far from each other: blocks of
# interacting features in made-up data were missed in six cases of eight; with eight dimensions, in one case of four.
_DIMENSIONS = 8
_SECONDS = 10
# The solver stops at this relative distance from the optimum: later steps improve the assignment anyway.
_GAP = 1e-4
_ROUNDS = 30
_STARTS = 6
# With more items there are too many pairs to try.
_MOST_IMPROVED = 100


def embed(distances: Floats, seed: int) -> Floats:
    """Return points ``[F, d]`` that are about as far from each other as `distances` says.

    The squared errors are minimized by gradient descent (Adam).
    """
    target = torch.from_numpy(distances)
    points = torch.randn(
        len(distances), _DIMENSIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    points = (points * 0.1).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        # The diagonal is 0, where the square root has no finite gradient.
        actual = ((points[:, None] - points[None]).square().sum(2) + 1e-12).sqrt()
        (actual - target).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return points.detach().cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resources that each item uses, and how much of each resource a cluster must and may use.

    Parameters
    ----------
    weights : ndarray
        ``[n, R]`` resources that each item uses.
    least, most : ndarray
        ``[R]`` bounds of every cluster; infinite if there is no bound.
    """

    weights: Floats
    least: Floats
    most: Floats

    def hold(self, labels: Labels, clusters: int) -> bool:
        """Return whether every cluster is within the bounds."""
        used = np.stack([np.bincount(labels, column, clusters) for column in self.weights.T], axis=1)
        return bool((used <= self.most * (1 + 1e-9)).all() and (used >= self.least * (1 - 1e-9)).all())


def assign(costs: Floats, limits: Limits) -> Labels | None:
    """Assign each item to a cluster within `limits` so that the sum of `costs` ``[n, K]`` is smallest.

    Returns None if no assignment exists, or if HiGHS does not find one in ten seconds.
    """
    items, clusters = costs.shape
    variables = np.arange(items * clusters).reshape(items, clusters)
    ones = np.ones(items * clusters)
    one_each = csr_array((ones, (np.repeat(np.arange(items), clusters), variables.ravel())))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for weight, least, most in zip(limits.weights.T, limits.least, limits.most, strict=True):
        # Bytes are up to 10^15. As shares of the largest item, they have coefficients as large as other resources.
        scale = max(float(weight.max()), 1e-300)
        usage = csr_array(
            (np.repeat(weight / scale, clusters), (np.tile(np.arange(clusters), items), variables.ravel()))
        )
        constraints.append(LinearConstraint(usage, least / scale, most / scale))
    spread = max(float(costs.max() - costs.min()), 1e-300)
    with quiet():
        solution = milp(
            (costs.ravel() - costs.min()) / spread,
            integrality=ones,
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
    return None if solution.x is None else solution.x.reshape(items, clusters).argmax(1)


def balanced_clusters(points: Floats, sizes: Floats, clusters: int, limits: Limits, seed: int) -> Labels | None:
    """Return a cluster for each point, ``[n]``, so that points are close to the means of their clusters.

    The result is the best of several local optima within `limits`; None if these cannot be met. Points are ``[n, d]``,
    and squared distances are added.

    Parameters
    ----------
    sizes : ndarray
        ``[n]`` weights of the points in sums and means.
    """
    draws = np.random.default_rng(seed)
    best, least = None, np.inf
    for _ in range(_STARTS):
        labels = _from(_first_centers(points, sizes, clusters, draws), points, sizes, limits)
        if labels is None:
            return None
        if len(points) <= _MOST_IMPROVED:
            labels = _improved(labels, points, sizes, clusters, limits)
        cost = spread(points, sizes, labels, clusters)
        if cost < least * (1 - 1e-9):
            best, least = labels, cost
    return best


def spread(points: Floats, sizes: Floats, labels: Labels, clusters: int) -> float:
    """Return the sum of squared distances from points to the means of their clusters, weighted by `sizes`."""
    centers = _centers(points, sizes, labels, clusters)
    return float((sizes * np.square(points - centers[labels]).sum(1)).sum())


def _from(centers: Floats, points: Floats, sizes: Floats, limits: Limits) -> Labels | None:
    """Repeat the two steps of k-means (Lloyd), starting from `centers`, until no item changes its cluster."""
    labels: Labels | None = None
    for _ in range(_ROUNDS):
        assigned = assign(sizes[:, None] * _squares(points, centers), limits)
        if assigned is None or (labels is not None and (assigned == labels).all()):
            return assigned
        labels, centers = assigned, _centers(points, sizes, assigned, len(centers))
    return labels


def _improved(labels: Labels, points: Floats, sizes: Floats, clusters: int, limits: Limits) -> Labels:
    """Move single items and swap pairs of items, as long as this reduces the distances to the means."""
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
    """Return all copies of `labels` with one change: `item` moved to another cluster, or swapped with a later item."""
    neighbours = []
    for cluster in range(clusters):
        if cluster != labels[item]:
            trial = labels.copy()
            trial[item] = cluster
            neighbours.append(trial)
    for other in range(item + 1, len(labels)):
        if labels[other] != labels[item]:
            trial = labels.copy()
            trial[[item, other]] = labels[[other, item]]
            neighbours.append(trial)
    return neighbours


def _first_centers(points: Floats, sizes: Floats, clusters: int, draws: np.random.Generator) -> Floats:
    """Draw centers among the points by k-means++ (Arthur and Vassilvitskii 2007).

    The probability of a point is proportional to its squared distance from the nearest center drawn before.
    """
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
    """Return the squared distances ``[n, K]`` from points to centers."""
    squares: Floats = np.square(points[:, None] - centers[None]).sum(2)
    return squares


@dataclass(frozen=True, kw_only=True)
class Item:
    """Features that must share a tower, with their bytes and lookups."""

    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int
    """Bytes of float32 rows and their optimizer state."""
    lookups: float
    """Number of ids per batch."""


def tied_items(schema: Schema, tables: Sequence[TableSpec]) -> list[Item]:
    """Return the items of a schema, in the order of the schema. `tables` has the spec of every vocabulary."""
    specs, vocabulary = {spec.name: spec for spec in tables}, {each.name: each.vocabulary for each in schema.sparse}
    items = []
    for features in tied(schema):
        names = tuple(dict.fromkeys(vocabulary[name] for name in features))
        rows = sum(specs[name].rows * specs[name].shape.slot_bytes for name in names)
        lookups = sum(specs[name].lookups for name in names)
        items.append(Item(features=features, tables=names, bytes=rows, lookups=lookups))
    return items


# Factor by which the bound on lookups is raised until a partition exists.
_WIDER = 1.25


@dataclass(frozen=True, kw_only=True)
class TowerBounds:
    """Limits of each tower."""

    towers: int
    ratio: float = 1.5
    """Allowed ratio between a tower's number of features and the mean number, in both directions."""
    dram: int | None = None
    """Bytes for tables in each process, as in `MemoryConfig.dram`; None for no limit."""
    ranks: int = 1
    """Number of processes on the host of a tower."""

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
        """Return how many features a tower must have and may have at most, if there are `count` features in total."""
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


def check_bounds(items: Sequence[Item], bounds: TowerBounds) -> None:
    """Raise `ConfigError` if it is obvious that no partition can meet the bounds. The message names the feature or
    table that prevents it.
    """
    count = sum(len(item.features) for item in items)
    if count < bounds.towers:
        raise ConfigError(f"--towers is {bounds.towers}, expected at most {count}, the number of sparse features")
    largest = max(items, key=lambda item: len(item.features))
    if len(items) < bounds.towers:
        raise ConfigError(
            f"{bounds.towers} towers, but only {len(items)} sets of features can be separated: "
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


def tightest(items: Sequence[Item], bounds: TowerBounds, labels: Callable[[Limits], Labels | None]) -> Labels:
    """Return the result of `labels` for the tightest bound on lookups per tower with which there is one.

    The bound is raised step by step. `labels` returns a tower for each item within given limits, or None.
    """
    heaviest = max(item.lookups for item in items)
    total = sum(item.lookups for item in items)
    most = _WIDER * max(heaviest, total / bounds.towers)
    while True:
        assigned = labels(_limits(items, bounds, most))
        if assigned is not None:
            return assigned
        if most >= total:
            heavy = max(items, key=lambda item: item.bytes)
            raise ConfigError(
                f"no {bounds.towers} towers fit a balance of {bounds.ratio:g} and the memory of a host (the "
                f"largest table is {heavy.tables[0]!r}, {format_bytes(heavy.bytes)}): ask for fewer towers or a larger "
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
    """Features of a planned tower, with the bytes of their tables and their lookups per batch."""

    features: tuple[str, ...]
    bytes: int
    lookups: float


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """Planned towers, in the order of their first features in the schema, and the interaction of all features."""

    towers: tuple[PlannedTower, ...]
    features: tuple[str, ...]
    """Features in the order of `interaction`."""
    interaction: tuple[tuple[float, ...], ...]
    """Matrix ``[F, F]`` of values from 0 to 1."""
    batch_size: int

    @property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """Features of each tower, in the form of `model.towers.plan` in a recipe."""
        return tuple(tower.features for tower in self.towers)

    @property
    def inside_and_between(self) -> tuple[float, float]:
        """Mean interaction of feature pairs in the same tower, and of pairs in different towers; NaN without pairs."""
        tower = {name: number for number, item in enumerate(self.towers) for name in item.features}
        labels = np.array([tower[name] for name in self.features])
        same, matrix = labels[:, None] == labels[None], np.array(self.interaction)
        inside = same & ~np.eye(len(labels), dtype=bool)
        return _mean(matrix[inside]), _mean(matrix[~same])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        inside, between = (None if np.isnan(value) else value for value in self.inside_and_between)
        return {**asdict(self), "plan": self.plan, "inside": inside, "between": between}


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def partition(
    items: Sequence[Item], matrix: Floats, bounds: TowerBounds, *, batch_size: int, seed: int = 0
) -> TowerPlan:
    """Partition `items` into towers.

    Parameters
    ----------
    items : sequence of Item
        Items from `tied_items`.
    matrix : ndarray
        ``[F, F]`` interactions of features, from 0 to 1, in the order of the items.

    Raises
    ------
    ConfigError
        If the bounds cannot be met. The message names the reason.
    """
    check_bounds(items, bounds)
    sizes = np.array([len(item.features) for item in items], dtype=float)
    joined = _of_items(matrix, sizes.astype(int))
    distances = 1 - joined
    np.fill_diagonal(distances, 0)
    points = embed(distances, seed)
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
    """Return the interaction of every two items, ``[items, items]``: the mean over pairs of their features."""
    member = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    means: Floats = (member @ matrix @ member.T) / np.outer(sizes, sizes)
    np.fill_diagonal(means, 0)
    return means
