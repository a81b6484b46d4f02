"""Logits of a whole split, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig, Share
from stratarec.distributed.mesh import Mesh
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
    mesh: Mesh | None = None,
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64] | None]]:
    """Label, logit and group of each batch, in the order of storage; `check` is called before each and may raise.

    The ranks of a mesh score a share of each batch; all of them get all of it.
    """
    mesh = mesh or Mesh.alone()
    share, config = Share(rank=mesh.rank, ranks=mesh.ranks), LoaderConfig(batch_size=_BATCH, shuffle=False)
    loader = Loader(dataset, split, config, share)
    training = model.training
    model.eval()
    progress.start(f"evaluate {split}", loader.samples, "samples")
    try:
        with torch.no_grad(), autocast(precision):
            for batch in loader.epoch(0):
                check()
                # A share without samples has no logits, but its rank's rows are asked for by the others.
                scores = model(batch).cpu().numpy() if batch.size else _no_logits(model, batch)
                users = np.empty(0, dtype=np.int64) if batch.user is None else batch.user.cpu().numpy()
                label, scores, users = (_joined(mesh, part) for part in (batch.label.cpu().numpy(), scores, users))
                yield label, scores, users if len(users) else None
                progress.advance(len(label))
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
    mesh: Mesh | None = None,
) -> tuple[Metrics, NDArray[np.float32], NDArray[np.float32]]:
    """Metrics of a split, and its labels and logits; see `logits`. Ranks have all of them: no metric is an estimate."""
    parts = list(logits(model, dataset, split, precision=precision, progress=progress, check=check, mesh=mesh))
    label, score = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    groups = [part[2] for part in parts if part[2] is not None]
    return evaluate_logits(label, score, np.concatenate(groups) if groups else None), label, score


def _joined(mesh: Mesh, mine: NDArray[Any]) -> NDArray[Any]:
    """What all ranks have of a batch, one after another."""
    if mesh.ranks == 1:
        return mine
    return np.concatenate([np.frombuffer(content, dtype=mine.dtype) for content in mesh.rows.gather(mine.tobytes())])


def _no_logits(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    model.embeddings(model.request(batch).features)
    return np.empty(0, dtype=np.float32)
