"""Measure how strongly the sparse features of a log interact, with an online probe
(`kernels.pair_probe`).

The interaction of two features is the root mean square of the pair's effect on the logit, as far as
samples that the probe has not yet learned from confirm it; below 0 if they contradict it. Without
interaction it has a known standard error, the same for all pairs, and a mean of about -0.5 of these
errors: gates of other pairs let some noise through. Even and odd samples give two measurements,
whose errors are independent.

Shapes: B samples, F sparse features, K codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.errors import TrainingError
from stratarec.kernels.pair_probe import new_state, observe

Matrix: TypeAlias = NDArray[np.float64]

# Number of codes of a feature's values; with many features fewer, so that the cells of all pairs
# fit into the bytes.
_CODES, _CELL_BYTES = 128, 256 << 20


class InteractionProbe:
    """A model of values and pairs of values that measures interactions between `features` while it
    learns.

    It learns the first label. The value of a feature with several values in a sample is the first
    one.
    """

    def __init__(self, features: Sequence[str], numbers: int) -> None:
        self._features = tuple(features)
        pairs = max(len(features) * (len(features) - 1) // 2, 1)
        self._codes = min(_CODES, max(2 ** int(math.log2(_CELL_BYTES / 8 / pairs) / 2), 4))
        self._state = new_state(len(features), self._codes, numbers + 1)
        self._information = 0.0
        """Sum of p (1 - p) over the measured samples."""
        self.samples = 0
        """Number of measured samples."""

    def learn(self, batch: Batch, *, pairs: bool = True) -> float:
        """Measure a batch without groups (`Batch.expanded`), then learn from it; return its mean
        log loss.

        Raises
        ------
        TrainingError
            If the loss is not finite.
        """
        label = (batch.label if batch.label.ndim == 1 else batch.label[:, 0]).double().cpu().numpy()
        has_label = ~np.isnan(label)
        numbers = np.concatenate([batch.dense.double().cpu().numpy(), np.ones((batch.size, 1))], axis=1)
        codes = self._encode(batch)[has_label]
        loss, information = observe(self._state, codes, numbers[has_label], label[has_label], pairs=pairs)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of the probe is {loss}: a dense feature is not finite; set its transform in "
                "data.schema, or remove the feature"
            )
        if pairs:
            self._information = self._information + information
            self.samples = self.samples + len(codes)
        return loss / max(len(codes), 1)

    def restart(self) -> None:
        """Discard the measurements; the model stays as it is."""
        self._state.tests[:] = 0
        self._information = 0.0
        self.samples = 0

    def halves(self) -> tuple[Matrix, Matrix]:
        """Return the interactions ``[F, F]``, with a zero diagonal, measured on even and on odd
        samples.
        """
        first, second = (self._matrix(tests, self._information / 2) for tests in self._state.tests)
        return first, second

    def _matrix(self, tests: Matrix, information: float) -> Matrix:
        pairs, matrix = np.triu_indices(len(self._features), 1), np.zeros((len(self._features),) * 2)
        matrix[pairs] = tests[0] / np.sqrt(np.maximum(tests[1] * information, 1e-300))
        return matrix + matrix.T

    def _encode(self, batch: Batch) -> NDArray[np.int64]:
        """Return codes ``[B, F]``. The first ids, the most frequent, have their own codes; later
        ids share codes.
        """
        codes = np.zeros((batch.size, len(self._features)), np.int64)
        for place, name in enumerate(self._features):
            bags: Any = batch.sparse[name]
            starts, filled = bags.offsets[:-1].cpu().numpy(), bags.lengths().cpu().numpy() > 0
            codes[filled, place] = bags.values.cpu().numpy()[starts[filled]] + 1
        half = self._codes // 2
        return np.where(codes < half, codes, half + codes % half)


def rank_correlation(first: Matrix, second: Matrix) -> float:
    """Return Spearman's correlation of two measurements of the same pairs; 0 if there are fewer
    than three pairs.
    """
    pairs = np.triu_indices(len(first), 1)
    ranks = np.stack([matrix[pairs].argsort().argsort() for matrix in (first, second)])
    return float(np.atleast_2d(np.corrcoef(ranks))[0, 1]) if ranks.shape[1] > 2 else 0.0
