"""Test interrupted preparation, and data sets that are replaced while they are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing, refuses
from recipes import fill_disk, log_config, prepared, tiny
from stratarec.cli import main
from stratarec.data.dataset import dataset as module
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SplitConfig
from stratarec.errors import DatasetError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every file. They stay the same only for files that were not written
    again.
    """
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*.parquet")
    }


@pytest.mark.parametrize(("free", "stopped_in"), [(150_000, "spilled"), (950_000, "output")])
def test_a_full_disk_gives_a_one_line_error_and_loses_nothing(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], free: int, stopped_in: str
) -> None:
    content = tiny(small_disk)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(content))
    earlier = prepared(Recipe.from_dict(content).data).fingerprint
    fill_disk(small_disk / "filler", free)
    capsys.readouterr()
    again = ["prepare", "-q", "--overwrite", str(recipe), "data.source.seed=8"]
    assert main(again) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    place = small_disk / "data.preparing" / stopped_in
    assert not missing(f"{place}", errors[0])
    assert Dataset.open(small_disk / "data").fingerprint == earlier
    work = small_disk / "data.preparing"
    notes = [json.loads(note.read_text()) for note in work.glob("encoded/*.json")]
    finished = [shard["path"] for note in notes for shard in note["shards"].values()]
    before = identities(work)
    (small_disk / "filler").unlink()
    assert main(again) == 0
    dataset = Dataset.open(small_disk / "data")
    assert dataset.fingerprint != earlier
    assert not work.exists()
    after = identities(small_disk / "data")
    assert all(after[path] == before[f"output/{path}"] for path in finished)
    assert finished or stopped_in != "encoded"


class RecordingProgress(SilentProgress):
    """Record messages except those about groups and times, and raise KeyboardInterrupt after `stop`
    steps.
    """

    def __init__(self, stop: int = 10**9) -> None:
        self.messages: list[str] = []
        self.left = stop

    def say(self, message: str) -> None:
        if not message.startswith(("found group", "times span")):
            self.messages.append(message)

    def advance(self, amount: int, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def config(root: Path, by: str = "fraction") -> PrepareConfig:
    """Return the configuration for three shards with few columns.

    All rows are for training, or the split is by time.
    """
    root.mkdir(exist_ok=True)
    draws = np.random.default_rng(3)
    columns = {name: draws.integers(0, 40, 600) for name in ("who", "item", "place", "age")}
    frame = pl.DataFrame({"label": draws.integers(0, 2, 600), **columns, "time": np.arange(600)})
    schema = Schema(
        label="label",
        user="who",
        sparse=(SparseFeature(name="item"), SparseFeature(name="place")),
        dense=(DenseFeature(name="age"),),
        time="time" if by == "time" else "",
    )
    split = (
        SplitConfig(by="time", valid="60s", test="60s")
        if by == "time"
        else SplitConfig(valid=0.0, test=0.0)
    )
    return log_config(root, schema, frame, shard_samples=200, split=split)


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def renamed(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda note: {("older" if name == key else name): value for name, value in note.items()}


STALE: dict[str, Callable[[Path], object]] = {
    "another format": lambda work: change_json(work / "origin.json", lambda note: {**note, "format": 1}),
    "no origin": lambda work: (work / "origin.json").unlink(),
    "a damaged origin": lambda work: (work / "origin.json").write_text("{"),
    "a chunk's other fields": lambda work: change_json(
        work / "spilled" / "00000000.json", renamed("times")
    ),
    "a lost chunk": lambda work: (work / "spilled" / "00000000.json").unlink(),
    "damaged rows": lambda work: (work / "spilled" / "00000000.arrow").write_bytes(b"no more"),
    "damaged counts": lambda work: (work / "counts" / "00002.arrow").write_bytes(b"no more"),
    "other moments": lambda work: change_json(work / "counts" / "00000.json", renamed("moments")),
    "no labels": lambda work: change_json(work / "encoded" / "00000.json", renamed("labels")),
    "a shard's other fields": lambda work: change_json(
        work / "encoded" / "00000.json",
        lambda note: {
            **note,
            "shards": {key: renamed("hash")(shard) for key, shard in note["shards"].items()},
        },
    ),
    "a lost shard": lambda work: (work / "output" / "train" / "shard-00000.parquet").unlink(),
}


@pytest.fixture(scope="module")
def interrupted_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a work directory with one chunk, three counts and the first of three shards."""
    root = tmp_path_factory.mktemp("half")
    with pytest.raises(KeyboardInterrupt):
        prepare(config(root), progress=RecordingProgress(stop=6))
    return root / "data.preparing"


@pytest.mark.parametrize("by", ["fraction", "time"])
def test_prepare_resumes_with_the_same_data_set_after_any_interruption(tmp_path: Path, by: str) -> None:
    """Values are counted while rows are spilled.

    If the last time determines the split, they are counted in a separate pass.
    """
    uninterrupted, interrupted = (config(tmp_path / name, by) for name in ("whole", "interrupted"))
    expected, stops = prepare(uninterrupted), 0
    with pytest.raises(KeyboardInterrupt):
        prepare(interrupted, progress=RecordingProgress(stop=1))
    while not (tmp_path / "interrupted" / "data").exists():
        stops += 1
        with suppress(KeyboardInterrupt):
            prepare(interrupted, progress=(progress := RecordingProgress(stop=2)))
        assert not progress.messages
    dataset = Dataset.open(interrupted.path, verify="full")
    assert dataset.fingerprint == expected.fingerprint
    for name in expected.vocabularies:
        np.testing.assert_array_equal(dataset.access_counts(name), expected.access_counts(name))
    assert stops > 4


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the fingerprint of a data set that was prepared without interruption."""
    return prepare(config(tmp_path_factory.mktemp("whole"))).fingerprint


@pytest.mark.parametrize("how", STALE)
def test_a_stale_or_damaged_work_directory_starts_again(
    tmp_path: Path, interrupted_work: Path, fingerprint: str, how: str
) -> None:
    shutil.copytree(interrupted_work, tmp_path / "data.preparing")
    STALE[how](tmp_path / "data.preparing")
    progress = RecordingProgress()
    dataset = prepare(config(tmp_path), progress=progress)
    assert len(progress.messages) == 1
    assert not missing("data.preparing", progress.messages[0])
    assert dataset.fingerprint == fingerprint


def test_a_valid_work_directory_is_resumed(tmp_path: Path, interrupted_work: Path) -> None:
    shutil.copytree(interrupted_work, tmp_path / "data.preparing")
    before = identities(tmp_path / "data.preparing" / "output" / "train")
    progress = RecordingProgress()
    prepare(config(tmp_path), progress=progress)
    assert not progress.messages
    assert identities(tmp_path / "data" / "train")["shard-00000.parquet"] == before["shard-00000.parquet"]


def make_recipe(root: Path, seed: int) -> Recipe:
    content = tiny(root, max_steps=2)
    content["data"]["source"] |= {"samples": 1000, "seed": seed}
    return Recipe.from_dict(content)


def test_files_of_a_replaced_data_set_are_not_read(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, 1)
    prepare(recipe.data)
    dataset = Dataset.open(recipe.data.path)
    trainer = Trainer(recipe, dataset)
    prepare(make_recipe(tmp_path, 2).data, overwrite=True)
    with refuses(DatasetError, "data"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_the_same_data_set_prepared_again_is_read(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, 1)
    prepare(recipe.data)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    prepare(recipe.data, overwrite=True)
    trainer.train()


def test_a_data_set_replaced_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(make_recipe(tmp_path, 1).data)
    before, hashes = Dataset.open(tmp_path / "data").fingerprint, module.file_hashes

    def replace_first(*args: Any, **options: Any) -> list[str]:
        monkeypatch.setattr(module, "file_hashes", hashes)
        prepare(make_recipe(tmp_path, 2).data, overwrite=True)
        return hashes(*args, **options)

    monkeypatch.setattr(module, "file_hashes", replace_first)
    after = Dataset.open(tmp_path / "data").fingerprint
    assert after != before
    assert after == Dataset.open(tmp_path / "data", verify="full").fingerprint
