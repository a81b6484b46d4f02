"""Models on `frappe_x1` by the published protocol, beside the figures that BARS publishes for them.

Split by file, D = 10, batches of 4,096, Adam at 0.001 on everything, L2 on all embedding rows at every step, gradient
norm at most 10, rates divided by ten at each evaluation that is not better, patience 2 on validation AUC, one test of
the best model. Sizes, dropout and lambda of each model are those of its published run. What a run gave is kept in
``data/benchmarks/quality`` and taken from there while recipe and data are the same, so that a benchmark that was ended
goes on with the next run: remove it when code has changed.

FuxiCTR, which has published them, runs beside it where it is installed (`fuxictr`), seed by seed in turns with ours.
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
    """A model as BARS trained it, and the means that it got."""

    auc: float
    log_loss: float
    decay: float
    """Lambda of embedding rows."""
    model: dict[str, Any] = field(default_factory=dict)


SHARED = {"embedding_dim": 10, "initialization": "xavier", "initial_logit": "zero", "initial_rows": 0.00017}
"""Rows uniform with the deviation of the published normal ones, 1e-4."""
DEEP = {"batch_norm": True, "deep_mlp": [400, 400, 400]}
PUBLISHED = {
    "lr": Published(auc=0.93558, log_loss=0.30764, decay=1e-5, model={"kind": "lr", "embedding_dim": 1}),
    # With rows as small as the others', one seed of three lost AUC at its second evaluation, and its rate with it.
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
    """Notes when each evaluation was over."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()
        self.seconds: dict[int, tuple[float, float]] = {}

    @property
    def now(self) -> tuple[float, float]:
        """Seconds of the clock and of the processor."""
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]

    def say(self, message: str) -> None:
        if message.startswith("step ") and "validation" in message:
            self.seconds[int(message.split(":")[0].removeprefix("step "))] = self.now


def files() -> dict[str, Path]:
    """Of each split; `PeerMissing` where one is not there."""
    found = {split: LOGS / "frappe_x1" / f"{split}.parquet" for split in ("train", "valid", "test")}
    if not all(file.is_file() for file in found.values()):
        raise PeerMissing(f"no {LOGS}/frappe_x1/*.parquet; set STRATAREC_TEST_DATA to the directory of the logs")
    return found


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How runs are made, whatever their model and seed."""

    threads: int = 1
    precision: str = "float32"
    epochs: int = 100

    def name(self, model: str, seed: int) -> str:
        """Of the file in which a run is kept."""
        return f"{model}-{self.precision}-{self.threads}-{self.epochs}-{seed}.json"


def recipe(name: str, seed: int, setting: Setting, codec: str = "") -> Recipe:
    """The shipped recipe with a model of `PUBLISHED`; with a codec, small batches and rows at home in it."""
    paths = ",".join(map(str, files().values()))
    made = Recipe.load(
        ROOT / "src" / "stratarec" / "recipes" / "frappe_x1.yaml",
        [f"data.source.paths=[{paths}]", f"data.path={DATA}", "data.keep_rows=false"],
    ).to_dict()
    wanted = PUBLISHED[name]
    train = made["train"] | {
        "seed": seed, "threads": setting.threads, "precision": setting.precision, "epochs": setting.epochs,
    }  # fmt: skip
    train["embedding"] = train["embedding"] | {"weight_decay": wanted.decay}
    changes = made | {"model": {**SHARED, **wanted.model}, "train": train}
    if codec:
        train["batch_size"] = SMALL_BATCH
    if codec in SHARES:
        cache = made["memory"]["cache"] | {"fraction": SHARES[codec]}
        changes["memory"] = made["memory"] | {"precision": codec, "state": "bf16", "lookahead": 0, "cache": cache}
    return Recipe.from_dict(changes)


def prepared(made: Recipe) -> Dataset:
    """The prepared log; made anew where it is of other files."""
    try:
        return prepare(made.data, name="frappe_x1")
    except DatasetError:
        return prepare(made.data, name="frappe_x1", overwrite=True)


def one(made: Recipe, path: Path) -> dict[str, Any]:
    """What a run gave: test metrics, and validation AUC by seconds; kept at `path`, and taken from there."""
    dataset = prepared(made)
    return kept(path, {"recipe": made.to_dict(), "data": dataset.fingerprint}, lambda: trained(made, dataset))


def trained(made: Recipe, dataset: Dataset) -> dict[str, Any]:
    """What a run gives."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(with_run(made, Path(folder) / "run"), dataset, progress=watch)
        result = trainer.train()
    evaluations = [
        {
            "step": each["step"], "auc": each["auc"], "log_loss": each["log_loss"],
            "seconds": watch.seconds[each["step"]][0], "processor_seconds": watch.seconds[each["step"]][1],
        }
        for each in trainer.state.evaluations
    ]  # fmt: skip
    best = int(result["checkpoint"].removeprefix("step-"))
    at_best = next(each for each in evaluations if each["step"] == best)
    return {
        "auc": result["test"]["auc"], "log_loss": result["test"]["log_loss"], "steps": result["steps"],
        "best_step": best, "seconds_to_best": at_best["seconds"], "seconds": watch.now[0], "evaluations": evaluations,
        "rows_behind_caches": behind_caches(trainer.plan),
    }  # fmt: skip


def behind_caches(plan: Plan | None) -> float:
    """Share of all rows that do not lie in float32 in level 0."""
    tables = () if plan is None else plan.tables
    behind = sum(placed.rows for placed in tables if placed.tier != "level0")
    return behind / max(sum(placed.rows for placed in tables), 1)


def told(title: str, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """A line of the samples."""
    print(
        f"{title}, seed {seed}: AUC {found['auc']:.5f}, log loss {found['log_loss']:.4f}", file=sys.stderr, flush=True
    )
    return {"model": title, "seed": seed, **found}


def peers(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the models that FuxiCTR runs here; none where it is not installed, which is said."""
    try:
        fuxictr.installed()
    except PeerMissing as missing:
        print(missing, file=sys.stderr, flush=True)
        return ()
    return tuple(name for name in names if name in fuxictr.MODELS)


def summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a model, of its runs."""
    found: dict[str, float] = {}
    for key in ("auc", "log_loss"):
        values = [row[key] for row in rows]
        found |= {f"{key}_{name}": mean(values), f"{key}_std_{name}": pstdev(values)}
    found[f"auc_delta_bars_{name}"] = found[f"auc_{name}"] - PUBLISHED[name].auc
    found[f"log_loss_delta_bars_{name}"] = found[f"log_loss_{name}"] - PUBLISHED[name].log_loss
    found[f"processor_seconds_to_best_{name}"] = mean(fuxictr.best(row)["processor_seconds"] for row in rows)
    return found


def run(
    quick: bool, models: Sequence[str] = DEFAULT, seeds: int = len(SEEDS), threads: int = 1, precision: str = "float32",
    peer_seeds: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Five seeds of six models; `quick` has two epochs of one, whose AUC is none to compare."""
    if other := [name for name in models if name not in PUBLISHED]:
        raise ConfigError(f"no published figures of {other[0]!r}; there are {', '.join(PUBLISHED)}")
    setting = Setting(threads=threads, precision=precision, epochs=2 if quick else 100)
    names, draws = (("dcnv2",), SEEDS[:1]) if quick else (tuple(models), SEEDS[:seeds])
    beside = peers(names) if peer_seeds else ()
    rows = []
    for name in names:
        for seed in draws:
            rows.append(told(name, seed, one(recipe(name, seed, setting), WORK / setting.name(name, seed))))
            if name in beside and seed in draws[:peer_seeds]:
                path, decay = WORK / setting.name(f"fuxictr-{name}", seed), PUBLISHED[name].decay
                found = fuxictr.trained(name, decay, seed, files(), threads=threads, epochs=setting.epochs, path=path)
                rows.append(told(f"{name} of FuxiCTR", seed, found))
    of = {title: [row for row in rows if row["model"] == title] for title in {row["model"] for row in rows}}
    metrics = {key: value for name in names for key, value in summary(name, of[name]).items()}
    for name in beside:
        metrics |= fuxictr.metrics(name, of[name], of[f"{name} of FuxiCTR"])
    if beside:
        metrics["ratio_fuxictr_seconds"] = min(metrics[f"ratio_fuxictr_{name}"] for name in beside)
    return {
        "config": {
            "threads": threads, "precision": precision, "seeds": list(draws), "epochs": setting.epochs,
            "peer_seeds": list(draws[:peer_seeds]) if beside else [],
            "published": {name: [PUBLISHED[name].auc, PUBLISHED[name].log_loss] for name in names},
        },
        "metrics": {
            "auc_delta_bars_min": min(metrics[f"auc_delta_bars_{name}"] for name in names),
            "auc_best": max(metrics[f"auc_{name}"] for name in names),
            **metrics,
        },
        "samples": {"rows": rows},
    }  # fmt: skip
