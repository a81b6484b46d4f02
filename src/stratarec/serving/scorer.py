"""Scores of raw samples from an exported model: files that are data alone, every one of them checked.

They are those of `predict` for the same samples up to rounding: to the bit where batches hold the same samples and
nothing is deduplicated, in bf16 within 0.004, since products round otherwise in batches of other sizes. A seal is no
signature: what is not checked is whether the writer of an export means well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.data.vocabulary import Vocabulary, read_vocabulary
from stratarec.errors import ConfigError, DatasetError, ExportError
from stratarec.io.names import as_html
from stratarec.io.tensors import Spec
from stratarec.kernels.runtime.threads import within_cores
from stratarec.models import build_network
from stratarec.models.base import Network, autocast, probabilities
from stratarec.models.calibration import Calibration
from stratarec.models.request import averaged
from stratarec.serving.export_files import MappedTensors, map_file, map_tensors
from stratarec.serving.export_manifest import ADVICE, FLOATS, NETWORK, ROWS, TABLES, ExportedTable, ExportManifest
from stratarec.serving.features import FeatureEncoder
from stratarec.serving.mapped_tables import EncodedTable, FloatTables, ReadOnlyTables

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

    def __init__(
        self, manifest: ExportManifest, encoder: FeatureEncoder, tables: ReadOnlyTables, network: Network
    ) -> None:
        self.manifest = manifest
        self.labels = manifest.columns.label_columns
        """What scores are of, by the columns of the log that it was in."""
        self._encoder, self._tables, self._network = encoder, tables, network

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
        folder = Path(folder)
        manifest = ExportManifest.read(folder)
        network = _network(folder, manifest)
        vocabularies = {name: _vocabulary(folder, manifest, name) for name in manifest.vocabularies}
        encoder = FeatureEncoder(manifest.columns, manifest.moments, vocabularies)
        return cls(manifest, encoder, _tables(folder, manifest, network.sequence_keys), network)

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
        dense, sparse = self._encoder.encode(frame)
        parts = [self._logits(*batch) for batch in _batches(dense, sparse)]
        empty = (0, len(self.labels)) if len(self.labels) > 1 else 0
        logits = np.concatenate(parts) if parts else np.zeros(empty, dtype=np.float32)
        wrong = np.isnan(logits)
        if wrong.any():
            raise ExportError(
                f"the score of row {int(np.argwhere(wrong)[0, 0]) + 1} is no number: the exported weights overflow"
            )
        return probabilities(logits)

    def _logits(self, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
        with torch.no_grad(), within_cores(), autocast(self.manifest.precision):
            pooled, histories = self._tables.look_up(averaged(sparse, self._network.weighted_means))
            logits: NDArray[np.float32] = self._network(dense, pooled, histories).cpu().numpy()
        return logits


def _batches(dense: Tensor, sparse: KeyedJagged) -> Iterator[tuple[Tensor, KeyedJagged]]:
    rows = len(dense)
    if 0 < rows <= _BATCH:
        yield dense, sparse
        return
    for first in range(0, rows, _BATCH):
        chosen = torch.arange(first, min(first + _BATCH, rows))
        yield dense[chosen], sparse.take(chosen)


def _network(folder: Path, manifest: ExportManifest) -> Network:
    """The network with its weights; nothing is allocated before the file is known to hold them."""
    pooled_keys = tuple(entry.feature for entry in manifest.pooled)
    try:
        with torch.device("meta"):
            network = build_network(manifest.model, manifest.columns, pooled_keys)
        specs = {name: Spec.of(tensor) for name, tensor in network.state_dict().items()}
    except (ConfigError, RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"{folder}: its manifest describes no network ({reason}); {ADVICE}") from error
    weights = map_tensors(folder, NETWORK, manifest.files[NETWORK], specs)
    # Copies: what lies in a file is aligned otherwise, and may not be written.
    state = {name: torch.from_numpy(weights[name].copy()).view(spec.shape) for name, spec in specs.items()}
    network.load_state_dict(state, assign=True)
    network.calibration = Calibration(manifest.calibration) if manifest.calibration else None
    return network.eval().requires_grad_(False)


def _tables(folder: Path, manifest: ExportManifest, histories: Sequence[str]) -> ReadOnlyTables:
    specs = {key: spec for name, table in manifest.tables.items() for key, spec in table.tensors(name).items()}
    found = map_tensors(folder, TABLES, manifest.files[TABLES], specs)
    flat, places = found.all_floats()
    plain = {name: places[name] for name, table in manifest.tables.items() if table.codec == "fp32"}
    encoded = {name: _encoded(table, name, found) for name, table in manifest.tables.items() if name not in plain}
    for name, table in encoded.items():
        if fault := table.fault():
            raise ExportError(f"{folder / TABLES}: {name!r} has {fault}; {ADVICE}")
    return ReadOnlyTables(manifest.configs(), FloatTables(weights=flat, place=plain), encoded, histories)


def _encoded(table: ExportedTable, name: str, found: MappedTensors) -> EncodedTable:
    few = bool(table.float32_rows)
    return EncodedTable(
        layout=table.record.layout,
        records=found[name].reshape(table.rows, -1),
        kept=found[ROWS + name] if few else np.zeros(0, dtype=np.int64),
        floats=(found[FLOATS + name] if few else np.zeros(0, dtype=np.float32)).reshape(-1, table.width),
    )


def _vocabulary(folder: Path, manifest: ExportManifest, name: str) -> Vocabulary:
    entry = manifest.vocabularies[name]
    content = map_file(folder, entry.path, manifest.files[entry.path])
    try:
        return read_vocabulary(pa.BufferReader(pa.py_buffer(content)), entry, str(folder / entry.path))
    except DatasetError as error:
        raise ExportError(f"{error}; {ADVICE}") from error
