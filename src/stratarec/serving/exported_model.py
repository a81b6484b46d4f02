"""An opened export whose files were checked. Tables are mapped files; after a delta, they are
arrays in memory.

Tables are never written. The same kernels as in training look up rows in the mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.data.vocabulary import Vocabulary, read_vocabulary
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.tables.base import features_of, group_layout
from stratarec.errors import ConfigError, DatasetError, ExportError
from stratarec.io.tensors import Spec
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.codec.records import decode
from stratarec.kernels.pooling import gather, pool
from stratarec.kernels.raw_values.row_features import RowFeatures
from stratarec.kernels.trees.columns import FittedTrees, Samples, compute_trees
from stratarec.models import build_network
from stratarec.models.base import Network
from stratarec.models.calibration import Calibration
from stratarec.models.history import History, HistoryWindows
from stratarec.serving.export_files import map_file, map_tensors
from stratarec.serving.export_manifest import (
    ADVICE,
    CHANGED,
    DELTA_ADVICE,
    DELTA_ROWS,
    FLOATS,
    GONE,
    NETWORK,
    ROWS,
    TABLES,
    DeltaManifest,
    ExportedFile,
    ExportedTable,
    ExportedVocabulary,
    ExportManifest,
    delta_fault,
)
from stratarec.serving.features import FeatureEncoder, PooledTables
from stratarec.serving.onnx_network import OnnxNetwork

Arrays = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]

# Number of rows in the layout of encoded tables. Their rows are decoded by position in the batch,
# so any number of ids must be valid.
_ANY_ROWS = 1 << 31
# Number of bytes of a table that are decoded at a time when it is checked.
_CHECK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """Network, tables and vocabularies of an export, with the encoder of raw values."""

    manifest: ExportManifest
    vocabularies: Mapping[str, Vocabulary]
    arrays: Arrays
    """Tensors of ``tables.safetensors`` by name, flattened."""
    encoder: FeatureEncoder
    tables: ReadOnlyTables
    network: Network
    trees: FittedTrees | None
    """Trees of `network`."""
    tree_keys: NDArray[np.int64]
    """Result of `TreeMembers.keys` for the sparse features of the schema."""
    onnx: OnnxNetwork | None = None
    """`network` for ONNX Runtime; None if torch computes it."""

    @classmethod
    def open(cls, folder: Path) -> ExportedModel:
        """Read and check the export in a directory."""
        manifest = ExportManifest.read(folder)
        network = read_network(folder, manifest)
        vocabularies = {
            name: _vocabulary(folder, entry, manifest.files[entry.path])
            for name, entry in manifest.vocabularies.items()
        }
        specs = manifest.tensors()
        tensors = map_tensors(folder, TABLES, manifest.files[TABLES], specs)
        arrays = {name: tensors[name] for name in specs}
        return _assemble(manifest, vocabularies, network, arrays, tensors.all_floats(), folder)

    def dense_of(self, rows: RowFeatures) -> NDArray[np.float32]:
        """Return `Network.inputs` of a few rows."""
        if self.trees is None:
            return rows.dense
        samples = Samples(rows.dense, rows.ids, rows.offsets, self.tree_keys)
        return np.concatenate([rows.dense, compute_trees(samples, self.trees)[1]], axis=1)

    def updated(self, folder: Path) -> ExportedModel:
        """Return a new model with the changes of a delta applied; this model is not changed."""
        delta = DeltaManifest.read(folder)
        manifest = delta.manifest
        if delta.parent != self.manifest.fingerprint:
            raise ExportError(
                f"{folder} is not a delta of this model: apply all deltas in order, each only once, or "
                "open the full export"
            )
        if fault := delta_fault(self.manifest, manifest):
            raise ExportError(f"{folder}: {fault}; {DELTA_ADVICE}")
        network = read_network(folder, manifest)
        changes = map_tensors(folder, DELTA_ROWS, delta.files[DELTA_ROWS], delta.tensors())
        none = np.zeros(0, dtype=np.int64)
        vocabularies = {
            name: _updated_vocabulary(
                folder, delta, name, old, changes[GONE + name] if name in delta.gone else none
            )
            for name, old in self.vocabularies.items()
        }
        plain = [name for name, table in manifest.tables.items() if table.codec == "fp32"]
        sizes = [manifest.tables[name].rows * manifest.tables[name].width for name in plain]
        ends = np.cumsum([0, *sizes]).tolist()
        places = dict(zip(plain, ends, strict=False))
        flat = np.empty(ends[-1], dtype=np.float32)
        arrays: dict[str, NDArray[Any]] = {
            name: flat[at : at + n] for (name, at), n in zip(places.items(), sizes, strict=True)
        }
        for name, table in manifest.tables.items():
            rows = changes[CHANGED + name] if delta.changed[name] else none
            if fault := _row_fault(rows, self.manifest.tables[name].rows, table.rows):
                raise ExportError(f"{folder / DELTA_ROWS}: {name!r} has {fault}; {DELTA_ADVICE}")
            if name not in places and not len(rows):
                arrays[name] = self.arrays[name]
            else:
                spec = table.tensors(name)[name]
                if name not in places:
                    arrays[name] = np.empty(spec.nbytes, dtype=np.uint8)
                new, old_rows = (
                    all_rows[name].reshape(-1, spec.shape[1]) for all_rows in (arrays, self.arrays)
                )
                new[: len(old_rows)] = old_rows
                if len(rows):
                    new[rows] = changes[name].reshape(len(rows), -1)
            if table.float32_rows:
                arrays |= {key + name: changes[key + name] for key in (ROWS, FLOATS)}
        return _assemble(manifest, vocabularies, network, arrays, (flat, places), folder)


def _row_fault(rows: NDArray[np.int64], before: int, after: int) -> str:
    """Check the changed rows of a table that had `before` rows; return the fault, or an empty
    string.
    """
    if (np.diff(rows) <= 0).any() or (rows < 0).any() or (rows >= after).any():
        return f"changed rows that are not ascending from 0 to {after - 1}"
    missing = after - before - int((rows >= before).sum())
    return f"{missing} new rows without values" if missing else ""


def _assemble(
    manifest: ExportManifest,
    vocabularies: Mapping[str, Vocabulary],
    network: Network,
    arrays: Arrays,
    floats: tuple[NDArray[np.float32], Mapping[str, int]],
    folder: Path,
) -> ExportedModel:
    plain = {name: floats[1][name] for name, table in manifest.tables.items() if table.codec == "fp32"}
    encoded = {
        name: _encoded(table, name, arrays) for name, table in manifest.tables.items() if name not in plain
    }
    for name, table in encoded.items():
        if fault := table.fault():
            raise ExportError(f"{folder}: table {name!r} has {fault}; {ADVICE}")
    keys = tuple(feature.name for feature in manifest.columns.sparse)
    tables = ReadOnlyTables(
        manifest.configs(),
        FloatTables(weights=floats[0], place=plain),
        encoded,
        network.sequence_keys,
        keys,
    )
    trees = network.trees
    return ExportedModel(
        manifest=manifest,
        vocabularies=vocabularies,
        arrays=arrays,
        encoder=FeatureEncoder(
            manifest.columns, manifest.moments, vocabularies, tables.pooled, manifest.nulls
        ),
        tables=tables,
        network=network,
        trees=None if trees is None else trees.fitted(),
        tree_keys=np.zeros((0, 2), np.int64) if trees is None else trees.keys(keys),
    )


def read_network(folder: Path, manifest: ExportManifest) -> Network:
    """Build the network of an export or a delta, and load and check its weights.

    Memory is allocated only after the file is known to contain them.
    """
    pooled_keys = tuple(entry.feature for entry in manifest.pooled)
    try:
        with torch.device("meta"):
            network = build_network(manifest.model, manifest.columns, pooled_keys)
            if network.trees is not None:
                network.trees.resize(manifest.trees)
        specs = {name: Spec.of(tensor) for name, tensor in network.state_dict().items()}
    except (ConfigError, RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"{folder}: its manifest describes no network ({reason}); {ADVICE}") from error
    weights = map_tensors(folder, NETWORK, manifest.files[NETWORK], specs)
    # Tensors are copied, because in the file they are read-only and not aligned.
    state = {name: torch.from_numpy(weights[name].copy()).view(spec.shape) for name, spec in specs.items()}
    network.load_state_dict(state, assign=True)
    if fault := network.fault():
        raise ExportError(f"{folder / NETWORK}: {fault}; {ADVICE}")
    network.correction = manifest.correction
    network.calibration = Calibration(manifest.calibration) if manifest.calibration else None
    return network.eval().requires_grad_(False)


def _encoded(table: ExportedTable, name: str, arrays: Arrays) -> EncodedTable:
    has_floats = bool(table.float32_rows)
    return EncodedTable(
        layout=table.record.layout,
        records=arrays[name].reshape(table.rows, -1),
        float_rows=arrays[ROWS + name] if has_floats else np.zeros(0, dtype=np.int64),
        floats=(arrays[FLOATS + name] if has_floats else np.zeros(0, dtype=np.float32)).reshape(
            -1, table.width
        ),
    )


def _vocabulary(folder: Path, entry: ExportedVocabulary, expected: ExportedFile) -> Vocabulary:
    content = map_file(folder, entry.path, expected)
    try:
        return read_vocabulary(pa.BufferReader(pa.py_buffer(content)), entry, str(folder / entry.path))
    except DatasetError as error:
        raise ExportError(f"{error}; {ADVICE}") from error


def _updated_vocabulary(
    folder: Path, delta: DeltaManifest, name: str, old: Vocabulary, removed: NDArray[np.int64]
) -> Vocabulary:
    """Return a copy of the vocabulary `old` without the ids `removed`, and with the values that the
    delta appends.
    """
    entry, values = delta.appended.get(name), old.values
    if len(removed):
        places = removed - old.tail_buckets
        if (np.diff(places) <= 0).any() or places[0] < 0 or places[-1] >= len(values):
            raise ExportError(
                f"{folder / DELTA_ROWS}: removes ids of {name!r} that the earlier export does not contain; "
                f"{DELTA_ADVICE}"
            )
        values = old.values_without(removed)
    if entry is not None:
        appended = _vocabulary(folder, entry, delta.files[entry.path]).values
        if appended.drop_nulls().is_in(values.implode()).any():
            raise ExportError(
                f"{folder / entry.path} repeats a value of the earlier export; {DELTA_ADVICE}"
            )
        values = pl.concat([values, appended])
    # Counts are set to 0, because scoring does not use them.
    if old.kind == "count":
        old = replace(old, counts=np.zeros(len(values) + old.tail_buckets, dtype=np.int64))
    vocabulary = replace(old, values=values)
    if vocabulary.digest != delta.manifest.vocabularies[name].digest:
        raise ExportError(
            f"{folder}: the resulting values of {name!r} do not match its manifest; {DELTA_ADVICE}"
        )
    return vocabulary


@dataclass(frozen=True, kw_only=True)
class FloatTables:
    """Float32 tables in one array."""

    weights: Floats
    """``[R * D]``, possibly a mapped file; never written."""
    place: Mapping[str, int]
    """Table -> position of its first element in `weights`."""


@dataclass(frozen=True, kw_only=True)
class EncodedTable:
    """A table of encoded records, with the exact float32 values of some rows."""

    layout: RecordLayout
    records: NDArray[np.uint8]
    """``[rows, record_bytes]``."""
    float_rows: NDArray[np.int64]
    """``[K]`` rows that have float32 values, in ascending order."""
    floats: Floats
    """``[K, D]`` values of `float_rows`."""

    def fault(self) -> str:
        """Check all rows, which are not trusted; return the fault, or an empty string."""
        if len(self.float_rows) and not (
            self.float_rows[0] >= 0 and self.float_rows[-1] < len(self.records)
        ):
            return "rows outside of the table"
        if (np.diff(self.float_rows) <= 0).any():
            return "rows that do not rise"
        width = self.layout.width
        step = max(_CHECK_BYTES // (4 * width), 1)
        out = np.empty((min(step, len(self.records)), width), dtype=np.float32)
        for first in range(0, len(self.records), step):
            part = self.records[first : first + step]
            _decode(self.layout, part, np.arange(len(part), dtype=np.int64), out)
            if not np.isfinite(out[: len(part)]).all():
                return "a number that is not finite"
        return ""

    def decode(self, ids: NDArray[np.int32], out: Floats) -> None:
        """Decode rows into `out` ``[len(ids), D]``."""
        _decode(self.layout, self.records, ids.astype(np.int64), out)
        if len(self.float_rows):
            place = np.minimum(np.searchsorted(self.float_rows, ids), len(self.float_rows) - 1)
            is_float = np.flatnonzero(self.float_rows[place] == ids)
            out[is_float] = self.floats[place[is_float]]


class ReadOnlyTables:
    """Pools and looks up rows of tables.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        Name, size and features of each table.
    floats : FloatTables
        The tables in float32.
    encoded : mapping of str to EncodedTable
        All other tables; the rows of a batch are decoded for each lookup.
    histories : sequence of str
        Unpooled features, in the order of the network's inputs.
    keys : sequence of str
        Names of all features, in the order in which they are looked up.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        floats: FloatTables,
        encoded: Mapping[str, EncodedTable],
        histories: Sequence[str],
        keys: Sequence[str],
    ) -> None:
        self._histories = tuple(histories)
        self._encoded = encoded
        widths = {table.embedding_dim for table in configs}
        features = [(name, table.embedding_dim) for table in configs for name in table.feature_names]
        ends = np.cumsum([0, *(width for _, width in features)]).tolist()
        self.columns = ends[-1]
        columns = {name: end for (name, _), end in zip(features, ends, strict=False)}
        self.pooled: PooledTables | None = None
        """All tables, if every feature is pooled from a float32 table."""
        if not (encoded or self._histories):
            places = {
                name: (
                    floats.place[table.name],
                    table.embedding_dim,
                    columns[name],
                    table.pooling == "mean",
                )
                for table in configs
                for name in table.feature_names
            }
            # Kernels are compiled for arrays that are never written, as a mapped file is.
            weights = floats.weights[:]
            weights.flags.writeable = False
            self.pooled = PooledTables(weights, self.columns, places)
        in_floats = [table for table in configs if table.name not in encoded]
        in_records = [table for table in configs if table.name in encoded]
        # Tables of one width are looked up together.
        self._float_groups = [
            _float_group(group, floats, columns, keys) for group in _groups(in_floats, len(widths))
        ]
        self._encoded_groups = [
            (
                features_of(group),
                _key_places(group, keys),
                group_layout(group, columns, [0] * len(group), [_ANY_ROWS] * len(group)),
            )
            for group in _groups(in_records, len(widths))
        ]

    def look_up(self, features: KeyedJagged) -> tuple[Tensor, list[History]]:
        """Return pooled rows ``[B, columns]`` and the rows of each history. Every id must be the
        number of a row.
        """
        pooled = torch.empty(features.batch_size, self.columns)
        rows: dict[str, Tensor] = {}
        for keys, places, layout, weights in self._float_groups:
            bags = _bags(features, features.values.numpy(), places)
            rows |= _pool(weights, layout, bags, keys, pooled)
        for keys, places, layout in self._encoded_groups:
            bags = _bags(features, np.arange(len(features.values), dtype=np.int32), places)
            rows |= _pool(self._decoded(features, bags, keys, layout.width), layout, bags, keys, pooled)
        return pooled, [_history(rows[name], features, name) for name in self._histories]

    def _decoded(
        self,
        features: KeyedJagged,
        bags: BagBatch,
        keys: Sequence[tuple[EmbeddingBagConfig, str]],
        width: int,
    ) -> Floats:
        """Return ``[N * D]`` decoded rows, one for each id of the batch.

        Only the rows for features in `keys` are set; others are arbitrary.
        """
        ids, out = features.values.numpy(), np.empty((len(features.values), width), dtype=np.float32)
        for place, (table, _) in enumerate(keys):
            first, last = bags.span(place)
            self._encoded[table.name].decode(ids[first:last], out[first:last])
        return out.reshape(-1)


def _groups(configs: Sequence[EmbeddingBagConfig], widths: int) -> list[list[EmbeddingBagConfig]]:
    return [[table] for table in configs] if widths > 1 else [list(configs)] if configs else []


def _float_group(
    configs: Sequence[EmbeddingBagConfig],
    floats: FloatTables,
    columns: Mapping[str, int],
    keys: Sequence[str],
) -> tuple[list[tuple[EmbeddingBagConfig, str]], NDArray[np.int64], GroupLayout, Floats]:
    width, start = configs[0].embedding_dim, min(floats.place[table.name] for table in configs)
    first = [(floats.place[table.name] - start) // width for table in configs]
    layout = group_layout(configs, columns, first, [table.num_embeddings for table in configs])
    return features_of(configs), _key_places(configs, keys), layout, floats.weights[start:]


def _key_places(configs: Sequence[EmbeddingBagConfig], keys: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each feature of some tables among `keys`."""
    return np.array([keys.index(name) for _, name in features_of(configs)], dtype=np.int64)


def _decode(
    layout: RecordLayout, records: NDArray[np.uint8], places: NDArray[np.int64], out: Floats
) -> None:
    slots = np.arange(len(places), dtype=np.int64)
    decode(layout, records, places, FloatRows.without_state(out.reshape(-1), layout.width).parts, slots)


def _bags(features: KeyedJagged, values: NDArray[np.int32], key: NDArray[np.int64]) -> BagBatch:
    offsets = features.bag_offsets().numpy()
    weights = None if features.weights is None else features.weights.numpy()
    return BagBatch(values=values, offsets=offsets, weights=weights, batch=features.batch_size, key=key)


def _pool(
    weights: Floats, layout: GroupLayout, bags: BagBatch, keys: Sequence[tuple[object, str]], pooled: Tensor
) -> dict[str, Tensor]:
    """Write the pooled rows of bags to `pooled`. Return feature -> looked-up rows, for features
    without pooling.
    """
    faults, rows = [pool(weights, layout, bags, pooled)], {}
    for place in np.flatnonzero(layout.sequence).tolist():
        first, last = bags.span(place)
        feature_rows = rows[keys[place][1]] = torch.empty(last - first, layout.width)
        faults.append(gather(weights, layout, bags, place, feature_rows))
    assert max(faults) < 0, "an id outside its table"
    return rows


def _history(rows: Tensor, features: KeyedJagged, name: str) -> History:
    bags = features[name]
    return History(rows=rows, windows=HistoryWindows(start=bags.offsets[:-1], length=bags.lengths()))
