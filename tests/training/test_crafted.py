"""Test checkpoints of other writers: every hash is right, but `train` never writes such content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from fuzzing.artefacts import TIERS, make_log, make_recipe, place_tables
from safetensors.torch import load_file, save_file

from errors import refuses
from recipes import last, table_values
from stratarec.cli.checks.artifacts import check
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import CheckpointError, TrainingError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import write_sealed
from stratarec.progress import SilentProgress
from stratarec.training.predict import predict
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train runs with tables in memory and with a cache.

    The last checkpoint of the first run is a chain of several files.
    """
    root = tmp_path_factory.mktemp("crafted")
    make_log(root)
    prepare(make_recipe(root, root / "plain").data)
    for name, memory in (("plain", None), ("cached", TIERS)):
        recipe = make_recipe(root, root / name, memory=memory)
        Trainer(recipe, Dataset.open(recipe.data.path), plan=place_tables(name, recipe)).train()
    return root


def rewrite(run: Path, change: Callable[[dict[str, Any], Path], object]) -> None:
    """Change the last checkpoint and seal its state again."""
    path = last(run)
    content = json.loads((path / "state.json").read_text())
    change(content, path)
    del content["hash"]
    write_sealed(path / "state.json", content)


def rows_file(
    entry: dict[str, Any], path: Path, rows: np.ndarray[Any, Any], records: np.ndarray[Any, Any]
) -> None:
    """Write rows and records as `write_rows` does, without validation, and update the entry of the
    manifest.
    """
    header = json.dumps(
        {
            "__metadata__": {"format": "stratarec rows 1"},
            "rows": {"dtype": "I64", "shape": [len(rows)], "data_offsets": [0, rows.nbytes]},
            "records": {
                "dtype": "U8",
                "shape": list(records.shape),
                "data_offsets": [rows.nbytes, rows.nbytes + records.nbytes],
            },
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + rows.tobytes() + records.tobytes())
    entry.update(rows=len(rows), hash=file_hash(path))


def change_rows(
    part: str, again: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> Callable[..., None]:
    """Replace row numbers in the first file of a group's home or slots."""

    def change(content: dict[str, Any], path: Path) -> None:
        group = content["tables"]["groups"][0]
        entry = group[part]["files"][0]
        file = path / "tables" / group["name"] / part / entry["name"]
        tensors = load_file(file)
        rows_file(entry, file, again(tensors["rows"].numpy()), tensors["records"].numpy())

    return change


ROWS = [
    ("plain", "home", lambda rows: np.r_[rows[:1], rows[:-1]], "rows"),
    ("plain", "home", lambda rows: np.r_[rows[:-1], np.int64(1) << 40], "rows"),
    ("plain", "home", lambda rows: np.r_[np.int64(-1), rows[1:]], "rows"),
    ("plain", "home", lambda rows: rows[::-1].copy(), "rows"),
    ("cached", "slots", lambda rows: np.r_[rows[:1], rows[:-1]], "rows"),
    ("cached", "slots", lambda rows: rows + (np.int64(1) << 30), "rows"),
]


@pytest.mark.parametrize(("name", "part", "again", "message"), ROWS)
def test_duplicate_and_out_of_range_rows_are_named(
    home: Path, tmp_path: Path, name: str, part: str, again: Any, message: str
) -> None:
    shutil.copytree(home / name, tmp_path / "run")
    rewrite(tmp_path / "run", change_rows(part, again))
    with refuses(CheckpointError, message) as caught, open_run(tmp_path / "run"):
        pass
    assert "safetensors" in str(caught.value)


NETWORKS: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda weight: weight.to(torch.int32), "int32"),
    (lambda weight: weight.to(torch.int64), "int64"),
    (lambda weight: weight.to(torch.float64), "float64"),
    (lambda weight: weight.to(torch.bool), "bool"),
    (lambda weight: weight.reshape(-1), ""),
    (lambda weight: weight * float("nan"), "finite"),
    (lambda weight: weight / 0.0, "finite"),
]


@pytest.mark.parametrize(("change", "message"), NETWORKS)
@pytest.mark.parametrize("name", ["network", "optimizer"])
def test_tensors_of_another_type_or_shape_and_non_finite_tensors_are_named(
    home: Path, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    def put(content: dict[str, Any], path: Path) -> None:
        file = path / f"{name}.safetensors"
        tensors = load_file(file)
        chosen = next(key for key, value in tensors.items() if value.ndim == 2)
        save_file({**tensors, chosen: change(tensors[chosen]).contiguous()}, file)
        content["hashes"][file.name] = file_hash(file)

    shutil.copytree(home / "plain", tmp_path / "run")
    rewrite(tmp_path / "run", put)
    recipe = make_recipe(home, tmp_path / "run", steps=8)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    with refuses(CheckpointError, f"{name}.safetensors {message}"):
        trainer.train(resume=True)


def test_random_states_with_an_invalid_position_are_refused(home: Path, tmp_path: Path) -> None:
    def put(content: dict[str, Any], path: Path) -> None:
        file = path / "optimizer.safetensors"
        tensors = load_file(file)
        words = tensors["random"].numpy()
        words[8:12].view(np.int32)[0], words[16:24].view(np.uint64)[0] = 624, 2
        torch.Generator().set_state(tensors["random"])  # torch itself accepts this state
        save_file(tensors, file)
        content["hashes"][file.name] = file_hash(file)

    shutil.copytree(home / "plain", tmp_path / "run")
    rewrite(tmp_path / "run", put)
    recipe = make_recipe(home, tmp_path / "run", steps=8)
    with refuses(CheckpointError, "optimizer.safetensors table 624 2"):
        Trainer(recipe, Dataset.open(recipe.data.path)).train(resume=True)


def test_rows_that_are_not_finite_give_no_scores(home: Path, tmp_path: Path) -> None:
    """Rows are not checked when they are loaded, but scores are checked."""

    def put(content: dict[str, Any], path: Path) -> None:
        for group in content["tables"]["groups"]:
            for entry in group["home"]["files"]:
                file = path / "tables" / group["name"] / "home" / entry["name"]
                tensors = load_file(file)
                records = tensors["records"].numpy()
                records[:, :4] = np.array([np.nan], "<f4").view(np.uint8)
                rows_file(entry, file, tensors["rows"].numpy(), records)

    shutil.copytree(home / "plain", tmp_path / "run")
    rewrite(tmp_path / "run", put)
    with open_run(tmp_path / "run") as trained, refuses(TrainingError, "score number"):
        predict(trained, "test", tmp_path / "scores.parquet", SilentProgress())
    assert not (tmp_path / "scores.parquet").exists()


def test_impossible_clocks_of_rows_mean_new_rows(home: Path, tmp_path: Path) -> None:
    """A negative clock would make rows apply steps before the first one."""
    recipe = make_recipe(home, tmp_path / "run")
    rows = RowOptimizerConfig(kind="adam", rows="all")
    recipe = replace(recipe, train=replace(recipe.train, embedding=rows))
    Trainer(recipe, Dataset.open(recipe.data.path)).train()

    def put(clock: int, content: dict[str, Any], path: Path) -> None:
        group = content["tables"]["groups"][0]
        for entry in group["home"]["files"]:
            file = path / "tables" / group["name"] / "home" / entry["name"]
            tensors = load_file(file)
            records = tensors["records"].numpy()
            records[:, -4:] = np.array([clock], "<i4").view(np.uint8)
            rows_file(entry, file, tensors["rows"].numpy(), records)

    scores = []
    for clock in (0, -1, -(2**31)):
        rewrite(tmp_path / "run", partial(put, clock))
        with open_run(tmp_path / "run") as trained:
            predict(trained, "test", tmp_path / "scores.parquet", SilentProgress())
        scores.append(pl.read_parquet(tmp_path / "scores.parquet")["score"].to_list())
    assert scores[0] == scores[1] == scores[2]


def _at(**changes: Any) -> Callable[[dict[str, Any], Path], object]:
    """Replace numbers in the parts of the state with these names."""
    return lambda content, _: [content[part].update(values) for part, values in changes.items()]


STATES = [
    (_at(tables={"step": 1 << 61}), "2305843009213693952 0 6"),
    (_at(tables={"step": 5}), "step 5 6"),
    (_at(tables={"earlier": 1 << 61}), "6 2305843009213693952"),
    (_at(tables={"batches": 5, "origin": 0}), "6 0 5"),
    (_at(tables={"changes": [[7, 0.5]]}), "7 step 6"),
    (_at(training={"epoch": 1 << 61}), "2305843009213693952 step 6"),
    (_at(training={"losses": [[7, 0.5]]}), "7 step 6"),
    (_at(training={"trained_samples": 5}), "samples 5"),
]


@pytest.mark.parametrize(("change", "message"), STATES)
def test_numbers_that_training_never_writes_are_named(
    home: Path, tmp_path: Path, change: Callable[[dict[str, Any], Path], object], message: str
) -> None:
    shutil.copytree(home / "plain", tmp_path / "run")
    rewrite(tmp_path / "run", change)
    with refuses(CheckpointError, f"state.json {message}"):
        list(check(tmp_path / "run"))


@pytest.mark.parametrize("lost", ["seed", "dense", "embedding"])
def test_a_run_starts_from_a_checkpoint_that_records_less_of_its_training(
    home: Path, tmp_path: Path, lost: str
) -> None:
    shutil.copytree(home / "plain", tmp_path / "run")
    rewrite(tmp_path / "run", lambda content, _: content["identity"]["train"].pop(lost))
    trainer = Trainer(make_recipe(home, tmp_path / "new", steps=1), Dataset.open(home / "data"))
    assert trainer.train(earlier=tmp_path / "run")["steps"] == 1


def test_the_later_file_of_a_chain_determines_a_row(home: Path, tmp_path: Path) -> None:
    """Deltas override earlier files, so a file that occurs twice under two names changes
    nothing.
    """

    def twice(content: dict[str, Any], path: Path) -> None:
        group = content["tables"]["groups"][0]
        entries = group["home"]["files"]
        folder = path / "tables" / group["name"] / "home"
        again = {**entries[-1], "name": "rows-000099.safetensors"}
        shutil.copy(folder / entries[-1]["name"], folder / again["name"])
        entries.append(again)

    shutil.copytree(home / "plain", tmp_path / "run")
    before = table_values(last(tmp_path / "run"))
    rewrite(tmp_path / "run", twice)
    after = table_values(last(tmp_path / "run"))
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(values, after[name])
    with open_run(tmp_path / "run"):
        pass
