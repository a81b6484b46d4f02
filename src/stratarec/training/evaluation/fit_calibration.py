"""Fits the correction of a model's logits to a validation split: ``train.calibration``.

*shift*: what is to be added to all logits so that on average they promise as many positives as there are. It follows
the logarithm of the weight of a class, which is all that a model needs that fits its weighted samples; so it is drawn
to 0 as if 100 positives said so, and a small split, whose rate is what chance made it, moves little.

*platt*: one line, a x + b, by logistic regression on the logit x (Platt 1999), whose labels are drawn in a little,

    t = (P + 1) / (P + 2) of positives and 1 / (N + 2) of negatives, of which there are P and N,

so that classes that the logit separates have an end; by Newton's method with halved steps (Lin, Lin and Weng 2007).

*isotonic*: the rates of the neighbouring samples that isotonic regression joins, each at the mean logit of its samples,
with lines between (centred isotonic regression, Oron and Flournoy 2017), here lines of logits. Other than the steps of
plain isotonic regression they leave the order of samples, and so the AUC, as it is. Beyond the outermost
knots logits are shifted, for what lies there was not seen.

The correction is no state of training: it is fitted once the checkpoint to test is chosen, ``result.json`` has it with
that checkpoint's name, and `open_run` gives it to the network. Prior shift is not corrected: a map that was fitted on
one period says nothing of the next day's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.models.calibration import LEAST_GAP, Calibration, LogitMap
from stratarec.training.evaluation.evaluate import Scored

Kind = Literal["shift", "platt", "isotonic"]
Doubles = NDArray[np.float64]

IDENTITY = LogitMap(knots=(0.0,), values=(0.0,), slopes=(1.0, 1.0))
_MOST_STEPS, _LEAST_SLOPE = 100, 1e-3
# Positives that a shift of 0 is worth.
_DOUBT = 100.0
# Isotonic regression of this many samples is by cells of logits, which bounds the knots.
_CELLS_PER_LOGIT = 256


def fit(kind: Kind, found: Scored) -> tuple[LogitMap, ...]:
    """The correction of each label by samples that know it; none for a label of which one class alone is known."""
    labels = found.label.reshape(len(found.label), -1).T
    logits = found.logit.reshape(len(found.logit), -1).T
    weight = found.weight.astype(np.float64) if len(found.weight) else np.ones(len(found.label))
    return tuple(_fit(kind, *each, weight) for each in zip(labels, logits, strict=True))


def corrected_by(maps: Sequence[LogitMap], found: Scored) -> Scored:
    """The same samples with corrected logits."""
    return found._replace(logit=Calibration(maps)(torch.from_numpy(found.logit)).cpu().numpy())


def _fit(kind: Kind, label: NDArray[np.float32], logit: NDArray[np.float32], weight: Doubles) -> LogitMap:
    known = ~np.isnan(label) & (weight > 0)
    truth, score, scale = (column[known].astype(np.float64) for column in (label, logit, weight))
    if not 0 < truth.sum() < len(truth):
        return IDENTITY
    return _FITS[kind](truth, score, scale / scale.mean())


def _shift(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    _, offset = _newton(score, truth, scale, free=False, doubt=_DOUBT)
    return LogitMap(knots=(0.0,), values=(offset,), slopes=(1.0, 1.0))


def _platt(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    positive, negative = float((scale * truth).sum()), float((scale * (1 - truth)).sum())
    target = np.where(truth > 0, (positive + 1) / (positive + 2), 1 / (negative + 2))
    slope, offset = _newton(score, target, scale, free=True)
    if slope < _LEAST_SLOPE:  # scores that tell nothing must not be turned around
        slope, offset = _newton(score * _LEAST_SLOPE, target, scale, free=False)
        slope *= _LEAST_SLOPE
    return LogitMap(knots=(0.0,), values=(offset,), slopes=(slope, slope))


def _newton(score: Doubles, target: Doubles, scale: Doubles, *, free: bool, doubt: float = 0.0) -> tuple[float, float]:
    """Slope and offset of least weighted cross-entropy; the slope is 1 unless it is `free`.

    To that are added `doubt` halves of the squared offset.
    """
    line = np.array([1.0, 0.0])
    columns = np.stack([score if free else np.zeros_like(score), np.ones_like(score)])

    def loss(at: Doubles) -> float:
        logit = at[0] * score + at[1]
        return float((scale * (np.logaddexp(0, logit) - target * logit)).sum() + doubt / 2 * at[1] ** 2)

    least = loss(line)
    for _ in range(_MOST_STEPS):
        probability = 1 / (1 + np.exp(-np.clip(line[0] * score + line[1], -80, 80)))
        slope = columns @ (scale * (probability - target)) + doubt * line * (0, 1)
        bend = (columns * (scale * probability * (1 - probability))) @ columns.T + np.diag([1e-9, doubt + 1e-9])
        step, length = np.linalg.solve(bend, slope), 1.0
        while length > 1e-9 and not loss(line - length * step) < least:
            length /= 2
        if length <= 1e-9:
            break
        line = line - length * step
        least = loss(line)
    return float(line[0]), float(line[1])


def _isotonic(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    from scipy.optimize import isotonic_regression  # a second to import, for one kind of two

    _, cell = np.unique(np.floor(np.clip(score, -80, 80) * _CELLS_PER_LOGIT), return_inverse=True)
    mass, positive, place = (
        np.bincount(cell, weights=column).astype(np.float64) for column in (scale, scale * truth, scale * score)
    )
    starts = isotonic_regression(positive / mass, weights=mass).blocks[:-1]
    mass, positive, place = (np.add.reduceat(column, starts) for column in (mass, positive, place))
    rate, knots = _inside(positive / mass, mass), place / mass
    chosen = [0]
    for number in range(1, len(knots)):
        if knots[number] - knots[chosen[-1]] >= 1.001 * LEAST_GAP:
            chosen.append(number)
    values = np.log(rate / (1 - rate))[chosen]
    return LogitMap(knots=tuple(knots[chosen].tolist()), values=tuple(values.tolist()), slopes=(1.0, 1.0))


def _inside(rate: Doubles, mass: Doubles) -> Doubles:
    """Rates that rise between 0 and 1, without the two: half a sample more of each class where one is missing."""
    found = rate.copy()
    if rate[0] == 0:
        found[0] = min(0.5 / (mass[0] + 1), rate[1] / 2)
    if rate[-1] == 1:
        found[-1] = max(1 - 0.5 / (mass[-1] + 1), (1 + rate[-2]) / 2)
    return found


_FITS = {"shift": _shift, "platt": _platt, "isotonic": _isotonic}
