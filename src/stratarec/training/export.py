"""A trained model written for use elsewhere; `serving.manifest` says what an export is.

By default it is data alone: configuration, weights, tables, vocabularies. `program.pt2`, on request, is the network as
`torch.export` wrote it, for use without StrataRec. Whoever opens such a file with torch runs what its writer put in,
since torch unpickles parts of it: open only those that you made. `stratarec.Scorer` never does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from stratarec.artifacts import describe, own_file
from stratarec.data.dataset import Dataset
from stratarec.data.manifest import ids_of
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import read_vocabulary
from stratarec.errors import CheckpointError, DatasetError, StorageError
from stratarec.files import check_output, file_hash, storage_error, sync, sync_tree, temporary_directory
from stratarec.naming import file_name
from stratarec.serving.manifest import (
    NETWORK,
    PROGRAM,
    README,
    TABLES,
    ExportedFile,
    ExportedMoments,
    ExportedTable,
    ExportedVocabulary,
    Manifest,
    inputs,
)
from stratarec.tensors import Pieces, write_tensors
from stratarec.training.program import program_bytes
from stratarec.training.run import TrainedModel

# Of a table, at a time.
_PIECE_BYTES = 8 << 20


def check_new(folder: Path) -> None:
    """Refuse a folder that is there already, or cannot be made."""
    if os.path.lexists(folder):
        raise StorageError(f"cannot write {folder}: it exists; name another --output")
    check_output(folder)


def export(trained: TrainedModel, folder: Path, *, program: bool = False) -> Path:
    """Write the exported model into `folder`, which must not exist; returns it.

    Parameters
    ----------
    program : bool
        Write ``program.pt2``, too.

    Raises
    ------
    StorageError
        When it cannot be written; nothing of it is left then.
    CheckpointError, DatasetError
        When a weight is not finite, or a vocabulary of the data set is not what its manifest says.
    """
    check_new(folder)
    temporary = temporary_directory(folder)
    try:
        _write(trained, temporary, program=program)
        sync_tree(temporary)
        # A directory that came here in the meantime is in the way, unless it is empty.
        os.rename(temporary, folder)
        sync(folder.parent)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(trained: TrainedModel, folder: Path, *, program: bool) -> None:
    collection, weights = trained.model.embeddings, trained.model.network.state_dict()
    # Who scores by an export need not know that negatives were left out.
    if trained.model.network.correction:
        weights["score.out.bias"] = weights["score.out.bias"] + trained.model.network.correction
    write_tensors(folder / NETWORK, {key: _finite(value, key) for key, value in weights.items()})
    write_tensors(folder / TABLES, {table.name: _pieces(trained, table.name) for table in collection.tables})
    vocabularies = _copy_vocabularies(trained.dataset, folder)
    if program:
        (folder / PROGRAM).write_bytes(program_bytes(trained))
    (folder / README).write_text(_readme(program=program), encoding="utf-8")
    try:
        manifest = Manifest(**_describe(trained, vocabularies), files=_files(folder))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{trained.checkpoint} cannot be exported: {describe(error)}") from error
    manifest.write(folder)


def _files(folder: Path) -> dict[str, ExportedFile]:
    return {
        path.relative_to(folder).as_posix(): ExportedFile(bytes=path.stat().st_size, hash=file_hash(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _describe(trained: TrainedModel, vocabularies: Mapping[str, ExportedVocabulary]) -> dict[str, Any]:
    """The manifest but for its list of files."""
    dataset, recipe, configs = trained.dataset, trained.recipe, trained.model.embeddings.tables
    pooled, sequences = inputs(configs, dataset.schema)
    moments, kept = dataset.about.moments, [field.name for field in fields(Moments)]
    return {
        "model": recipe.model,
        "precision": recipe.train.precision,
        "columns": dataset.schema,
        "moments": {name: ExportedMoments(**{key: getattr(moments[name], key) for key in kept}) for name in moments},
        "pooled": pooled,
        "sequences": sequences,
        "tables": {
            table.name: ExportedTable(rows=table.num_embeddings, width=table.embedding_dim, dtype="float32")
            for table in configs
        },
        "vocabularies": dict(vocabularies),
    }


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{name} has a weight that is no finite number: export an earlier checkpoint of the run")
    return tensor


def _pieces(trained: TrainedModel, name: str) -> Pieces:
    """A table as it is in memory or at home, some rows at a time."""
    collection = trained.model.embeddings
    table = next(table for table in collection.tables if table.name == name)
    step = max(_PIECE_BYTES // (4 * table.embedding_dim), 1)

    def parts() -> Iterator[Tensor]:
        for first in range(0, table.num_embeddings, step):
            rows = collection.rows(name, first, min(first + step, table.num_embeddings))
            yield _finite(rows["weight"], f"table {name!r}")

    return Pieces(dtype=torch.float32, shape=(table.num_embeddings, table.embedding_dim), parts=parts)


def _copy_vocabularies(dataset: Dataset, folder: Path) -> dict[str, ExportedVocabulary]:
    """Copies of the data set's own files, no links, with the content that its manifest says."""
    found = {}
    (folder / "vocabulary").mkdir()
    for number, (name, info) in enumerate(dataset.vocabularies.items()):
        path = f"vocabulary/{file_name(name, number)}.parquet"
        try:
            source = own_file(dataset.path, info.path)
        except ValueError as error:
            raise DatasetError(f"{error}; prepare the data again") from error
        shutil.copyfile(source, folder / path, follow_symlinks=False)
        if (folder / path).is_symlink() or file_hash(folder / path) != info.hash:
            raise DatasetError(f"{source} is damaged: its hash does not match; prepare the data again")
        ids = ids_of(read_vocabulary(folder / path, info, str(source)))
        found[name] = ExportedVocabulary(**vars(ids), path=path)
    return found


_README = """\
A click model that StrataRec exported. In Python:

    scorer = stratarec.Scorer.open("this directory")
    scores = scorer.score(frame)

`frame` has a column for each feature that manifest.json names under "schema", with values as the log had them; a
history is a list of the values that came before, oldest first.

manifest.json              how the model is built; bytes and hash (xxh3_128) of the other files
network.safetensors        weights of the network
tables.safetensors         a table of float32 rows for each vocabulary
vocabulary/                value, id (the row of its table) and count; values that are not there share the rows behind

These files are data. Scorer checks all of them, and runs nothing that is in them.
"""

_PROGRAM = """
program.pt2                the network as torch.export wrote it: (dense [B, F], pooled rows side by side [B, P * D] in
                           the order of "pooled" in manifest.json, then rows [B, L, D] and mask [B, L] of each of
                           "sequences") -> probabilities [B]

OPENING program.pt2 RUNS CODE. torch.export.load unpickles parts of it, and a pickle does whatever its writer wanted.
Open it only if you made this export yourself, or trust whoever did as you would trust a program of theirs. Scorer
never opens it.
"""


def _readme(*, program: bool) -> str:
    return _README + _PROGRAM if program else _README
