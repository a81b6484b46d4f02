"""Choose which sparse features share a tower, as the partitioner of Disaggregated Multi-Tower
(arXiv 2403.00877).

Features that interact strongly share a tower: the sum of the interactions inside towers, minus the
mean interaction of all pairs, is largest among the partitions that single moves and swaps reach.
The bounds on features, bytes and lookups hold at the same time. To spread lookups evenly, their
bound is first tight and is then raised step by step until a partition exists. Features that share a
table, or of which one is a history of another, form one *item*, which is not divided.

A partition is verified on samples that it was not made from: the towers of one half of the samples
must also have more interaction inside in the other half than towers to which the same items are
dealt at random.

Shapes: n items, K clusters, R resources with bounds in every cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from stratarec.config.units import format_bytes
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.tower_config import tied
from stratarec.planning.candidates import TableSpec
from stratarec.planning.interaction import rank_correlation
from stratarec.planning.solve import quiet

Floats: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

_SECONDS = 10
# The solver stops at this relative distance from the optimum: later steps improve the assignment
# anyway.
_GAP = 1e-4
_STARTS = 12
# Random partitions with which a partition is compared, and the largest share of them that may be as
# good.
_CHANCE_DRAWS, _CHANCE = 2000, 0.001


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
    """Assign each item to a cluster within `limits` so that the sum of `costs` ``[n, K]`` is
    smallest.

    Returns None if no assignment exists, or if HiGHS does not find one in ten seconds.
    """
    items, clusters = costs.shape
    variables = np.arange(items * clusters).reshape(items, clusters)
    ones = np.ones(items * clusters)
    one_each = csr_array((ones, (np.repeat(np.arange(items), clusters), variables.ravel())))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for weight, least, most in zip(limits.weights.T, limits.least, limits.most, strict=True):
        # Bytes are up to 10^15. As shares of the largest item, they have coefficients as large as
        # other resources.
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


def best_clusters(affinity: Floats, clusters: int, limits: Limits, seed: int) -> Labels | None:
    """Return a cluster for each item, ``[n]``, so that the affinities inside clusters have a large
    sum.

    The result is the best of several local optima within `limits`; None if these cannot be met.

    Parameters
    ----------
    affinity : ndarray
        ``[n, n]``, symmetric with a zero diagonal.
    clusters : int
        Number of clusters.
    limits : Limits
        Bounds that every cluster must meet.
    seed : int
        Seed of the starting points.
    """
    draws = np.random.default_rng(seed)
    best, most = None, -np.inf
    for _ in range(_STARTS):
        labels = assign(draws.random((len(affinity), clusters)), limits)
        if labels is None:
            return None
        labels = _climb(labels, affinity, clusters, limits)
        total = inside(affinity, labels)
        if total > most:
            best, most = labels, total
    return best


def inside(affinity: Floats, labels: Labels) -> float:
    """Return the sum of `affinity` ``[n, n]`` over all pairs in the same cluster.

    `labels` is ``[n]``, the cluster of each item.
    """
    return float(affinity[labels[:, None] == labels].sum()) / 2


def _climb(labels: Labels, affinity: Floats, clusters: int, limits: Limits) -> Labels:
    """Move one item or swap two, whichever adds most to the affinities inside clusters, as long as
    one adds any.
    """
    labels, weights = labels.copy(), limits.weights
    every, low, high = np.arange(len(labels)), limits.least * (1 - 1e-9), limits.most * (1 + 1e-9)
    while True:
        toward = affinity @ np.eye(clusters)[labels]
        used = np.stack([np.bincount(labels, column, clusters) for column in weights.T], axis=1)
        current, mine = toward[every, labels], used[labels]
        move = toward - current[:, None]
        fits = (
            np.all(used + weights[:, None] <= high, axis=2) & np.all(mine - weights >= low, axis=1)[:, None]
        )
        move[~fits | (labels[:, None] == np.arange(clusters))] = -np.inf
        swap = toward[:, labels] - current[:, None]
        swap = swap + swap.T - 2 * affinity
        after = mine[:, None] + weights - weights[:, None]
        fits = np.all((after <= high) & (after >= low), axis=2)
        swap[~(fits & fits.T) | (labels[:, None] == labels)] = -np.inf
        if max(move.max(), swap.max()) <= 1e-9 * np.abs(affinity).max():
            return labels
        if move.max() >= swap.max():
            item, cluster = np.unravel_index(move.argmax(), move.shape)
            labels[item] = cluster
        else:
            pair = np.array(np.unravel_index(swap.argmax(), swap.shape))
            labels[pair] = labels[pair[::-1]]


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
    """Return the items of a schema, in the order of the schema. `tables` has the spec of every
    vocabulary.
    """
    specs = {spec.name: spec for spec in tables}
    vocabulary = {feature.name: feature.vocabulary for feature in schema.sparse}
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
    """Limits that a partition of features into towers must meet."""

    towers: int
    """Number of towers."""
    ratio: float = 1.5
    """Allowed ratio between a tower's number of features and the mean number, in both
    directions.
    """
    dram: int | None = None
    """Bytes for tables in each process, as in `MemoryConfig.dram`; None for no limit."""
    ranks: int = 1
    """Number of processes on the host of a tower."""

    def __post_init__(self) -> None:
        if self.towers < 2:
            raise ConfigError(
                f"--towers is {self.towers}, expected at least 2: one tower is the model itself"
            )
        if not 1 <= self.ratio <= 1000:
            raise ConfigError(f"--balance is {self.ratio:g}, expected 1 to 1000")

    @property
    def bytes(self) -> int | None:
        """Bytes for tables on the host of a tower; None for no limit."""
        return None if self.dram is None else self.dram * self.ranks

    def features(self, count: int) -> tuple[int, int]:
        """Return how many features a tower must have and may have at most, if there are `count`
        features in total.
        """
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


def check_bounds(items: Sequence[Item], bounds: TowerBounds) -> None:
    """Raise `ConfigError` if it is obvious that no partition can meet the bounds. The message names
    the feature or table that prevents it.
    """
    count = sum(len(item.features) for item in items)
    if count < bounds.towers:
        raise ConfigError(
            f"--towers is {bounds.towers}, expected at most {count}, the number of sparse features"
        )
    largest = max(items, key=lambda item: len(item.features))
    if len(items) < bounds.towers:
        raise ConfigError(
            f"--towers is {bounds.towers}, expected at most {len(items)}, the number of sets of features "
            f"that can be separated: {', '.join(largest.features)} share a table or are "
            "a history of one another"
        )
    _, most = bounds.features(count)
    if len(largest.features) > most:
        raise ConfigError(
            f"{', '.join(largest.features)} must be in one tower (they share a table or are a history of "
            "one another), "
            f"which may have at most {most} of the {count} features: ask for fewer "
            "towers or a larger --balance"
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
            f"{format_bytes(heaviest.bytes)} with its optimizer state, more than memory.dram of the host "
            f"of a tower, which is {format_bytes(bounds.dram)}{processes}: raise memory.dram or --ranks"
        )
    if total > bounds.bytes * bounds.towers:
        raise ConfigError(
            f"the tables take {format_bytes(total)} with their optimizer state, more than memory.dram of "
            f"{bounds.towers} hosts, which is {format_bytes(bounds.dram)}{processes} of a host (the "
            "largest table is "
            f"{heaviest.tables[0]!r}, {format_bytes(heaviest.bytes)}): ask for more towers, or raise "
            "memory.dram or --ranks"
        )


def tightest(
    items: Sequence[Item], bounds: TowerBounds, labels: Callable[[Limits], Labels | None]
) -> Labels:
    """Return the result of `labels` for the tightest bound on lookups per tower with which there is
    one.

    The bound is raised step by step.

    Parameters
    ----------
    items : sequence of Item
        Sets of features that cannot be separated.
    bounds : TowerBounds
        Number of towers, and the other bounds.
    labels : callable
        Returns a tower for each item within given limits, or None if these cannot be met.
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
                f"no {bounds.towers} towers fit a balance of {bounds.ratio:g} and the memory of a host "
                "(the "
                f"largest table is {heavy.tables[0]!r}, {format_bytes(heavy.bytes)}): ask for fewer towers "
                "or a larger --balance, or raise memory.dram"
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
    """Planned towers, in the order of their first features in the schema, and the interaction of
    all features.
    """

    towers: tuple[PlannedTower, ...]
    features: tuple[str, ...]
    """Features in the order of `interaction`."""
    interaction: tuple[tuple[float, ...], ...]
    """Matrix ``[F, F]``: root mean square of each pair's effect on the logit."""
    batch_size: int
    chance: float
    """Share of random partitions that are as good as the towers, on samples that the towers were
    not made from.
    """
    agreement: float
    """Rank correlation between the interactions in the two halves of the samples."""
    samples: int
    """Number of samples that interactions were measured on."""

    @property
    def structure(self) -> bool:
        """Whether interactions inside and between towers differ beyond chance. If not, only costs
        are balanced.
        """
        return self.chance <= _CHANCE

    @property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """Features of each tower, in the form of `model.towers.plan` in a recipe."""
        return tuple(tower.features for tower in self.towers)

    @property
    def inside_and_between(self) -> tuple[float, float]:
        """Mean interaction of feature pairs in the same tower, and of pairs in different towers;
        NaN without pairs.
        """
        tower = {name: number for number, item in enumerate(self.towers) for name in item.features}
        labels = np.array([tower[name] for name in self.features])
        same, matrix = labels[:, None] == labels[None], np.array(self.interaction)
        inside = same & ~np.eye(len(labels), dtype=bool)
        return _mean(matrix[inside]), _mean(matrix[~same])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        inside, between = (None if np.isnan(value) else value for value in self.inside_and_between)
        return {
            **asdict(self),
            "plan": self.plan,
            "inside": inside,
            "between": between,
            "structure": self.structure,
        }


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def partition(
    items: Sequence[Item],
    halves: tuple[Floats, Floats],
    bounds: TowerBounds,
    *,
    batch_size: int,
    samples: int = 0,
    seed: int = 0,
) -> TowerPlan:
    """Partition `items` into towers. If no structure is found, only their lookups and bytes are
    balanced.

    Parameters
    ----------
    items : sequence of Item
        Items from `tied_items`.
    halves : pair of ndarray
        ``[F, F]`` interactions of features in two halves of the samples, in the order of the items.
    bounds : TowerBounds
        Number of towers, and limits of each.
    batch_size : int
        Samples of a batch, for which lookups are counted.
    samples : int
        Number of samples in both halves.
    seed : int
        Seed of the starting points.

    Raises
    ------
    ConfigError
        If the bounds cannot be met. The message names the reason.
    """
    check_bounds(items, bounds)
    matrix = (halves[0] + halves[1]) / 2
    chance = _chance(items, halves, bounds, seed)
    affinity = _affinity(items, matrix) if chance <= _CHANCE else np.zeros((len(items),) * 2)
    labels = _labels(items, affinity, bounds, seed)
    members = [
        [item for item, label in zip(items, labels, strict=True) if label == k]
        for k in range(bounds.towers)
    ]
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
        chance=chance,
        agreement=rank_correlation(*halves),
        samples=samples,
    )


def _labels(items: Sequence[Item], affinity: Floats, bounds: TowerBounds, seed: int) -> Labels:
    return tightest(items, bounds, lambda limits: best_clusters(affinity, bounds.towers, limits, seed))


def _chance(items: Sequence[Item], halves: tuple[Floats, Floats], bounds: TowerBounds, seed: int) -> float:
    """Return how often random partitions are as good in one half as the partition that was made
    from the other half.
    """
    first, second = (_affinity(items, half) for half in halves)
    draws, better = np.random.default_rng(seed), 1
    pairs = [
        (test, _labels(items, grouping, bounds, seed))
        for grouping, test in ((first, second), (second, first))
    ]
    actual = sum(inside(test, labels) for test, labels in pairs)
    for _ in range(_CHANCE_DRAWS):
        order = draws.permutation(len(items))
        better += sum(inside(test, labels[order]) for test, labels in pairs) >= actual
    return better / (_CHANCE_DRAWS + 1)


def _affinity(items: Sequence[Item], matrix: Floats) -> Floats:
    """Return, for every two items, the sum of the interactions between their features, ``[n, n]``.

    The mean of all interactions is subtracted from each one first.
    """
    sizes = [len(item.features) for item in items]
    member = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    count = len(matrix)
    added: Floats = member @ (matrix - matrix.sum() / max(count * (count - 1), 1)) @ member.T
    np.fill_diagonal(added, 0)
    return added
