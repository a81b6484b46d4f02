"""Test exports from untrusted sources: a scorer returns scores or raises one clear error, and never
runs code from a file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

from errors import check_refusal, missing, refuses
from recipes import tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import ExportError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import write_sealed
from stratarec.recipe import Recipe
from stratarec.serving.export_files import check_files
from stratarec.serving.export_manifest import ExportManifest
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

VALUES = [None, True, -1, 0, 2**62, 2**70, 0.5, 1e300, "", "../x", [], {"a": 1}]


def log(rows: int = 600) -> pl.DataFrame:
    draws = np.random.default_rng(2)
    return pl.DataFrame(
        {
            "label": draws.integers(0, 2, rows),
            "who": draws.integers(0, 20, rows),
            "time": draws.integers(0, 3000, rows),
            "price": draws.lognormal(2, 2, rows),
            "item": draws.integers(0, 30, rows),
            "city": [f"c{place}" for place in draws.integers(0, 9, rows)],
        }
    )


FRAME = log()[:50].with_columns(
    pl.Series("history", [[3, 4], [], [5]] * 16 + [[], []], dtype=pl.List(pl.Int64))
)


def make_recipe(root: Path, **model: Any) -> Recipe:
    config = tiny(root, epochs=1, max_steps=3, eval_every=0)
    schema = {
        "user": "who",
        "time": "time",
        "dense": [{"name": "price"}],
        "sparse": [
            {"name": "item"},
            {"name": "city"},
            {"name": "history", "kind": "history", "of": "item"},
        ],
    }
    config["data"]["source"] = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema}
    config["model"] |= {"history": {"pooling": "transformer"}, "dropout": 0.2, "batch_norm": True} | model
    return Recipe.from_dict(config)


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export that tests do not change. Its run and data set are next to it."""
    root = tmp_path_factory.mktemp("exports")
    log().write_parquet(root / "log.parquet")
    run_recipe = make_recipe(root)
    Trainer(run_recipe, prepare(run_recipe.data)).train()
    with open_run(root / "run") as trained:
        return export(trained, root / "unmodified")


@pytest.fixture(scope="module")
def scores(unmodified: Path) -> np.ndarray[Any, Any]:
    return Scorer.open(unmodified).score(FRAME)


@pytest.fixture
def copy(unmodified: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unmodified, tmp_path / "copy"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Change a manifest and update the hashes of all files, as an attacker can."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["hash"]
    for name, entry in content["files"].items():
        if (folder / name).is_file():
            entry |= {"bytes": (folder / name).stat().st_size, "hash": file_hash(folder / name)}
    change(content)
    write_sealed(folder / "manifest.json", content)


def refused(folder: Path) -> str:
    with pytest.raises(ExportError) as caught:
        Scorer.open(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_an_export_is_data_and_its_manifest_names_every_file(unmodified: Path) -> None:
    names = [path.relative_to(unmodified).as_posix() for path in files(unmodified)]
    vocabularies = ["vocabulary/0000-city.parquet", "vocabulary/0001-item.parquet"]
    assert names == [
        "README.txt",
        "manifest.json",
        "network.safetensors",
        "tables.safetensors",
        *vocabularies,
    ]
    assert set(ExportManifest.read(unmodified).files) == set(names) - {"manifest.json"}
    assert "rows_0" not in (unmodified / "README.txt").read_text()
    # Other readers of the formats can read the files.
    assert safetensors.numpy.load_file(unmodified / "tables.safetensors")["item"].shape == (30 + 16, 4)
    check_files(unmodified, ExportManifest.read(unmodified).files)


@pytest.mark.slow
def test_onnx_gives_the_same_scores(unmodified: Path, tmp_path: Path, scores: np.ndarray[Any, Any]) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    with open_run(unmodified.parent / "run") as trained:
        folder = export(trained, tmp_path / "out", onnx=True)
        again = export(trained, tmp_path / "again", onnx=True)
    content = (folder / "network.onnx").read_bytes()
    assert (again / "network.onnx").read_bytes() == content
    assert b"stratarec" not in content, "names and places of code"
    assert "network.onnx" in ExportManifest.read(folder).files
    dense, sparse = Scorer.open(folder)._model.encoder.encode(FRAME)
    pooled, (history,) = Scorer.open(folder)._model.tables.look_up(sparse)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    assert names == ["dense", "pooled", "rows_0", "mask_0"]
    for rows in (slice(None), slice(0, 1)):
        given = [part[rows].numpy() for part in (dense, pooled, *history.padded())]
        (actual,) = session.run(["score"], dict(zip(names, given, strict=True)))
        np.testing.assert_allclose(actual, scores[rows], rtol=1e-5, atol=1e-6)


class CreatesMarker:
    """Unpickling this object creates a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_any_file_never_runs(copy: Path, tmp_path: Path, scores: np.ndarray[Any, Any]) -> None:
    marker = tmp_path / "ran"
    torch.save({"weights": CreatesMarker(marker)}, tmp_path / "pickle.pt")
    for path in files(copy):
        kept = path.read_bytes()
        for poison in (pickle.dumps(CreatesMarker(marker)), (tmp_path / "pickle.pt").read_bytes()):
            path.write_bytes(poison)
            if path.name == "manifest.json":
                refused(copy)
            else:
                reseal(copy)
                if path.name != "README.txt":
                    refused(copy)
                else:
                    np.testing.assert_array_equal(Scorer.open(copy).score(FRAME), scores)
        path.write_bytes(kept)
        reseal(copy)
    assert not marker.exists()


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every path in JSON data, including those of objects and lists."""
    if path:
        yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield from paths_in(inner, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def drop(content: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        content = content[key]
    del content[path[-1]]


def test_a_manifest_with_changed_fields_is_refused_or_gives_scores(
    copy: Path, scores: np.ndarray[Any, Any]
) -> None:
    """Every field is replaced by invalid values and the manifest is sealed again.

    Some changes have the same meaning or describe another model.
    """
    original = json.loads((copy / "manifest.json").read_text())
    del original["hash"]
    accepted, long = set(), 0
    values = (*VALUES, "absent")
    for number, path in enumerate(paths_in(original)):
        for value in (values * 2)[number % len(values) :][:3]:
            content = json.loads(json.dumps(original))
            if value == "absent":
                drop(content, path)
            else:
                put(content, path, value)
            write_sealed(copy / "manifest.json", content)
            try:
                result = Scorer.open(copy).score(FRAME)
            except ExportError as error:
                long += "\n" in str(error) or len(str(error)) > 1000
                continue
            assert result.dtype == np.float32
            assert ((result >= 0) & (result <= 1)).all()
            if value == "absent":  # fields with a default may be missing
                np.testing.assert_array_equal(result, scores)
            accepted.add(".".join(str(part) for part in path if not isinstance(part, int)))
    free = {
        # Scoring does not read these fields, or other values are valid too.
        "schema.sparse.type", "schema.time_format", "schema.weight", "schema.sparse.beside",
        "schema.labels", "model.heads", "model.heads.kind", "model.heads.tower_mlp", "model.heads.experts",
        "model.heads.expert_mlp", "model.embedding_dims",
        "schema.label", "schema.session", "schema.time", "schema.user", "schema.time_unit", "schema.dense.group",
        "schema.sparse.group", "schema.sparse.max_length", "schema.sparse.separator", "schema.dense.standardize",
        "schema.sparse", "schema.sparse.kind", "schema.sparse.of", "schema.sparse.vocabulary", "schema.dense.transform",
        "model.history.layers", "format", "model.history.heads", "model.history.attention_mlp", "model.history",
        "model.pooling", "model", "model.dropout", "model.batch_norm", "model.interaction", "model.initialization",
            "model.initial_rows", "model.initial_logit", "calibration", "correction",
        "moments.price.mean", "moments.price.deviation", "model.towers", "tables.city.float32_rows",
        "tables.item.float32_rows", "files.README.txt.bytes", "files.README.txt.hash",
        # The ids of a base are those of the file in any case, and a seed that is 0 may be set to 0.
        "vocabularies.city.inherited", "vocabularies.item.inherited",
        "vocabularies.city.holes", "vocabularies.item.holes",
        # Lengths of the tensors of trees, which this model has not.
        "trees.nodes", "trees.rated", "trees.sets", "trees.trees", "trees.pairs", "trees.pair_rates", "trees.edges",
        "trees",
    }  # fmt: skip
    assert accepted <= free
    assert not long


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSON"),
        ("[]", "object"),
        (deep(100_000), "nested"),
        ('{"format": 1e999}', ""),
        ('{"format": NaN}', "number"),
        (f'{{"format": {"9" * 5000}}}', "damaged"),
        ('{"format": 1}', "1 6"),
        ('{"format": 6}', "hash"),
    ],
)
def test_invalid_manifests_are_refused(copy: Path, text: str, message: str) -> None:
    (copy / "manifest.json").write_text(text)
    assert not missing(message, refused(copy))


def test_a_codec_that_nothing_provides_is_named(copy: Path) -> None:
    reseal(copy, lambda content: content["tables"]["city"].update(codec="int3"))
    message = refused(copy)
    assert not missing("tables.city.codec 'int3' install package", message)
    assert "export the model again" not in message


def tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return safetensors.numpy.load_file(path)


def change_weights(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change tensors, write the file as the library does, and update the hashes."""
    content = tensors(folder / name)
    change(content)
    safetensors.numpy.save_file(content, folder / name)
    reseal(folder)


def change_first(content: dict[str, Any], make: Callable[[Any], Any]) -> None:
    name = sorted(content)[0]
    content[name] = make(content[name].copy())


def with_value(value: float) -> Callable[[Any], Any]:
    def make(array: Any) -> Any:
        array.flat[array.size // 2] = value
        return array

    return make


@pytest.mark.parametrize("name", ["network.safetensors", "tables.safetensors"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: change_first(arrays, with_value(float("nan"))), "number finite"),
        (lambda arrays: change_first(arrays, with_value(float("inf"))), "number finite"),
        (lambda arrays: change_first(arrays, lambda array: array.astype(np.int32)), "I32 F32"),
        (lambda arrays: change_first(arrays, lambda array: array.astype(np.float64)), "F64"),
        (lambda arrays: change_first(arrays, lambda array: array.astype(np.float16)), "F16"),
        (lambda arrays: change_first(arrays, lambda array: array.reshape(1, -1, 1)), "F32"),
        (lambda arrays: change_first(arrays, lambda array: array[:-1]), "F32"),
        (lambda arrays: arrays.pop(sorted(arrays)[0]), "missing F32"),
        (lambda arrays: arrays.update(extra=np.zeros(3, np.float32)), "tensor"),
        (lambda arrays: arrays.clear(), "missing"),
    ],
)
def test_invalid_weights_with_correct_hashes_are_refused(
    copy: Path, name: str, change: Any, message: str
) -> None:
    change_weights(copy, name, change)
    assert not missing(message, refused(copy))


def invalid_headers(path: Path) -> Iterator[bytes]:
    """Yield files with invalid headers."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]

    def file(header: Any) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    name, other = list(header)[:2]
    for length in (0, 7, 1 << 40, (1 << 64) - 1, len(content), size - 8, size + 8):
        yield struct.pack("<Q", length) + content[8:]
    yield content[:4]
    yield content[:-4]
    yield content + bytes(4)
    yield file(b"{")
    yield file(deep(100_000).encode())
    for offsets in (
        [0, 1 << 62],
        [-4, 0],
        [1 << 63, 1 << 64],
        header[other]["data_offsets"],
        [8, 4],
        "x",
        None,
        [0],
    ):
        yield file(header | {name: header[name] | {"data_offsets": offsets}})
    for shape in ([1 << 62, 4], [-1], [[1]], "x", None, [0], [1 << 31, 1 << 31]):
        yield file(header | {name: header[name] | {"shape": shape}})
    for kind in ("I64", "BOOL", "F4", "", None, 3, ["F32"]):
        yield file(header | {name: header[name] | {"dtype": kind}})
    yield file(header | {name: None})
    yield file({})
    # Two tensors over the same bytes.
    yield file(dict.fromkeys(header, header[name]))


@pytest.mark.parametrize("name", ["network.safetensors", "tables.safetensors"])
def test_invalid_headers_are_refused(copy: Path, name: str) -> None:
    for content in list(invalid_headers(copy / name)):
        (copy / name).write_bytes(content)
        reseal(copy)
        assert name in refused(copy)


def columns(path: Path) -> dict[str, pa.Array]:
    table = pq.read_table(path)
    return {key: table[key].combine_chunks() for key in table.column_names}


def replace_value(values: pa.Array, place: int, value: Any) -> pa.Array:
    cells = values.to_pylist()
    cells[place] = value
    return pa.array(cells, values.type)


def invalid_text(size: int) -> pa.Array:
    """Return bytes that are typed as text but are not."""
    buffers = pa.array([b"\xff\xfe" * (place + 1) for place in range(size)], pa.large_binary()).buffers()
    return pa.Array.from_buffers(pa.large_string(), size, buffers)


@pytest.fixture(scope="module")
def encoded(unmodified: Path) -> Path:
    """Return an export of int8 rows with some rows in float32."""
    config = make_recipe(unmodified.parent).to_dict()
    config |= {"memory": {"precision": "int8", "cache": {"fraction": 0.05}, "lookahead": 0}}
    config["train"] |= {"run": str(unmodified.parent / "coded"), "batch_size": 2}
    config["data"] |= {"path": str(unmodified.parent / "more"), "vocabulary": {"tail_buckets": 3000}}
    changed = Recipe.from_dict(config)
    Trainer(changed, prepare(changed.data)).train()
    with open_run(unmodified.parent / "coded") as trained:
        return export(trained, unmodified.parent / "encoded")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays["@rows/item"].__setitem__(0, -1), "'item' has rows outside of the table"),
        (lambda arrays: arrays["@rows/item"].__setitem__(-1, 3030), "'item' has rows outside of the table"),
        (
            lambda arrays: arrays["@rows/item"].__setitem__(1, arrays["@rows/item"][0]),
            "'item' has rows that do not rise",
        ),
        (
            lambda arrays: arrays["@float32/item"].fill(np.nan),
            "'@float32/item' has a number that is not finite",
        ),
        (lambda arrays: arrays["item"].fill(255), "'item' has a number that is not finite"),
        (lambda arrays: arrays.update(item=arrays["item"][:, :-1].copy()), "'item' is U8"),
        (lambda arrays: arrays.pop("@rows/item"), "'@rows/item' is missing"),
    ],
)
def test_invalid_encoded_tables_are_refused(
    encoded: Path, tmp_path: Path, change: Any, message: str
) -> None:
    folder = Path(shutil.copytree(encoded, tmp_path / "copy"))
    assert ExportManifest.read(folder).tables["item"].float32_rows > 1
    assert ExportManifest.read(folder).tables["item"].codec == "int8"
    change_weights(folder, "tables.safetensors", change)
    assert message in refused(folder)


VOCABULARIES: list[tuple[Any, str]] = [
    (lambda c: c | {"more": c["id"]}, "columns"),
    (lambda c: {key: c[key] for key in ("value", "id")}, "columns"),
    (lambda c: {key: c[key] for key in ("id", "value", "count")}, "columns"),
    (lambda c: c | {"id": c["id"].cast(pa.int64())}, "columns"),
    (lambda c: c | {"count": c["count"].cast(pa.float64())}, "columns"),
    (lambda c: c | {"value": c["id"].cast(pa.float64())}, "values"),
    (lambda c: c | {"value": pa.array([[1]] * len(c["id"]))}, "values"),
    (lambda c: c | {"value": c["id"]}, "int32"),
    (lambda c: c | {"value": replace_value(c["value"], -1, c["value"][-2].as_py())}, "values"),
    (lambda c: c | {"value": replace_value(c["value"], -1, None)}, "rows"),
    (lambda c: c | {"value": replace_value(c["value"], 0, c["value"][-1].as_py())}, ""),
    (lambda c: c | {"id": replace_value(c["id"], 0, 1)}, "count"),
    (lambda c: c | {"id": replace_value(c["id"], 3, -1)}, "count"),
    (lambda c: c | {"id": replace_value(c["id"], 3, None)}, ""),
    (lambda c: c | {"count": replace_value(c["count"], -1, -1)}, "counts"),
    (lambda c: c | {"count": replace_value(c["count"], -1, 1 << 60)}, "counts"),
    (lambda c: c | {"count": replace_value(c["count"], 1, None)}, ""),
    (lambda c: {key: array[:-1] for key, array in c.items()}, "rows"),
    (lambda c: {key: pa.concat_arrays([array, array]) for key, array in c.items()}, "rows"),
    (lambda c: c | {"value": invalid_text(len(c["id"]))}, ""),
    (
        lambda c: (
            c
            | {
                "value": c["value"].take(
                    pa.array([*range(len(c["value"]) - 2), len(c["value"]) - 1, len(c["value"]) - 2])
                )
            }
        ),
        "values",
    ),
]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("place", range(len(VOCABULARIES)))
def test_invalid_vocabularies_are_refused(copy: Path, number: int, place: int) -> None:
    change, message = VOCABULARIES[place]
    path = sorted((copy / "vocabulary").iterdir())[number]
    pq.write_table(pa.table(change(columns(path))), path)
    reseal(copy)
    error = refused(copy)
    assert not missing(f"{path.name} {message}", error)


def test_vocabularies_behind_links_are_neither_read_nor_exported(
    unmodified: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "vocabulary").symlink_to((copy / "vocabulary").rename(tmp_path / "folder"))
    assert not missing("link", refused(copy))
    for name in ("data", "run"):
        shutil.copytree(unmodified.parent / name, tmp_path / name)
    content = json.loads(
        (tmp_path / "run" / "recipe.json").read_text().replace(str(unmodified.parent), str(tmp_path))
    )
    del content["hash"]
    write_sealed(tmp_path / "run" / "recipe.json", content)
    path = next((tmp_path / "data" / "vocabulary").iterdir())
    path.symlink_to(path.rename(tmp_path / "secret"))
    assert main(["export", "-q", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 2
    check_refusal(path.name, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_small_file_that_decompresses_to_gigabytes_is_refused(copy: Path) -> None:
    path = copy / "vocabulary/0000-city.parquet"
    content = columns(path)
    long = pa.array(["x" * (1 << 22)] * len(content["id"]), pa.large_string())
    pq.write_table(pa.table(content | {"value": long}), path, compression="zstd", use_dictionary=["value"])
    assert path.stat().st_size < 1 << 20
    reseal(copy)
    assert "its values are not distinct" in refused(copy) or "decompresses" in refused(copy)
    pq.write_table(pa.table(content | {"value": long}), path, compression="zstd", use_dictionary=False)
    reseal(copy)
    assert "decompresses to" in refused(copy)


@pytest.mark.parametrize(
    "model",
    [
        {"embedding_dim": 10**9},
        {"top_mlp": [10**12]},
        {"top_mlp": [1] * 5000},
        {"history": {"pooling": "transformer", "layers": 10**9}},
    ],
)
def test_models_too_large_to_build_are_refused_at_once(copy: Path, model: dict[str, Any]) -> None:
    def change(content: dict[str, Any]) -> None:
        content["model"] |= model
        for table in content["tables"].values():
            table["width"] = content["model"]["embedding_dim"]

    reseal(copy, change)
    refused(copy)


def test_weights_that_overflow_give_an_error_and_no_score(copy: Path) -> None:
    change_weights(
        copy,
        "network.safetensors",
        lambda arrays: arrays.update({k: v * 0 + 3e38 for k, v in arrays.items()}),
    )
    with refuses(ExportError, "score row 1"):
        Scorer.open(copy).score(FRAME)
