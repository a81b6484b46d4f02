"""Score raw samples with an exported model. The files of an export contain only data and are
checked.

Scores equal the scores of `predict` up to rounding. They have the same bits if torch computes the
network, batches are equal and nothing is deduplicated. In bf16 they differ by at most 0.004,
because matrix products round differently for other batch sizes. The seal of a manifest (a hash of
its content) is not a signature: it does not show who wrote the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.config.validate import check_choice
from stratarec.errors import ConfigError, ExportError
from stratarec.io.names import as_html
from stratarec.io.remote import is_url, local_copy
from stratarec.kernels.runtime.threads import within_cores
from stratarec.models.base import autocast, probabilities
from stratarec.models.history import History
from stratarec.models.request import averaged
from stratarec.serving.export_manifest import ExportManifest
from stratarec.serving.exported_model import ExportedModel
from stratarec.serving.onnx_graph import Unsupported
from stratarec.serving.onnx_network import OnnxNetwork

Runtime: TypeAlias = Literal["auto", "onnxruntime", "torch"]

# Number of samples that are scored at a time, which limits memory.
_BATCH = 8192
# Largest ratio of padded to real events of histories for which ONNX Runtime is used, if there are
# more than a few.
_MOST_PADDING, _FEW_EVENTS = 4, 1000


class Scorer:
    """An exported model that computes click probabilities from raw columns. Create one with
    `Scorer.open`.

    Notes
    -----
    Several threads may use one scorer. If they do, or if single rows are scored, call
    ``torch.set_num_threads(1)``: synchronizing torch's threads takes longer than computing one row.
    Tables are read from their mapped file, which must not change while the scorer is in use.

    A pickle of a scorer contains only paths: of the export, and of the deltas that were applied to
    it. Loading it opens these directories again, so they must still be there.

    Examples
    --------
    >>> import polars as pl
    >>> from stratarec import Scorer
    >>> scorer = Scorer.open("exported")
    >>> scorer.labels
    ('clicked',)
    >>> scorer.manifest.model.kind, scorer.runtime in ("onnxruntime", "torch")
    ('dlrm', True)
    """

    def __init__(self, model: ExportedModel, folder: str | Path, runtime: Runtime = "auto") -> None:
        self._runtime = runtime
        self._updating = Lock()
        self._model = _with_runtime(model, runtime)
        self._places = [_place(folder)]

    def __reduce__(self) -> tuple[Any, ...]:
        with self._updating:
            return _reopen, (self._places[0], self._places[1:], self._runtime, self.manifest.fingerprint)

    @property
    def manifest(self) -> ExportManifest:
        """Description of the export: model, features, labels, precision, and hashes of its
        files.
        """
        return self._model.manifest

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels that are predicted, which are columns of the log."""
        return self.manifest.columns.label_columns

    @property
    def runtime(self) -> Literal["onnxruntime", "torch"]:
        """Library that computes the network."""
        return "torch" if self._model.onnx is None else "onnxruntime"

    @classmethod
    def open(cls, folder: str | Path, *, runtime: Runtime = "auto") -> Scorer:
        """Open a directory that ``stratarec export`` wrote.

        No code in the directory is run. Configuration, weights, tables and vocabularies are
        checked, which reads each of these files once.

        Parameters
        ----------
        folder : str or Path
            Directory, or the URL of a directory in an object store, which is copied to ``TMPDIR``
            while it is opened.
        runtime : {"auto", "onnxruntime", "torch"}
            Library that computes the network. ONNX Runtime is faster for single rows, and its
            scores differ from torch's by at most about 1e-6, multiplied by the slope of the
            calibration map where it is steep. ``auto``: ONNX Runtime if ``stratarec[onnx]`` is
            installed and ONNX can represent the network, otherwise torch. The network is converted
            in memory; ``network.onnx`` is not opened.

        Raises
        ------
        ExportError
            If a file is missing, damaged, a symbolic link, or differs from its description in the
            manifest.
        ConfigError
            If `runtime` is ``onnxruntime``, which cannot be used.

        Examples
        --------
        >>> Scorer.open("exported", runtime="torch").runtime
        'torch'
        """
        with local_copy(folder, "export") as path:
            return cls(ExportedModel.open(path), folder, runtime)

    def update(self, delta: str | Path) -> None:
        """Apply a delta that ``stratarec export --since`` wrote. Scores then equal the scores of
        the later model exactly.

        Threads that score at the same time use either the old or the new model. The tables of the
        new model are kept in memory; during the update, memory holds the tables of both models.

        Parameters
        ----------
        delta : path
            Directory of the delta, or the URL of a directory in an object store.

        Raises
        ------
        ExportError
            If the delta does not belong to this model, for example because a delta was skipped or
            applied twice, or if its files are damaged. The scorer is then unchanged.

        Examples
        --------
        >>> before = scorer.manifest.fingerprint
        >>> scorer.update("exported-today.delta")
        >>> scorer.manifest.fingerprint == before
        False
        """
        with self._updating, local_copy(delta, "delta") as path:
            self._model = _with_runtime(self._model.updated(path), self._runtime)
            self._places.append(_place(delta))

    def _repr_html_(self) -> str:
        columns = self.manifest.columns
        features = ", ".join(columns.names)
        rows = [
            ("model", self.manifest.model.kind),
            ("scores of", ", ".join(self.labels)),
            ("features", features),
        ]
        rows.append(("network computed by", self.runtime))
        return as_html("Scorer", rows)

    def score(self, frame: Any) -> NDArray[np.float32]:
        """Return ``[N]`` click probabilities, or ``[N, T]`` for several `labels`.

        Parameters
        ----------
        frame : DataFrame or mapping of columns
            A DataFrame of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or
            series. Its columns have the names of the schema's features and raw values as in a log.
            A history is a list of earlier values, oldest first, without values older than its
            `within`. Features of ``schema.dates`` are computed from their columns; a row must have
            ``schema.time`` if it is one of them. Other columns, such as the label, are ignored.
            Texts that `data.source.nulls` of the recipe listed are missing values.

        Raises
        ------
        DataError
            If a column is missing or a value cannot be converted. The message names the column and
            the row.
        ExportError
            If a score is NaN.

        Examples
        --------
        >>> scorer.score(pl.read_csv("tomorrow.csv").head(2)).round(2)
        array([0.27, 0.29], dtype=float32)
        >>> row = {"user": ["u1"], "item": ["i2"], "country": ["fr"], "device": ["phone"]}
        >>> row["price"] = [17.99]
        >>> scorer.score(row).shape
        (1,)
        """
        model = self._model  # once: another thread may replace it
        rows = model.encoder.encode_rows(frame)
        if rows is None:
            logits = _batch_logits(model, *model.encoder.encode_frame(frame))
        elif model.tables.pooled is None:
            logits = _batch_logits(model, *model.encoder.tensors(rows))
        else:
            logits = _network_logits(model, model.dense_of(rows), rows.pooled)
        wrong = np.isnan(logits)
        if np.count_nonzero(wrong):
            raise ExportError(
                f"the score of row {int(np.argwhere(wrong)[0, 0]) + 1} is not a number: the "
                "exported weights overflow"
            )
        return probabilities(logits)


def _place(folder: str | Path) -> str:
    """Return a URL, or a path that does not depend on the current directory."""
    return str(folder) if is_url(folder) else str(Path(folder).absolute())


def _reopen(folder: str, deltas: list[str], runtime: Runtime, fingerprint: str) -> Scorer:
    """Open the export and the deltas of a pickled scorer."""
    scorer = Scorer.open(folder, runtime=runtime)
    for delta in deltas:
        scorer.update(delta)
    if scorer.manifest.fingerprint != fingerprint:
        raise ExportError(
            f"{folder} has another model than when the scorer was pickled; open it by Scorer.open"
        )
    return scorer


def _with_runtime(model: ExportedModel, runtime: Runtime) -> ExportedModel:
    check_choice(runtime, "runtime", get_args(Runtime))
    if runtime == "torch":
        return model
    try:
        return replace(model, onnx=OnnxNetwork(model.network, model.manifest))
    except Unsupported as error:
        if runtime == "onnxruntime":
            raise ConfigError(
                f"runtime is 'onnxruntime', which cannot be used: {error}; set it to 'auto'"
            ) from error
        return model


def _batch_logits(model: ExportedModel, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
    parts = [_logits(model, *batch) for batch in _batches(dense, sparse)]
    empty = (0, len(model.network.labels)) if len(model.network.labels) > 1 else 0
    return np.concatenate(parts) if parts else np.zeros(empty, dtype=np.float32)


def _logits(model: ExportedModel, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
    pooled, histories = model.tables.look_up(averaged(sparse, model.network.weighted_means))
    return _network_logits(
        model, model.network.inputs(dense, sparse).cpu().numpy(), pooled.cpu().numpy(), histories
    )


def _network_logits(
    model: ExportedModel,
    dense: NDArray[np.float32],
    pooled: NDArray[np.float32],
    histories: Sequence[History] = (),
) -> NDArray[np.float32]:
    # Contexts of torch take 20 us, so they are entered only if torch computes the network.
    if model.onnx is not None and not any(map(_is_mostly_padding, histories)):
        return model.onnx(dense, pooled, histories)
    with torch.no_grad(), within_cores(), autocast(model.manifest.precision):
        logits = model.network(torch.from_numpy(dense), torch.from_numpy(pooled), histories)
        numbers: NDArray[np.float32] = logits.cpu().numpy()
    return numbers


def _is_mostly_padding(history: History) -> bool:
    """Whether padding to the longest history would take longer than ONNX Runtime saves: torch's
    attention is not padded. For 1,000 histories of 0 to 150 events, 20 on average, ONNX Runtime
    takes 27 ms and torch 7 ms.
    """
    lengths = history.windows.length
    return len(lengths) * int(lengths.max()) > _MOST_PADDING * len(history.rows) + _FEW_EVENTS


def _batches(dense: Tensor, sparse: KeyedJagged) -> Iterator[tuple[Tensor, KeyedJagged]]:
    rows = len(dense)
    if 0 < rows <= _BATCH:
        yield dense, sparse
        return
    for first in range(0, rows, _BATCH):
        chosen = torch.arange(first, min(first + _BATCH, rows))
        yield dense[chosen], sparse.take(chosen)
