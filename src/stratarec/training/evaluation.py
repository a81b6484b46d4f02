"""Logits of a whole split, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.models import CTRModel
from stratarec.models.outputs import autocast
from stratarec.progress import Progress
from stratarec.training.metrics import Metrics, evaluate_logits

_BATCH = 8192


def logits(
    model: CTRModel,
    dataset: Dataset,
    split: str,
    *,
    precision: str,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64] | None]]:
    """Label, logit and group of each batch, in the order of storage; `check` is called before each and may raise."""
    loader = Loader(dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False))
    training = model.training
    model.eval()
    progress.start(f"evaluate {split}", loader.samples, "samples")
    try:
        with torch.no_grad(), autocast(precision):
            for batch in loader.epoch(0):
                check()
                scores = model(batch).cpu().numpy()
                yield batch.label.cpu().numpy(), scores, None if batch.user is None else batch.user.cpu().numpy()
                progress.advance(batch.size)
    finally:
        progress.finish()
        model.train(training)


def evaluate_split(
    model: CTRModel,
    dataset: Dataset,
    split: str,
    *,
    precision: str,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> tuple[Metrics, NDArray[np.float32], NDArray[np.float32]]:
    """Metrics of a split, and its labels and logits; see `logits`."""
    parts = list(logits(model, dataset, split, precision=precision, progress=progress, check=check))
    label, score = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    groups = [part[2] for part in parts if part[2] is not None]
    return evaluate_logits(label, score, np.concatenate(groups) if groups else None), label, score
