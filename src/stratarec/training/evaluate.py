"""Score whole splits, compute metrics, rank within groups, and fit the calibration of probabilities.

``train.calibration`` fits a map of a model's logits on the validation split:

*shift*: a number added to all logits, so that on average they predict the observed rate of positives. It corrects class
weights, whose effect on a model that fits its weighted samples is a shift by the logarithm of the weight. The shift is
regularized towards 0 with the weight of 100 positives, because the rate of a small split is mostly chance.

*platt*: a line a x + b by logistic regression on the logit x (Platt 1999) with smoothed labels

    t = (P + 1) / (P + 2) of positives and 1 / (N + 2) of negatives, with P positives and N negatives,

so that the fit is finite when the logit separates the classes; by Newton's method with halved steps (Lin, Lin, Weng
2007).

*isotonic*: centred isotonic regression (Oron and Flournoy 2017): the rate of each block that isotonic regression joins,
at the mean logit of its samples, with lines between, here lines of logits. Unlike the steps of plain isotonic
regression they keep the order of samples, and so the AUC. Beyond the outermost knots logits are only shifted, because
no sample was seen there.

The map is not part of the training state: it is fitted once the checkpoint to test is chosen, ``result.json`` holds it
with the name of that checkpoint, and `open_run` gives it to the network. Prior shift is not corrected: a map fitted on
one period says nothing about the rate of the next day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

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
from stratarec.models.metrics import Metrics, Ranked, RankedGroups, estimates, evaluate_labels
from stratarec.progress import Progress

_BATCH = 8192


class ScoredSamples(NamedTuple):
    """Samples and what the model says of them."""

    label: NDArray[np.float32]
    """``[N]``, or ``[N, T]`` of several labels, NaN where one is not known."""
    logit: NDArray[np.float32]
    """Likewise."""
    user: NDArray[np.int64]
    """Empty where samples have none."""
    weight: NDArray[np.float32]
    """Likewise."""

    @classmethod
    def joined(cls, parts: Iterable[ScoredSamples]) -> ScoredSamples:
        """One after another."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def of(self, rows: NDArray[np.int64]) -> ScoredSamples:
        """Some of them."""
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
    """What each rank of a mesh scored of a batch, on all of them; `check` is called before each batch and may raise.

    Batches follow the order of storage, and ranks within a batch that of their samples; of several portions each does
    by itself, and a rank reads only those that it scores.
    """
    mesh = mesh or Mesh.alone()
    share = BatchShare(rank=mesh.place, ranks=mesh.ranks)
    loader = Loader(dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False, portions=portions), share)
    training = model.training
    model.eval()
    progress.start(f"evaluate {split}", loader.samples, "samples")
    try:
        for batch in loader.epoch(0):
            check()
            # torch's settings are those of the thread: whoever takes what is given here must not find them changed.
            with torch.no_grad(), autocast(precision, model.device):
                mine = _scored(model, batch)
            found = [ScoredSamples(*columns) for columns in zip(*(_of_all(mesh, part) for part in mine), strict=True)]
            yield found
            progress.advance(sum(len(part.label) for part in found))
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
    """All samples of a split, on every rank; see `logits`."""
    parts = logits(
        model, dataset, split, precision=precision, progress=progress, check=check, mesh=mesh,
        portions=1 if mesh is None else mesh.ranks,
    )  # fmt: skip
    # A rank's parts follow one another in storage, so sums have the order that one process gives them.
    return ScoredSamples.joined(ScoredSamples.joined(of_rank) for of_rank in zip(*parts, strict=True))


def evaluate_split(
    model: CTRModel, dataset: Dataset, split: str, **options: Any
) -> tuple[dict[str, Metrics], ScoredSamples]:
    """Metrics of each label on a split, and its samples, with the options of `score_split`. Ranks have all of them: no
    metric is an estimate."""
    found = score_split(model, dataset, split, **options)
    return measured(dataset.schema.label_columns, found), found


def measured(names: Sequence[str], found: ScoredSamples) -> dict[str, Metrics]:
    """Metrics of each label on samples."""
    return evaluate_labels(
        names,
        found.label,
        found.logit,
        found.user if len(found.user) else None,
        found.weight if len(found.weight) else None,
    )


def score(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    """Logits of a batch; `TrainingError` where one is no number."""
    try:
        found: NDArray[np.float32] = model(batch).cpu().numpy()
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{model.device} has too little memory to score {batch.size:,} samples at a time: leave the network on the "
            "cpu"
        ) from error
    # Rows are not looked through when they are loaded: of most of them nobody asks.
    if np.isnan(found).any():
        raise TrainingError(
            "a score is no number: rows or weights of the model are not finite, or overflow; `stratarec check` of its "
            "run names those, and an earlier checkpoint may have none"
        )
    return found


def _scored(model: CTRModel, batch: Batch) -> ScoredSamples:
    # A share without samples has no logits, but its rank's rows are asked for by the others.
    scores = score(model, batch) if batch.size else _no_logits(model, batch)
    users = np.empty(0, dtype=np.int64) if batch.user is None else batch.user.cpu().numpy()
    weights = np.empty(0, dtype=np.float32) if batch.weight is None else batch.weight.cpu().numpy()
    return ScoredSamples(batch.label.cpu().numpy(), scores, users, weights)


def _of_all(mesh: Mesh, mine: NDArray[Any]) -> list[NDArray[Any]]:
    """What each rank has of a batch, in the order of their samples."""
    if mesh.ranks == 1:
        return [mine]
    found = mesh.rows.gather(mine.tobytes())
    return [np.frombuffer(found[rank], dtype=mine.dtype).reshape(-1, *mine.shape[1:]) for rank in mesh.order]


def _no_logits(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    model.lookup_zero(batch)
    return np.empty(batch.label.shape, dtype=np.float32)


def chosen_split(dataset: Dataset, split: str | None) -> str:
    """The split that is asked for, else that of tests, else that of validation; `DatasetError` where it is empty."""
    found = split or next((each for each in ("test", "valid") if dataset.samples(each)), "test")
    if not dataset.samples(found):
        others = ", ".join(each for each in dataset.splits if dataset.samples(each))
        change = (
            f"there are {others}: name one by --split, or a log after the run"
            if others
            else "nor in another: name a log after the run"
        )
        raise DatasetError(f"{dataset.path} has no samples in its split {found}; {change}")
    return found


def rank_within(
    labels: Sequence[str],
    found: ScoredSamples,
    group: NDArray[np.int64],
    at: Sequence[int],
    grouped: NDArray[np.bool_] | None = None,
) -> dict[str, Ranked]:
    """Of each label, by the samples that know it.

    Parameters
    ----------
    group : array
        ``[N]`` a number for each group.
    at : sequence of int
        Places down to which a list is looked at.
    grouped : array or None
        ``[N]`` whether a sample is in a group; None where all are.
    """
    ranked, grouped = {}, np.ones(len(group), dtype=np.bool_) if grouped is None else grouped
    for place, name in enumerate(labels):
        label, score = (part if part.ndim == 1 else part[:, place] for part in (found.label, found.logit))
        known = ~np.isnan(label) & (found.weight > 0 if len(found.weight) else True)
        chosen = known & grouped
        figures = {}
        if chosen.any():
            weight = found.weight[chosen] if len(found.weight) else None
            groups = RankedGroups(label[chosen], score[chosen], group[chosen], weight)
            each = [groups.figures(places) for places in at]
            # Those that look at places first, as the options name them.
            figures = estimates({name: one[name] for name in _sorted(each) for one in each if name in one})
        ranked[name] = Ranked(
            groups=len(np.unique(group[chosen])), ungrouped=int((known & ~grouped).sum()), figures=figures
        )
    return ranked


def _sorted(each: Sequence[Mapping[str, object]]) -> list[str]:
    """Names of figures: NDCG at every place, then recall at every place, and so on."""
    return list(dict.fromkeys(name for names in zip(*each, strict=True) for name in names))


def split_groups(dataset: Dataset, split: str, found: ScoredSamples, by: str) -> NDArray[np.int64]:
    """The user or the session of each sample of a whole split, in the order of storage.

    Raises
    ------
    ConfigError
        Where the data set was prepared without, and for anything else.
    """
    check_group_column(dataset.schema, by)
    if by == "user" or not dataset.schema.user:
        return found.user
    return np.concatenate([np.zeros(0, dtype=np.int64), *dataset.session_keys(split)])


def check_group_column(schema: Schema, by: str, option: str = "--rank-by") -> None:
    """Refuse what samples of a prepared data set cannot be grouped by."""
    if by not in ("user", "session"):
        raise ConfigError(
            f"{option} {by}: a prepared data set knows user and session of its samples; name one of these, or raw logs"
        )
    if not getattr(schema, by):
        raise ConfigError(f"{option} {by}: the data set was prepared without schema.{by}; name it and prepare again")


def column_of(schema: Schema, by: str) -> str:
    """The column of raw logs behind a word: that of the schema's user or session, or the one that is called so."""
    return {"user": schema.user, "session": schema.session}.get(by) or by


def value_groups(values: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A number for each value of a column, and which of them is one."""
    return values.rank("dense").fill_null(0).to_numpy().astype(np.int64), values.is_not_null().to_numpy()


Kind = Literal["shift", "platt", "isotonic"]
Doubles = NDArray[np.float64]

IDENTITY = LogitMap(knots=(0.0,), values=(0.0,), slopes=(1.0, 1.0))
_MOST_STEPS, _LEAST_SLOPE = 100, 1e-3
# Positives that a shift of 0 is worth.
_DOUBT = 100.0
# Isotonic regression of this many samples is by cells of logits, which bounds the knots.
_CELLS_PER_LOGIT = 256


def fit(kind: Kind, found: ScoredSamples) -> tuple[LogitMap, ...]:
    """The correction of each label by samples that know it; none for a label of which one class alone is known."""
    labels = found.label.reshape(len(found.label), -1).T
    logits = found.logit.reshape(len(found.logit), -1).T
    weight = found.weight.astype(np.float64) if len(found.weight) else np.ones(len(found.label))
    return tuple(_fit(kind, *each, weight) for each in zip(labels, logits, strict=True))


def corrected_by(maps: Sequence[LogitMap], found: ScoredSamples) -> ScoredSamples:
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
