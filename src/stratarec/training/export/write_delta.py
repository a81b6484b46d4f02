"""Write a delta: the changes from an earlier export to a later one. Rows are compared in their
encoded form.

`serving.export_manifest` describes the format.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import ExportError
from stratarec.io.names import file_name
from stratarec.io.sealed import write_sealed
from stratarec.io.tensors import write_tensors
from stratarec.serving.export_manifest import (
    CHANGED,
    DELTA,
    DELTA_ROWS,
    FLOATS,
    GONE,
    NETWORK,
    ROWS,
    DeltaManifest,
    ExportedVocabulary,
    delta_fault,
)
from stratarec.serving.exported_model import ExportedModel
from stratarec.training.export.export import files_of, new_directory

# Largest share of changed rows for which a delta is written.
_MOST = 0.25
# Number of rows that are compared at a time.
_PIECE = 1 << 16


def write_delta(before: ExportedModel, export: Path, folder: Path) -> float | None:
    """Write the changes from the model `before` to a later export into `folder`, and return the
    share of changed rows.

    If the share is more than a quarter, nothing is written, and the result is None.

    Raises
    ------
    ExportError
        If the export is damaged, or if a delta cannot describe its differences from the model
        `before`.
    StorageError
        If the delta cannot be written. No part of it remains then.
    """
    after = ExportedModel.open(export)
    fault = delta_fault(before.manifest, after.manifest)
    removed: dict[str, NDArray[np.int64]] = {}
    for name, old in () if fault else before.vocabularies.items():
        now = after.vocabularies[name].values[: len(old.values)]
        here, there = (item.is_not_null().to_numpy() for item in (now, old.values))
        if (here & ~there).any() or not (now == old.values).drop_nulls().all():
            fault = f"vocabulary {name!r} does not begin with the values of the earlier export"
            break
        if (there & ~here).any():
            removed[name] = np.flatnonzero(there & ~here) + old.tail_buckets
    if fault:
        raise ExportError(f"{export} does not continue the earlier export: {fault}; use the full export")
    shapes = {name: table.tensors(name)[name].shape for name, table in after.manifest.tables.items()}
    changed = {
        name: _changed(before.arrays[name].reshape(-1, shape[1]), after.arrays[name].reshape(shape))
        for name, shape in shapes.items()
    }
    # A model with only dense features has no tables.
    share = sum(map(len, changed.values())) / max(sum(shape[0] for shape in shapes.values()), 1)
    if share > _MOST:
        return None
    with new_directory(folder, {DELTA, DELTA_ROWS, NETWORK, "vocabulary"}) as directory:
        shutil.copyfile(export / NETWORK, directory / NETWORK)
        write_tensors(directory / DELTA_ROWS, _tensors(after, changed, removed))
        appended = _append(directory, before.vocabularies, after.vocabularies)
        manifest = DeltaManifest(
            parent=before.manifest.fingerprint,
            manifest=after.manifest,
            changed={name: len(rows) for name, rows in changed.items()},
            appended=appended,
            gone={name: len(ids) for name, ids in removed.items()},
            files=files_of(directory),
        )
        write_sealed(directory / DELTA, manifest.to_dict())
    return share


def _changed(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.int64]:
    """Return the sorted numbers of rows that differ in any bit, and of rows that are new."""
    result = [np.arange(len(before), len(after), dtype=np.int64)]
    for first in range(0, len(before), _PIECE):
        old, new = (
            item[first : min(first + _PIECE, len(before))].view(np.uint8) for item in (before, after)
        )
        result.append(first + np.flatnonzero((old != new).any(axis=1)))
    return np.sort(np.concatenate(result))


def _tensors(
    after: ExportedModel, changed: Mapping[str, NDArray[np.int64]], removed: Mapping[str, NDArray[np.int64]]
) -> dict[str, Tensor]:
    result = {GONE + name: ids for name, ids in removed.items()}
    for name, table in after.manifest.tables.items():
        rows, specs = changed[name], table.tensors(name)
        if len(rows):
            result[CHANGED + name] = rows
            result[name] = after.arrays[name].reshape(specs[name].shape)[rows]
        result |= {
            key: after.arrays[key].reshape(specs[key].shape)
            for key in (ROWS + name, FLOATS + name)
            if key in specs
        }
    # Copied, because torch warns about arrays of a file that is mapped read-only.
    return {name: torch.from_numpy(np.array(array)) for name, array in result.items()}


def _append(
    folder: Path, before: Mapping[str, Vocabulary], after: Mapping[str, Vocabulary]
) -> dict[str, ExportedVocabulary]:
    result = {}
    (folder / "vocabulary").mkdir()
    for number, (name, now) in enumerate(after.items()):
        values = now.values[len(before[name].values) :]
        if len(values):
            counts = np.zeros(len(values) + now.tail_buckets, dtype=np.int64)
            more = Vocabulary(values=values, counts=counts, tail_buckets=now.tail_buckets)
            path = f"vocabulary/{file_name(name, number)}.parquet"
            more.frame().write_parquet(folder / path)
            result[name] = ExportedVocabulary(**vars(more.ids), path=path)
    return result
