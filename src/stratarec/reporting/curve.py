"""What a calibration curve is drawn of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Curve(NamedTuple):
    """Samples of the test split."""

    label: NDArray[np.float32]
    """``[N]``"""
    probability: NDArray[np.float64]
    """``[N]``"""
    weight: NDArray[np.float32]
    """``[N]``, or empty where samples have none."""

    def bins(self, most: int, least: int) -> tuple[list[float], list[float]]:
        """Mean prediction and click rate of up to `most` bins of equally many samples, `least` at least."""
        order = np.argsort(self.probability, kind="stable")
        if len(self.weight):  # samples that count nothing could be all there are of a bin
            order = order[self.weight[order] > 0]
        bins = min(len(order) // least, most)
        parts = np.array_split(order, bins) if bins else []
        return [self._mean(self.probability, part) for part in parts], [self._mean(self.label, part) for part in parts]

    def _mean(self, values: NDArray[Any], part: NDArray[np.int64]) -> float:
        if not len(self.weight):
            return float(values[part].mean())
        return float(np.average(values[part], weights=self.weight[part].astype(np.float64)))
