"""A data set that is prepared anew between being opened and being read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from errors import refuses
from recipes import tiny
from stratarec.data.dataset import dataset as module
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DatasetError
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


def made(root: Path, seed: int) -> Recipe:
    content = tiny(root, max_steps=2)
    content["data"]["source"] |= {"samples": 1000, "seed": seed}
    return Recipe.from_dict(content)


def test_files_of_another_data_set_are_never_read_for_those_that_were_opened(tmp_path: Path) -> None:
    recipe = made(tmp_path, 1)
    prepare(recipe.data)
    dataset = Dataset.open(recipe.data.path)
    trainer = Trainer(recipe, dataset)
    prepare(made(tmp_path, 2).data, overwrite=True)
    with refuses(DatasetError, "data"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_the_same_data_set_prepared_anew_is_read(tmp_path: Path) -> None:
    recipe = made(tmp_path, 1)
    prepare(recipe.data)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    prepare(recipe.data, overwrite=True)
    trainer.train()


def test_a_data_set_that_is_replaced_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(made(tmp_path, 1).data)
    before, hashes = Dataset.open(tmp_path / "data").fingerprint, module.file_hashes

    def replaced_first(*args: Any, **options: Any) -> list[str]:
        monkeypatch.setattr(module, "file_hashes", hashes)
        prepare(made(tmp_path, 2).data, overwrite=True)
        return hashes(*args, **options)

    monkeypatch.setattr(module, "file_hashes", replaced_first)
    after = Dataset.open(tmp_path / "data").fingerprint
    assert after != before
    assert after == Dataset.open(tmp_path / "data", verify="full").fingerprint
