"""What an export is: ``manifest.json`` says how the model is built and which files hold its numbers.

    manifest.json              configuration, features, tables, vocabularies; bytes and hash of every other file
    network.safetensors        weights of the network
    tables.safetensors         <table>: [rows, D] float32
    vocabulary/0000-x.parquet  value, id and count of a vocabulary; the manifest says which one
    README.txt                 this, for people
    program.pt2                only on request: a program that torch.export made

All of it but the program is data. An export may come from somebody else, so nothing of it is used before it was
checked, and `program.pt2` is never opened: torch unpickles parts of it, and a pickle runs whatever its writer put in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from stratarec.artifacts import Count, Hash, Model, read_sealed, write_sealed
from stratarec.data.manifest import Ids
from stratarec.data.schema import Schema
from stratarec.data.transforms import Moments
from stratarec.embedding import EmbeddingBagConfig
from stratarec.errors import ExportError
from stratarec.models import DCNv2Config, ModelConfig
from stratarec.models.base import build_tables

FORMAT: Literal[2] = 2
MANIFEST, NETWORK, TABLES, README, PROGRAM = (
    "manifest.json", "network.safetensors", "tables.safetensors", "README.txt", "program.pt2",
)  # fmt: skip
ADVICE = "export the model again"
# Of each kind; a number of nine digits would otherwise be built before any weight is missed.
_MOST_LAYERS = 1 << 10
# Ids are int32.
_MOST_ROWS = 1 << 31
_Squares = Annotated[float, pydantic.Field(ge=0)]


class ExportedFile(Model):
    """What a file must be."""

    bytes: Count
    hash: Hash


class ExportedMoments(Model):
    """Of a dense column over the training split; see `Moments`."""

    count: Count
    mean: float
    squares: _Squares
    least: float
    most: float

    @pydantic.model_validator(mode="after")
    def _check(self) -> ExportedMoments:
        if self.least > self.most or (not self.count and self.least != self.most):
            raise ValueError(f"{self.count} numbers from {self.least} to {self.most}")
        # Of what is read as a finite number, a difference may be none.
        if not 0 < self.moments.deviation < float("inf"):
            raise ValueError(f"a deviation of {self.moments.deviation}, expected a positive number")
        return self

    @property
    def moments(self) -> Moments:
        return Moments(**vars(self))


class ExportedTable(Model):
    """One table of ``tables.safetensors``."""

    rows: Annotated[int, pydantic.Field(ge=1, le=_MOST_ROWS)]
    width: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
    dtype: Literal["float32"]


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


class Manifest(Model):
    """All of ``manifest.json`` but its seal."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    format: Literal[2] = FORMAT
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
    files: dict[str, ExportedFile]
    """All but this one, by path."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Manifest:
        for fault in chain(self._sizes(), self._names(), self._inputs(), self._files()):
            raise ValueError(fault)
        return self

    def _sizes(self) -> Iterator[str]:
        config = self.model
        lists = [config.deep_mlp] if isinstance(config, DCNv2Config) else [config.bottom_mlp, config.top_mlp]
        layers = [config.cross_layers] if isinstance(config, DCNv2Config) else []
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
        pooled, sequences = inputs(self.configs(), self.columns)
        if self.pooled != pooled or self.sequences != sequences:
            yield "pooled and sequences: other features, tables or pooling than model and schema give"

    def _files(self) -> Iterator[str]:
        paths = [entry.path for entry in self.vocabularies.values()]
        needed = {NETWORK, TABLES, README, *paths}
        if len(set(paths)) != len(paths) or set(self.files) - {PROGRAM} != needed:
            yield f"files: {sorted(self.files)}, expected {sorted(needed)} and {PROGRAM} at most"

    def configs(self) -> list[EmbeddingBagConfig]:
        """The tables as a collection takes them."""
        return build_tables(self.model, self.columns, {name: table.rows for name, table in self.tables.items()})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
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
