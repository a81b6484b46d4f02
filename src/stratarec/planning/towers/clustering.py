"""Items to balanced clusters: interactions as distances, distances as points, and points to clusters of bounded size.

The last is k-means whose assignment step is an integer program.

Shapes: n items or points, K clusters, R resources of which every cluster has least and most, d dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

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
