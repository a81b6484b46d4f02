"""Losses of slates against the log loss on real impressions (Trivago): the order within the list that was shown.

The slate is ``slate_id``, one click-out with its 22 impressions on average. Each seed deals users to splits anew, so
that three seeds test on about 2,900 slates. Every loss has the best of three learning rates of rows, and tests the best
evaluation of that run, both by NDCG@10 within validation users, which is what all three are to be good at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.sessions import ROOT, prepared, recipe, with_run
from stratarec.data.dataset.dataset import Dataset
from stratarec.models.metrics import RankedGroups
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.evaluate import evaluate_split
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

LOSSES = {"pointwise": [], **{kind: [f"train.loss={{kind: {kind}, by: slate_id}}"] for kind in ("softmax", "pairwise")}}
RATES = (0.05, 0.02, 0.005)
COMMON = (
    "train.epochs=4", "train.eval_every=25", "train.threads=1", "train.report=false",
    "train.checkpoint.every_minutes=0", "train.early_stopping={patience: 6, metric: ndcg_at_10}",
    "train.calibration=platt",
)  # fmt: skip


def best_run(loss: str, seed: int, steps: int) -> dict[str, Any]:
    """Means over the slates of the test split, and figures of its probabilities."""
    data = [f"data.split.seed={seed}", f"data.path={ROOT}/data/benchmarks/trivago_slates-{seed}"]
    dataset = prepared("trivago_slates", "auto", *data)
    fields = [*data, *COMMON, *LOSSES[loss], f"train.seed={seed}", f"train.max_steps={steps}"]
    rated = [
        tested(recipe("trivago_slates", "auto", *fields, f"train.embedding.learning_rate={rate}"), dataset)
        | {"rate": rate}
        for rate in RATES
    ]
    return {"seed": seed, "loss": loss, **max(rated, key=lambda run: run["validation"])}


def tested(made: Recipe, dataset: Dataset) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        trainer = Trainer(with_run(made, run), dataset)
        trainer.train()
        with open_run(run) as trained:
            metrics, scored = evaluate_split(
                trained.model, dataset, "test", precision="float32", progress=SilentProgress()
            )
            step = int(trained.checkpoint.name.removeprefix("step-"))
    slates = np.concatenate(list(dataset.session_keys("test")))
    ranked, found = RankedGroups(scored.label, scored.logit, slates), metrics["label"]
    return {
        "validation": max(each["ndcg_at_10"] for each in trainer.state.evaluations),
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
        for loss in LOSSES:
            rows.append(best_run(loss, seed, 20 if quick else 0))
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
    config = {"recipe": "trivago", "fields": list(COMMON), "rates": list(RATES)}
    return {"config": config, "metrics": metrics, "samples": {"rows": rows}}
