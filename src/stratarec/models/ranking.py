"""How well samples are ordered within groups: users, sessions, slates.

Samples of equal score have no order, so a figure is what is to be expected of a random one: NDCG (gain 1 of a positive)
as scikit-learn has it, each of the others in closed form. Groups without a positive, and for AUC those of one class,
have no figure and are left out. Intervals are of the bootstrap over groups: another thousand users, the same model.

Shapes: N samples in G groups; T *ties*, samples of equal score in one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]
Doubles = NDArray[np.float64]
Figures: TypeAlias = Mapping[str, tuple[Doubles, Doubles]]
"""Name of a figure -> ``[G]`` of each group, NaN where it has none, and what the group weighs in the mean."""

_DRAWS = 500


class RankedGroups:
    """Samples by falling score within their group.

    Parameters
    ----------
    label, score : array
        ``[N]``, labels of 0 and 1; at least one sample.
    group : array
        ``[N]`` any number for each group.
    weight : array or None
        ``[N]`` how much each sample counts in `areas`, by default 1; ranks are of samples, whatever these weigh.
    """

    def __init__(self, label: Floats, score: Floats, group: NDArray[np.int64], weight: Floats | None = None) -> None:
        group = np.unique(group, return_inverse=True)[1]
        order = np.lexsort((score, group))
        group, ranked = group[order], np.asarray(score, dtype=np.float64)[order]
        self._truth = np.asarray(label, dtype=np.float64)[order]
        self._scale = np.ones(len(order)) if weight is None else np.asarray(weight, dtype=np.float64)[order]
        # Ties by rising score, within groups by rising number.
        self._tie = np.flatnonzero(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(ranked) != 0)]))
        self._group = group[self._tie]
        self._first = np.searchsorted(self._group, np.arange(int(group[-1]) + 1))
        self._size = np.diff(self._tie, append=len(order))
        self._positive = np.add.reduceat(self._truth, self._tie)
        self._positives = np.add.reduceat(self._positive, self._first)
        ends = np.cumsum(np.add.reduceat(self._size, self._first))
        # Samples of the group above the tie.
        self._above = ends[self._group] - self._tie - self._size

    @cached_property
    def areas(self) -> tuple[Doubles, Doubles]:
        """``[G]`` AUC of each group, by pairs (Mann and Whitney), and the weight of its samples."""
        positive, negative = (
            np.add.reduceat(part, self._tie) for part in (self._scale * self._truth, self._scale * (1 - self._truth))
        )
        below = negative.cumsum() - negative
        # Each half of a tie stands above the other.
        won = positive * (below - below[self._first][self._group] + negative / 2)
        totals = [np.add.reduceat(part, self._first) for part in (positive, negative, won)]
        return _ratio(totals[2], totals[0] * totals[1]), totals[0] + totals[1]

    def ndcg(self, at: int) -> Doubles:
        """``[G]`` discounted gain of the first `at` samples over that of the best order (Järvelin and Kekäläinen)."""
        at = min(at, int(self._size.sum()))
        discount = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, at + 2)))])
        first, last = np.minimum(self._above, at), np.minimum(self._above + self._size, at)
        gained = self._positive / self._size * (discount[last] - discount[first])
        best = discount[np.minimum(self._positives, at).astype(np.int64)]
        return _ratio(np.add.reduceat(gained, self._first), best)

    def recall(self, at: int) -> Doubles:
        """``[G]`` share of the positives that are among the first `at` samples."""
        found = self._positive / self._size * self._inside(at)
        return _ratio(np.add.reduceat(found, self._first), self._positives)

    def hit_rate(self, at: int) -> Doubles:
        """``[G]`` chance that a positive is among the first `at` samples."""
        inside, size, positive = self._inside(at), self._size, self._positive
        none = positive <= size - inside
        # Of a tie that goes beyond the place only some are inside: how many ways leave all positives outside?
        missed = np.exp(
            _log_ways(np.where(none, size - positive, inside), inside) - _log_ways(size.astype(np.float64), inside)
        )
        missed = np.where(none, missed, 0.0)
        return np.where(self._positives > 0, 1 - np.multiply.reduceat(missed, self._first), np.nan)

    def reciprocal_rank(self) -> Doubles:
        """``[G]`` one over the place of the first positive, counted from 1."""
        found = np.full(len(self._first), np.nan)
        places = np.where(self._positive > 0, np.arange(len(self._tie)), -1)
        best = np.maximum.reduceat(places, self._first)
        known = np.flatnonzero(self._positives > 0)
        tie = best[known]
        size, positive = self._size[tie], self._positive[tie]
        # The first of p positives among m stands at place j in C(m - j, p - 1) of C(m, p) orders.
        choices = (size - positive + 1).astype(np.int64)
        ends = np.cumsum(choices)
        owner = np.repeat(np.arange(len(tie)), choices)
        place = 1 + np.arange(ends[-1] if len(ends) else 0) - (ends - choices)[owner]
        chance = np.exp(_log_ways(size[owner] - place, positive[owner] - 1) - _log_ways(size - 1, positive - 1)[owner])
        of_each = np.bincount(owner, chance / (self._above[tie][owner] + place), minlength=len(tie))
        found[known] = of_each / np.bincount(owner, chance, minlength=len(tie))
        return found

    def figures(self, at: int) -> dict[str, tuple[Doubles, Doubles]]:
        """All of them, as `Figures`: AUC by the weight of a group's samples (Zhu et al. 2017), the others by groups."""
        alike = np.ones(len(self._first))
        return {
            f"NDCG@{at}": (self.ndcg(at), alike),
            f"recall@{at}": (self.recall(at), alike),
            f"hit rate@{at}": (self.hit_rate(at), alike),
            "MRR": (self.reciprocal_rank(), alike),
            "grouped AUC": self.areas,
        }

    def _inside(self, at: int) -> NDArray[np.int64]:
        """``[T]`` how many samples of a tie are among the first `at` of their group."""
        return np.clip(at - self._above, 0, self._size)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of a figure over groups."""

    value: float
    """NaN where no group has the figure."""
    low: float
    high: float
    """Between these are 95 % of the means of as many groups, drawn anew from the same ones; NaN of a single group."""
    groups: int
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What is known of the order within the groups of one column."""

    groups: int
    ungrouped: int
    """Samples that have no value of the column."""
    figures: Mapping[str, Estimate]


def mean(values: Doubles, weights: Doubles) -> float:
    """Of the groups that have a figure; NaN where none has."""
    known = ~np.isnan(values)
    return float(np.average(values[known], weights=weights[known])) if weights[known].sum() > 0 else float("nan")


def estimates(figures: Figures, seed: int = 0) -> dict[str, Estimate]:
    """The mean of each figure, with its interval: the same numbers for the same seed."""
    known = np.stack([~np.isnan(values) for values, _ in figures.values()])
    weights = np.stack([weights for _, weights in figures.values()]) * known
    sums = np.concatenate([np.nan_to_num(np.stack([values for values, _ in figures.values()])) * weights, weights]).T
    draws, groups, drawn = np.random.default_rng(seed), len(sums), np.empty((_DRAWS, sums.shape[1]))
    for place in range(_DRAWS):
        drawn[place] = np.bincount(draws.integers(0, groups, groups), minlength=groups) @ sums
    means = _ratio(drawn[:, : len(figures)], drawn[:, len(figures) :])
    found = {}
    for place, (name, (values, weight)) in enumerate(figures.items()):
        count, column = int(known[place].sum()), means[:, place]
        column = column[~np.isnan(column)]
        low, high = np.percentile(column, [2.5, 97.5]) if count > 1 and len(column) else (np.nan, np.nan)
        found[name] = Estimate(
            value=mean(values, weight), low=float(low), high=float(high), groups=count, left_out=groups - count
        )
    return found


def _log_ways(of: NDArray[Any], chosen: NDArray[Any]) -> Doubles:
    """Logarithm of the binomial coefficient."""
    from scipy.special import gammaln  # a tenth of a second, for those who ask for it

    found: Doubles = gammaln(of + 1.0) - gammaln(chosen + 1.0) - gammaln(of - chosen + 1.0)
    return found


def _ratio(part: Doubles, whole: Doubles) -> Doubles:
    """NaN where `whole` is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)
