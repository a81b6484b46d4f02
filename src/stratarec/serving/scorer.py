"""Scores of raw samples from an exported model, whose files are only data and are checked.

The scores equal those of `predict` for the same samples up to rounding: exactly if batches have the same samples and
nothing is deduplicated, within 0.004 in bf16, where products round differently in batches of other sizes. A seal is no
signature: it does not show who wrote the export.
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

# Samples that are scored at a time; bounds memory.
_BATCH = 8192


class Scorer:
    """An exported model that turns raw columns of a log into click probabilities; open one by `Scorer.open`.

    Notes
    -----
    Threads may share a scorer. If they do, or if rows come one at a time, `torch.set_num_threads(1)` is fastest:
    synchronising torch's threads takes longer than the network of a row. Tables stay in their file, which must not
    change while the scorer is in use.
    """

    def __init__(self, model: ExportedModel) -> None:
        self._model, self._updating = model, Lock()

    @property
    def manifest(self) -> ExportManifest:
        """Manifest of the export."""
        return self._model.manifest

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that are predicted, by their columns in the log."""
        return self.manifest.columns.label_columns

    @classmethod
    def open(cls, folder: str | Path) -> Scorer:
        """Open a directory that ``stratarec export`` wrote.

        No code in the directory is run: configuration, weights, tables and vocabularies are read and checked. Every
        byte that is used is read once, including the tables.

        Raises
        ------
        ExportError
            If a file is missing, a link, damaged, of another export, or not as the manifest describes it.
        """
        return cls(ExportedModel.open(Path(folder)))

    def update(self, delta: str | Path) -> None:
        """Apply a directory of ``stratarec export --since``; scores are then exactly those of the later model.

        Threads that score meanwhile use either the old or the new model. The tables of the new model are in memory;
        during the update those of both models are.

        Raises
        ------
        ExportError
            If the delta is of another model than this one, as when a delta was skipped or is applied twice, or if its
            files are damaged. The scorer does not change then.
        """
        with self._updating:
            self._model = self._model.updated(Path(delta))

    def _repr_html_(self) -> str:
        columns = self.manifest.columns
        features = ", ".join(columns.names)
        rows = [("model", self.manifest.model.kind), ("scores of", ", ".join(self.labels)), ("features", features)]
        return as_html("Scorer", rows)

    def score(self, frame: Any) -> NDArray[np.float32]:
        """Return ``[N]`` probabilities, equal to those of ``stratarec predict`` up to rounding; ``[N, T]`` for several
        `labels`.

        Parameters
        ----------
        frame : DataFrame or mapping of columns
            A DataFrame of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series, with the values
            of a log by the names of the schema's features. A history is a list of the earlier values, oldest first.
            Other columns, such as label and time, are not read.

        Raises
        ------
        DataError
            If a column or value cannot be used; names the column, and the row.
        ExportError
            If a score is no number.
        """
        model = self._model  # once: another thread may replace it
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
