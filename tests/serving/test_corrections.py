"""Test that every correction of scores has the same effect through every way of scoring.

Corrections: sampled negatives, class weights, calibration. Ways: `predict` on a split and on a raw
log, `Scorer` by each runtime, a scorer after a delta, ``network.onnx``, and `ClickModel`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from recipes import tiny, train
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.prepare.prepare import prepare
from stratarec.estimator.click_model import ClickModel
from stratarec.models.base import probabilities
from stratarec.models.request import averaged
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.export import write_delta
from stratarec.training.export.export import export
from stratarec.training.predict import predict
from stratarec.training.raw_logs import RawLogs
from stratarec.training.run.open_run import open_run

TREES = {"kind": "ensemble", "embedding_dim": 3, "members": 2, "member_mlp": [4], "bins": 4, "trees": 1000}
TOWERS = {
    "kind": "dlrm",
    "embedding_dim": 4,
    "bottom_mlp": [4],
    "top_mlp": [8],
    "towers": {"plan": [["item"], ["b"]]},
}
CASES: dict[str, dict[str, Any]] = {
    "trees-negatives-platt": {"model": TREES, "negatives": 0.3, "train": {"calibration": "platt"}},
    "trees-weights": {"model": TREES, "train": {"class_weight": "balanced"}},
    "towers-negatives-isotonic": {"model": TOWERS, "negatives": 0.3, "train": {"calibration": "isotonic"}},
    "labels-weights": {"labels": ["label", "other"], "train": {"class_weight": {"other": 0.2}, "calibration": "none"}},
    "lr-weights-bf16": {"model": {"kind": "lr"}, "train": {"class_weight": {"label": 9.0}, "precision": "bf16"}},
}  # fmt: skip


def log(path: Path, rows: int, seed: int) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    item, x = draws.integers(0, 12, rows), draws.normal(size=rows)
    click = draws.random(rows) < 0.05 + 0.3 * (item % 3 == 0) * (x > 0)
    other = draws.random(rows) < 0.5
    frame = pl.DataFrame(
        {"item": item, "b": draws.integers(0, 4, rows), "x": x, "label": click, "other": other}
    )
    frame = frame.with_columns(pl.col("label", "other").cast(pl.Int64))
    frame.write_parquet(path)
    return frame


def make_recipe(root: Path, case: dict[str, Any]) -> Recipe:
    labels = {"labels": case["labels"]} if "labels" in case else {"label": "label"}
    schema = {**labels, "dense": [{"name": "x"}], "sparse": [{"name": "item"}, {"name": "b"}]}
    config = tiny(root, epochs=2, batch_size=64, eval_every=0, **case["train"])
    config["data"] |= {
        "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema},
        "split": {"valid": 0.2, "test": 0.2, "negatives": case.get("negatives", 1.0)},
        "vocabulary": {"min_count": 1},
    }
    return Recipe.from_dict(config | ({"model": case["model"]} if "model" in case else {}))


def of_run(run: Path, rows: Path, root: Path) -> NDArray[np.float32]:
    """Return the scores of `predict` on a raw log, which must be those on the test split."""
    with open_run(run) as trained:
        if trained.dataset.samples("test"):
            predict(trained, "test", root / "test.parquet", SilentProgress())
        logs = RawLogs(trained, [str(rows)])
        scores = probabilities(np.concatenate([part.logits for part in logs.scored(SilentProgress())]))
    if not (root / "test.parquet").exists():
        return scores
    known = pl.read_parquet(root / "test.parquet")
    split = known.select(pl.col(r"^score.*$")).to_numpy().squeeze()
    np.testing.assert_allclose(split, scores[known["row"].to_numpy() - 1], rtol=1e-6)
    (root / "test.parquet").unlink()
    return scores


def by_onnx_file(folder: Path, scorer: Scorer, frame: pl.DataFrame) -> NDArray[np.float32]:
    """Return the scores of ``network.onnx``, computed as README.txt of an export describes."""
    import onnxruntime

    model = scorer._model
    dense, sparse = model.encoder.encode(frame)
    pooled, _ = model.tables.look_up(averaged(sparse, model.network.weighted_means))
    session = onnxruntime.InferenceSession(folder / "network.onnx", providers=["CPUExecutionProvider"])
    given = {"dense": model.network.inputs(dense, sparse).numpy(), "pooled": pooled.numpy()}
    scores: NDArray[np.float32] = session.run(["score"], given)[0]
    return scores


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_scoring_has_every_correction(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, path = CASES[name], tmp_path / "log.parquet"
    frame = log(path, 1500, 1)
    recipe = make_recipe(tmp_path, case)
    prepare(recipe.data)
    train(recipe)
    run, is_float32 = Path(recipe.train.run), recipe.train.precision == "float32"
    expected = of_run(run, path, tmp_path)
    clicks = frame[case.get("labels", ["label"])].mean().to_numpy().squeeze()
    np.testing.assert_allclose(expected.mean(axis=0), clicks, rtol=0.35)
    with open_run(run) as trained:
        assert any(trained.model.network.correction)
        export(trained, tmp_path / "export", onnx=is_float32)
    scorer = Scorer.open(tmp_path / "export", runtime="torch")
    np.testing.assert_allclose(scorer.score(frame), expected, rtol=1e-6 if is_float32 else 1e-2)
    if not is_float32:
        return
    np.testing.assert_allclose(by_onnx_file(tmp_path / "export", scorer, frame), expected, rtol=1e-5)
    np.testing.assert_allclose(Scorer.open(tmp_path / "export").score(frame), expected, rtol=1e-5)
    if "labels" in case:
        return
    monkeypatch.setattr(write_delta, "_MOST", 1.0)
    log(tmp_path / "later.parquet", 200, 2)
    assert main(["continue", "-q", str(run), str(tmp_path / "later.parquet")]) == 0
    options = ["-o", str(tmp_path / "later"), "--since", str(tmp_path / "export")]
    assert main(["export", "-q", str(run), *options]) == 0
    scorer.update(tmp_path / "later.delta")
    later = of_run(run, path, tmp_path)
    assert math.dist(later, expected) > 0.01
    np.testing.assert_allclose(scorer.score(frame), later, rtol=1e-6)


def test_an_estimator_has_the_correction_of_its_trees(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet", 1500, 1)
    recipe = make_recipe(tmp_path, CASES["trees-weights"])
    model = ClickModel(recipe).fit(frame.drop("other"), label="label")
    # Few trees pull the clicked rows toward the weighted rate of one half: the mean of four seeds
    # is 16 to 21 % below the rate of clicks (7 % without weights). Without the correction it is
    # five times that rate.
    assert model.predict_proba(frame)[:, 1].mean() == pytest.approx(frame["label"].mean(), rel=0.35)
