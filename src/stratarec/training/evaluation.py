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
    share: Share | None = None,
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64] | None]]:
    """Label, logit and group of each batch, in the order of storage; `check` is called before each and may raise.

    With a share these are its own of each batch, of which there are as many whatever the share.
    """
    loader = Loader(dataset, split, LoaderConfig(batch_size=_BATCH, shuffle=False), share)
    training = model.training
    model.eval()
    progress.start(f"evaluate {split}", loader.samples, "samples")
    try:
        with torch.no_grad(), autocast(precision):
            for batch in loader.epoch(0):
                check()
                # A share without samples has no logits, but its rank's rows are asked for by the others.
                scores = model(batch).cpu().numpy() if batch.size else _no_logits(model, batch)
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
    mesh: Mesh | None = None,
) -> tuple[Metrics, NDArray[np.float32], NDArray[np.float32]]:
    """Metrics of a split, and its labels and logits; see `logits`.

    The ranks of a mesh take a share each; all of them get all logits, so that no metric is an estimate.
    """
    mesh = mesh or Mesh.alone()
    share = Share(rank=mesh.rank, ranks=mesh.ranks)
    parts = list(logits(model, dataset, split, precision=precision, progress=progress, check=check, share=share))
    floats = np.dtype(np.float32)
    label = _everyones(mesh, [label for label, _, _ in parts], floats)
    score = _everyones(mesh, [score for _, score, _ in parts], floats)
    nobody = np.empty(0, dtype=np.int64)
    users = _everyones(mesh, [nobody if user is None else user for _, _, user in parts], nobody.dtype)
    return evaluate_logits(label, score, users if len(users) else None), label, score


def _everyones(mesh: Mesh, parts: list[NDArray[Any]], kind: np.dtype[Any]) -> NDArray[Any]:
    """What all ranks have, in the order of storage: batch after batch, of each the ranks one after another."""
    mine = np.concatenate([np.empty(0, dtype=kind), *parts])
    if mesh.ranks == 1:
        return mine
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    every = [np.frombuffer(content, dtype=kind) for content in mesh.rows.gather(mine.tobytes())]
    lengths = [np.frombuffer(content, dtype=np.int64) for content in mesh.rows.gather(sizes.tobytes())]
    cut = [np.split(found, np.cumsum(size)[:-1]) for found, size in zip(every, lengths, strict=True) if len(size)]
    batches = max((len(size) for size in lengths), default=0)
    pieces = [rank[batch] for batch in range(batches) for rank in cut if batch < len(rank)]
    return np.concatenate([np.empty(0, dtype=kind), *pieces])


def _no_logits(model: CTRModel, batch: Batch) -> NDArray[np.float32]:
    model.embeddings(model.request(batch).features)
    return np.empty(0, dtype=np.float32)
