"""Scores of raw samples from an exported model: files that are data alone, every one of them checked.

They are those of `predict` for the same samples up to rounding: to the bit where batches hold the same samples and
nothing is deduplicated, in bf16 within 0.004, since products round otherwise in batches of other sizes. A seal is no
signature: what is not checked is whether the writer of an export means well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.errors import ExportError
from stratarec.io.names import as_html
from stratarec.kernels.runtime.threads import within_cores
from stratarec.models.base import autocast, probabilities
from stratarec.models.request import averaged
from stratarec.serving.export_manifest import ExportManifest
from stratarec.serving.exported_model import ExportedModel

# Samples that are scored at once: bounds memory.
_BATCH = 8192


class Scorer:
    """An exported model: raw columns of a log -> probabilities of a click. Use `Scorer.open`.

    Notes
    -----
    Threads may share a scorer. Where they do, or where rows come one at a time, `torch.set_num_threads(1)` is fastest:
    threads of torch that wait for each other take longer than the network of a row. Tables stay in their file, which
    must not change while the scorer is in use.
    """

    def __init__(self, model: ExportedModel) -> None:
        self._model, self._updating = model, Lock()

    @property
    def manifest(self) -> ExportManifest:
        """What the model is."""
        return self._model.manifest

    @property
    def labels(self) -> tuple[str, ...]:
        """What scores are of, by the columns of the log that it was in."""
        return self.manifest.columns.label_columns

    @classmethod
    def open(cls, folder: str | Path) -> Scorer:
        """The model in a directory that ``stratarec export`` wrote.

        Nothing in it is run: configuration, weights, tables and vocabularies are read and checked. Every byte that is
        used is read once, those of the tables too.

        Raises
        ------
        ExportError
            Where a file is missing, a link, damaged, of another export, or not what the manifest says.
        """
        return cls(ExportedModel.open(Path(folder)))

    def update(self, delta: str | Path) -> None:
        """Go on to the later model that a directory of ``stratarec export --since`` leads to: its scores to the bit.

        Threads that score meanwhile do so by all of one model or all of the other. From then on tables lie in memory,
        and while this runs those of both models do.

        Raises
        ------
        ExportError
            Where it is of another model than this one, as when a delta was left out or is taken twice, or its files
            are damaged. The scorer is then as it was.
        """
        with self._updating:
            self._model = self._model.updated(Path(delta))

    def _repr_html_(self) -> str:
        columns = self.manifest.columns
        features = ", ".join([each.name for each in columns.dense] + [each.name for each in columns.sparse])
        rows = [("model", self.manifest.model.kind), ("scores of", ", ".join(self.labels)), ("features", features)]
        return as_html("Scorer", rows)

    def score(self, frame: Any) -> NDArray[np.float32]:
        """``[N]`` probabilities, those that ``stratarec predict`` gives for the same samples up to rounding; ``[N, T]``
        of the T `labels` where there are several.

        Parameters
        ----------
        frame : DataFrame or mapping of columns
            Of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series: the values of a log, by the
            names of the schema's features. A history is a list of the values that came before, oldest first. Label,
            time and other columns are not read.

        Raises
        ------
        DataError
            Naming the column, and the row where it is one.
        ExportError
            When a score is no number.
        """
        model = self._model  # which another thread may exchange
        dense, sparse = model.encoder.encode(frame)
        parts = [_logits(model, *batch) for batch in _batches(dense, sparse)]
        empty = (0, len(self.labels)) if len(self.labels) > 1 else 0
        logits = np.concatenate(parts) if parts else np.zeros(empty, dtype=np.float32)
        wrong = np.isnan(logits)
        if wrong.any():
            raise ExportError(
                f"the score of row {int(np.argwhere(wrong)[0, 0]) + 1} is no number: the exported weights overflow"
            )
        return probabilities(logits)


def _logits(model: ExportedModel, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
    with torch.no_grad(), within_cores(), autocast(model.manifest.precision):
        pooled, histories = model.tables.look_up(averaged(sparse, model.network.weighted_means))
        logits: NDArray[np.float32] = model.network(dense, pooled, histories).cpu().numpy()
    return logits


def _batches(dense: Tensor, sparse: KeyedJagged) -> Iterator[tuple[Tensor, KeyedJagged]]:
    rows = len(dense)
    if 0 < rows <= _BATCH:
        yield dense, sparse
        return
    for first in range(0, rows, _BATCH):
        chosen = torch.arange(first, min(first + _BATCH, rows))
        yield dense[chosen], sparse.take(chosen)
