"""Pool rows of a group of tables into bags, gather rows without pooling, and compute gradients of
weights.

Shapes: F features, B samples, N ids, D width, R rows of all tables of the group together. If an id
is outside its table, it is not used as an index, and its position is returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.pooling import cpu
from stratarec.kernels.runtime.accelerator import backend

Floats = NDArray[np.float32]
_BACKENDS = {"cpu": cpu}


def pool(weights: Floats, group: GroupLayout, bags: BagBatch, out: Tensor) -> int:
    """Pool every pooled feature of the group into ``out[b, column[f]:column[f] + D]``.

    Parameters
    ----------
    weights : ndarray
        ``[R * D]`` float32 rows of the group.
    group : GroupLayout
        Features of the tables.
    bags : BagBatch
        Lookups of a batch.
    out : Tensor
        ``[B, columns]`` float32, contiguous; its device determines the kernel.

    Returns
    -------
    int
        Position in `values` of an id outside its table, or -1.
    """
    if _pools_nothing(group, bags):
        return -1
    return int(backend(_BACKENDS, out).pool(weights, group, bags, out))


def gather(weights: Floats, group: GroupLayout, bags: BagBatch, feature: int, out: Tensor) -> int:
    """Copy the row of each id of one sequence feature to `out`, ``[N, D]``; return the same as
    `pool`.

    `feature` is the index of the feature in the group. The other arguments are those of `pool`.
    """
    first, last = bags.span(feature)
    bad = int(backend(_BACKENDS, out).gather(weights, group, bags.values[first:last], feature, out))
    return bad if bad < 0 else first + bad


def weight_gradient(
    weights: Floats, group: GroupLayout, bags: BagBatch, gradient: Tensor, out: Tensor
) -> None:
    """Add the gradient of the weight of each pooled lookup to `out`, ``[N]`` float32.

    `gradient` is the gradient of the pooled output, ``[B, columns]`` float32. The other arguments
    are those of `pool`.
    """
    if not _pools_nothing(group, bags):
        backend(_BACKENDS, out).weight_gradient(weights, group, bags, gradient, out)


def _pools_nothing(group: GroupLayout, bags: BagBatch) -> bool:
    # Kernels divide tasks by features and samples; if there are none, they would divide by zero.
    return (isinstance(group.pooled, np.ndarray) and not len(group.pooled)) or not bags.batch
