"""Score whole splits, compute metrics, rank within groups, and fit the calibration of
probabilities.

``train.calibration`` chooses the kind of a map that corrects a model's logits; the map is fitted on
the validation split. ``auto`` uses a more complex kind only if its log loss on samples to which it
was not fitted is lower by more than three standard errors of the difference, and isotonic
regression only with many samples. The error is that of sums by user, because the samples of a user
are alike. With few positives or few negatives, a fit is mostly chance, so the current map stays.
The kinds are

*shift*: One number is added to all logits, so that they predict the observed rate of positives on
average. It corrects class weights, which shift the logits of a well fitted model by the logarithm
of the weight. The shift is regularized towards 0 with the weight of 100 positives, because the rate
in a small split is mostly chance.

*platt*: The logit x becomes a x + b, with a and b from a logistic regression (Platt 1999) on
smoothed labels. With P positives and N negatives, the labels are

    t = (P + 1) / (P + 2) for positives, 1 / (N + 2) for negatives

Smoothing keeps the fit finite if the logit separates the classes. It is computed by Newton's method
with halved steps (Lin, Lin, Weng 2007).

*isotonic*: Centred isotonic regression (Oron and Flournoy 2017). Isotonic regression joins samples
to blocks; each block gives one knot with the mean logit of its samples and the logit of their rate.
The map is a line between two knots. Plain isotonic regression has steps instead, which make scores
equal; lines keep the order of samples and so the AUC. Beyond the outermost knots, logits are only
shifted, because there were no samples.

The map is not part of the training state. It is fitted when the checkpoint to test has been chosen.
``result.json`` stores it with the name of that checkpoint, and `open_run` adds it to the network. A
change of the rate of positives after the fit is not corrected: a map that was fitted on one period
says nothing about the next day's rate. A model that is trained on the samples of validation and
test as well (`train.refit`) learns their rate from them, so its map corrects only the shape
(`fit_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader, LoaderConfig
from stratarec.data.schema import Schema
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError, DatasetError, TrainingError
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.models.calibration import LEAST_GAP, Calibration, LogitMap
from stratarec.models.metrics import (
    Metrics,
    Ranked,
    RankedGroups,
    estimates,
    evaluate_labels,
    mean_and_error,
)
from stratarec.progress import Progress
from stratarec.recipe.train_section import CalibrationKind

BATCH = 8192
"""Samples that are scored at a time."""


class ScoredSamples(NamedTuple):
    """Labels, logits, users and weights of scored samples."""

    label: NDArray[np.float32]
    """Labels ``[N]``, or ``[N, T]`` if there are several; NaN if a label is not known."""
    logit: NDArray[np.float32]
    """Logits ``[N]`` or ``[N, T]``."""
    user: NDArray[np.int64]
    """Users ``[N]``; empty if samples have no user."""
    weight: NDArray[np.float32]
    """Weights ``[N]``; empty if samples have no weight."""

    @classmethod
    def joined(cls, parts: Iterable[ScoredSamples]) -> ScoredSamples:
        """Concatenate parts of scored samples."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def of(self, rows: NDArray[np.int64]) -> ScoredSamples:
        """Return the samples with these indices."""
        return ScoredSamples._make(column[rows] if len(column) else column for column in self)


def logits(
    model: CTRModel,
    dataset: Dataset,
    split: str,
    *,
    precision: str,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
    mesh: Mesh | None = None,
    portions: int = 1,
) -> Iterator[list[ScoredSamples]]:
    """Score a split, and yield for each batch a list with the scored samples of each rank.

    `check` is called before each batch and may raise to stop. Batches are in the stored order of
    the data set, and the parts in a batch are in the order of ranks. With several portions (one per
    rank), this order holds only within each portion, and a rank reads only the portions that it
    scores.
    """
    mesh = mesh or Mesh.alone()
    share = BatchShare(rank=mesh.place, ranks=mesh.ranks)
    loader = Loader(
        dataset, split, LoaderConfig(batch_size=BATCH, shuffle=False, parallel_readers=portions), share
    )
    training = model.training
    model.eval()
    progress.start(f"evaluate {split}", loader.samples, "samples")
    try:
        for batch in loader.epoch(0):
            check()
            # These torch settings apply to the thread, so they must be restored before the yield
            # returns to the caller.
            with torch.no_grad(), autocast(precision, model.device):
                mine = _scored(model, batch)
            by_rank = [
                ScoredSamples(*columns)
                for columns in zip(*(_of_all(mesh, part) for part in mine), strict=True)
            ]
            yield by_rank
            progress.advance(sum(len(part.label) for part in by_rank))
    finally:
        progress.finish()
        model.train(training)


def score_split(
    model: CTRModel,
    dataset: Dataset,
    split: str,
    *,
    precision: str,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
    mesh: Mesh | None = None,
) -> ScoredSamples:
    """Score all samples of a split, and return them in the order in which the data set stores them,
    on every rank.
    """
    parts = logits(
        model,
        dataset,
        split,
        precision=precision,
        progress=progress,
        check=check,
        mesh=mesh,
        portions=1 if mesh is None else mesh.ranks,
    )
    # The parts that a rank scores are contiguous in the split, so the order is the same as in one
    # process.
    return ScoredSamples.joined(ScoredSamples.joined(of_rank) for of_rank in zip(*parts, strict=True))


def evaluate_split(
    model: CTRModel, dataset: Dataset, split: str, **options: Any
) -> tuple[dict[str, Metrics], ScoredSamples]:
    """Return the metrics of each label on a split, and the scored samples. `score_split` describes
    the `options`.
    """
    samples = score_split(model, dataset, split, **options)
    return measured(dataset.schema.label_columns, samples), samples


def measured(names: Sequence[str], samples: ScoredSamples) -> dict[str, Metrics]:
    """Return the metrics of each label, by name, for scored samples."""
    return evaluate_labels(
        names,
        samples.label,
        samples.logit,
        samples.user if len(samples.user) else None,
        samples.weight if len(samples.weight) else None,
    )


def score(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    """Return the logits of a batch; `TrainingError` if a logit is NaN, or if the device has too
    little memory.
    """
    try:
        logits: NDArray[np.float32] = model(batch).cpu().numpy()
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{model.device} has too little memory to score {batch.size:,} samples at a time: leave the "
            "network on the cpu"
        ) from error
    # Scores are checked because rows are not: most rows that are loaded are never used.
    if np.isnan(logits).any():
        raise TrainingError(
            "a score is not a number: rows or weights of the model are not finite, or overflow; run "
            "`stratarec check` on the run to find them, or use an earlier checkpoint"
        )
    return logits


def _scored(model: CTRModel, batch: Batch) -> ScoredSamples:
    # A rank without samples in this batch must still send its rows to the other ranks.
    scores = score(model, batch) if batch.size else _no_logits(model, batch)
    users = np.empty(0, dtype=np.int64) if batch.user is None else batch.user.cpu().numpy()
    weights = np.empty(0, dtype=np.float32) if batch.weight is None else batch.weight.cpu().numpy()
    return ScoredSamples(batch.label.cpu().numpy(), scores, users, weights)


def _of_all(mesh: Mesh, mine: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the arrays of all ranks, in the order of the ranks' samples."""
    if mesh.ranks == 1:
        return [mine]
    by_rank = mesh.rows.gather(mine.tobytes())
    return [
        np.frombuffer(by_rank[rank], dtype=mine.dtype).reshape(-1, *mine.shape[1:]) for rank in mesh.order
    ]


def _no_logits(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    model.lookup_zero(batch)
    return np.empty(batch.label.shape, dtype=np.float32)


def chosen_split(dataset: Dataset, split: str | None) -> str:
    """Return `split`, or if it is None, the test split, or the validation split if there are no
    test samples.

    Raises `DatasetError` if the chosen split has no samples.
    """
    chosen = split or next((name for name in ("test", "valid") if dataset.samples(name)), "test")
    if not dataset.samples(chosen):
        others = ", ".join(name for name in dataset.splits if dataset.samples(name))
        change = (
            f"there are {others}: name one by --split, or a log after the run "
            "(`explain` needs --row with a log)"
            if others
            else "nor in another: name a log after the run (`explain` needs --row with a log)"
        )
        raise DatasetError(f"{dataset.path} has no samples in its split {chosen}; {change}")
    return chosen


def rank_within(
    labels: Sequence[str],
    samples: ScoredSamples,
    group: NDArray[np.int64],
    at: Sequence[int],
    grouped: NDArray[np.bool_] | None = None,
) -> dict[str, Ranked]:
    """Compute the ranking metrics of each label, for samples that are ranked within groups.

    Parameters
    ----------
    group : array
        ``[N]`` number of each sample's group.
    at : sequence of int
        Cutoffs K of NDCG and other metrics at K.
    grouped : array or None
        ``[N]`` booleans that say whether a sample has a group; None if all samples have one.
    """
    ranked, grouped = {}, np.ones(len(group), dtype=np.bool_) if grouped is None else grouped
    for place, name in enumerate(labels):
        label, score = (
            part if part.ndim == 1 else part[:, place] for part in (samples.label, samples.logit)
        )
        has_label = ~np.isnan(label) & (samples.weight > 0 if len(samples.weight) else True)
        chosen = has_label & grouped
        figures = {}
        if chosen.any():
            weight = samples.weight[chosen] if len(samples.weight) else None
            groups = RankedGroups(label[chosen], score[chosen], group[chosen], weight)
            by_cutoff = [groups.figures(places) for places in at]
            # Metrics at K come first, in the order of `at`: NDCG at every cutoff, then recall at
            # every cutoff.
            names = (name for names in zip(*by_cutoff, strict=True) for name in names)
            figures = estimates({name: one[name] for name in names for one in by_cutoff if name in one})
        ranked[name] = Ranked(
            groups=len(np.unique(group[chosen])),
            ungrouped=int((has_label & ~grouped).sum()),
            figures=figures,
        )
    return ranked


def split_groups(dataset: Dataset, split: str, samples: ScoredSamples, by: str) -> NDArray[np.int64]:
    """Return the number of each sample's user or session, in the order in which the data set stores
    samples.

    Raises
    ------
    ConfigError
        If `by` is neither ``user`` nor ``session``, or the data set was prepared without such a
        column.
    """
    check_group_column(dataset.schema, by)
    if by == "user" or not dataset.schema.user:
        return samples.user
    return np.concatenate([np.zeros(0, dtype=np.int64), *dataset.session_keys(split)])


def check_group_column(schema: Schema, by: str, option: str = "--rank-by") -> None:
    """Raise `ConfigError` if samples of a prepared data set cannot be grouped by `by`."""
    if by not in ("user", "session"):
        raise ConfigError(
            f"{option} {by}: samples of a prepared data set have only user and session; name "
            "one of these, or raw logs"
        )
    if not getattr(schema, by):
        raise ConfigError(
            f"{option} {by}: the data set was prepared without schema.{by}; name it and prepare again"
        )


def column_of(schema: Schema, by: str) -> str:
    """Return the name of a column in raw logs: the user's or session's column, or `by` if it
    already is a name.
    """
    return {"user": schema.user, "session": schema.session}.get(by) or by


def value_groups(values: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return, for each row, a number that identifies the value of a column, and whether that value
    is not null.
    """
    return values.rank("dense").fill_null(0).to_numpy().astype(np.int64), values.is_not_null().to_numpy()


Doubles = NDArray[np.float64]

IDENTITY = LogitMap(knots=(0.0,), values=(0.0,), slopes=(1.0, 1.0))
_MOST_STEPS, _LEAST_SLOPE = 100, 1e-3
# Weight of the regularization of a shift towards 0, as a number of positives.
_DOUBT = 100.0
# Isotonic regression groups samples into cells of similar logits, which limits the number of knots.
_CELLS_PER_LOGIT = 256
# To compare kinds, samples are divided into this many parts, and each part is scored by a map that
# was fitted on the others. Isotonic regression is compared only with at least this many samples.
_PARTS, _MANY = 5, 10_000
# Smallest number of samples of each class to which a map is fitted. With a tenth of them, the log
# loss of a well calibrated model rose from 0.45 to 0.75 in the worst of 200 files. A shift is
# regularized instead.
LEAST_OF_CLASS = 20
# Standard errors by which a more complex kind must be better. On 30 public logs, both lines that
# were better by more than one error on validation samples (2.3 and 2.9) raised the log loss of
# held-out samples by 1 %.
_ERRORS = 3.0


def fit(
    kinds: Sequence[CalibrationKind], samples: ScoredSamples, current: Sequence[LogitMap] = ()
) -> tuple[LogitMap, ...]:
    """Fit a map for each label, on the samples in which that label is known.

    Returns an empty tuple if no map changes a score.

    Parameters
    ----------
    kinds : sequence of str
        Kinds of maps to choose from, the simplest one first (`TrainConfig.fitted`).
    current : sequence of LogitMap
        Map of each label that is used for the kind ``none``, and if there are few samples of one
        class. By default the identity.
    """
    parts = _by_label(samples)
    earlier = current or (IDENTITY,) * len(parts)
    maps = tuple(_fit(kinds, curve, *part) for curve, part in zip(earlier, parts, strict=True))
    return () if all(curve == IDENTITY for curve in maps) else maps


def fit_again(kinds: Sequence[CalibrationKind], samples: ScoredSamples) -> tuple[LogitMap, ...]:
    """Fit maps as `fit` does, for a model that is afterwards trained on the same samples.

    A map that ``auto`` chose keeps its shape, but is shifted so that the mean probability of the
    samples is that of the uncorrected scores: the training corrects the rate, and the map would
    correct it a second time. Other maps, such as those for class weights, correct a rate that
    training does not change.
    """
    maps = fit(kinds, samples)
    if kinds[0] != "none":
        return maps
    # Without maps, there is nothing to shift.
    return tuple(
        _with_mean(curve, part.score, part.scale)
        for curve, part in zip(maps, _by_label(samples), strict=False)
    )


def _with_mean(curve: LogitMap, score: Doubles, scale: Doubles) -> LogitMap:
    """Return a map that is shifted so that its mean probability of `score` is that without a
    map.
    """
    if curve == IDENTITY:
        return curve
    mapped = _mapped_by(curve, score)
    _, shift = _newton(mapped, 1 / (1 + np.exp(-np.clip(score, -80, 80))), scale, free=False)
    values = tuple(value + shift for value in curve.values)
    return LogitMap(knots=curve.knots, values=values, slopes=curve.slopes)


def corrected_by(maps: Sequence[LogitMap], samples: ScoredSamples) -> ScoredSamples:
    """Return the samples with logits corrected by `maps`, or unchanged if there are no maps."""
    if not maps:
        return samples
    return samples._replace(logit=Calibration(maps)(torch.from_numpy(samples.logit)).cpu().numpy())


class _Known(NamedTuple):
    """Samples in which a label is known and whose weight is not 0."""

    truth: Doubles
    score: Doubles
    """Logits."""
    scale: Doubles
    """Weights with a mean of 1."""
    user: NDArray[np.int64] | None
    """Number of the user; None without users."""


def _by_label(samples: ScoredSamples) -> list[_Known]:
    """Return the known samples of each label."""
    size = len(samples.label)
    labels, logits = samples.label.reshape(size, -1).T, samples.logit.reshape(size, -1).T
    weight = samples.weight.astype(np.float64) if len(samples.weight) else np.ones(size)
    parts = []
    for label, logit in zip(labels, logits, strict=True):
        chosen = ~np.isnan(label) & (weight > 0)
        truth, score, scale = (column[chosen].astype(np.float64) for column in (label, logit, weight))
        number = np.unique(samples.user[chosen], return_inverse=True)[1] if len(samples.user) else None
        parts.append(_Known(truth, score, scale / scale.mean() if len(scale) else scale, number))
    return parts


def _fit(
    kinds: Sequence[CalibrationKind],
    current: LogitMap,
    truth: Doubles,
    score: Doubles,
    scale: Doubles,
    user: NDArray[np.int64] | None,
) -> LogitMap:
    """Return the map of the best kind. A more complex kind must be better by three standard
    errors.
    """
    positives = int(truth.sum())
    are_many = min(positives, len(truth) - positives) >= LEAST_OF_CLASS

    def mapped(kind: CalibrationKind, chosen: slice | NDArray[np.bool_]) -> LogitMap:
        fits = 0 < truth[chosen].sum() < len(truth[chosen]) and (are_many or kind == "shift")
        return (
            _FITS[kind](truth[chosen], score[chosen], scale[chosen]) if kind != "none" and fits else current
        )

    def losses(kind: CalibrationKind) -> Doubles:
        """Return the log loss of each sample, scored by a map that was fitted on the other
        parts.
        """
        part, output = np.arange(len(truth)) * _PARTS // len(truth), np.empty(len(truth))
        for number in range(_PARTS):
            in_part = part == number
            logit = _mapped_by(mapped(kind, ~in_part), score[in_part])
            output[in_part] = np.logaddexp(0, logit) - truth[in_part] * logit
        return output

    usable = [kind for kind in kinds if kind != "isotonic" or len(kinds) == 1 or len(truth) >= _MANY]
    best = usable[0]
    if len(usable) > 1 and are_many:
        least = losses(best)
        for kind in usable[1:]:
            other = losses(kind)
            gain, error = mean_and_error(least - other, scale, user)
            best, least = (kind, other) if gain > _ERRORS * error else (best, least)
    return mapped(best, slice(None))


def _mapped_by(curve: LogitMap, score: Doubles) -> Doubles:
    """Return the corrected logits ``[N]`` of one label."""
    logit: Doubles = Calibration([curve])(torch.from_numpy(score.astype(np.float32))).double().cpu().numpy()
    return logit


def _shift(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    _, offset = _newton(score, truth, scale, free=False, doubt=_DOUBT)
    return LogitMap(knots=(0.0,), values=(offset,), slopes=(1.0, 1.0))


def _platt(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    positive, negative = float((scale * truth).sum()), float((scale * (1 - truth)).sum())
    target = np.where(truth > 0, (positive + 1) / (positive + 2), 1 / (negative + 2))
    slope, offset = _newton(score, target, scale, free=True)
    if slope < _LEAST_SLOPE:  # a negative slope would reverse the order of scores
        slope, offset = _newton(score * _LEAST_SLOPE, target, scale, free=False)
        slope *= _LEAST_SLOPE
    return LogitMap(knots=(0.0,), values=(offset,), slopes=(slope, slope))


def _newton(
    score: Doubles, target: Doubles, scale: Doubles, *, free: bool, doubt: float = 0.0
) -> tuple[float, float]:
    """Return the slope and offset of a line of logits, fitted by Newton's method.

    They minimize the weighted cross-entropy plus `doubt` / 2 times the squared offset. The slope is
    1 unless `free`.
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
        bend = (columns * (scale * probability * (1 - probability))) @ columns.T + np.diag(
            [1e-9, doubt + 1e-9]
        )
        step, length = np.linalg.solve(bend, slope), 1.0
        while length > 1e-9 and not loss(line - length * step) < least:
            length /= 2
        if length <= 1e-9:
            break
        line = line - length * step
        least = loss(line)
    return float(line[0]), float(line[1])


def _isotonic(truth: Doubles, score: Doubles, scale: Doubles) -> LogitMap:
    from scipy.optimize import isotonic_regression  # takes a second to import, and only this kind needs it

    _, cell = np.unique(np.floor(np.clip(score, -80, 80) * _CELLS_PER_LOGIT), return_inverse=True)
    mass, positive, place = (
        np.bincount(cell, weights=column).astype(np.float64)
        for column in (scale, scale * truth, scale * score)
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
    """Replace a first rate of 0 and a last rate of 1, which have no finite logit, by rates between
    0 and 1.

    The new rates are computed as if the block had half a sample of the missing class.
    """
    inside = rate.copy()
    if rate[0] == 0:
        inside[0] = min(0.5 / (mass[0] + 1), rate[1] / 2)
    if rate[-1] == 1:
        inside[-1] = max(1 - 0.5 / (mass[-1] + 1), (1 + rate[-2]) / 2)
    return inside


_FITS = {"shift": _shift, "platt": _platt, "isotonic": _isotonic}
