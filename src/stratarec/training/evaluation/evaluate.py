"""Logits of a whole split, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.loading.portions import BatchShare
from stratarec.distributed.mesh import Mesh
from stratarec.errors import DatasetError, TrainingError
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.models.metrics import Metrics, evaluate_labels
from stratarec.progress import Progress

_BATCH = 8192


class Scored(NamedTuple):
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
    def joined(cls, parts: Iterable[Scored]) -> Scored:
        """One after another."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def of(self, rows: NDArray[np.int64]) -> Scored:
        """Some of them."""
        return Scored._make(column[rows] if len(column) else column for column in self)


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
) -> Iterator[list[Scored]]:
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
            found = [Scored(*columns) for columns in zip(*(_of_all(mesh, part) for part in mine), strict=True)]
            yield found
            progress.advance(sum(len(part.label) for part in found))
    finally:
        progress.finish()
        model.train(training)


def whole_split(
    model: CTRModel,
    dataset: Dataset,
    split: str,
    *,
    precision: str,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
    mesh: Mesh | None = None,
) -> Scored:
    """All samples of a split, on every rank; see `logits`."""
    parts = logits(
        model, dataset, split, precision=precision, progress=progress, check=check, mesh=mesh,
        portions=1 if mesh is None else mesh.ranks,
    )  # fmt: skip
    # A rank's parts follow one another in storage, so sums have the order that one process gives them.
    return Scored.joined(Scored.joined(of_rank) for of_rank in zip(*parts, strict=True))


def evaluate_split(model: CTRModel, dataset: Dataset, split: str, **options: Any) -> tuple[dict[str, Metrics], Scored]:
    """Metrics of each label on a split, and its samples, with the options of `whole_split`. Ranks have all of them: no
    metric is an estimate."""
    found = whole_split(model, dataset, split, **options)
    return measured(dataset.schema.label_columns, found), found


def measured(names: Sequence[str], found: Scored) -> dict[str, Metrics]:
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


def _scored(model: CTRModel, batch: Batch) -> Scored:
    # A share without samples has no logits, but its rank's rows are asked for by the others.
    scores = score(model, batch) if batch.size else _no_logits(model, batch)
    users = np.empty(0, dtype=np.int64) if batch.user is None else batch.user.cpu().numpy()
    weights = np.empty(0, dtype=np.float32) if batch.weight is None else batch.weight.cpu().numpy()
    return Scored(batch.label.cpu().numpy(), scores, users, weights)


def _of_all(mesh: Mesh, mine: NDArray[Any]) -> list[NDArray[Any]]:
    """What each rank has of a batch, in the order of their samples."""
    if mesh.ranks == 1:
        return [mine]
    found = mesh.rows.gather(mine.tobytes())
    return [np.frombuffer(found[rank], dtype=mine.dtype).reshape(-1, *mine.shape[1:]) for rank in mesh.order]


def _no_logits(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    model.nothing(batch)
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
