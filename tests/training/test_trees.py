"""Test trees of an ensemble: they have LightGBM's scores in every file and score of a run."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import polars as pl
import pytest
import torch
from training.test_members import of_log
from training.test_no_signal import assert_chance

from errors import missing, refuses
from recipes import agreeing_scores, assert_same_model, fill_disk, last, train
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError, ExportError, StorageError, TrainingError
from stratarec.estimator.click_model import ClickModel
from stratarec.io.sealed import write_sealed
from stratarec.io.tensors import read_tensors, write_tensors
from stratarec.kernels.trees.pair_rates import no_pairs
from stratarec.models.zoo.trees import RATED, TreeMembers, TreeSizes
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.serving.export_manifest import DeltaManifest, ExportedFile, ExportManifest
from stratarec.serving.exported_model import ExportedModel
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.export.export import export, files_of
from stratarec.training.export.write_delta import write_delta
from stratarec.training.resolve import choose_defaults, resolve
from stratarec.training.run import periods
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.pair_rates import Labels
from stratarec.training.steps.tree_process import _grow, fit
from stratarec.training.steps.trees import TreeFit, _fit_rates, read_models
from stratarec.training.trainer import Trainer

NODES, WEIGHTS = "score.trees.nodes", "score.out.weights"


def log(path: Path, rows: int = 1500, *, random: bool = False, seed: int = 5) -> pl.DataFrame:
    """Return a log in which an interval of a number determines the label for some items, and pairs
    of an item and a shop that of others, with missing values and lists.
    """
    draws = np.random.default_rng(seed)
    item, age = draws.integers(0, 30, rows), draws.gamma(2.0, 10.0, rows)
    shop = np.random.default_rng(seed + 100).integers(0, 6, rows)
    rate = np.where((age > 15) & (age < 18) & (item % 3 == 0), 0.9, 0.1) + 0.3 * (item % 2)
    rate = np.where((item * 5 + shop) % 7 < 2, rate + 0.6, rate)
    frame = pl.DataFrame(
        {
            "label": (draws.random(rows) < (0.5 if random else rate.clip(0, 1))).astype(np.int64),
            "item": [None if each == 7 else f"i{each}" for each in item],
            "shop": [f"s{each}" for each in shop],
            "tags": [
                [f"t{each}" for each in draws.integers(0, 9, size)] for size in draws.integers(0, 4, rows)
            ],
            "age": [None if each > 60 else each for each in age.tolist()],
        }
    )
    frame.write_parquet(path)
    return frame


def make_recipe(root: Path, **options: Any) -> Recipe:
    content = of_log(root, **options)
    content["data"]["source"]["schema"]["sparse"] += [
        {"name": "tags", "kind": "multi", "max_length": 3},
        {"name": "shop"},
    ]
    content["model"] = {**content["model"], "trees": 1000}
    return Recipe.from_dict(content)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trees")
    log(root / "log.parquet")
    prepare(make_recipe(root).data)
    return root


@pytest.fixture(scope="module")
def whole(home: Path) -> tuple[Trainer, dict[str, Any]]:
    """Train a run without interruption. Return it with the arrays that the process of the trees
    received.
    """
    requests, real_savez = list[dict[str, Any]](), np.savez
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            np, "savez", lambda file, **arrays: (requests.append(arrays), real_savez(file, **arrays))
        )
        return train(make_recipe(home, run=str(home / "whole"), report=True)), requests[0]


def test_logits_match_lightgbm_and_trees_have_weight(
    home: Path, whole: tuple[Trainer, dict[str, Any]]
) -> None:
    trainer, request = whole
    trees = trainer.parts.model.network.trees
    assert trees is not None
    again, names = fit(request), len(trees.features)
    # Columns of new samples, because those of training samples have click rates without their own
    # labels.
    samples = next(
        Loader(Dataset.open(home / "data"), "valid", LoaderConfig(batch_size=1 << 16, expand=True)).epoch(0)
    )
    rows = trees.columns(samples.dense, samples.sparse)
    assert np.isnan(rows).sum() == 0
    models = [model.decode() for model in again["models"].tolist()]
    arrays = read_models(models, [0, 0, 0, names, 0, 0])
    np.testing.assert_array_equal(arrays["nodes"], trees.nodes.numpy())
    pairs = len(trees.pairs)
    assert pairs
    columns = [rows[:, : -names - pairs]] * 3 + [rows[:, names:-pairs], rows[:, :-pairs], rows]
    expected = [
        lightgbm.Booster(model_str=model).predict(seen, raw_score=True)
        for model, seen in zip(models, columns, strict=True)
    ]
    assert (trees.counts > 0).all()
    actual = trees(samples.dense, samples.sparse).numpy()
    np.testing.assert_allclose(actual, np.stack(expected, 1), atol=1e-5)
    assert trees.sets.any(), "no set of values"
    members = trainer.state.evaluations[-1]["members"]
    assert len(members) == 10
    assert sum(row["weight"] for row in members[4:]) > 0.2
    assert [row["step"] for row in members[4:]] == [0] * 6


def test_click_rates_are_those_of_other_parts_and_of_all_samples_for_new_rows() -> None:
    draws = np.random.default_rng(3)
    code, label = draws.integers(0, 9, 500), draws.integers(0, 2, 500).astype(np.float32)
    code[:3] = RATED + 5, RATED, 0  # without rates
    weight = draws.gamma(2.0, 1.0, 500).astype(np.float32)
    trees = TreeMembers(1000)
    trees.set_features((("item", False), ("tags", True)))
    trees.resize(TreeSizes(rated=RATED))
    rows = np.stack([code, code, np.zeros(500), np.zeros(500), code], axis=1).astype(np.float32)
    _fit_rates(trees, rows, Labels(label, weight, seed=7))
    part, known = np.random.default_rng(7).integers(0, 10, 500), np.where(code < RATED, code, 0)
    mean = (label * weight).sum() / weight.sum()
    for row in range(500):
        others = (known == known[row]) & (part != part[row])
        rate = ((label * weight)[others].sum() + 3 * mean) / (weight[others].sum() + 3)
        assert rows[row, 3] == pytest.approx(rate, rel=1e-5)
    for value in (0, 8, 9):
        chosen = known == value
        rate = ((label * weight)[chosen].sum() + 3 * mean) / (weight[chosen].sum() + 3)
        assert float(trees.rates[0, value]) == pytest.approx(rate, rel=1e-5)
    assert not trees.rates[1].any()
    assert (rows[:, [0, 1, 4]] == code[:, None]).all()


def test_a_run_an_export_and_an_estimator_have_the_same_scores(
    home: Path, whole: tuple[Trainer, dict[str, Any]], tmp_path: Path
) -> None:
    frame, run = pl.read_parquet(home / "log.parquet"), whole[0].run
    assert ">trees</td>" in (run / "report.html").read_text()
    scorer, scores = agreeing_scores(run, home / "log.parquet", tmp_path, rtol=1e-6)
    np.testing.assert_allclose(
        np.concatenate([scorer.score(frame[row]) for row in range(20)]), scores[:20], rtol=1e-5
    )
    for runtime in ("torch", "onnxruntime"):
        opened = Scorer.open(tmp_path / "export", runtime=runtime)  # type: ignore[arg-type]
        np.testing.assert_allclose(opened.score(frame), scores, atol=1e-6)
    model = ClickModel(make_recipe(home)).fit(frame, label="label")
    saved = model.save(tmp_path / "model")
    np.testing.assert_allclose(
        ClickModel.load(saved).predict_proba(frame)[:, 1],
        Scorer.open(saved / "export").score(frame),
        rtol=1e-6,
    )


@pytest.mark.parametrize("stop", [5, 13, 20])
def test_a_stopped_run_matches_an_uninterrupted_run_bit_for_bit(
    home: Path, whole: tuple[Trainer, dict[str, Any]], tmp_path: Path, stop: int
) -> None:
    train(make_recipe(home, run=str(tmp_path / "parts"), max_steps=stop))
    torch.rand(100)
    train(make_recipe(home, run=str(tmp_path / "parts")), resume=True)
    assert_same_model(last(whole[0].run), last(tmp_path / "parts"))


def test_an_average_of_weights_does_not_change_trees(
    home: Path, whole: tuple[Trainer, dict[str, Any]], tmp_path: Path
) -> None:
    averaged = train(make_recipe(home, run=str(tmp_path / "averaged"), average={"decay": 0.9}))
    nodes = [
        read_tensors(last(trainer.run) / "network.safetensors")[NODES] for trainer in (whole[0], averaged)
    ]
    assert torch.equal(*nodes)


def test_a_continued_run_keeps_its_trees(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home, tmp_path / "home")
    log(tmp_path / "later.parquet", seed=6)
    trainer = train(make_recipe(tmp_path / "home", run=str(tmp_path / "run")))
    with open_run(trainer.run) as trained:
        before = {name: tensor.clone() for name, tensor in trained.model.network.state_dict().items()}
    assert main(["continue", str(trainer.run), str(tmp_path / "later.parquet")]) == 0
    assert "boosted trees stay" in capsys.readouterr().err
    with open_run(trainer.run) as trained:
        after = trained.model.network.state_dict()
    assert torch.equal(after[NODES], before[NODES])
    assert torch.equal(after[WEIGHTS], before[WEIGHTS])
    assert main(["rebase", "-q", str(trainer.run)]) != 0
    assert "model.trees" in capsys.readouterr().err


def test_the_click_rate_of_a_forgotten_value_is_removed_for_good(home: Path, tmp_path: Path) -> None:
    """Also from the optimizer's file, and if the first data set and checkpoints are deleted
    afterwards.
    """
    shutil.copytree(home, tmp_path / "home")
    log(tmp_path / "later.parquet", seed=6)
    trainer = train(make_recipe(tmp_path / "home", run=str(tmp_path / "run"), average={"decay": 0.9}))
    pl.DataFrame({"item": ["i3"]}).write_csv(tmp_path / "values.csv")
    assert main(["forget", "-q", str(trainer.run), str(tmp_path / "values.csv")]) == 0
    stored = checkpoint.load(periods.only_checkpoint(periods.of_number(trainer.run, 1)))
    rates = stored.network["score.trees.rates"]
    assert torch.equal(stored.optimizer["weights/score.trees.rates"], rates)
    assert trainer.parts.model.network.trees is not None
    before = trainer.parts.model.network.trees.rates
    ((place, code),) = (rates != before).nonzero().tolist()
    assert (place, rates[place, code]) == (0, 0)
    pairs = trainer.parts.model.network.trees.pair_rates
    of_item = trainer.parts.model.network.trees.pairs[pairs[:, 0].long(), 0] == place
    has_code = of_item & (pairs[:, 1] == code)
    assert has_code.any()
    assert torch.equal(stored.network["score.trees.pair_rates"], pairs[~has_code])
    assert torch.equal(stored.optimizer["weights/score.trees.pair_rates"], pairs[~has_code])
    clicks = pl.read_parquet(home / "log.parquet").filter(pl.col("item") == "i3")["label"].mean()
    assert before[place, code] == pytest.approx(clicks, abs=0.1)
    shutil.rmtree(tmp_path / "home" / "data")
    shutil.rmtree(trainer.run / "checkpoints")
    assert main(["check", "-q", str(trainer.run)]) == 0
    assert main(["continue", "-q", str(trainer.run), str(tmp_path / "later.parquet")]) == 0
    with open_run(trainer.run) as trained:
        assert torch.equal(trained.model.network.state_dict()["score.trees.rates"], rates)
    pl.DataFrame({"item": ["i4"]}).write_csv(tmp_path / "values.csv")
    assert main(["forget", "-q", str(trainer.run), str(tmp_path / "values.csv")]) == 0


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [
        *(
            ("nodes", (0, place), value)
            for place, value in ((0, 5), (0, -7), (0, 0.5), (0, 1e30), (1, 1), (1, 0.5))
        ),
        *(("nodes", (0, 2), value) for value in (0, 0.5, 99, -90)),
        *(("sets", (0,), value) for value in (0, 1 << 24, 0.5, -0.5)),
        *(("trees", (0, place), value) for place, value in ((0, 6), (0, 0.5), (1, 0), (1, 2), (1, 0.5))),
        ("rates", (0, 0), 2),
        *(("pairs", (0, place), value) for place, value in ((0, 2), (1, -1), (0, 0.5), (2, 1.5), (2, -1))),
        *(
            ("pair_rates", (0, place), value)
            for place, value in ((0, 1), (1, 3), (1, 0.5), (2, 1 << 24), (3, 1.5))
        ),
        *(("edges", (0, place), value) for place, value in ((0, 0), (0, 2), (0, 1.5), (1, 4))),
    ],
)
def test_invalid_trees_have_a_fault(array: str, place: tuple[int, ...], value: float) -> None:
    trees = TreeMembers(1000)
    trees.set_features((("item", False),), 1)
    trees.resize(TreeSizes(trees=1, nodes=1, sets=1, pairs=1, pair_rates=2, edges=2))
    trees.pairs[0], trees.pair_rates[:, 1] = torch.tensor([0.0, 1, 0.5]), torch.tensor([1, 2])
    trees.edges[:, 0], trees.edges[1, 1] = 1, 3
    trees.trees[0], trees.nodes[0] = torch.tensor([4.0, 1]), torch.tensor([-1.0, 0, -1, -2])
    trees.sets[0] = -8
    assert not trees.fault()
    trees.nodes = trees.nodes.clone()
    getattr(trees, array)[place] = value
    assert trees.fault()


def test_damaged_trees_are_refused_by_every_reader(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have the right hashes, and their numbers are finite."""
    # imports ignore an entry that is no text
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path])
    (tmp_path / "lightgbm.py").write_text("raise OSError('a file of the working directory')")
    monkeypatch.chdir(tmp_path)
    trainer = train(make_recipe(home, run=str(tmp_path / "run"), max_steps=3))
    assert trainer.parts.model.network.trees is not None
    assert trainer.parts.model.network.trees.counts.all()
    with open_run(trainer.run) as trained:
        export(trained, tmp_path / "export")
    scorer = Scorer.open(tmp_path / "export")
    frame = pl.read_parquet(home / "log.parquet")
    scores, manifest = scorer.score(frame), ExportManifest.read(tmp_path / "export")
    delta = tmp_path / "delta"
    assert write_delta(ExportedModel.open(tmp_path / "export"), tmp_path / "export", delta) == 0

    def damaged(folder: Path) -> dict[str, ExportedFile]:
        tensors = {
            name: tensor.clone() for name, tensor in read_tensors(folder / "network.safetensors").items()
        }
        tensors[NODES][0, 2] = 99
        write_tensors(folder / "network.safetensors", tensors)
        name = "manifest.json" if folder != delta else "delta.json"
        return {path: each for path, each in files_of(folder).items() if path != name}

    manifest.model_copy(update={"files": damaged(tmp_path / "export")}).write(tmp_path / "export")
    with refuses(ExportError, "score.trees nodes"):
        Scorer.open(tmp_path / "export")
    assert main(["check", "-q", str(tmp_path / "export")]) == 2
    content, files = DeltaManifest.read(delta), damaged(delta)
    of_export = content.manifest.files | {"network.safetensors": files["network.safetensors"]}
    later = content.manifest.model_copy(update={"files": of_export})
    content = content.model_copy(update={"files": files, "manifest": later})
    write_sealed(delta / "delta.json", content.to_dict())
    with refuses(ExportError, "score.trees nodes"):
        scorer.update(delta)
    assert main(["check", "-q", str(delta)]) == 2
    np.testing.assert_array_equal(scorer.score(frame), scores)


def test_one_class_in_validation_gives_an_ensemble_without_trees(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet").with_columns(time=pl.int_range(pl.len()))
    one = (pl.col("time") >= 900) & (pl.col("time") < 1200)
    frame.with_columns(label=pl.when(one).then(0).otherwise("label")).write_parquet(
        tmp_path / "log.parquet"
    )
    content = make_recipe(tmp_path).to_dict()
    content["data"]["source"]["schema"]["time"] = "time"
    content["data"]["split"] = {"by": "time", "valid": "300s", "test": "300s"}
    recipe = Recipe.from_dict(content)
    prepare(recipe.data)
    trainer = train(recipe)
    weights = [row["weight"] for row in trainer.state.evaluations[-1]["members"]]
    assert weights == pytest.approx([0.25] * 4 + [0] * 6)
    trees = trainer.parts.model.network.trees
    assert trees is not None
    assert not len(trees.leaves)


def test_random_labels_stay_random_with_a_unique_value_per_row(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet", rows=12_000, random=True)
    unique = frame.with_columns(visit=pl.int_range(pl.len()).cast(pl.String).reverse())
    unique.write_parquet(tmp_path / "log.parquet")
    content = make_recipe(tmp_path).to_dict()
    content["data"]["source"]["schema"]["sparse"].append({"name": "visit"})
    content["data"]["split"] = {"valid": 0.1, "test": 0.5}
    recipe = Recipe.from_dict(content)
    test = Trainer(recipe, prepare(recipe.data)).train()["test"]
    assert_chance(test["auc"], test["positives"], test["samples"], 0.01)


def test_several_ranks_have_no_trees(home: Path) -> None:
    dataset, mesh = Dataset.open(home / "data"), replace(Mesh.alone(), ranks=2)
    content = make_recipe(home).to_dict()
    assert choose_defaults(Recipe.from_dict(content), {}, dataset)["model.trees"] > 0
    assert (
        resolve(Recipe.from_dict(content), dataset, mesh, named={"model.members": 4}).recipe.model.trees
        == 0
    )  # type: ignore[attr-defined]
    with refuses(ConfigError, "model.trees 1,000 2 ranks"):
        resolve(Recipe.from_dict(content), dataset, mesh)


START = """
import signal, sys
from stratarec.data.dataset.dataset import Dataset
from stratarec.models.zoo.trees import TreeMembers
from stratarec.recipe import Recipe
from stratarec.training.steps.trees import TreeFit
trees, recipe = TreeMembers(1000), Recipe.load(sys.argv[1])
trees.set_features((("item", False), ("tags", True), ("shop", False)), 1)
fit = TreeFit(trees, Dataset.open(recipe.data.path), recipe.train)
print(fit._process.pid, flush=True)
signal.pause()
"""


def test_trees_are_not_fitted_after_the_process_of_the_networks_was_killed(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "lightgbm.py").write_text("import time; time.sleep(600)")
    (tmp_path / "recipe.yaml").write_text(json.dumps(make_recipe(home).to_dict()))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", START, str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as networks:
        assert networks.stdout is not None
        trees = os.pidfd_open(int(networks.stdout.readline()))
        networks.kill()
    try:
        assert select.select([trees], [], [], 60)[0]
    finally:
        os.close(trees)


def test_a_full_disk_is_reported_before_training(
    home: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    fill_disk(small_disk / "filler", 1 << 14)
    trainer = Trainer(make_recipe(home), Dataset.open(home / "data"))
    with refuses(StorageError, f"{small_disk} space"):
        trainer.train()
    assert not trainer.state.step


def test_a_disk_that_is_full_later_does_not_matter(
    home: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trees are not written to the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    recipe, trees = make_recipe(home), TreeMembers(1000)
    trees.set_features((("item", False), ("tags", True), ("shop", False)), 1)
    fit = TreeFit(trees, Dataset.open(recipe.data.path), recipe.train)
    with suppress(OSError):  # the space that the removed file of samples takes is not counted
        fill_disk(small_disk / "filler", 0)
    assert fit.finish(SilentProgress()) == ""
    fit.close()
    assert trees.counts.all()


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "-9 killed memory"),
        ("def Dataset(*_, **__): raise MemoryError('no more')", "1 MemoryError no more"),
    ],
)
def test_too_little_memory_for_trees_loses_no_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, message: str
) -> None:
    (tmp_path / "lightgbm.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = train_without_trees(home, tmp_path)
    assert not missing(message, trainer.state.may_differ[0][1])
    assert main(["check", "-q", str(trainer.run)]) == 0


def train_without_trees(home: Path, root: Path, **options: Any) -> Trainer:
    trainer = train(make_recipe(home, run=str(root / "run"), max_steps=20, **options))
    assert [row["weight"] for row in trainer.state.evaluations[-1]["members"][4:]] == [0] * 6
    return trainer


def test_a_missing_library_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    (tmp_path / "lightgbm.py").write_text('raise OSError("libgomp.so.1: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    train_without_trees(home, tmp_path)
    assert any("lightgbm does not load (libgomp.so.1" in line for line in said)


def test_samples_that_do_not_fit_into_memory_are_not_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("stratarec.training.steps.trees.memory_bytes", lambda: 1 << 12)
    train_without_trees(home, tmp_path)
    assert any("no trees are fitted: their samples take" in line for line in said)


def test_a_limit_of_seconds_may_end_before_the_first_tree(
    home: Path, tmp_path: Path, said: list[str]
) -> None:
    trainer = train_without_trees(home, tmp_path, tree_seconds=0)
    assert any("no trees are fitted: train.tree_seconds is 0" in line for line in said)
    assert "tree_seconds" in trainer.state.may_differ[0][1]
    _, scores = agreeing_scores(trainer.run, home / "log.parquet", tmp_path, rtol=1e-6)
    assert len(set(scores.tolist())) > 1


class SlowBooster:
    """Booster whose loss falls with each tree, of which each takes some milliseconds."""

    def __init__(self) -> None:
        self.trees = 0

    def update(self) -> bool:
        time.sleep(0.002)
        self.trees += 1
        return False

    def current_iteration(self) -> int:
        return self.trees

    def eval_valid(self) -> list[tuple[str, str, float]]:
        return [("valid", "binary_logloss", 1 / self.trees)]


def test_a_deadline_ends_the_growth_and_keeps_the_trees_until_then() -> None:
    count, is_limited = _grow(SlowBooster(), time.monotonic() + 0.2, 10_000, is_validated=True)
    assert is_limited
    assert 1 <= count <= 100
    assert _grow(SlowBooster(), time.monotonic() + 60, 7, is_validated=True) == (7, False)


@pytest.mark.parametrize("rounds", [0, 40])
def test_draws_that_split_no_leaf_do_not_end_the_growth(rounds: int) -> None:
    """Of three features, two are constant, and a tree of extremely randomized trees compares one
    feature.
    """
    draws = np.random.default_rng(0)
    rows = np.zeros((2000, 3), np.float32)
    rows[:, 0] = draws.normal(size=2000)
    label = (draws.random(2000) < 1 / (1 + np.exp(-2 * rows[:, 0]))).astype(np.float32)
    part = {"rows": rows, "label": label, "weight": np.ones(2000, np.float32)}
    request = {f"{split}_{name}": array for split in ("train", "valid") for name, array in part.items()}
    if rounds:
        request = {key: array for key, array in request.items() if key.startswith("train")}
        request |= {"pairs": no_pairs().pairs, "edges": no_pairs().edges}
    settings = {"sets": [], "categorical": [], "seed": 3, "num_leaves": 31, "seconds": 60, "most": 40}
    request |= {key: np.array(value, np.int64) for key, value in settings.items()}
    models = fit(request | {"rounds": np.full(6, rounds)})["models"]
    assert [model.decode().count("\nTree=") for model in models] == [40] * 5 + [0]


def test_an_error_of_lightgbm_is_reported_with_its_last_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightgbm.py").write_text("def Dataset(*_, **__): raise ValueError('bad rows')")
    monkeypatch.syspath_prepend(tmp_path)
    with refuses(TrainingError, "LightGBM ended with 1 ValueError bad rows"):
        train(make_recipe(home, run=str(tmp_path / "run")))
