"""Export a trained model. `serving.export_manifest` describes the format.

An export is data: configuration, weights, encoded tables and vocabularies, and on request the
network as ONNX.

Records of tables are copied without their optimizer state. Rows that were in level 0 at the end of
training are also exported as float32, so that scores equal the scores of `predict`; these are the
popular rows. Rows without a current record are encoded, rounded to nearest: the initial values of
rows that were never trained, and rows that missed steps of the optimizer (``train.embedding.rows:
all``). Scores of these rows differ a little from those of `predict`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pydantic
import torch
from torch import Tensor

from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.atomic import check_absent, file_hash, rename_directory, storage_errors, working_directory
from stratarec.io.names import file_name
from stratarec.io.sealed import describe_error
from stratarec.io.tensors import ChunkedTensor, write_tensors
from stratarec.kernels.codec.kinds import KINDS
from stratarec.models.base import Network
from stratarec.serving.export_manifest import (
    FLOATS,
    MANIFEST,
    NETWORK,
    ONNX,
    README,
    ROWS,
    TABLES,
    ExportedFile,
    ExportedMoments,
    ExportedTable,
    ExportedVocabulary,
    ExportManifest,
    inputs,
)
from stratarec.serving.onnx_graph import Unsupported
from stratarec.serving.onnx_network import OnnxNetwork, load_runtime
from stratarec.training.run.open_run import TrainedModel

_PARTS = {MANIFEST, NETWORK, TABLES, README, ONNX, "vocabulary"}


def export(trained: TrainedModel, folder: Path, *, onnx: bool = False, repeated: bool = False) -> Path:
    """Export a trained model into the new directory `folder`, and return `folder`.

    Parameters
    ----------
    onnx : bool
        Whether to write also ``network.onnx``.
    repeated : bool
        Whether to accept a `folder` that already contains the same export.

    Raises
    ------
    ConfigError
        If ONNX is not installed, or cannot represent the network.
    StorageError
        If the export cannot be written. No part of it remains then.
    CheckpointError
        If a weight is not finite.
    DatasetError
        If a vocabulary of the data set does not match its manifest.
    """
    if not repeated:
        check_absent(folder)
    try:
        if onnx:
            load_runtime(trained.recipe.train.precision)
        with new_directory(folder, _PARTS) as temporary:
            _write(trained, temporary, onnx=onnx)
            if repeated and (folder / MANIFEST).exists():
                if ExportManifest.read(folder).fingerprint != ExportManifest.read(temporary).fingerprint:
                    check_absent(folder)
                shutil.rmtree(temporary)
    except Unsupported as error:
        raise ConfigError(f"--onnx: {error}") from error
    return folder


@contextmanager
def new_directory(folder: Path, parts: set[str]) -> Iterator[Path]:
    """Yield a temporary directory, and rename it to `folder` at the end unless it was removed.

    `parts` are the names of all entries that the directory may have.
    """
    with working_directory(folder, parts) as temporary:
        with storage_errors(folder):
            yield temporary
        if temporary.exists():
            rename_directory(temporary, folder)


def _write(trained: TrainedModel, folder: Path, *, onnx: bool) -> None:
    collection, weights = trained.model.embeddings, trained.model.network.state_dict()
    write_tensors(folder / NETWORK, {key: finite(value, key) for key, value in weights.items()})
    writers = {table.name: TableWriter(trained, table) for table in collection.tables}
    write_tensors(
        folder / TABLES,
        {name: item for table in writers.values() for name, item in table.tensors().items()},
    )
    vocabularies = _write_vocabularies(trained.dataset, folder)
    (folder / README).write_text(read_me(onnx=onnx), encoding="utf-8")
    tables = {name: table.about for name, table in writers.items()}
    content = {**_describe(trained), "tables": tables, "vocabularies": vocabularies}
    try:
        manifest = ExportManifest(**content, files=files_of(folder))
        if onnx:
            (folder / ONNX).write_bytes(_onnx_bytes(trained.model.network.eval(), manifest))
            manifest = ExportManifest(**content, files=files_of(folder))
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"{trained.checkpoint} cannot be exported: {describe_error(error)}"
        ) from error
    manifest.write(folder)


def _onnx_bytes(network: Network, manifest: ExportManifest) -> bytes:
    """Return the content of ``network.onnx``.

    The inputs are named `dense` and `pooled`, and for each sequence n `rows_<n>` and `mask_<n>`.
    The output is `score`.
    """
    from onnx import helper, load_from_string

    model = load_from_string(OnnxNetwork(network, manifest).content)
    (output,) = model.graph.output
    model.graph.node.append(helper.make_node("Sigmoid", [output.name], ["score"]))
    output.name = "score"
    return bytes(model.SerializeToString(deterministic=True))


def files_of(folder: Path) -> dict[str, ExportedFile]:
    """Return the size and hash of each file in a directory, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): ExportedFile(bytes=path.stat().st_size, hash=file_hash(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_me(*, onnx: bool) -> str:
    """Return the text of README.txt: how to score without StrataRec, and a section on the optional
    file.
    """
    kinds = (f"       {kind.name:<12} {kind.about}" for kind in KINDS.values() if kind.about)
    codecs = "\n".join(fill(line, 120, subsequent_indent=" " * 20) for line in kinds)
    parts = ["export", *(["onnx"] if onnx else [])]
    texts = [
        Path(__file__).with_name("readme").joinpath(f"{part}.txt").read_text(encoding="utf-8")
        for part in parts
    ]
    return "".join(texts).replace("@CODECS@", codecs)


def _describe(trained: TrainedModel) -> dict[str, Any]:
    """Return the fields of the manifest other than tables, vocabularies and files."""
    dataset, recipe, configs = trained.dataset, trained.recipe, trained.model.embeddings.tables
    pooled, sequences = inputs(configs, dataset.schema)
    trees = trained.model.network.trees
    return {
        "model": recipe.model,
        **({} if trees is None else {"trees": trees.sizes}),
        "precision": recipe.train.precision,
        "columns": dataset.schema,
        "nulls": getattr(recipe.data.source, "nulls", ()),
        "moments": {
            name: ExportedMoments(mean=item.mean, deviation=item.deviation)
            for name, item in dataset.about.moments.items()
        },
        "pooled": pooled,
        "sequences": sequences,
        "correction": trained.model.network.correction,
        "calibration": () if (result := trained.model.network.calibration) is None else result.maps,
    }


def _write_vocabularies(dataset: Dataset, folder: Path) -> dict[str, ExportedVocabulary]:
    """Write the vocabularies of the data set, and return their descriptions."""
    result = {}
    (folder / "vocabulary").mkdir()
    for number, name in enumerate(dataset.vocabularies):
        vocabulary, path = dataset.vocabulary(name), f"vocabulary/{file_name(name, number)}.parquet"
        table = vocabulary.frame().to_arrow(compat_level=pl.CompatLevel.oldest())
        with open(folder / path, "wb") as file:
            pq.write_table(table, file, compression="zstd")
        result[name] = ExportedVocabulary(**vars(vocabulary.ids), path=path)
    return result


# Bytes of a table that are processed at a time.
_PIECE_BYTES = 8 << 20


class TableWriter:
    """Reads one table of a trained model in chunks of rows, in the form in which an export stores
    it.
    """

    def __init__(self, trained: TrainedModel, config: EmbeddingBagConfig) -> None:
        self._collection = trained.model.embeddings
        self._config = config
        tables = self._collection.engine.tables_of(config.name)
        config_at_home = tables.codec.config if isinstance(tables, CachedTables) else CodecConfig()
        self._cached = (
            tables if isinstance(tables, CachedTables) and config_at_home.kind != "fp32" else None
        )
        self._step = max(_PIECE_BYTES // (4 * config.embedding_dim), 1)
        result = (
            [self._cached.rows_in_slots(config.name, *span) for span in self._spans()]
            if self._cached
            else []
        )
        self._in_slots = np.concatenate(result) if result else np.zeros(0, dtype=np.int64)
        self.about = ExportedTable(
            rows=config.num_embeddings,
            width=config.embedding_dim,
            codec=config_at_home.kind,
            parameters=config_at_home.parameters,
            float32_rows=len(self._in_slots),
        )

    def tensors(self) -> dict[str, Tensor | ChunkedTensor]:
        """Return the tensors that an export stores for the table. `ExportedTable.tensors`
        determines their names.
        """
        parts: dict[str, Callable[[], Iterator[Tensor]]] = {self._config.name: self._rows}
        if self._cached:
            parts = {
                self._config.name: partial(self._records, self._cached),
                ROWS + self._config.name: lambda: iter([torch.from_numpy(self._in_slots)]),
                FLOATS + self._config.name: self._slots,
            }
        specs = self.about.tensors(self._config.name)
        return {
            name: ChunkedTensor(dtype=specs[name].dtype, shape=specs[name].shape, parts=parts[name])
            for name in specs
        }

    def _spans(self) -> Iterator[tuple[int, int]]:
        rows = self._config.num_embeddings
        return ((first, min(first + self._step, rows)) for first in range(0, rows, self._step))

    def _floats(self, first: int, last: int) -> Tensor:
        return finite(
            self._collection.rows(self._config.name, first, last)["weight"], f"table {self._config.name!r}"
        )

    def _rows(self) -> Iterator[Tensor]:
        return (self._floats(*span) for span in self._spans())

    def _slots(self) -> Iterator[Tensor]:
        """Yield the rows that are in slots, as float32."""
        for first, last in self._spans():
            begin, end = np.searchsorted(self._in_slots, [first, last])
            if begin < end:
                yield self._floats(first, last)[self._in_slots[begin:end] - first]

    def _records(self, cached: CachedTables) -> Iterator[Tensor]:
        codec = self.about.record
        for first, last in self._spans():
            records, home = cached.read_records(self._config.name, first, last)
            weights = self._floats(first, last)
            encoded = np.ascontiguousarray(records[:, : codec.record_bytes])
            others = np.flatnonzero(~home)
            source = FloatRows.without_state(weights.contiguous().reshape(-1).cpu().numpy(), codec.width)
            bad = codec.encode(source, others, encoded, others, np.zeros(len(others), dtype=np.uint64), 0)
            if bad >= 0:
                raise CheckpointError(
                    f"table {self._config.name!r}, row {first + int(others[bad])}: {codec.config.kind} "
                    "cannot represent a weight; export an earlier checkpoint of the run"
                )
            yield torch.from_numpy(encoded)


def finite(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor`; `CheckpointError` if one of its numbers is not finite."""
    # If the sum is finite, all numbers are, and the sum takes a twentieth of the time of
    # `isfinite`. But the sum of finite numbers may overflow, so all numbers are checked if it is
    # not finite.
    if not (torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} has a weight that is not finite: export an earlier checkpoint of the run"
        )
    return tensor
