"""How strongly the sparse features of a model interact: a matrix ``[F, F]``, symmetric, with a diagonal of zeros.

They are asked of the model: what does another sample's vector in place of feature i's change in what another sample's
in place of feature j's does to the logit? This mixed second difference is exact in i and of first order in j, so a
batch costs F + 1 backward passes of the network and no look-up; its root mean square over samples counts, beside what
the two features have with all others (`normalized`). The paper of the towers (arXiv 2403.00877) takes the absolute
cosine of the vectors of two features instead: by it, planted blocks were never found.

Shapes: B samples, F sparse features, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.models import CTRModel

Matrix: TypeAlias = NDArray[np.float64]


def feature_keys(model: CTRModel) -> tuple[str, ...]:
    """The sparse features in the order of the vectors that a model's score takes: unpooled histories last."""
    return (*model.embeddings.pooled_keys, *model.network.sequence_keys)


def measure(model: CTRModel, batches: Iterable[Batch]) -> Matrix:
    """Interactions, 0 to 1, between the features of a trained model, in the order of `feature_keys`.

    Parameters
    ----------
    batches : iterable of Batch
        Without groups (`Batch.expanded`). A batch of one sample says nothing of mixed differences.
    """
    training = model.training
    model.eval()
    try:
        found = [_mixed(model, *_inputs(model, batch)) for batch in batches]
    finally:
        model.train(training)
    sums, samples = np.sum([each for each, _ in found], axis=0), sum(count for _, count in found)
    root: Matrix = np.sqrt(sums / max(samples, 1))
    return normalized((root + root.T) / 2)


def normalized(matrix: Matrix) -> Matrix:
    """Interactions ``[F, F]`` as numbers from 0 to 1, each beside what its two features have with others.

    A feature that a model makes much of has stronger interactions with everything. So the matrix is divided by s_i and
    s_j such that every row has a mean of one (Sinkhorn and Knopp 1967), and x becomes x / (1 + x).
    """
    count = len(matrix)
    scale, floor = np.ones(count), 1e-9 * max(float(matrix.max()), 1e-300)
    kept = np.where(np.eye(count, dtype=bool), 0, np.maximum(matrix, floor))
    for _ in range(100):
        scale *= np.sqrt((kept / np.outer(scale, scale)).sum(1) / max(count - 1, 1)) if count > 1 else 1
    found = kept / np.outer(scale, scale)
    return found / (1 + found)


def _inputs(model: CTRModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Dense ``[B, F_dense]`` and vectors ``[B, F, D]`` as the score is given them."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append((inputs[0].clone(), inputs[1].float().clone()))

    hook = model.network.score.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            model(batch)
    finally:
        hook.remove()
    return found[0]


def _mixed(model: CTRModel, dense: Tensor, vectors: Tensor) -> tuple[Matrix, int]:
    """Sum of squared mixed differences, and samples."""
    # Another sample of the batch: what is put in place of a vector is one that occurs.
    other = vectors.roll(len(vectors) // 2, 0)
    change = other - vectors
    before = _gradient(model.network.score, dense, vectors)
    rows = []
    for feature in range(vectors.shape[1]):
        moved = vectors.clone()
        moved[:, feature] = other[:, feature]
        difference = _gradient(model.network.score, dense, moved) - before
        rows.append((difference * change).sum(2).double().square().sum(0))
    return torch.stack(rows).cpu().numpy(), len(vectors)


def _gradient(score: nn.Module, dense: Tensor, vectors: Tensor) -> Tensor:
    """Of the logits, by vectors: ``[B, F, D]``. Samples do not meet in a score, so the sum's gradient is each one's."""
    with torch.enable_grad():
        at = vectors.clone().requires_grad_()
        (found,) = torch.autograd.grad(score(dense, at, None).float().sum(), at)
    return found
