"""Test `train.refit`: the second phase of a run, which trains the tested model on validation and
test samples, too.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from training.test_trees import log, make_recipe

from errors import missing, refuses
from recipes import agreeing_scores, assert_same_model, measure_briefly, start, tiny, train
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SPLITS
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError, DatasetError, Interrupted
from stratarec.estimator.click_model import ClickModel
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training import checkpoint
from stratarec.training.build import new_model
from stratarec.training.continual.chain import revert
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.evaluate import ScoredSamples, fit, score_split
from stratarec.training.resolve import check_refit, resolve
from stratarec.training.run import periods
from stratarec.training.run.build_run import Run
from stratarec.training.run.open_run import open_run
from stratarec.training.run.run_directory import read_recipe, read_result, write_result
from stratarec.training.steps.members import select_weights
from stratarec.training.steps.step import TrainPipeline, loader_config
from stratarec.training.torch_setup import build_optimizer
from stratarec.training.trainer import Trainer

CONFIG: dict[str, Any] = {"epochs": 1, "refit": True, "average": {"decay": 0.9}}
SCHEDULE = {"learning_rate": 0.01, "schedule": {"kind": "polynomial"}}


def recipe_of(root: Path, data: Path, **changes: Any) -> Recipe:
    content = with_values(
        tiny(data, **{**CONFIG, "dense": SCHEDULE, **changes}), {"train.run": str(root / "run")}
    )
    return Recipe.from_dict(content)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refit")
    prepare(Recipe.from_dict(tiny(root)).data)
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(recipe_of(tmp_path_factory.mktemp("whole"), data)).run


def served(run: Path) -> Path:
    result = read_result(run)
    assert result is not None
    return result.served(run)


class At(SilentProgress):
    """Calls a function at one step of the refit."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self._step = step
        self._call = call
        self._left = 0

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self._left = self._step if task == "refit" else 0

    def advance(self, amount: int, note: str = "") -> None:
        self._left -= 1
        if not self._left:
            self._call()


def crash() -> None:
    raise OSError("the process ends here")


def test_the_phase_continues_the_tested_model_on_the_held_out_samples(
    run: Path, data: Path, tmp_path: Path
) -> None:
    plain = train(recipe_of(tmp_path, data, refit=False)).run
    result, other = read_result(run), read_result(plain)
    assert result is not None
    assert result.refit is not None
    assert other is not None
    assert (result.test, result.checkpoint) == (other.test, other.checkpoint)
    assert_same_model(result.tested(run), other.served(plain))
    dataset = Dataset.open(data / "data")
    assert result.refit.samples == dataset.samples("valid") + dataset.samples("test")
    # The same steps without a loop.
    recipe = read_recipe(run / "refit")
    assert recipe.train.dense.schedule.total_steps == result.refit.steps
    model = new_model(recipe, dataset.complete(), None, "reference")
    optimizer, loader = build_optimizer(recipe.train.dense, model.network), loader_config(recipe.train)
    pipeline = TrainPipeline(
        model, optimizer, recipe.train, Loader(dataset.joined(("valid", "test")), "train", loader)
    )
    checkpoint.continue_from(
        result.tested(run), model, optimizer, pipeline.average, read_recipe(run).train.embedding
    )
    pipeline.earlier = int(result.checkpoint.removeprefix("step-"))
    for step, batch in enumerate(pipeline.loader.batches(0)):
        pipeline.train(step, batch)
    with pipeline.average.shown():
        state = {
            "step": step + 1,
            "training": checkpoint.read_state(served(run))["training"],
            "identity": {},
        }
        state["identity"] = checkpoint.read_state(served(run))["identity"]
        tensors = {
            **checkpoint.optimizer_tensors(optimizer),
            **checkpoint.average_tensors(pipeline.average),
        }
        expected = checkpoint.save(
            tmp_path / "by-hand", model=model, optimizer=tensors, state=state, previous=None
        )
    names = ("network.safetensors",)
    assert all((expected / name).read_bytes() == (served(run) / name).read_bytes() for name in names)
    model.embeddings.close()


def test_the_model_that_is_used_has_a_calibration_by_validation_and_test_samples(
    data: Path, tmp_path: Path
) -> None:
    run = train(recipe_of(tmp_path, data, calibration="platt")).run
    result = read_result(run)
    assert result is not None
    with open_run(run, tested=True) as tested:
        assert tested.maps == result.calibration
        tested.model.network.calibration = None
        samples = [
            score_split(tested.model, tested.dataset, split, precision="float32", progress=SilentProgress())
            for split in SPLITS[1:]
        ]
    assert result.calibration == fit(("platt",), samples[0])
    with open_run(run) as used:
        assert used.maps == result.refit_calibration == fit(("platt",), ScoredSamples.joined(samples))
    assert main(["export", str(run), "-o", str(tmp_path / "export")]) == 0
    assert Scorer.open(tmp_path / "export").manifest.calibration == result.refit_calibration


def test_the_parts_of_the_first_phase_are_released_before_the_second_phase(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models together could need more memory than the machine has."""
    recipe = recipe_of(tmp_path, data, max_steps=2)
    trainer = Trainer(recipe, Dataset.open(recipe.data.path))
    build, models, alive = trainer.build, list[Any](), list[Any]()

    def first() -> Run:
        parts = build()
        models.append(weakref.ref(parts.model))
        return parts

    def second(*args: Any, **options: Any) -> Run:
        gc.collect()
        alive.append(models[0]())
        raise OSError("the second phase begins")

    trainer.build = first  # type: ignore[method-assign]
    monkeypatch.setattr("stratarec.training.run.refit.build_run", second)
    with pytest.raises(OSError, match="second phase begins"):
        trainer.train()
    assert alive == [None]


@pytest.mark.parametrize("step", [1, 10], ids=["before a checkpoint", "after a checkpoint"])
def test_a_process_that_ended_in_the_phase_resumes_to_the_same_bits(
    run: Path, data: Path, tmp_path: Path, step: int
) -> None:
    recipe = recipe_of(tmp_path, data)
    with pytest.raises(OSError, match="ends here"):
        train(recipe, progress=At(step, crash))
    unfinished = read_result(recipe.run)
    assert unfinished is not None
    assert unfinished.refit is None
    with open_run(recipe.run) as trained:  # until the phase has ended, the tested model is used
        assert trained.checkpoint == unfinished.tested(recipe.run)
    train(recipe, resume=True)
    assert_same_model(served(recipe.run), served(run))
    result = read_result(recipe.run)
    assert result is not None
    # Killed after the last checkpoint of the phase, before the result.
    write_result(
        recipe.run, result.model_dump(mode="json", exclude_unset=True, exclude={"format", "refit"})
    )
    train(recipe, resume=True)
    assert_same_model(served(recipe.run), served(run))
    assert read_result(recipe.run) == result


def test_ctrl_c_writes_a_checkpoint_of_the_phase(run: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, data, checkpoint={"every_minutes": 0})
    with pytest.raises(Interrupted, match="refit"):
        train(recipe, progress=At(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    (stopped,) = checkpoint.list_checkpoints(recipe.run / "refit" / "checkpoints")
    assert checkpoint.read_state(stopped)["training"]["phase"] == "refit"
    train(recipe, resume=True)
    assert_same_model(served(recipe.run), served(run))


def test_a_pass_over_seen_samples_has_a_tenth_of_the_rates_and_periods_have_all(tmp_path: Path) -> None:
    """`train.plateau` multiplies the rates of the pass and of later periods."""
    log(tmp_path / "log.parquet")
    plateau = {"patience": 1, "metric": "auc", "factor": 0.5}
    settings = {
        "refit": True,
        "epochs": 3,
        "eval_every": 6,
        "plateau": plateau,
        "checkpoint": {"every_minutes": 0},
    }
    recipe = Recipe.from_dict(with_values(make_recipe(tmp_path, **settings).to_dict(), {"model.trees": 0}))
    prepare(recipe.data)
    whole = train(
        Recipe.from_dict(with_values(recipe.to_dict(), {"train.run": str(tmp_path / "whole")}))
    ).run
    with pytest.raises(Interrupted, match="refit"):
        train(recipe, progress=At(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    run = train(recipe, resume=True).run
    assert_same_model(served(run), served(whole))
    assert checkpoint.read_state(served(run))["tables"]["changes"] == [[0, 0.1]]
    rate = read_recipe(run / "refit").train.embedding.learning_rate
    halvings = np.log2(recipe.train.embedding.learning_rate / rate)
    assert halvings == round(halvings) > 0
    log(tmp_path / "later.parquet", 300, seed=6)
    list(continue_run(run, [str(tmp_path / "later.parquet")], SilentProgress()))
    period = periods.latest(run)
    assert period is not None
    assert read_recipe(period).train.embedding.learning_rate == rate
    assert checkpoint.read_state(periods.only_checkpoint(period))["tables"]["changes"] == []
    revert(run)
    assert periods.latest(run) is None


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(run: Path, data: Path, tmp_path: Path) -> None:
    path, recipe = tmp_path / "recipe.json", recipe_of(tmp_path, data)
    path.write_text(json.dumps(recipe.to_dict()))
    child = start(path)
    while child.poll() is None and not checkpoint.list_checkpoints(recipe.run / "refit" / "checkpoints"):
        pass
    child.kill()
    child.communicate()
    child = start(path)
    child.communicate()
    assert child.returncode == 0
    assert_same_model(served(recipe.run), served(run))


def test_a_finished_run_is_refitted_later_and_again_when_it_gets_more_steps(
    run: Path, data: Path, tmp_path: Path
) -> None:
    train(recipe_of(tmp_path, data, refit=False))
    later = train(recipe_of(tmp_path, data), resume=True).run
    assert_same_model(served(later), served(run))
    # With constant schedules, a longer run continues a shorter one.
    constant = {"dense": {"learning_rate": 0.01}, "average": {"decay": 0.0}}
    train(recipe_of(tmp_path / "short", data, **constant))
    longer = train(recipe_of(tmp_path / "short", data, **constant, epochs=2), resume=True).run
    at_once = train(recipe_of(tmp_path / "long", data, **constant, epochs=2)).run
    assert_same_model(served(longer), served(at_once))
    result = read_result(longer)
    assert result is not None
    assert result.refit is not None
    assert result.refit.samples == sum(map(Dataset.open(data / "data").samples, SPLITS))


def test_commands_say_what_the_model_has_seen(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", str(run), "--split", "test", "--json"])
    seen = json.loads(capsys.readouterr().out)
    assert seen["test"]["trained"]
    assert "refit" in seen["model"]
    main(["evaluate", str(run), "--split", "valid"])
    assert "trained on the valid split" in capsys.readouterr().out
    main(["explain", str(run), "--json", "--samples", "50", "--repeats", "1"])
    assert "refit" not in json.loads(capsys.readouterr().out)["model"]  # the model has not seen the split
    main(["explain", str(run), str(data / "data"), "--json", "--samples", "50", "--repeats", "1"])
    assert "refit" not in json.loads(capsys.readouterr().out)["model"]
    main(["check", str(run)])
    assert f"refit, {served(run).name}: " in capsys.readouterr().out
    with open_run(run, tested=True) as trained:
        assert trained.trained_splits == ("train",)


def test_a_new_run_starts_from_the_tested_model(run: Path, data: Path, tmp_path: Path) -> None:
    starts = []
    for name, earlier in (("refitted", run), ("plain", train(recipe_of(tmp_path, data, refit=False)).run)):
        recipe = recipe_of(tmp_path / name, data, refit=False, max_steps=1)
        Trainer(recipe, Dataset.open(data / "data")).train(earlier=earlier)
        starts.append(recipe.run / "checkpoints" / "step-00000001")
    assert_same_model(*starts)


def test_an_ensemble_is_refitted_with_more_trees_and_has_the_same_scores_everywhere(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet")
    recipe = make_recipe(tmp_path, refit=True, epochs=3)
    dataset = prepare(recipe.data)
    with pytest.raises(OSError, match="ends here"):
        train(recipe, progress=At(2, crash))
    run = train(recipe, resume=True).run
    whole = Recipe.from_dict(with_values(recipe.to_dict(), {"train.run": str(tmp_path / "whole")}))
    assert_same_model(served(train(whole).run), served(run))
    counts = []
    for tested in (True, False):
        with open_run(run, tested=tested) as trained:
            trees = trained.model.network.trees
            assert trees is not None
            counts.append(trees.counts)
            score = trained.model.network.score
            weights = score.out.weights.numpy().copy()
            assert weights[4:].sum() > 0
            if tested:
                score.separate = True
                options: dict[str, Any] = {"precision": "float32", "progress": SilentProgress()}
                splits = [score_split(trained.model, dataset, split, **options) for split in SPLITS[1:]]
                both = ScoredSamples.joined(splits)
                used = both.logit.std(axis=0) > 0
                expected = np.zeros(len(weights))
                expected[used] = select_weights(
                    both.logit[:, used], both.label, np.ones(len(both.label)), trees=int(used[4:].sum())
                )
    result = read_result(run)
    assert result is not None
    assert not result.calibration
    np.testing.assert_allclose(weights, expected, atol=2e-3)
    growth = len(frame) / dataset.samples("train")
    np.testing.assert_array_equal(counts[1], np.rint(growth * counts[0]))
    agreeing_scores(run, tmp_path / "log.parquet", tmp_path, rtol=1e-6)
    # A period continues the refitted model, and its removal restores it.
    log(tmp_path / "later.parquet", 300, seed=6)
    list(continue_run(run, [str(tmp_path / "later.parquet")], SilentProgress()))
    revert(run)
    with open_run(run) as trained:
        assert trained.checkpoint == served(run)
    main(["evaluate", str(run), str(tmp_path / "log.parquet")])


@pytest.mark.parametrize("trees", [0, 40])
def test_an_averaged_ensemble_is_refitted_with_weights_by_its_average(trees: int, tmp_path: Path) -> None:
    log(tmp_path / "log.parquet")
    content = make_recipe(tmp_path, refit=True, epochs=2, average={"decay": 0.99}).to_dict()
    recipe = Recipe.from_dict(with_values(content, {"model.trees": trees}))
    dataset = prepare(recipe.data)
    run = train(recipe).run
    with open_run(run, tested=True) as trained:
        trained.model.network.score.separate = True
        options: dict[str, Any] = {"precision": "float32", "progress": SilentProgress()}
        splits = [score_split(trained.model, dataset, split, **options) for split in SPLITS[1:]]
    both = ScoredSamples.joined(splits)
    used = both.logit.std(axis=0) > 0
    expected = select_weights(
        both.logit[:, used], both.label, np.ones(len(both.label)), trees=int(used[4:].sum()) if trees else 0
    )
    with open_run(run) as trained:
        np.testing.assert_allclose(
            trained.model.network.score.out.weights.numpy()[used], expected, atol=2e-3
        )
    agreeing_scores(run, tmp_path / "log.parquet", tmp_path, rtol=1e-6)


def test_an_estimator_is_refitted_unless_validation_samples_are_passed(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet", 400)
    recipe = with_values(make_recipe(tmp_path, refit=True, epochs=1).to_dict(), {"model.trees": 0})
    assert "refit" in ClickModel(recipe).fit(frame, label="label").result_
    assert "refit" not in ClickModel(recipe).fit(frame, label="label", valid=frame[:100]).result_


def test_impossible_refits_are_refused(data: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(data / "data")
    with refuses(ConfigError, "train.refit"):
        resolve(recipe_of(tmp_path, data), dataset.joined(("train",)), Mesh.alone())
    with_negatives = with_values(recipe_of(tmp_path, data).to_dict(), {"data.split.negatives": 0.5})
    with refuses(ConfigError, "train.refit data.split.negatives"):
        check_refit(Recipe.from_dict(with_negatives), dataset)


def test_a_plan_names_the_smallest_budget_with_which_a_run_and_its_refit_fit(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_briefly(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(tmp_path, data).to_dict()))

    def least(*words: str) -> int:
        assert main([*words, "memory.dram=1KiB"]) == 2
        return int(re.search(r"memory.dram to at least (\d+)", capfd.readouterr().err)[1])  # type: ignore[index]

    alone = least("plan", str(recipe), "train.refit=false")
    assert main(["plan", str(recipe), f"memory.dram={alone}"]) == 2
    error = capfd.readouterr().err
    assert not missing("memory.dram train.refit", error)
    needed = int(re.search(r"memory.dram to at least (\d+)", error)[1])  # type: ignore[index]
    for budget, code in ((needed, 0), (needed - 1, 2)):
        assert main(["plan", str(recipe), f"memory.dram={budget}"]) == code
        words = [str(recipe), f"memory.dram={budget}", f"train.run={tmp_path / str(budget)}"]
        assert main(["train", *words, "train.max_steps=2"]) == code
        output = capfd.readouterr()
    assert "train.refit" in output.err
    assert main(["plan", str(recipe)]) == 0
    rows = sum(Dataset.open(data / "data").joined(SPLITS).table_rows().values())
    assert f"the refit (train.refit) has {rows:,} rows" in capfd.readouterr().out


def test_values_of_held_out_rows_have_rows_in_the_model_that_is_used(run: Path, data: Path) -> None:
    stored = Dataset.open(data / "data").manifest.vocabularies
    held_out = {name: info.held_out for name, info in stored.items() if info.held_out}
    assert held_out
    with open_run(run) as used, open_run(run, tested=True) as tested:
        for name, count in held_out.items():
            values = used.dataset.vocabulary(name).values.tail(count)
            rows = used.dataset.table_rows()[name]
            assert used.dataset.vocabulary(name).encode(values).tolist() == list(range(rows - count, rows))
            assert tested.dataset.table_rows()[name] == rows - count
            assert (tested.dataset.vocabulary(name).encode(values) < stored[name].tail_buckets).all()
            weights = used.model.embeddings.rows(name, rows - count, rows)["weight"]
            untrained = new_model(used.recipe, used.dataset, None, "untrained")
            assert not np.array_equal(
                untrained.embeddings.rows(name, rows - count, rows)["weight"], weights
            )
            untrained.embeddings.close()


def test_about_half_of_the_lookups_of_held_out_values_train_tail_buckets(data: Path) -> None:
    dataset = Dataset.open(data / "data")
    name = max(dataset.manifest.vocabularies, key=lambda name: dataset.manifest.vocabularies[name].held_out)
    first, tail = dataset.table_rows()[name], dataset.vocabularies[name].tail_buckets

    def ids(view: Dataset) -> Any:
        groups = [
            (number, group)
            for number, shard in enumerate(view.shards("train"))
            for group in range(len(shard.row_groups))
        ]
        return np.concatenate([view.read_row_group("train", *place)[name].to_numpy() for place in groups])

    joined = dataset.joined(SPLITS[1:])
    mixed = ids(joined)
    np.testing.assert_array_equal(mixed, ids(dataset.joined(SPLITS[1:])))
    rows = np.concatenate(
        [ids(Dataset(dataset.path, joined.manifest, rare_share=share)) for share in (0.0, 1.0)]
    )
    own, bucket = np.split(rows, 2)
    is_held_out = own >= first
    assert (bucket[is_held_out] < tail).all()
    np.testing.assert_array_equal(mixed[~is_held_out], own[~is_held_out])
    assert ((mixed == own) | (mixed == bucket)).all()
    assert 0.3 < (mixed == own)[is_held_out].mean() < 0.7


def test_models_before_and_after_the_refit_score_a_data_set_without_new_values(
    run: Path, data: Path, tmp_path: Path
) -> None:
    values = {"data.path": str(tmp_path / "later"), "data.vocabulary.base": str(data / "data")}
    values |= {"data.source.seed": 5, "data.vocabulary.min_count": 10**9}
    later = prepare(Recipe.from_dict(with_values(tiny(data), values)).data)
    stored = Dataset.open(data / "data").manifest.vocabularies
    assert {name: info.held_out for name, info in later.manifest.vocabularies.items()} == {
        name: info.held_out for name, info in stored.items()
    }
    for tested in (False, True):
        with open_run(run, later.path, tested=tested) as trained:
            assert trained.dataset.table_rows() == {
                name: info.rows - tested * info.held_out for name, info in stored.items()
            }
    # With new values, ids mean other values than in the run.
    values |= {"data.path": str(tmp_path / "new"), "data.vocabulary.min_count": 2}
    new = prepare(Recipe.from_dict(with_values(tiny(data), values)).data)
    with refuses(DatasetError, "ids mean other values"):
        open_run(run, new.path)


def test_held_out_values_are_not_evicted_at_once(data: Path) -> None:
    dataset = Dataset.open(data / "data").complete()
    for name in dataset.vocabularies:
        counts = dataset.carried_counts(name)
        assert counts["value"].n_unique() == len(counts)
        assert dataset.vocabulary(name).values.is_in(counts["value"].implode()).all()
