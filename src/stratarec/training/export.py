"""A trained model for use without StrataRec: safetensors tables and a `torch.export` program.

    tables.safetensors   <table>: [rows, D] float32
    network.pt2          (dense [B, F], pooled [B, F * D], rows [B, L, D] and mask [B, L] of each history) -> [B]
    manifest.json        which feature reads which table, in which order, and how bags are pooled
    vocabulary/          value, id and count of each vocabulary

To score: map values to ids, pool each feature's rows in the manifest's order side by side, and call the program.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratarec.errors import CheckpointError, StorageError
from stratarec.files import read_json, replace_directory, storage_error, temporary_directory, write_json
from stratarec.models.base import Network
from stratarec.tensors import read_tensors, write_tensors
from stratarec.training.run import TrainedModel


class _Probability(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        return torch.sigmoid(self.network.padded(dense, pooled, *sequences))


def check_new(folder: Path) -> None:
    """Refuse a folder that is there already."""
    if folder.exists():
        raise StorageError(f"cannot write {folder}: it exists; name another --output")


def export(trained: TrainedModel, folder: Path) -> Path:
    """Write the exported model into `folder`, which must not exist; returns it."""
    check_new(folder)
    temporary = temporary_directory(folder)
    try:
        collection = trained.model.embeddings
        tables = {table.name: collection.table(table.name)["weight"] for table in collection.tables}
        write_tensors(temporary / "tables.safetensors", tables)
        torch.export.save(_program(trained), temporary / "network.pt2")
        write_json(temporary / "manifest.json", _manifest(trained))
        shutil.copytree(trained.dataset.path / "vocabulary", temporary / "vocabulary")
        replace_directory(temporary, folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _program(trained: TrainedModel) -> torch.export.ExportedProgram:
    network, width = trained.model.network, trained.recipe.model.embedding_dim
    batch = torch.export.Dim("batch", min=1)
    pooled = len(trained.model.embeddings.pooled_keys) * width
    inputs: list[Tensor] = [torch.zeros(3, len(trained.dataset.schema.dense)), torch.zeros(3, pooled)]
    shapes: list[dict[int, Any]] = [{0: batch}, {0: batch}]
    for number, _ in enumerate(network.sequence_keys):
        longest = torch.export.Dim(f"length_{number}", min=1)
        inputs += [torch.zeros(3, 5, width), torch.ones(3, 5, dtype=torch.bool)]
        shapes += [{0: batch, 1: longest}, {0: batch, 1: longest}]
    extra = [tuple(shapes[2:])] if len(shapes) > 2 else []
    model = _Probability(network).eval()
    return torch.export.export(model, tuple(inputs), dynamic_shapes=(*shapes[:2], *extra))


def _manifest(trained: TrainedModel) -> dict[str, Any]:
    collection, schema = trained.model.embeddings, trained.dataset.schema
    table_of = {
        name: table.name for table in collection.tables for name in (*table.feature_names, *table.sequence_features)
    }
    pooling = {table.name: table.pooling for table in collection.tables}
    moments = {name: info.to_dict() for name, info in trained.dataset.about.moments.items()}
    return {
        "dense": [
            {
                "name": feature.name,
                "transform": feature.transform,
                "standardize": feature.standardize,
                "moments": moments[feature.name],
            }
            for feature in schema.dense
        ],
        "pooled": [
            {"feature": name, "table": table_of[name], "pooling": pooling[table_of[name]]}
            for name in collection.pooled_keys
        ],
        "sequences": [{"feature": name, "table": table_of[name]} for name in trained.model.network.sequence_keys],
        "embedding_dim": trained.recipe.model.embedding_dim,
    }


def load_export(folder: str | Path) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
    """The program, the tables and the manifest of an exported model."""
    folder = Path(folder)
    if not (folder / "manifest.json").is_file():
        raise CheckpointError(f"{folder} is no exported model: it has no manifest.json")
    with warnings.catch_warnings():
        # torch 2.11 warns of how its own reader makes tensors; 2.13 does not.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(folder / "network.pt2")
    return program.module(), read_tensors(folder / "tables.safetensors"), read_json(folder / "manifest.json")
