"""What an export is: ``manifest.json`` says how the model is built and which files hold its numbers.

    manifest.json              configuration, features, tables, vocabularies; bytes and hash of every other file
    network.safetensors        weights of the network
    tables.safetensors         <table>: [rows, D] float32, or [rows, record bytes] uint8 with
                               @rows/<table>: [K] int64 and @float32/<table>: [K, D], rows that are float32 as well
    vocabulary/0000-x.parquet  value, id and count of a vocabulary; the manifest says which one
    README.txt                 this, for people
    program.pt2, network.onnx  only on request: the network as torch.export wrote it, or as ONNX

All of it but the program is data. An export may come from somebody else, so nothing of it is used before it was
checked, and those two are never opened by `Scorer`: torch unpickles parts of a program, and a pickle runs whatever its
writer put in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch

from stratarec.data.schema import Schema
from stratarec.data.vocabulary import Ids
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import CodecConfig, CodecKind, RecordCodec
from stratarec.errors import ExportError
from stratarec.io.sealed import Count, Hash, Model, content_hash, read_sealed, write_sealed
from stratarec.io.tensors import Spec
from stratarec.models import ModelConfig
from stratarec.models.base import build_tables
from stratarec.models.calibration import LogitMap

FORMAT: Literal[4] = 4
MANIFEST, NETWORK, TABLES, README, PROGRAM, ONNX = (
    "manifest.json", "network.safetensors", "tables.safetensors", "README.txt", "program.pt2", "network.onnx",
)  # fmt: skip
ADVICE = "export the model again"
# Of each kind; a number of nine digits would otherwise be built before any weight is missed.
_MOST_LAYERS = 1 << 10
# Ids are int32.
_MOST_ROWS = 1 << 31
_Rows = Annotated[int, pydantic.Field(ge=0, le=_MOST_ROWS)]
_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
# No vocabulary has a name that begins so.
ROWS, FLOATS = "@rows/", "@float32/"


class ExportedFile(Model):
    """What a file must be."""

    bytes: Count
    hash: Hash


class ExportedMoments(Model):
    """Of a dense column over the training split, after its transform: less `mean`, over `deviation`."""

    mean: _Finite
    deviation: _Positive


class ExportedTable(Model):
    """One table of ``tables.safetensors``."""

    rows: Annotated[int, pydantic.Field(ge=1, le=_MOST_ROWS)]
    width: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    codec: CodecKind
    """Of its rows, as they were at home while they were trained."""
    parameters: Literal["fp16", "fp32"]
    """Storage of the scale and the offset of an int8 or int4 row."""
    float32_rows: _Rows
    """Of another codec than fp32, how many rows are there as float32, too, which is what they are."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> ExportedTable:
        if self.float32_rows > (0 if self.codec == "fp32" else self.rows):
            raise ValueError(f"{self.float32_rows} of {self.rows} rows of {self.codec} as float32")
        return self

    @property
    def record(self) -> RecordCodec:
        """The codec of its rows: without optimizer state, and to nearest where a row has to be encoded."""
        config = CodecConfig(kind=self.codec, rounding="nearest", parameters=self.parameters)
        return RecordCodec(config, width=self.width, row_state=False, full_state=0)

    def tensors(self, name: str) -> dict[str, Spec]:
        """What there is of it in the file."""
        if self.codec == "fp32":
            return {name: Spec(torch.float32, (self.rows, self.width))}
        kept = {
            ROWS + name: Spec(torch.int64, (self.float32_rows,)),
            FLOATS + name: Spec(torch.float32, (self.float32_rows, self.width)),
        }
        return {name: Spec(torch.uint8, (self.rows, self.record.record_bytes)), **(kept if self.float32_rows else {})}


class ExportedVocabulary(Ids):
    """One vocabulary and its file."""

    path: Annotated[str, pydantic.Field(pattern=r"^vocabulary/[0-9]{4,}[A-Za-z0-9_-]{0,60}\.parquet$")]


class PooledInput(Model):
    """A feature whose rows become one vector."""

    feature: str
    table: str
    pooling: Literal["mean", "sum"]


class SequenceInput(Model):
    """A history, or a column of a sequence, that the network is given row by row."""

    feature: str
    table: str


class ExportManifest(Model):
    """All of ``manifest.json`` but its seal."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    format: Literal[4] = FORMAT
    model: ModelConfig
    """The recipe's section."""
    precision: Literal["float32", "bf16"]
    """In which the network runs."""
    columns: Annotated[Schema, pydantic.Field(alias="schema")]
    moments: dict[str, ExportedMoments]
    """Of each dense column, after its transform."""
    pooled: tuple[PooledInput, ...]
    """What lies side by side in the network's second input, in this order."""
    sequences: tuple[SequenceInput, ...]
    """What follows: rows and mask of each."""
    tables: dict[str, ExportedTable]
    vocabularies: dict[str, ExportedVocabulary]
    calibration: tuple[LogitMap, ...] = ()
    """What becomes of each label's logit; none where no correction was fitted."""
    files: dict[str, ExportedFile]
    """All but this one, by path."""

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
        if max(layers) > _MOST_LAYERS:
            yield f"model: {max(layers)} layers, expected at most {_MOST_LAYERS}"
        for feature in self.columns.sparse:
            if feature.max_length >= _MOST_ROWS:
                yield f"schema: {feature.name!r} has a max_length of {feature.max_length}, expected less than 2^31"

    def _names(self) -> Iterator[str]:
        known = set(self.columns.vocabularies())
        expected = {
            "moments": (set(self.moments), {feature.name for feature in self.columns.dense}),
            "vocabularies": (set(self.vocabularies), known),
            "tables": (set(self.tables), known),
        }
        for what, (found, names) in expected.items():
            if found != names:
                yield f"{what}: of {sorted(found)}, expected of {sorted(names)}"
                return
        for name, table in self.tables.items():
            vocabulary = self.vocabularies[name]
            rows, width = vocabulary.values + vocabulary.tail_buckets, self.model.table_width(name)
            if (table.rows, table.width) != (rows, width):
                yield (f"tables.{name}: {table.rows} rows of {table.width}, expected {rows} of {width}")

    def _inputs(self) -> Iterator[str]:
        labels = len(self.columns.label_columns)
        if len(self.calibration) not in (0, labels):
            yield f"calibration: of {len(self.calibration)} labels, expected of {labels}"
        pooled, sequences = inputs(self.configs(), self.columns)
        if self.pooled != pooled or self.sequences != sequences:
            yield "pooled and sequences: other features, tables or pooling than model and schema give"

    def _files(self) -> Iterator[str]:
        paths = [entry.path for entry in self.vocabularies.values()]
        needed = {NETWORK, TABLES, README, *paths}
        if len(set(paths)) != len(paths) or set(self.files) - {PROGRAM, ONNX} != needed:
            yield f"files: {sorted(self.files)}, expected {sorted(needed)}, and {PROGRAM} and {ONNX} at most"

    def configs(self) -> list[EmbeddingBagConfig]:
        """The tables as a collection takes them."""
        return build_tables(self.model, self.columns, {name: table.rows for name, table in self.tables.items()})

    def tensors(self) -> dict[str, Spec]:
        """What ``tables.safetensors`` holds."""
        return {key: spec for name, table in self.tables.items() for key, spec in table.tensors(name).items()}

    @property
    def fingerprint(self) -> str:
        """Hash of what the export holds, however it was made."""
        return content_hash(self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> ExportManifest:
        """The manifest of the export in `folder`; `ExportError` names what is wrong with it."""
        if not (folder / MANIFEST).exists():
            what = f"it has no {MANIFEST}" if folder.exists() else "it does not exist"
            raise ExportError(f"{folder} is no exported model: {what}; name a directory that `stratarec export` wrote")
        return read_sealed(folder / MANIFEST, cls, ADVICE, ExportError)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``, last of all."""
        write_sealed(folder / MANIFEST, self.to_dict())


def inputs(
    configs: Sequence[EmbeddingBagConfig], schema: Schema
) -> tuple[tuple[PooledInput, ...], tuple[SequenceInput, ...]]:
    """What the network is given of some tables, in order."""
    pooled = tuple(
        PooledInput(feature=name, table=table.name, pooling=table.pooling)
        for table in configs
        for name in table.feature_names
    )
    unpooled = {name: table.name for table in configs for name in table.sequence_features}
    behaviours = [feature.name for columns in schema.behaviours.values() for feature in columns]
    return pooled, tuple(SequenceInput(feature=name, table=unpooled[name]) for name in behaviours if name in unpooled)
