"""The untuned recipe of `init` on logs of 200,000 to 2 million rows, compared with trees.

As in `small_logs`, a fifth of each log is held out: the last fifth of events in time, a random
fifth of synthetic logs. Here, the commands `init`, `prepare`, `train` and `predict` run as a user
runs them, with one thread. The rivals are LightGBM with native categories, LightGBM on click rates,
and CatBoost. They get the columns that `init` selected, except lists and histories. CatBoost grows
at most 250 trees instead of 2,000, with its default learning rate for that number, and stops after
`MOST_SECONDS` processor seconds. `train.tree_seconds` is two hours, so that other work on the
machine does not end the fit of trees.

`benchmarks/public_logs.py` writes `flights_all`, and ``python -m benchmarks.large_logs DIR FOLDER``
the other logs, with FOLDER as there; STRATAREC_PUBLIC_LOGS names DIR. `globo_1m` has a million
samples of the click log of the recipe ``globo``: clicks and drawn negatives, with counts of earlier
clicks. In the synthetic logs `criteo_*`, values are too many for an ensemble; tables of `small_1m`
have at most 4,000 rows. ``--logs`` and ``--models`` select logs and methods; `LEFT_OUT` are not
measured. Finished parts are stored (`kept`). Seconds are processor seconds of all processes of a
method, without those of `predict`.

Gate: `predict` writes a probability for each held-out row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import polars as pl

from benchmarks import small_logs
from benchmarks.kept import FOLDER, kept
from benchmarks.registry import PeerMissing, import_peer
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.sources.synthetic import SyntheticConfig, SyntheticSource
from stratarec.data.splits import SplitConfig
from stratarec.errors import TrainingError
from stratarec.models.metrics import evaluate_logits

LOGS = {
    "flights_all": "late", "trivago_all": "label", "globo_1m": "label", "small_1m": "label", "criteo_1m": "label",
    "criteo_2m": "label",
}  # fmt: skip
"""Log -> its label column."""
SYNTHETIC = {
    "small_1m": SyntheticConfig(samples=1_000_000, max_rows=4000, session_length=1.0, missing=0.0, seed=1),
    "criteo_1m": SyntheticConfig(samples=1_000_000, session_length=1.0, missing=0.0, seed=1),
    "criteo_2m": SyntheticConfig(samples=2_000_000, session_length=1.0, missing=0.0, seed=1),
}
CLICKS, SAMPLES = 300_000, 1_000_000
"""First clicks of Globo's log of which samples are drawn, and number of the last of these samples,
which are used.
"""
METHODS = ("stratarec", "lightgbm", "lightgbm_encoded", "catboost")
TREES, MOST_SECONDS = 250, 1500.0
"""Limits of CatBoost."""
LEFT_OUT = {
    "globo_1m": ("lightgbm",), "small_1m": ("catboost",), "criteo_1m": ("lightgbm",),
    "criteo_2m": ("lightgbm", "catboost"),
}  # fmt: skip
"""Log -> rivals that have not been measured, for lack of time."""
FIGURES = ("auc", "log_loss", "seconds")
TARGETS = {"auc_gap_worst": 0.0, "log_loss_gap_worst": 0.0}


def run(
    quick: bool, logs: Sequence[str] = tuple(LOGS), models: Sequence[str] = METHODS, seeds: int = 1
) -> dict[str, Any]:
    """Measure the logs; `quick` measures the smallest one without CatBoost."""
    names, methods = (("trivago_all",), METHODS[:-1]) if quick else (logs, models)
    folder = os.environ.get("STRATAREC_PUBLIC_LOGS", "")
    for name in names:
        if not Path(folder, f"{name}.csv").is_file():
            raise PeerMissing(
                f"no {name}.csv in STRATAREC_PUBLIC_LOGS={folder!r}; see benchmarks/large_logs.py"
            )
    rows = [
        {
            "log": name,
            "seed": seed,
            "method": method,
            **_measured(Path(folder, f"{name}.csv"), seed, method),
        }
        for name in names
        for seed in range(seeds)
        for method in methods
        if method not in LEFT_OUT.get(name, ())
    ]
    return {
        "config": {
            "logs": list(names),
            "seeds": seeds,
            "threads": 1,
            "held_out": small_logs.HELD_OUT,
            "catboost_trees": TREES,
            "catboost_seconds": MOST_SECONDS,
            "left_out": LEFT_OUT,
            "targets": TARGETS,
        },
        "metrics": _metrics(rows, names),
        "samples": {"rows": rows},
    }


def _metrics(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Return, for each log, our AUC minus the best rival's, the share by which our log loss is
    below the best rival's, and our seconds over those of the rival with the best log loss; and the
    worst gaps.
    """
    metrics: dict[str, float] = {}
    for name in names:
        of_log = {
            method: {
                key: mean(row[key] for row in rows if (row["log"], row["method"]) == (name, method))
                for key in FIGURES
            }
            for method in dict.fromkeys(row["method"] for row in rows if row["log"] == name)
        }
        if not (ours := of_log.pop("stratarec", None)) or not of_log:
            continue
        best = min(of_log.values(), key=lambda figures: figures["log_loss"])
        metrics[f"auc_gap_{name}"] = ours["auc"] - max(figures["auc"] for figures in of_log.values())
        metrics[f"log_loss_gap_{name}"] = 1 - ours["log_loss"] / best["log_loss"]
        metrics[f"seconds_over_best_{name}"] = ours["seconds"] / best["seconds"]
    gaps = {
        kind: [value for key, value in metrics.items() if key.startswith(kind)]
        for kind in ("auc_gap", "log_loss_gap")
    }
    return metrics | {f"{kind}_worst": min(values) for kind, values in gaps.items() if values}


def _measured(path: Path, seed: int, method: str) -> dict[str, float]:
    """Return the stored or new figures of one method on one log."""
    part = FOLDER / "large_logs" / f"{path.stem}-{seed}-{method}.json"
    part.parent.mkdir(parents=True, exist_ok=True)
    limits = {"catboost": [TREES, MOST_SECONDS]} if method == "catboost" else {}
    about = {"log": path.name, "bytes": path.stat().st_size, **limits}
    result = kept(part, about, partial(_ours if method == "stratarec" else _theirs, path, seed, method))
    print(f"{path.stem} {seed} {method}: {result}", file=sys.stderr, flush=True)
    return result


def _ours(path: Path, seed: int, _method: str) -> dict[str, float]:
    """Run the commands and score what `predict` writes for the held-out rows."""
    label, seconds = LOGS[path.stem], {}
    with tempfile.TemporaryDirectory() as work:
        parts = small_logs.write_parts(path, seed, Path(work))
        commands = {
            "init": ["init", parts.seen.name, "--label", label, "-o", "recipe.yaml"],
            "prepare": ["prepare", "recipe.yaml", f"data.split.seed={seed}"],
            "train": [
                "train", "recipe.yaml", f"data.split.seed={seed}", f"train.seed={seed}", "train.threads=1",
                "train.run=run", "train.report=false", "train.tree_seconds=7200",
            ],
            "predict": ["predict", "run", parts.held_out.name, "-o", "scores.csv"],
        }  # fmt: skip
        one = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS"), "1")
        for name, words in commands.items():
            start = small_logs.processor_seconds()
            subprocess.run(
                [sys.executable, "-m", "stratarec", *words],
                cwd=work,
                env=os.environ | one,
                check=True,
                stdout=2,
            )
            seconds[name] = small_logs.processor_seconds() - start
        held_out = pl.read_csv(parts.held_out, columns=[label], infer_schema_length=None)
        scores = pl.read_csv(Path(work, "scores.csv")).to_series(-1).to_numpy()
    if len(scores) != held_out.height or not ((scores >= 0) & (scores <= 1)).all():
        raise TrainingError(
            f"{path.stem}: predict wrote {len(scores)} scores of {held_out.height} rows, or no rates"
        )
    tested = evaluate_logits(
        held_out[label].to_numpy().astype(np.float32), small_logs.logits(scores)
    ).values
    total = sum(value for name, value in seconds.items() if name != "predict")
    of_commands = {f"seconds_{name}": value for name, value in seconds.items()}
    return {"auc": tested["auc"], "log_loss": tested["log_loss"], "seconds": total, **of_commands}


@lru_cache(maxsize=1)
def _table(path: Path, seed: int) -> small_logs.Table:
    with tempfile.TemporaryDirectory() as work:
        label = LOGS[path.stem]
        return small_logs.read_table(small_logs.write_parts(path, seed, Path(work)), label, seed)


def _theirs(path: Path, seed: int, method: str) -> dict[str, float]:
    import_peer("catboost" if method == "catboost" else "lightgbm")
    table, start = _table(path, seed), small_logs.processor_seconds()
    if method == "catboost":
        scores = small_logs.fit_catboost(table, seed, TREES, MOST_SECONDS)
    else:
        scores = small_logs.RIVALS[method](table, seed)
    seconds = small_logs.processor_seconds() - start
    tested = evaluate_logits(table.label[table.split["test"]].astype(np.float32), scores).values
    return {"auc": tested["auc"], "log_loss": tested["log_loss"], "seconds": seconds}


def write_logs(folder: Path, shared: Path) -> None:
    """Write the synthetic logs, and those from the files of `shared`."""
    for name, config in SYNTHETIC.items():
        frame = pl.concat([chunk.frame for chunk in SyntheticSource(config).chunks(folder)])
        frame.drop("time", "session", "user").write_csv(folder / f"{name}.csv")
    impressions = pl.read_parquet(shared / "trivago_impressions.parquet")
    impressions.sample(fraction=1, shuffle=True, seed=0).write_csv(folder / "trivago_all.csv")
    contexts = ("environment", "deviceGroup", "os", "country", "region", "referrer_type")
    with tempfile.TemporaryDirectory() as work:
        pl.scan_parquet(shared / "globo_clicks.parquet").head(CLICKS).sink_parquet(
            Path(work, "clicks.parquet")
        )
        config = ClicksConfig(
            paths=(f"{work}/clicks.parquet",),
            item="click_article_id",
            time="click_timestamp",
            time_unit="ms",
            contexts=tuple(f"click_{name}" for name in contexts),
            history_length=0,
        )
        chunks = ClicksSource(config, "error", SplitConfig(valid=0.0, test=0.0)).chunks(
            Path(work, "buckets")
        )
        samples = pl.concat([chunk.frame for chunk in chunks]).drop_nulls("label")
    samples.tail(SAMPLES).drop("hour_of_day", "weekday").write_csv(folder / "globo_1m.csv")


if __name__ == "__main__":
    write_logs(*map(Path, sys.argv[1:3]))
