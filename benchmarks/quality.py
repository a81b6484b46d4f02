"""Models on `frappe_x1` by the published protocol, compared with the results that BARS publishes.

The protocol: split by file, D = 10, batches of 4,096, Adam at 0.001 on all weights, L2 on all
embedding rows at every step, gradient norm at most 10, rates divided by ten after each evaluation
without improvement, patience 2 on validation AUC, one test of the best model. Sizes, dropout and
lambda of each model are those of its published run. Results are stored in
``data/benchmarks/quality`` and reused while recipe and data are the same, so that an interrupted
benchmark resumes with the next run: remove the folder after the code has changed.

FuxiCTR, which published the results, is trained on the same seeds in alternation if it is installed
(`fuxictr`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from benchmarks import fuxictr
from benchmarks.kept import kept
from benchmarks.precision_quality import SHARES
from benchmarks.registry import PeerMissing
from benchmarks.sessions import LOGS, ROOT, with_run
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import ConfigError, DatasetError
from stratarec.planning.plan import Plan
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

DATA = ROOT / "data" / "benchmarks" / "frappe_x1"
WORK = ROOT / "data" / "benchmarks" / "quality"
SEEDS = (1, 2, 3, 4, 5)
SMALL_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model with the settings of BARS, and its published mean results."""

    auc: float
    log_loss: float
    decay: float
    """L2 coefficient (lambda) of embedding rows."""
    model: dict[str, Any] = field(default_factory=dict)


SHARED = {"embedding_dim": 10, "initialization": "xavier", "initial_logit": "zero", "initial_rows": 0.00017}
"""Settings of all models; rows are uniform with the standard deviation of the published normal
rows, 1e-4.
"""
DEEP = {"batch_norm": True, "deep_mlp": [400, 400, 400]}
PUBLISHED = {
    "lr": Published(auc=0.93558, log_loss=0.30764, decay=1e-5, model={"kind": "lr", "embedding_dim": 1}),
    # With smaller initial rows, one seed of three lost AUC at its second evaluation, which reduced
    # its rate.
    "fm": Published(auc=0.96711, log_loss=0.20652, decay=5e-6, model={"kind": "fm", "initial_rows": 0.01}),
    "wide_deep": Published(
        auc=0.98307, log_loss=0.15398, decay=0.1, model={"kind": "wide_deep", "dropout": 0.6, **DEEP}
    ),
    "deepfm": Published(auc=0.98395, log_loss=0.14946, decay=0.05, model={"kind": "deepfm", "dropout": 0.2, **DEEP}),
    "dcnv2": Published(
        auc=0.98382, log_loss=0.15204, decay=0.05,
        model={"kind": "dcnv2", "structure": "parallel", "cross_layers": 4, "dropout": 0.4, **DEEP},
    ),
    "dlrm": Published(
        auc=0.98400, log_loss=0.14444, decay=0.1,
        model={
            "kind": "dlrm", "interaction": "cat", "top_mlp": [400, 400, 400], "dropout": 0.4, "batch_norm": True,
        },
    ),
    "finalmlp": Published(
        auc=0.98607, log_loss=0.14842, decay=0.05,
        model={
            "kind": "finalmlp", "first_mlp": [400], "second_mlp": [100], "gate_features": [["user"], ["item"]],
            "gate_vectors": "own", "gate_mlp": [400], "fusion_heads": 5, "dropout": 0.4, "batch_norm": True,
        },
    ),
}  # fmt: skip
DEFAULT = ("lr", "fm", "deepfm", "dcnv2", "dlrm", "finalmlp")


class Watch(SilentProgress):
    """Progress that records the time of each evaluation."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()
        self.seconds: dict[int, tuple[float, float]] = {}

    @property
    def now(self) -> tuple[float, float]:
        """Clock and processor seconds since the start."""
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]

    def say(self, message: str) -> None:
        if message.startswith("step ") and "validation" in message:
            self.seconds[int(message.split(":")[0].removeprefix("step "))] = self.now


def files() -> dict[str, Path]:
    """Return the file of each split; raise `PeerMissing` if one does not exist."""
    paths = {split: LOGS / "frappe_x1" / f"{split}.parquet" for split in ("train", "valid", "test")}
    if not all(file.is_file() for file in paths.values()):
        raise PeerMissing(
            f"no {LOGS}/frappe_x1/*.parquet; set STRATAREC_TEST_DATA to the directory of the logs"
        )
    return paths


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of runs that do not depend on model and seed."""

    threads: int = 1
    precision: str = "float32"
    epochs: int = 100

    def name(self, model: str, seed: int) -> str:
        """Return the name of the file that stores the result of a run."""
        return f"{model}-{self.precision}-{self.threads}-{self.epochs}-{seed}.json"


def recipe(name: str, seed: int, setting: Setting, codec: str = "") -> Recipe:
    """Return the shipped recipe with a model of `PUBLISHED`; with a codec, small batches and
    encoded rows.
    """
    paths = ",".join(map(str, files().values()))
    content = Recipe.load(
        ROOT / "src" / "stratarec" / "recipes" / "frappe_x1.yaml",
        [f"data.source.paths=[{paths}]", f"data.path={DATA}", "data.keep_rows=false"],
    ).to_dict()
    published = PUBLISHED[name]
    train = content["train"] | {
        "seed": seed,
        "threads": setting.threads,
        "precision": setting.precision,
        "epochs": setting.epochs,
    }
    train["embedding"] = train["embedding"] | {"weight_decay": published.decay}
    changes = content | {"model": {**SHARED, **published.model}, "train": train}
    if codec:
        train["batch_size"] = SMALL_BATCH
    if codec in SHARES:
        cache = content["memory"]["cache"] | {"fraction": SHARES[codec]}
        changes["memory"] = content["memory"] | {
            "precision": codec,
            "state": "bf16",
            "lookahead": 0,
            "cache": cache,
        }
    return Recipe.from_dict(changes)


def prepared(recipe: Recipe) -> Dataset:
    """Prepare the log, or prepare it again if the data set is from other files."""
    try:
        return prepare(recipe.data, name="frappe_x1")
    except DatasetError:
        return prepare(recipe.data, name="frappe_x1", overwrite=True)


def one(recipe: Recipe, path: Path) -> dict[str, Any]:
    """Train a run or return its stored result: test metrics, and validation AUC with the time of
    each evaluation.
    """
    dataset = prepared(recipe)
    return kept(
        path, {"recipe": recipe.to_dict(), "data": dataset.fingerprint}, lambda: trained(recipe, dataset)
    )


def trained(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Train a run and return its results."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(with_run(recipe, Path(folder) / "run"), dataset, progress=watch)
        result = trainer.train()
    evaluations = [
        {
            "step": each["step"],
            "auc": each["auc"],
            "log_loss": each["log_loss"],
            "seconds": watch.seconds[each["step"]][0],
            "processor_seconds": watch.seconds[each["step"]][1],
        }
        for each in trainer.state.evaluations
    ]
    best = int(result["checkpoint"].removeprefix("step-"))
    at_best = next(each for each in evaluations if each["step"] == best)
    return {
        "auc": result["test"]["auc"],
        "log_loss": result["test"]["log_loss"],
        "steps": result["steps"],
        "best_step": best,
        "seconds_to_best": at_best["seconds"],
        "seconds": watch.now[0],
        "evaluations": evaluations,
        "rows_behind_caches": cached_share(trainer.parts.plan),
    }


def cached_share(plan: Plan | None) -> float:
    """Return the share of all rows that are not stored as float32 in level 0."""
    tables = () if plan is None else plan.tables
    cached = sum(placed.rows for placed in tables if placed.tier != "level0")
    return cached / max(sum(placed.rows for placed in tables), 1)


def report_run(title: str, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """Print the result of a run and return it as a row."""
    print(
        f"{title}, seed {seed}: AUC {result['auc']:.5f}, log loss {result['log_loss']:.4f}",
        file=sys.stderr,
        flush=True,
    )
    return {"model": title, "seed": seed, **result}


def peers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the models that FuxiCTR can train here; if it is not installed, print so and return
    none.
    """
    try:
        fuxictr.installed()
    except PeerMissing as missing:
        print(missing, file=sys.stderr, flush=True)
        return ()
    return tuple(name for name in names if name in fuxictr.MODELS)


def summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a model from the rows of its runs."""
    metrics: dict[str, float] = {}
    for key in ("auc", "log_loss"):
        values = [row[key] for row in rows]
        metrics |= {f"{key}_{name}": mean(values), f"{key}_std_{name}": pstdev(values)}
    metrics[f"auc_delta_bars_{name}"] = metrics[f"auc_{name}"] - PUBLISHED[name].auc
    metrics[f"log_loss_delta_bars_{name}"] = metrics[f"log_loss_{name}"] - PUBLISHED[name].log_loss
    metrics[f"processor_seconds_to_best_{name}"] = mean(
        fuxictr.best(row)["processor_seconds"] for row in rows
    )
    return metrics


def run(
    quick: bool,
    models: Sequence[str] = DEFAULT,
    seeds: int = len(SEEDS),
    threads: int = 1,
    precision: str = "float32",
    peer_seeds: int = 1,
) -> dict[str, Any]:
    """Train five seeds of six models; `quick` has two epochs of one model, whose AUC is not
    comparable.
    """
    if other := [name for name in models if name not in PUBLISHED]:
        raise ConfigError(f"--models: unknown model {other[0]!r}; choose from {', '.join(PUBLISHED)}")
    setting = Setting(threads=threads, precision=precision, epochs=2 if quick else 100)
    names, draws = (("dcnv2",), SEEDS[:1]) if quick else (tuple(models), SEEDS[:seeds])
    peer_names = peers(names) if peer_seeds else ()
    rows = []
    for name in names:
        for seed in draws:
            rows.append(
                report_run(name, seed, one(recipe(name, seed, setting), WORK / setting.name(name, seed)))
            )
            if name in peer_names and seed in draws[:peer_seeds]:
                path, decay = WORK / setting.name(f"fuxictr-{name}", seed), PUBLISHED[name].decay
                result = fuxictr.trained(
                    name, decay, seed, files(), threads=threads, epochs=setting.epochs, path=path
                )
                rows.append(report_run(f"{name} of FuxiCTR", seed, result))
    rows_of = {
        title: [row for row in rows if row["model"] == title] for title in {row["model"] for row in rows}
    }
    metrics = {key: value for name in names for key, value in summary(name, rows_of[name]).items()}
    for name in peer_names:
        metrics |= fuxictr.metrics(name, rows_of[name], rows_of[f"{name} of FuxiCTR"])
    if peer_names:
        metrics["ratio_fuxictr_seconds"] = min(metrics[f"ratio_fuxictr_{name}"] for name in peer_names)
    return {
        "config": {
            "threads": threads,
            "precision": precision,
            "seeds": list(draws),
            "epochs": setting.epochs,
            "peer_seeds": list(draws[:peer_seeds]) if peer_names else [],
            "published": {name: [PUBLISHED[name].auc, PUBLISHED[name].log_loss] for name in names},
        },
        "metrics": {
            "auc_delta_bars_min": min(metrics[f"auc_delta_bars_{name}"] for name in names),
            "auc_best": max(metrics[f"auc_{name}"] for name in names),
            **metrics,
        },
        "samples": {"rows": rows},
    }
