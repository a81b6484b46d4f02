"""Items to clusters at the least cost, within what each cluster may take: an integer program.

Shapes: n items, K clusters, R resources of which every cluster has least and most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from stratarec.planning.solve import quiet

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

_SECONDS = 10
# An assignment this much dearer than the best one will do: what it is for goes on from there anyway.
_GAP = 1e-4


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
