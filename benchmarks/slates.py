"""Losses of slates against the log loss on real impressions (Trivago): the order within the list that was shown.

The same recipe, seed and epochs, three losses; each run is tested at its own best evaluation of NDCG@10 within users.
The slate is ``slate_id``, one click-out with its 22 impressions on average; users are whole in one split. Intervals are
of the bootstrap over the slates of the test split.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.sessions import prepared, recipe, with_run
from stratarec.models.ranking import RankedGroups
from stratarec.progress import SilentProgress
from stratarec.training.evaluation.evaluate import evaluate_split
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

LOSSES = {"pointwise": [], **{kind: [f"train.loss={{kind: {kind}, by: slate_id}}"] for kind in ("softmax", "pairwise")}}
COMMON = (
    "train.epochs=6", "train.threads=1", "train.report=false", "train.checkpoint.every_minutes=0",
    "train.early_stopping={patience: 2, metric: ndcg_at_10}", "train.calibration=platt",
)  # fmt: skip


def slate_ndcg(loss: list[str], seed: int, steps: int) -> dict[str, float]:
    """Means over the slates of the test split, and figures of its probabilities, of one run."""
    dataset = prepared("trivago_slates", "auto")
    fields = [*COMMON, *loss, f"train.seed={seed}", f"train.max_steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        Trainer(with_run(recipe("trivago_slates", "auto", *fields), run), dataset).train()
        with open_run(run) as trained:
            metrics, scored = evaluate_split(
                trained.model, dataset, "test", precision="float32", progress=SilentProgress()
            )
            step = int(trained.checkpoint.name.removeprefix("step-"))
    slates = np.concatenate(list(dataset.session_keys("test")))
    ranked, found = RankedGroups(scored.label, scored.logit, slates), metrics["label"]
    return {
        "ndcg_at_10": float(np.nanmean(ranked.ndcg(10))),
        "mrr": float(np.nanmean(ranked.reciprocal_rank())),
        "auc": found["auc"],
        "log_loss": found["log_loss"],
        "step": step,
    }


def run(quick: bool) -> dict[str, Any]:
    """Three seeds; `quick` has one, of 20 steps."""
    rows = []
    for seed in (1,) if quick else (1, 2, 3):
        for name, loss in LOSSES.items():
            rows.append({"seed": seed, "loss": name, **slate_ndcg(loss, seed, 20 if quick else 0)})
            print(rows[-1], file=sys.stderr, flush=True)

    def of(loss: str, figure: str) -> list[float]:
        return [float(row[figure]) for row in rows if row["loss"] == loss]

    metrics = {f"{figure}_{loss}": mean(of(loss, figure)) for loss in LOSSES for figure in ("ndcg_at_10", "log_loss")}
    for loss in ("softmax", "pairwise"):
        pairs = zip(of(loss, "ndcg_at_10"), of("pointwise", "ndcg_at_10"), strict=True)
        deltas = [mine - other for mine, other in pairs]
        metrics[f"ndcg_at_10_delta_{loss}"] = mean(deltas)
        if len(deltas) > 1:
            metrics[f"ndcg_at_10_delta_{loss}_deviation"] = stdev(deltas)
    return {"config": {"recipe": "trivago", "fields": COMMON}, "metrics": metrics, "samples": {"rows": rows}}
