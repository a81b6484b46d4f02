"""Test `ClickModel`, which takes a frame and returns probabilities like scikit-learn's
estimators.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from errors import refuses
from stratarec import ClickModel, Scorer
from stratarec.cli import main
from stratarec.errors import ConfigError, DataError, ExportError, StorageError
from stratarec.estimator.frame_log import FitArguments, split_log

SMALL = {
    "model__embedding_dim": 3,
    "model__members": 2,
    "model__member_mlp": [8],
    "train__epochs": 4,
    "train__threads": 1,
}
NETWORKS = {**SMALL, "model__trees": 0, "train__refit": False}
"""Settings without trees and without a second phase, in half of the time."""


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    draws = np.random.default_rng(0)
    user, item, price = draws.integers(0, 60, 3000), draws.integers(0, 40, 3000), draws.normal(size=3000)
    logit = draws.normal(size=60)[user] + draws.normal(size=40)[item] + price
    click = (draws.random(3000) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    return pl.DataFrame(
        {"user": user, "item": [f"i{each}" for each in item], "price": price, "click": click}
    )


@pytest.fixture(scope="module")
def fit_model(frame: pl.DataFrame) -> ClickModel:
    return ClickModel(**SMALL).fit(frame[:2400], label="click", valid=frame[2400:2700])


def test_it_learns_and_reports_the_metrics_of_scikit_learn(
    fit_model: ClickModel, frame: pl.DataFrame
) -> None:
    test = frame[2700:]
    scores, result = fit_model.predict_proba(test), fit_model.evaluate(test)
    assert scores.shape == (300, 2)
    np.testing.assert_allclose(scores.sum(axis=1), 1)
    assert result["auc"] == pytest.approx(roc_auc_score(test["click"], scores[:, 1]))
    assert result["log_loss"] == pytest.approx(log_loss(test["click"], scores[:, 1]))
    assert result["auc"] > 0.7
    assert fit_model.score(test) == np.mean(fit_model.predict(test) == test["click"].to_numpy())


def test_the_type_of_the_frame_changes_nothing(fit_model: ClickModel, frame: pl.DataFrame) -> None:
    test = frame[2700:].drop("click")
    expected = fit_model.predict_proba(test)
    for other in (
        test.to_arrow(),
        test.to_dict(as_series=False),
        {name: test[name].to_numpy() for name in test.columns},
    ):
        np.testing.assert_array_equal(fit_model.predict_proba(other), expected)


def test_files_are_scored_and_evaluated_like_frames(
    fit_model: ClickModel, frame: pl.DataFrame, tmp_path: Path
) -> None:
    test = frame[2700:]
    test[:100].drop("click").write_csv(tmp_path / "a.csv")
    test[100:].drop("click").write_csv(tmp_path / "b.csv")
    np.testing.assert_array_equal(
        fit_model.predict_proba([tmp_path / "a.csv", str(tmp_path / "b.csv")]),
        fit_model.predict_proba(test),
    )
    for name, write in (
        ("c.csv", "write_csv"),
        ("c.jsonl", "write_ndjson"),
        ("c.parquet", "write_parquet"),
    ):
        getattr(test, write)(tmp_path / name)
        np.testing.assert_array_equal(fit_model.predict(tmp_path / name), fit_model.predict(test))
        assert fit_model.evaluate(tmp_path / name) == fit_model.evaluate(test)
    (tmp_path / "bad.csv").write_text((tmp_path / "a.csv").read_text().replace("\n", "\nx,x,x,x,x\n", 1))
    with refuses(DataError, "bad.csv line 2 5 fields"):
        fit_model.predict_proba(tmp_path / "bad.csv")
    with refuses(DataError, "no such file"):
        fit_model.predict_proba(tmp_path / "missing.csv")


def test_scores_match_those_of_the_commands(
    fit_model: ClickModel, frame: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train, valid, test = frame[:2400], frame[2400:2700], frame[2700:]
    train.write_parquet("train.parquet")
    valid.write_parquet("valid.parquet")
    test.write_parquet("test.parquet")
    content: dict[str, Any] = deepcopy(fit_model.recipe_)
    content["data"] |= {
        "path": "data/clicks",
        "split": {"by": "file", "valid": ["valid.parquet"], "test": []},
    }
    content["data"]["source"]["paths"] = ["train.parquet", "valid.parquet"]
    content["train"]["run"] = "run"
    Path("clicks.yaml").write_text(yaml.safe_dump(content))
    for words in ("prepare clicks.yaml", "train clicks.yaml", "predict run test.parquet -o scores.parquet"):
        assert main(words.split()) == 0
    scores = pl.read_parquet("scores.parquet")
    np.testing.assert_allclose(fit_model.predict_proba(test)[:, 1], scores["score"].to_numpy(), atol=2e-6)


def test_it_is_saved_completely_and_checked(
    fit_model: ClickModel, frame: pl.DataFrame, tmp_path: Path
) -> None:
    expected = fit_model.predict_proba(frame)
    saved = fit_model.save(tmp_path / "model")
    for other in (ClickModel.load(saved), pickle.loads(pickle.dumps(fit_model))):
        np.testing.assert_array_equal(other.predict_proba(frame), expected)
        assert other.get_params() == fit_model.get_params()
    np.testing.assert_allclose(
        Scorer.open(saved / "export").score(frame), expected[:, 1].astype(np.float32)
    )
    with pytest.raises(StorageError, match="it exists"):
        fit_model.save(saved)
    state = (saved / "estimator.json").read_text()
    (saved / "estimator.json").write_text(state.replace('"price"', '"rpice"', 1))
    with pytest.raises(ExportError, match="was changed after it was written"):
        ClickModel.load(saved)


MISTAKES = {
    "a setting that there is not": ({"train__epoch": 3}, {}, ConfigError, "train.epoch"),
    "a setting without a section": ({"epochs": 3}, {}, ConfigError, "epochs"),
    "no such label": ({}, {"label": "clik"}, DataError, "clik"),
    "labels of another length": ({}, {"y": [0, 1]}, DataError, "lengths"),
    "three classes": ({}, {"y": [0, 1, 2] * 1000}, DataError, "binary"),
    "one class": ({}, {"y": [1] * 3000}, DataError, "class 1"),
    "a label that is missing": ({}, {"y": [None, *[0, 1] * 1499, 1]}, DataError, "label row 1"),
    "a negative weight": (
        {},
        {"label": "click", "sample_weight": [1.0, *[-1.0] * 2999]},
        DataError,
        "sample_weight row 2 -1.0",
    ),
    "a weight that is no number": (
        {},
        {"label": "click", "sample_weight": [1.0, 2.0, np.nan, *[1.0] * 2997]},
        DataError,
        "sample_weight row 3",
    ),
    "weights of text": (
        {},
        {"label": "click", "sample_weight": ["a"] * 3000},
        DataError,
        "sample_weight String",
    ),
}


@pytest.mark.parametrize(("settings", "given", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(
    frame: pl.DataFrame,
    settings: dict[str, Any],
    given: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with refuses(error, message):
        ClickModel(**settings).fit(**{"frame": frame, **given})


def test_labels_that_are_passed_as_y_replace_the_label_of_a_recipe(
    fit_model: ClickModel, frame: pl.DataFrame
) -> None:
    recipe = {**fit_model.recipe_, "model": {"kind": "dlrm", "embedding_dim": 4}}
    features, labels = frame[:300].drop("click"), np.where(frame[:300]["click"], "yes", "no")
    model = ClickModel(recipe, train__max_steps=2).fit(features, labels)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.score(features, labels) == np.mean(model.predict(features) == labels)


def test_an_unusable_row_is_named_by_its_position_in_the_frame(
    fit_model: ClickModel, frame: pl.DataFrame
) -> None:
    bad = frame.with_columns(price=pl.Series([*frame["price"][:200], np.inf, *frame["price"][201:]]))
    for given, message in (
        ({"frame": bad}, "the frame, row 201: column 'price': got inf"),
        ({"frame": frame, "valid": bad}, "valid, row 201: column 'price': got inf"),
    ):
        with pytest.raises(DataError, match=message):
            ClickModel(**NETWORKS).fit(**given, label="click")
    with pytest.raises(DataError, match="weight"):
        fit_model.score(frame, sample_weight=["a"] * len(frame))


@pytest.mark.parametrize("kind", ["ensemble", "dlrm"])
def test_a_log_of_numbers_needs_no_tables(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(2000, 3))
    y = (x[:, 0] + np.random.default_rng(1).normal(size=2000) > 0).astype(int)
    options = (
        SMALL
        if kind == "ensemble"
        else {"model__kind": "dlrm", "model__interaction": "cat", "train__threads": 1}
    )
    model = ClickModel(**options).fit(x, y)
    assert roc_auc_score(y, model.predict_proba(x)[:, 1]) > 0.75


@pytest.mark.parametrize("words", [("0", "1"), ("no", "yes")])
def test_labels_may_be_words_in_frames_and_files(
    words: tuple[str, str], frame: pl.DataFrame, tmp_path: Path
) -> None:
    log = frame.with_columns(pl.Series("click", [words[label] for label in frame["click"]]))
    log.write_csv(tmp_path / "log.csv")
    model = ClickModel(**NETWORKS).fit(log, label="click")
    assert model.evaluate(log) == model.evaluate(tmp_path / "log.csv")
    of_file = ClickModel(**NETWORKS).fit(tmp_path / "log.csv", label="click")
    assert of_file.evaluate(log)["auc"] == of_file.evaluate(tmp_path / "log.csv")["auc"] > 0.6


@pytest.mark.slow
def test_it_works_with_the_tools_of_scikit_learn(frame: pl.DataFrame) -> None:
    columns = ["item", "price"]
    x, y = frame.select(columns).to_dict(as_series=False), frame["click"].to_numpy()
    table = np.stack([np.unique(x["item"], return_inverse=True)[1], x["price"]], axis=1)
    steps = Pipeline([("same", FunctionTransformer()), ("model", ClickModel(**SMALL))])
    assert cross_val_score(steps, table, y, cv=2, scoring="roc_auc").mean() > 0.6
    search = GridSearchCV(ClickModel(**SMALL), {"train__max_steps": [1, 30]}, cv=2, scoring="neg_log_loss")
    assert search.fit(table, y).best_params_ == {"train__max_steps": 30}


# Checks of scikit-learn that fail, with the reason.
NOT_HELD = {
    "check_sample_weight_equivalence_on_dense_data": "batches of weighted samples are "
    "not those of repeated ones",
    "check_supervised_y_2d": "labels in a column are taken as they are, without a warning",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Estimator ClickModel does not inherit")
def test_the_checks_of_scikit_learn_pass() -> None:
    pytest.importorskip("sklearn", minversion="1.7")  # 1.6 calls an error about sparse matrices wrong
    check_estimator(ClickModel(**SMALL), expected_failed_checks=NOT_HELD, on_skip=None)


def repeat_users(rows: int = 2000) -> pl.DataFrame:
    """Return a log with times in which users occur several times."""
    draws = np.random.default_rng(1)
    user, item = draws.integers(0, 80, rows), draws.integers(0, 30, rows)
    click = (draws.random(rows) < np.where((user + item) % 3 == 0, 0.8, 0.2)).astype(np.int64)
    moment = pl.Series(np.arange(rows) * 60 + 1_700_000_000)
    return pl.DataFrame(
        {
            "user": [f"u{each}" for each in user],
            "item": [f"i{each}" for each in item],
            "at": moment,
            "click": click,
        }
    ).with_columns(pl.from_epoch("at"))


def test_histories_use_training_rows_and_earlier_rows_of_the_frame(tmp_path: Path) -> None:
    log = repeat_users()
    train, test = log[:1500], log[1500:]
    model = ClickModel(**SMALL | {"train__epochs": 1}).fit(train, label="click")
    (history,) = [
        each["name"]
        for each in model.recipe_["data"]["source"]["schema"]["sparse"]
        if each["kind"] == "history"
    ]
    # The expected lists: the last items of earlier positive rows, including those of the frame if
    # it has labels.
    past: dict[str, list[str]] = {}
    lists = []
    for user, item, click in log.select("user", "item", "click").iter_rows():
        lists.append(past.get(user, [])[-50:])
        past.setdefault(user, []).extend([item] if click else [])
    by_hand = test.with_columns(pl.Series(history, lists[1500:], dtype=pl.List(pl.String)))
    assert model.evaluate(test)["auc"] == pytest.approx(model.evaluate(by_hand)["auc"], abs=1e-6)
    # with a column of histories, and without
    for name, rows in (("log.jsonl", by_hand), ("log.csv", test)):
        getattr(rows, "write_ndjson" if name == "log.jsonl" else "write_csv")(tmp_path / name)
        assert model.evaluate(tmp_path / name) == model.evaluate(rows)
    nothing = test.with_columns(pl.lit([], dtype=pl.List(pl.String)).alias(history))
    assert not np.allclose(model.predict_proba(test), model.predict_proba(nothing))
    first = test[:1]
    np.testing.assert_allclose(model.predict_proba(first), model.predict_proba(by_hand[:1]), rtol=1e-6)
    loaded = ClickModel.load(model.save(tmp_path / "model"))
    for other in (loaded, pickle.loads(pickle.dumps(model))):
        assert other.evaluate(test) == model.evaluate(test)
        np.testing.assert_array_equal(other.predict_proba(test), model.predict_proba(test))
    with refuses(DataError, "'at'"):
        model.predict_proba(test.drop("at"))
    content = bytearray((tmp_path / "model" / "events.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "model" / "events.parquet").write_bytes(content)
    with refuses(ExportError, "events.parquet"):
        ClickModel.load(tmp_path / "model")


@pytest.mark.parametrize("by_time", [False, True])
def test_copies_of_a_row_are_on_one_side_of_the_split(by_time: bool, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    one = pl.DataFrame({"user": draws.integers(0, 300, 3000), "item": draws.integers(0, 60, 3000)})
    y = (draws.random(3000) < 0.2).astype(int)
    place = np.concatenate([np.arange(3000), np.repeat(np.flatnonzero(y), 3)])
    place = place[draws.permutation(len(place))]
    schema = {"label": "label", "sparse": [{"name": "user"}, {"name": "item"}], "dense": []}
    # Copies may have other row numbers and times.
    times = np.sort(draws.integers(1_700_000_000, 1_702_000_000, len(place)))
    frame = one[place].with_columns(row=pl.Series(range(len(place))), ts=pl.Series(times))
    log = FitArguments(frame, y[place], "", None).write(tmp_path / "all.parquet")
    split = {"by": "time", "valid": "1d", "test": "1d"} if by_time else {"by": "fraction"}
    data = {"source": {"schema": schema | ({"time": "ts"} if by_time else {})}, "split": split}
    split_log(data, log, None)
    train, valid = map(pl.read_parquet, data["source"]["paths"])
    assert len(train) + len(valid) == len(place)
    assert 0.05 < len(valid) / len(place) < 0.2
    assert not len(valid.join(train, on=["user", "item"], how="semi"))
    # Without copies, users and items that are equal by chance are drawn like all rows.
    log = FitArguments(one.with_columns(ts=pl.Series(times[:3000])), y, "", None).write(
        tmp_path / "one.parquet"
    )
    data = {"source": {"schema": data["source"]["schema"]}, "split": split}
    split_log(data, log, None)
    assert (
        data["split"] == {"by": "time", "valid": "1d", "test": 0}
        if by_time
        else data["split"]["by"] == "file"
    )
    assert by_time or len(pl.read_parquet(data["source"]["paths"][1])) == round(
        (y == 0).sum() / 10
    ) + round(y.sum() / 10)
