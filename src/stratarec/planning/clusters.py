"""Points into clusters of bounded size: k-means whose assignment step is an integer program.

Shapes: n points, K clusters, d dimensions.
"""

from __future__ import annotations

import numpy as np

from stratarec.planning.assignment import Floats, Labels, Limits, assign

_ROUNDS = 30
_STARTS = 6
# Pairs of more items are too many to try.
_MOST_IMPROVED = 100


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
