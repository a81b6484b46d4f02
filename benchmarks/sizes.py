"""The untuned Criteo recipe on synthetic logs of Criteo's shape, compared with LightGBM on target
encodings.

A log of N rows has 0.8 N for training, 0.1 N for validation, and at least 100,000 for the test,
because noise of a smaller test exceeds the differences. Each seed draws another log. StrataRec is
the shipped `recipes/criteo.yaml` with the defaults of `training.resolve` for the number of samples.
Trees get the same samples, with an id for every value that occurs twice instead of ten times, which
improves them. Both sides use the same number of threads. On logs of up to 300,000 rows, `ensemble`
is the model that `stratarec init` drafts instead of the recipe's, on the recipe's ids.

The labels come from a factorisation machine with first-order effects (`data.sources.synthetic`).
Half of the signal is additive, which trees on target encodings learn from few samples. The other
half are products of latent factors of all pairs of features, the form of a DLRM. These logs
therefore favour the DLRM once there are enough samples. ``--samples 100000,1000000,10000000``
selects sizes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import trees
from benchmarks.kept import FOLDER, kept
from benchmarks.registry import import_peer
from benchmarks.sessions import ROOT
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError
from stratarec.models.metrics import evaluate_logits
from stratarec.recipe import Recipe, leaves, read_content, with_values
from stratarec.training.resolve import choose_defaults, defaults_by_size, describe_defaults
from stratarec.training.torch_setup import torch_settings
from stratarec.training.trainer import Trainer

RECIPE = ROOT / "src" / "stratarec" / "recipes" / "criteo.yaml"
SIZES, SEEDS = (100_000, 1_000_000), 3
LEAST_TEST = 100_000
RARE = (10, 2)
"""Minimum occurrences of a value with an id: in the recipe, and for trees."""
FIGURES = ("auc", "log_loss", "calibration")
ENSEMBLE_ROWS = 300_000
TARGETS = {
    "auc_delta_lightgbm_100000": 0.0,
    "auc_ensemble_delta_lightgbm_100000": 0.0,
    "auc_delta_lightgbm_1000000": 0.001,
}
Row = dict[str, Any]


def log(folder: Path, samples: int, seed: int, rare: int, least_test: int = LEAST_TEST) -> PrepareConfig:
    """Return the configuration of a log of N rows, enlarged to at least `least_test` test
    samples.
    """
    test = max(samples // 10, least_test)
    total = samples * 9 // 10 + test
    return PrepareConfig(
        source=SyntheticConfig(samples=total, session_length=1.0, missing=0.0, seed=seed),
        path=str(folder / f"{samples}-{rare}"),
        vocabulary=VocabularyConfig(min_count=rare, tail_buckets=64),
        split=SplitConfig(by="fraction", valid=samples / 10 / total, test=test / total),
        keep_rows=False,
    )


def ours(data: PrepareConfig, seed: int, threads: int, model: str = "stratarec") -> Row:
    """Train the shipped recipe, or an ensemble with defaults only, on a log and return its
    metrics.
    """
    dataset = prepare(data)
    content = read_content(RECIPE)
    content["data"] = replace(Recipe.load(RECIPE), data=data).to_dict()["data"]
    if model == "ensemble":
        content |= {"model": {"kind": "ensemble"}, "train": {}}
    with tempfile.TemporaryDirectory() as folder:
        content["train"] |= {"seed": seed, "threads": threads, "run": f"{folder}/run"}
        defaults = choose_defaults(Recipe.from_dict(content), leaves(content), dataset)
        content, description = with_values(content, defaults), describe_defaults(defaults, dataset)
        began = time.perf_counter()
        result = Trainer(Recipe.from_dict(content), dataset).train()
        seconds = time.perf_counter() - began
    metrics = {name: result["test"][name] for name in FIGURES}
    return {"model": model, **metrics, "seconds": seconds, "settings": description}


def lightgbm(data: PrepareConfig, seed: int, threads: int, *, quick: bool) -> Row:
    """Fit trees to the same samples and return their metrics."""
    dataset = prepare(data)
    splits = {split: trees.read(dataset, split) for split in dataset.splits}
    rows = [dataset.vocabularies[feature.vocabulary].rows for feature in dataset.schema.sparse]
    grown = trees.grow(splits, rows, seed=seed, threads=threads, quick=quick)
    test = evaluate_logits(splits["test"].label, grown.test).to_dict()
    metrics = {name: test[name] for name in FIGURES}
    settings = f"{grown.trees} trees, {grown.settings}"
    return {"model": "lightgbm", **metrics, "seconds": grown.seconds, "settings": settings}


def gate(forms: Sequence[PrepareConfig]) -> None:
    """Check that all prepared forms of a log have as many clicks in each split."""
    positives = [dict(prepare(data).positives) for data in forms]
    if any(each != positives[0] for each in positives):
        raise AssertionError(f"clicks of the splits differ between prepared forms: {positives}")


def measure_log(samples: int, seed: int, threads: int, *, quick: bool) -> list[Row]:
    """Generate a log and return the results of all models."""
    with tempfile.TemporaryDirectory() as folder:
        forms = [log(Path(folder), samples, seed, rare, 1000 if quick else LEAST_TEST) for rare in RARE]
        gate(forms)
        results = [ours(forms[0], seed, threads), lightgbm(forms[1], seed, threads, quick=quick)]
        results += [ours(forms[0], seed, threads, "ensemble")] if samples <= ENSEMBLE_ROWS else []
    text = ", ".join(f"{row['model']} {row['auc']:.5f} in {row['seconds']:.0f} s" for row in results)
    print(f"{samples:,} rows, seed {seed}: AUC {text}", file=sys.stderr, flush=True)
    return [{"samples": samples, "seed": seed, **row} for row in results]


@torch_settings()
def run(
    quick: bool, samples: Sequence[int] = SIZES, seeds: int = SEEDS, threads: int = 1
) -> dict[str, Any]:
    """Measure every size and seed; `quick` has one log of 4,000 rows and 20 trees."""
    import_peer("lightgbm")
    if few := [size for size in samples if size < 1000]:
        raise ConfigError(f"--samples must be at least 1000; got {few[0]}")
    sizes, draws = ((4000,), 1) if quick else (tuple(samples), seeds)
    about = {"recipe": read_content(RECIPE), "grid": trees.GRID, "fixed": trees.FIXED, "threads": threads}
    about["ensemble_rows"] = ENSEMBLE_ROWS
    rows: list[Row] = []
    for size in sizes:
        about["chosen"] = defaults_by_size(size * 8 // 10, validated=True)
        for seed in range(1, draws + 1):
            path = FOLDER / "sizes" / f"{size}-{seed}{'-quick' if quick else ''}.json"
            rows += kept(
                path, about, lambda at=(size, seed): {"rows": measure_log(*at, threads, quick=quick)}
            )["rows"]
    return {
        "config": {
            "recipe": "criteo",
            "samples": list(sizes),
            "seeds": draws,
            "threads": threads,
            "least_test": LEAST_TEST,
            "trees": {"grid": list(trees.GRID), "fixed": trees.FIXED, "min_count": RARE},
            "targets": TARGETS,
        },
        "metrics": {name: value for size in sizes for name, value in _metrics_of_size(size, rows).items()},
        "samples": {
            "rows": [{name: value for name, value in row.items() if name != "settings"} for row in rows],
            "settings": [row["settings"] for row in rows],
        },
    }


def _metrics_of_size(size: int, rows: Sequence[Row]) -> dict[str, float]:
    """Return mean metrics of both models over the logs of a size, and the differences between the
    models.
    """
    metrics: dict[str, float] = {}
    for name in ("auc", "log_loss", "seconds"):
        models = dict.fromkeys(row["model"] for row in rows if row["samples"] == size)
        means = {
            model: mean(row[name] for row in rows if (row["samples"], row["model"]) == (size, model))
            for model in models
        }
        peer = means.pop("lightgbm")
        metrics[f"{name}_lightgbm_{size}"] = peer
        for model, value in means.items():
            key = name if model == "stratarec" else f"{name}_{model}"
            metrics[f"{key}_{size}"] = value
            if name != "seconds":
                metrics[f"{key}_delta_lightgbm_{size}"] = value - peer
    return metrics
