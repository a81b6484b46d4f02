"""An export, opened: its files checked, its tables where they lie in their file, or, after a delta, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray

from stratarec.data.vocabulary import Vocabulary, read_vocabulary
from stratarec.errors import ConfigError, DatasetError, ExportError
from stratarec.io.tensors import Spec
from stratarec.models import build_network
from stratarec.models.base import Network
from stratarec.models.calibration import Calibration
from stratarec.serving.delta import CHANGED, DELTA_ADVICE, DELTA_ROWS, GONE, DeltaManifest, difference
from stratarec.serving.export_files import map_file, map_tensors
from stratarec.serving.export_manifest import (
    ADVICE,
    FLOATS,
    NETWORK,
    ROWS,
    TABLES,
    ExportedFile,
    ExportedTable,
    ExportedVocabulary,
    ExportManifest,
)
from stratarec.serving.features import FeatureEncoder
from stratarec.serving.mapped_tables import EncodedTable, FloatTables, ReadOnlyTables

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """All that scores; see `Scorer`."""

    manifest: ExportManifest
    vocabularies: Mapping[str, Vocabulary]
    arrays: Arrays
    """Tensors of ``tables.safetensors`` by name, flat."""
    encoder: FeatureEncoder
    tables: ReadOnlyTables
    network: Network

    @classmethod
    def open(cls, folder: Path) -> ExportedModel:
        """See `Scorer.open`."""
        manifest = ExportManifest.read(folder)
        network = _network(folder, manifest)
        vocabularies = {
            name: _vocabulary(folder, entry, manifest.files[entry.path])
            for name, entry in manifest.vocabularies.items()
        }
        specs = manifest.tensors()
        found = map_tensors(folder, TABLES, manifest.files[TABLES], specs)
        flat, places = found.all_floats()
        return _assembled(
            manifest, vocabularies, network, {name: found[name] for name in specs}, (flat, places), folder
        )

    def updated(self, folder: Path) -> ExportedModel:
        """With the changes of a delta; this one stays as it is."""
        delta = DeltaManifest.read(folder)
        manifest = delta.manifest
        if delta.parent != self.manifest.fingerprint:
            raise ExportError(
                f"{folder} is a delta of another model than this one: take all deltas in their order, none twice, or "
                "open the full export"
            )
        if fault := difference(self.manifest, manifest):
            raise ExportError(f"{folder}: {fault}; {DELTA_ADVICE}")
        network = _network(folder, manifest)
        found = map_tensors(folder, DELTA_ROWS, delta.files[DELTA_ROWS], delta.tensors())
        none = np.zeros(0, dtype=np.int64)
        vocabularies = {
            name: _later(folder, delta, name, old, found[GONE + name] if name in delta.gone else none)
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
            rows = found[CHANGED + name] if delta.changed[name] else none
            if fault := _fault(rows, self.manifest.tables[name].rows, table.rows):
                raise ExportError(f"{folder / DELTA_ROWS}: {name!r} has {fault}; {DELTA_ADVICE}")
            if name not in places and not len(rows):
                arrays[name] = self.arrays[name]
            else:
                if name not in places:
                    arrays[name] = np.empty(table.tensors(name)[name].nbytes, dtype=np.uint8)
                now, before = (
                    each[name].reshape(-1, table.tensors(name)[name].shape[1]) for each in (arrays, self.arrays)
                )
                now[: len(before)] = before
                if len(rows):
                    now[rows] = found[name].reshape(len(rows), -1)
            if table.float32_rows:
                arrays |= {key + name: found[key + name] for key in (ROWS, FLOATS)}
        return _assembled(manifest, vocabularies, network, arrays, (flat, places), folder)


def _fault(rows: NDArray[np.int64], before: int, after: int) -> str:
    """What is wrong with changed rows of a table that had so many; empty if nothing is."""
    if (np.diff(rows) <= 0).any() or (rows < 0).any() or (rows >= after).any():
        return f"changed rows that do not rise from 0 to {after}"
    missing = after - before - int((rows >= before).sum())
    return f"{missing} new rows that are not there" if missing else ""


def _assembled(
    manifest: ExportManifest, vocabularies: Mapping[str, Vocabulary], network: Network, arrays: Arrays,
    floats: tuple[NDArray[np.float32], Mapping[str, int]], folder: Path,
) -> ExportedModel:  # fmt: skip
    plain = {name: floats[1][name] for name, table in manifest.tables.items() if table.codec == "fp32"}
    encoded = {name: _encoded(table, name, arrays) for name, table in manifest.tables.items() if name not in plain}
    for name, table in encoded.items():
        if fault := table.fault():
            raise ExportError(f"{folder}: table {name!r} has {fault}; {ADVICE}")
    return ExportedModel(
        manifest=manifest,
        vocabularies=vocabularies,
        arrays=arrays,
        encoder=FeatureEncoder(manifest.columns, manifest.moments, vocabularies),
        tables=ReadOnlyTables(
            manifest.configs(), FloatTables(weights=floats[0], place=plain), encoded, network.sequence_keys
        ),
        network=network,
    )


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


def _encoded(table: ExportedTable, name: str, found: Arrays) -> EncodedTable:
    few = bool(table.float32_rows)
    return EncodedTable(
        layout=table.record.layout,
        records=found[name].reshape(table.rows, -1),
        kept=found[ROWS + name] if few else np.zeros(0, dtype=np.int64),
        floats=(found[FLOATS + name] if few else np.zeros(0, dtype=np.float32)).reshape(-1, table.width),
    )


def _vocabulary(folder: Path, entry: ExportedVocabulary, expected: ExportedFile) -> Vocabulary:
    content = map_file(folder, entry.path, expected)
    try:
        return read_vocabulary(pa.BufferReader(pa.py_buffer(content)), entry, str(folder / entry.path))
    except DatasetError as error:
        raise ExportError(f"{error}; {ADVICE}") from error


def _later(folder: Path, delta: DeltaManifest, name: str, old: Vocabulary, gone: NDArray[np.int64]) -> Vocabulary:
    """Return a copy of a vocabulary without the values that a delta removes, and with those that it appends."""
    entry, values = delta.appended.get(name), old.values
    if len(gone):
        places = gone - old.tail_buckets
        if (np.diff(places) <= 0).any() or places[0] < 0 or places[-1] >= len(values):
            raise ExportError(
                f"{folder / DELTA_ROWS}: removes ids of {name!r} that the earlier export does not contain; "
                f"{DELTA_ADVICE}"
            )
        values = old.values_without(gone)
    if entry is not None:
        more = _vocabulary(folder, entry, delta.files[entry.path]).values
        if more.drop_nulls().is_in(values.implode()).any():
            raise ExportError(f"{folder / entry.path} has a value that is there already; {DELTA_ADVICE}")
        values = pl.concat([values, more])
    # Counts are of no use to who scores.
    found = replace(old, values=values, counts=np.zeros(len(values) + old.tail_buckets, dtype=np.int64))
    if found.digest != delta.manifest.vocabularies[name].digest:
        raise ExportError(f"{folder}: the values of {name!r} are not those that it leads to; {DELTA_ADVICE}")
    return found
