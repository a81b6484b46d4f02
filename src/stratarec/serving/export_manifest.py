"""Manifests of exports and deltas, which describe how the model is built and which files contain
its weights.

An export is a directory:

    manifest.json              configuration, features, tables, vocabularies; bytes and hash of
                               every other file
    network.safetensors        weights of the network
    tables.safetensors         <table>: [rows, D] float32, or [rows, record bytes] uint8; for
                               encoded tables also @rows/<table>: [K] int64 and @float32/<table>:
                               [K, D], the rows with exact values
    vocabulary/0000-x.parquet  value, id and count of each value of a vocabulary; the manifest has
                               its name
    README.txt                 this description
    network.onnx               only on request: the network as ONNX

A delta contains the changes between an export, its parent, and a later export:

    delta.json                 the parent's fingerprint, the later export's manifest; bytes and hash
                               of every other file
    network.safetensors        all weights of the network
    rows.safetensors           @changed/<table>: [K] int64, changed and new rows, and <table>: [K,
                               ...] their values; all float32 rows of encoded tables;
                               @gone/<vocabulary>: [K] int64, ids of the parent whose values were
                               removed
    vocabulary/0000-x.parquet  values that follow the values of the parent

Deltas must be applied in order without a gap: each names its parent by a hash of the parent's
manifest and files. All files contain only data. An export or delta may be untrusted, so nothing in
it is used before it is checked, and `Scorer` never opens network.onnx, because a graph can take any
time and memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch

from stratarec.data.schema import Schema
from stratarec.data.vocabulary import Ids
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, CodecKind
from stratarec.errors import ExportError
from stratarec.io.sealed import Count, Hash, Model, content_hash, read_sealed, write_sealed
from stratarec.io.tensors import Spec
from stratarec.models import ModelConfig
from stratarec.models.base import build_tables
from stratarec.models.calibration import LogitMap
from stratarec.models.zoo.trees import TreeSizes

FORMAT: Literal[6] = 6
DELTA_FORMAT: Literal[3] = 3
MANIFEST = "manifest.json"
NETWORK = "network.safetensors"
TABLES = "tables.safetensors"
README = "README.txt"
ONNX = "network.onnx"
DELTA, DELTA_ROWS = "delta.json", "rows.safetensors"
ADVICE = "export the model again"
DELTA_ADVICE = "export the delta again, or open the full export"
# Maximum number of layers of each kind. Layers are built before weights are read, so a huge number
# in a manifest would exhaust memory.
_MAX_LAYERS = 1 << 10
# The number of rows is limited because ids are int32.
_MAX_ROWS = 1 << 31
_Rows = Annotated[int, pydantic.Field(ge=0, le=_MAX_ROWS)]
_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
# Prefixes of tensor names. They are unambiguous, because names of vocabularies do not begin with @.
ROWS = "@rows/"
FLOATS = "@float32/"
CHANGED = "@changed/"
GONE = "@gone/"


class ExportedFile(Model):
    """Size and hash of a file."""

    bytes: Count
    hash: Hash


class ExportedMoments(Model):
    """Moments that standardize a transformed dense column: ``(x - mean) / deviation``."""

    mean: _Finite
    deviation: _Positive


class ExportedTable(Model):
    """One table of ``tables.safetensors``."""

    rows: Annotated[int, pydantic.Field(ge=1, le=_MAX_ROWS)]
    width: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    codec: CodecKind
    """Codec of the rows, the same as in training."""
    parameters: Literal["fp16", "fp32"]
    """Type of the scale and the offset of an int8 or int4 row."""
    float32_rows: _Rows
    """Number of encoded rows that are also stored in float32, with their exact values; 0 for the
    codec fp32.
    """

    @pydantic.model_validator(mode="after")
    def _check(self) -> ExportedTable:
        if self.float32_rows > (0 if self.codec == "fp32" else self.rows):
            raise ValueError(
                f"float32_rows is {self.float32_rows}, too many for {self.rows} rows of {self.codec}"
            )
        return self

    @property
    def record(self) -> RecordCodec:
        """Codec of the rows; records have no optimizer state, and values are rounded to nearest."""
        config = CodecConfig(kind=self.codec, rounding="nearest", parameters=self.parameters)
        return RecordCodec(config, width=self.width, row_state=False, full_state=0)

    def tensors(self, name: str) -> dict[str, Spec]:
        """Return name -> type and shape of the tensors that store the table `name` in the file."""
        if self.codec == "fp32":
            return {name: Spec(torch.float32, (self.rows, self.width))}
        exact = {
            ROWS + name: Spec(torch.int64, (self.float32_rows,)),
            FLOATS + name: Spec(torch.float32, (self.float32_rows, self.width)),
        }
        return {
            name: Spec(torch.uint8, (self.rows, self.record.record_bytes)),
            **(exact if self.float32_rows else {}),
        }


class ExportedVocabulary(Ids):
    """One vocabulary and its file."""

    path: Annotated[str, pydantic.Field(pattern=r"^vocabulary/[0-9]{4,}[A-Za-z0-9_-]{0,60}\.parquet$")]


class PooledInput(Model):
    """A feature whose looked-up rows are pooled into one vector per sample."""

    feature: str
    table: str
    pooling: Literal["mean", "sum"]


class SequenceInput(Model):
    """A history, or a column of a sequence. Its rows are not pooled: the network gets every single
    row.
    """

    feature: str
    table: str


class ExportManifest(Model):
    """Content of ``manifest.json``, without its seal."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    format: Literal[6] = FORMAT
    model: ModelConfig
    """The ``model`` section of the recipe."""
    precision: Literal["float32", "bf16"]
    """Precision of the network."""
    columns: Annotated[Schema, pydantic.Field(alias="schema")]
    # Not written if it is empty, because earlier exports, whose hash deltas name, do not have it.
    nulls: Annotated[tuple[str, ...], pydantic.Field(exclude_if=operator.not_)] = ()
    """Texts that mean a missing value, in addition to an empty text; ``data.source.nulls`` of the
    recipe.
    """
    moments: dict[str, ExportedMoments]
    """Moments of each dense column, after its transform."""
    pooled: tuple[PooledInput, ...]
    """Pooled features, in the order of their columns in the network's second input."""
    sequences: tuple[SequenceInput, ...]
    """Sequence features; the next inputs of the network are the rows and the mask of each."""
    tables: dict[str, ExportedTable]
    vocabularies: dict[str, ExportedVocabulary]
    trees: TreeSizes = TreeSizes()
    """Lengths of the tensors of trees in ``network.safetensors``, if the model has trees."""
    correction: tuple[_Finite, ...]
    """Number that is added to each label's logit, because negatives were sampled or classes
    weighted.
    """
    calibration: tuple[LogitMap, ...] = ()
    """Map of each label's corrected logit; empty if none was fitted."""
    files: dict[str, ExportedFile]
    """All other files, by path."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> ExportManifest:
        for fault in chain(self._sizes(), self._names(), self._inputs(), self._files()):
            raise ValueError(fault)
        return self

    def _sizes(self) -> Iterator[str]:
        config = self.model
        layers = [getattr(config, name) for name in config.layer_counts]
        lists = [value for value in vars(config).values() if isinstance(value, tuple)]
        lists += [config.history.attention_mlp, config.heads.tower_mlp, config.heads.expert_mlp]
        layers += [config.history.layers, config.heads.experts, *map(len, (*lists, self.columns.labels))]
        if max(layers) > _MAX_LAYERS:
            yield f"model: {max(layers)} layers, expected at most {_MAX_LAYERS}"
        for feature in self.columns.sparse:
            if feature.max_length >= _MAX_ROWS:
                yield f"schema: {feature.name!r} has a max_length of {feature.max_length}, expected less than 2^31"

    def _names(self) -> Iterator[str]:
        vocabularies = set(self.columns.vocabularies())
        expected = {
            "moments": (set(self.moments), {feature.name for feature in self.columns.dense}),
            "vocabularies": (set(self.vocabularies), vocabularies),
            "tables": (set(self.tables), vocabularies),
        }
        for field, (keys, names) in expected.items():
            if keys != names:
                yield f"{field}: entries for {sorted(keys)}, expected {sorted(names)}"
                return
        for name, table in self.tables.items():
            vocabulary = self.vocabularies[name]
            rows, width = vocabulary.values + vocabulary.tail_buckets, self.model.table_width(name)
            if (table.rows, table.width) != (rows, width):
                yield (f"tables.{name}: {table.rows} rows of {table.width}, expected {rows} of {width}")

    def _inputs(self) -> Iterator[str]:
        labels = len(self.columns.label_columns)
        if len(self.correction) != labels:
            yield f"correction: entries for {len(self.correction)} labels, expected {labels}"
        if len(self.calibration) not in (0, labels):
            yield f"calibration: entries for {len(self.calibration)} labels, expected {labels}"
        pooled, sequences = inputs(self.configs(), self.columns)
        if self.pooled != pooled or self.sequences != sequences:
            yield "pooled and sequences: features, tables or pooling do not match model and schema"

    def _files(self) -> Iterator[str]:
        paths = [entry.path for entry in self.vocabularies.values()]
        needed = {NETWORK, TABLES, README, *paths}
        if len(set(paths)) != len(paths) or set(self.files) - {ONNX} != needed:
            yield f"files: {sorted(self.files)}, expected {sorted(needed)}, optionally {ONNX}"

    def configs(self) -> list[EmbeddingBagConfig]:
        """Return the configurations of the tables."""
        return build_tables(
            self.model, self.columns, {name: table.rows for name, table in self.tables.items()}
        )

    def tensors(self) -> dict[str, Spec]:
        """Return name -> type and shape of the tensors in ``tables.safetensors``."""
        return {
            key: spec for name, table in self.tables.items() for key, spec in table.tensors(name).items()
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the content of the export."""
        return content_hash(self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> ExportManifest:
        """Read the manifest of the export in `folder`; `ExportError` names the file and field that
        is wrong.
        """
        if not (folder / MANIFEST).exists():
            reason = f"it has no {MANIFEST}" if folder.exists() else "it does not exist"
            raise ExportError(
                f"{folder} is not an exported model: {reason}; name a directory that "
                "`stratarec export` wrote"
            )
        return read_sealed(folder / MANIFEST, cls, ADVICE, ExportError)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``. Call it last: the manifest marks the export as complete."""
        write_sealed(folder / MANIFEST, self.to_dict())


def inputs(
    configs: Sequence[EmbeddingBagConfig], schema: Schema
) -> tuple[tuple[PooledInput, ...], tuple[SequenceInput, ...]]:
    """Return the inputs that the network gets from the tables, in order."""
    pooled = tuple(
        PooledInput(feature=name, table=table.name, pooling=table.pooling)
        for table in configs
        for name in table.feature_names
    )
    unpooled = {name: table.name for table in configs for name in table.sequence_features}
    behaviours = [feature.name for columns in schema.behaviours.values() for feature in columns]
    return pooled, tuple(
        SequenceInput(feature=name, table=unpooled[name]) for name in behaviours if name in unpooled
    )


class DeltaManifest(Model):
    """Content of ``delta.json``, without its seal."""

    format: Literal[3] = DELTA_FORMAT
    parent: Hash
    """`ExportManifest.fingerprint` of the export to which the delta is applied."""
    manifest: ExportManifest
    """Manifest of the later export, which results from applying the delta."""
    changed: dict[str, Count]
    """Table -> number of changed and new rows."""
    appended: dict[str, ExportedVocabulary]
    """Vocabulary -> file with the values that are appended to it."""
    gone: dict[str, Count]
    """Vocabulary -> number of values that were evicted or forgotten; vocabularies without such
    values are left out.
    """
    files: dict[str, ExportedFile]
    """All other files, by path."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> DeltaManifest:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        if set(self.changed) != set(self.manifest.tables):
            yield f"changed: entries for {sorted(self.changed)}, expected {sorted(self.manifest.tables)}"
            return
        for name, rows in self.changed.items():
            if rows > self.manifest.tables[name].rows:
                yield f"changed.{name}: {rows} rows, expected at most {self.manifest.tables[name].rows}"
        for name, ids in self.gone.items():
            if (
                name not in self.manifest.vocabularies
                or not 0 < ids <= self.manifest.vocabularies[name].holes
            ):
                yield f"gone: {ids} of {name!r}, which does not have that many holes"
        paths = [entry.path for entry in self.appended.values()]
        if len(set(paths)) != len(paths) or set(self.files) != {NETWORK, DELTA_ROWS, *paths}:
            yield f"files: {sorted(self.files)}, expected {sorted({NETWORK, DELTA_ROWS, *paths})}"

    def tensors(self) -> dict[str, Spec]:
        """Return name -> type and shape of the tensors in ``rows.safetensors``."""
        tensors = {GONE + name: Spec(torch.int64, (ids,)) for name, ids in self.gone.items()}
        for name, table in self.manifest.tables.items():
            specs, rows = table.tensors(name), self.changed[name]
            if rows:
                tensors[CHANGED + name] = Spec(torch.int64, (rows,))
                tensors[name] = Spec(specs[name].dtype, (rows, *specs[name].shape[1:]))
            tensors |= {key: spec for key, spec in specs.items() if key in (ROWS + name, FLOATS + name)}
        return tensors

    @classmethod
    def read(cls, folder: Path) -> DeltaManifest:
        """Read the manifest of the delta in `folder`; `ExportError` names the file and field that
        is wrong.
        """
        if not (folder / DELTA).exists():
            reason = f"it has no {DELTA}" if folder.exists() else "it does not exist"
            raise ExportError(
                f"{folder} is not a delta: {reason}; name a directory of `stratarec export --since`"
            )
        return read_sealed(folder / DELTA, cls, DELTA_ADVICE, ExportError)


def _untyped(schema: Schema) -> Schema:
    """Return a schema without types of values: they depend on the log's format, and vocabularies
    store their own.
    """
    return replace(schema, sparse=tuple(replace(feature, type="auto") for feature in schema.sparse))


def delta_fault(before: ExportManifest, after: ExportManifest) -> str:
    """Return the reason why a delta cannot turn export `before` into `after`; an empty string if it
    can.
    """
    for part, old, new in (
        ("model", before.model, after.model),
        ("schema", _untyped(before.columns), _untyped(after.columns)),
        ("data.source.nulls", before.nulls, after.nulls),
        ("precision", before.precision, after.precision),
    ):
        if old != new:
            return f"{part} differs"
    for name, table in after.tables.items():
        old_table, ids, old_ids = before.tables[name], after.vocabularies[name], before.vocabularies[name]
        if (old_table.codec, old_table.parameters) != (table.codec, table.parameters):
            return f"table {name!r} is {table.codec} and was {old_table.codec}"
        if (ids.kind, ids.type, ids.tail_buckets) != (old_ids.kind, old_ids.type, old_ids.tail_buckets):
            return f"vocabulary {name!r} has other tail buckets, or values of another type"
        if ids.values < old_ids.values:
            return f"vocabulary {name!r} has {ids.values:,} values and had {old_ids.values:,}"
    return ""
