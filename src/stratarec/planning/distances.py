"""Interactions as distances, and features as points whose distances are these.

Shapes: F features, d dimensions.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Goal: TypeAlias = Literal["coherent", "diverse"]

_STEPS, _RATE = 500, 0.05
DIMENSIONS = 8
"""Of the points. In two or three, clusters that are all equally far from each other have no room; see docs/log.md."""


def distances(matrix: Floats, goal: Goal) -> Floats:
    """``coherent``: 1 - I, near are features that interact strongly; ``diverse``: I, near are those that do not."""
    found = 1 - matrix if goal == "coherent" else matrix.copy()
    np.fill_diagonal(found, 0)
    return found


def embed(wanted: Floats, seed: int, dimensions: int = DIMENSIONS) -> Floats:
    """Points ``[F, d]`` whose distances come near to `wanted`: least squared errors, by gradient descent (Adam)."""
    given = torch.from_numpy(wanted)
    points = torch.randn(len(wanted), dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    points = (points * 0.1).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        # The square root has no slope at 0, where the diagonal lies.
        found = ((points[:, None] - points[None]).square().sum(2) + 1e-12).sqrt()
        (found - given).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return points.detach().cpu().numpy()
