"""What changed from one export to a later one: ``delta.json`` says of which export it is and which one it leads to.

    delta.json                 the parent's fingerprint, the later export's manifest; bytes and hash of every file here
    network.safetensors        weights of the network, all of them
    rows.safetensors           @changed/<table>: [K] int64, rows that differ or are new, and <table>: [K, ...] what they
                               are now; of encoded tables also those that are float32, all of them;
                               @gone/<vocabulary>: [K] int64, ids of the parent's that have no value any more
    vocabulary/0000-x.parquet  values that follow those of the parent

Deltas follow each other without a gap: each names what it is of by a hash of all that it says and of all its files. As
an export, a delta may come from somebody else, and is data alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pydantic
import torch

from stratarec.data.schema import Schema
from stratarec.errors import ExportError
from stratarec.io.sealed import Count, Hash, Model, read_sealed
from stratarec.io.tensors import Spec
from stratarec.serving.export_manifest import (
    FLOATS,
    NETWORK,
    ROWS,
    ExportedFile,
    ExportedVocabulary,
    ExportManifest,
)

DELTA, DELTA_ROWS = "delta.json", "rows.safetensors"
CHANGED, GONE = "@changed/", "@gone/"
DELTA_ADVICE = "export the delta again, or open the full export"
FORMAT: Literal[2] = 2


class DeltaManifest(Model):
    """All of ``delta.json`` but its seal."""

    format: Literal[2] = FORMAT
    parent: Hash
    """`ExportManifest.fingerprint` of what it is to be laid over."""
    manifest: ExportManifest
    """Of the export that it leads to."""
    changed: dict[str, Count]
    """Table -> rows that differ or are new."""
    appended: dict[str, ExportedVocabulary]
    """Vocabulary -> the values that follow, as a vocabulary of their own."""
    gone: dict[str, Count]
    """Vocabulary -> values of the parent that are evicted or forgotten since; those that have any."""
    files: dict[str, ExportedFile]
    """All but this one, by path."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> DeltaManifest:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        if set(self.changed) != set(self.manifest.tables):
            yield f"changed: of {sorted(self.changed)}, expected of {sorted(self.manifest.tables)}"
            return
        for name, rows in self.changed.items():
            if rows > self.manifest.tables[name].rows:
                yield f"changed.{name}: {rows} of {self.manifest.tables[name].rows} rows"
        for name, ids in self.gone.items():
            if name not in self.manifest.vocabularies or not 0 < ids <= self.manifest.vocabularies[name].holes:
                yield f"gone: {ids} of {name!r}, which has no so many holes"
        paths = [entry.path for entry in self.appended.values()]
        if len(set(paths)) != len(paths) or set(self.files) != {NETWORK, DELTA_ROWS, *paths}:
            yield f"files: {sorted(self.files)}, expected {sorted({NETWORK, DELTA_ROWS, *paths})}"

    def tensors(self) -> dict[str, Spec]:
        """What ``rows.safetensors`` holds."""
        found = {GONE + name: Spec(torch.int64, (ids,)) for name, ids in self.gone.items()}
        for name, table in self.manifest.tables.items():
            specs, rows = table.tensors(name), self.changed[name]
            if rows:
                whole = specs[name]
                found[CHANGED + name] = Spec(torch.int64, (rows,))
                found[name] = Spec(whole.dtype, (rows, *whole.shape[1:]))
            found |= {key: spec for key, spec in specs.items() if key in (ROWS + name, FLOATS + name)}
        return found

    @classmethod
    def read(cls, folder: Path) -> DeltaManifest:
        """That of the delta in `folder`; `ExportError` names what is wrong with it."""
        if not (folder / DELTA).exists():
            what = f"it has no {DELTA}" if folder.exists() else "it does not exist"
            raise ExportError(f"{folder} is no delta: {what}; name one that `stratarec export --since` wrote")
        return read_sealed(folder / DELTA, cls, DELTA_ADVICE, ExportError)


def _untyped(schema: Schema) -> Schema:
    """Return a schema without the types of values, which those of vocabularies say: a log of another format names
    them."""
    return replace(schema, sparse=tuple(replace(feature, type="auto") for feature in schema.sparse))


def difference(before: ExportManifest, after: ExportManifest) -> str:
    """Why one export cannot be said as what changed since another; empty if it can."""
    for part, mine, theirs in (
        ("model", before.model, after.model),
        ("schema", _untyped(before.columns), _untyped(after.columns)),
        ("precision", before.precision, after.precision),
    ):
        if mine != theirs:
            return f"{part} is another one"
    for name, table in after.tables.items():
        old, ids, was = before.tables[name], after.vocabularies[name], before.vocabularies[name]
        if (old.codec, old.parameters) != (table.codec, table.parameters):
            return f"table {name!r} is {table.codec} and was {old.codec}"
        if (ids.kind, ids.type, ids.tail_buckets) != (was.kind, was.type, was.tail_buckets):
            return f"vocabulary {name!r} has other tail buckets, or values of another type"
        if ids.values < was.values:
            return f"vocabulary {name!r} has {ids.values:,} values and had {was.values:,}"
    return ""
