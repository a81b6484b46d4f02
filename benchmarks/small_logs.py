"""The untuned recipe of `init` on public logs of 2,000 to 300,000 rows, compared with the usual
alternatives.

A fifth of each log, drawn by the seed, is held out: nothing sees it but the last evaluation. In
logs of events in time (`BY_TIME`), it is the last fifth. `init`, `prepare` and `train` get the
other rows, the name of the label and a seed, and split them as the drafted recipe says; the model
is the one that is used after `train.refit`. The rivals train on nine tenths of these rows and stop
by the last tenth, drawn by the seed or the newest in time. They get the columns that `init`
selected as features:

- LightGBM, text and ids as native categories, whole numbers as numbers;
- LightGBM, categories as out-of-fold click rates (formula of `trees.Encoder` with a strength of 10)
  and numbers;
- CatBoost, with the columns of the first and its default learning rate;
- logistic regression on standardised numbers and one-hot categories; validation chooses one of
  seven penalties.

Trees stop after 50 rounds without a better validation log loss, and at 2,000. All methods use one
thread. Seconds are processor seconds of all processes of a method, which hardly depend on other
work on the machine.

The gap of a log is our mean over seeds minus that of the best rival, which is chosen for each log
after the test. The rank is our position among the five methods by that mean; `rank_lead` is the
mean rank of the best rival minus ours.

The logs come from packages and are not part of the repository: `benchmarks/public_logs.py` writes
them, and STRATAREC_PUBLIC_LOGS names their folder. Finished parts are stored (`kept`), so an
interrupted benchmark resumes.

Gate: on each log with its labels in random order, our AUC on the held-out rows is 0.5 within four
standard errors.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.kept import FOLDER, kept
from benchmarks.registry import PeerMissing, import_peer
from stratarec.cli.init.draft import content_of
from stratarec.data.columns.frames import read_frame
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SPLITS
from stratarec.errors import ConfigError
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, leaves, with_values
from stratarec.training.raw_logs import RawLogs, evaluate_logs
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

LOGS = {
    "hmda": "deny", "credit": "Status", "spambase": "y", "mlc_churn": "churn", "stackoverflow": "Remote",
    "caravan": "Purchase", "wa_churn": "churn", "verbagg": "r2", "healthins": "insurance", "lending": "Class",
    "magic": "y", "nasscds": "dead", "mplsstops": "personSearch", "insteval": "good", "flights": "late",
    "taxi": "tip", "cells": "class", "benefits": "ui", "flchain": "death", "surveys": "sex", "seattlepets": "species",
    "police": "subject_injury", "nlswork": "union", "chem97": "high", "bundesliga": "home", "birds": "affected",
    "trivago": "label", "frappe": "label", "movielens": "good", "smokeban": "smoker", "pension": "e401k",
    "fertility": "morekids", "covid": "result", "happiness": "vhappy", "vocab": "high", "trump": "votetrump",
    "inspections": "clean", "doctor": "visited", "wives": "whi", "phoneme": "y",
}  # fmt: skip
"""Log -> its label column."""
BY_TIME = {
    "trivago": "timestamp", "movielens": "timestamp", "mplsstops": "date", "seattlepets": "license_issue_date",
    "flights": "time_hour", "police": "response_datetime", "flights_all": "time_hour", "trivago_all": "timestamp",
    "globo_1m": "click_timestamp",
}  # fmt: skip
"""Log, also of `large_logs` -> column by which rows are ordered, so that the last fifth is held
out.
"""
QUICK = ("hmda", "verbagg")
SEEDS = 3
FEWER = {"flights": 1}
"""Number of seeds of logs of more than 200,000 rows, on which noise is small compared with the
differences.
"""
TARGETS = {
    "rank_lead": 0.0,
    "rank_lead_log_loss": 0.0,
    "auc_gap_worst": -0.004,
    "log_loss_gap_worst": -0.01,
}
# Standard errors by which the AUC of random labels may differ from 0.5 on one of the logs.
_ERRORS = 4
ROUNDS, PATIENCE, STRENGTH, FOLDS = 2000, 50, 10.0, 5
# Shares of a log that are held out, and of the other rows by which rivals stop.
HELD_OUT, STOPPING = 0.2, 0.1
# Whole numbers with more distinct values are ids if `init` treats them so; others are numbers,
# which trees can split.
_FEW = 100
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Means = dict[str, dict[str, float]]


class Table(NamedTuple):
    """The rows of a log that belong to a split."""

    label: Floats
    numbers: Floats
    """``[N, F]``, NaN where missing."""
    codes: NDArray[np.int64]
    """``[N, C]`` categories as numbers from 1 on; 0 for values that are not in the training
    split.
    """
    split: Mapping[str, Mask]
    """``test`` are the rows that are held out, ``train`` and ``valid`` the others."""


class Parts(NamedTuple):
    """A log in two files in a directory."""

    seen: Path
    held_out: Path


def run(quick: bool, seeds: int | None = None) -> dict[str, Any]:
    """Measure all logs, or two small ones with one seed."""
    folder = os.environ.get("STRATAREC_PUBLIC_LOGS", "")
    names = QUICK if quick else tuple(LOGS)
    for name in names:
        if not Path(folder, f"{name}.csv").is_file():
            raise PeerMissing(
                f"no {name}.csv in STRATAREC_PUBLIC_LOGS={folder!r}; benchmarks/public_logs.py writes it"
            )
    for peer in ("lightgbm", "catboost", "sklearn"):
        import_peer(peer)
    count = seeds or (1 if quick else SEEDS)
    rows = [
        {"log": name, "seed": seed, **_of_one(Path(folder, f"{name}.csv"), LOGS[name], seed)}
        for seed in range(count)
        for name in names
        if seed < FEWER.get(name, count)
    ]
    gate = [_gate(Path(folder, f"{name}.csv"), LOGS[name]) for name in names]
    return {
        "config": {
            "logs": list(names),
            "seeds": count,
            "fewer_seeds": FEWER,
            "threads": 1,
            "targets": TARGETS,
            "held_out": HELD_OUT,
            "by_time": sorted(BY_TIME.keys() & names),
        },
        "metrics": _metrics(rows, names) | {"gate_errors_most": max(row["errors"] for row in gate)},
        "samples": {"rows": rows, "random_labels": gate},
    }


def _metrics(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float]:
    """Return gaps to the best rival, mean ranks and mean seconds."""
    columns = [key for key in rows[0] if key not in ("log", "seed")]
    means = {
        name: {key: mean(row[key] for row in rows if row["log"] == name) for key in columns}
        for name in names
    }
    auc, loss = (
        {name: {method: each[f"{kind}_{method}"] for method in METHODS} for name, each in means.items()}
        for kind in ("auc", "log_loss")
    )
    by_auc = {name: each["stratarec"] - max(each[rival] for rival in RIVALS) for name, each in auc.items()}
    by_loss = {
        name: 1 - each["stratarec"] / min(each[rival] for rival in RIVALS) for name, each in loss.items()
    }
    signs: tuple[tuple[str, Means, int], ...] = (("", auc, 1), ("_log_loss", loss, -1))
    metrics: dict[str, float] = {}
    for ending, values, sign in signs:
        ranks_by_log = [
            {
                method: 1 + sum(sign * (each[other] - each[method]) > 0 for other in METHODS)
                for method in METHODS
            }
            for each in values.values()
        ]
        ranks = {method: mean(by_method[method] for by_method in ranks_by_log) for method in METHODS}
        metrics[f"rank_lead{ending}"] = min(ranks[rival] for rival in RIVALS) - ranks["stratarec"]
        metrics |= {f"mean_rank{ending}_{method}": rank for method, rank in ranks.items()}
    for kind, gaps in (("auc", by_auc), ("log_loss", by_loss)):
        metrics |= {f"{kind}_gap_worst": min(gaps.values()), f"{kind}_gap_mean": mean(gaps.values())}
    metrics |= {
        f"seconds_{method}": mean(each[f"seconds_{method}"] for each in means.values())
        for method in METHODS
    }
    metrics |= {f"auc_gap_{name}": gap for name, gap in by_auc.items()}
    return metrics | {f"log_loss_gap_{name}": gap for name, gap in by_loss.items()}


def write_parts(path: Path, seed: int, work: Path, *, shuffled: str = "") -> Parts:
    """Write a log as two files; `shuffled` is a column whose values get a random order."""
    frame = pl.read_csv(path, infer_schema_length=None)
    if shuffled:
        frame = frame.with_columns(pl.col(shuffled).shuffle(seed=1))
    frame = frame.sample(fraction=1, shuffle=True, seed=seed)
    if path.stem in BY_TIME:
        frame = frame.sort(BY_TIME[path.stem], nulls_last=False, maintain_order=True)
    seen = int(frame.height * (1 - HELD_OUT))
    parts = Parts(work / path.name, work / f"held-out-{path.name}")
    frame.head(seen).sample(fraction=1, shuffle=True, seed=seed).write_csv(parts.seen)
    frame.tail(frame.height - seen).write_csv(parts.held_out)
    return parts


def _gate(path: Path, label: str) -> dict[str, Any]:
    """Train on a log with its labels in random order, and raise `ConfigError` if the AUC differs
    from 0.5.
    """

    def test() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as work:
            tested = _ours(write_parts(path, 0, Path(work), shuffled=label), label, 0)[0]
        return {key: tested[key] for key in ("auc", "samples", "positives")}

    result = kept(_folder() / f"{path.stem}-random.json", _about(path), test)
    positives, samples, auc = result["positives"], result["samples"], result["auc"]
    error = math.sqrt((samples + 1) / (12 * positives * (samples - positives)))
    if abs(auc - 0.5) > _ERRORS * error:
        raise ConfigError(
            f"{path.stem} with random labels: AUC is {auc:.4f}, expected 0.5 +- {_ERRORS * error:.4f}"
        )
    return {"log": path.stem, "auc": auc, "standard_error": error, "errors": abs(auc - 0.5) / error}


def _folder() -> Path:
    folder = FOLDER / "small_logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _about(path: Path) -> dict[str, Any]:
    return {"log": path.name, "bytes": path.stat().st_size, "held_out": HELD_OUT}


def processor_seconds() -> float:
    """Processor seconds of this process and of the processes that it started."""
    return sum(os.times()[:4])


def _of_one(path: Path, label: str, seed: int) -> dict[str, float]:
    about, folder = {**_about(path), "seed": seed}, _folder()

    def ours() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as work:
            result, seconds = _ours(write_parts(path, seed, Path(work)), label, seed)
        return {
            "auc_stratarec": result["auc"],
            "log_loss_stratarec": result["log_loss"],
            "seconds_stratarec": seconds,
        }

    def theirs() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as work:
            table = read_table(write_parts(path, seed, Path(work)), label, seed)
        return {key: value for name in RIVALS for key, value in _of_rival(name, table, seed).items()}

    scores = {
        **kept(folder / f"{path.stem}-{seed}-ours.json", about, ours),
        **kept(folder / f"{path.stem}-{seed}-theirs.json", about, theirs),
    }
    aucs = " ".join(f"{name} {scores[f'auc_{name}']:.4f}" for name in ("stratarec", *RIVALS))
    print(f"{path.stem} {seed}: {aucs}; {scores['seconds_stratarec']:.0f} s", file=sys.stderr, flush=True)
    return scores


def _of_rival(name: str, table: Table, seed: int) -> dict[str, float]:
    start = processor_seconds()
    scores = RIVALS[name](table, seed)
    seconds = processor_seconds() - start
    tested = evaluate_logits(table.label[table.split["test"]].astype(np.float32), scores).values
    return {
        f"auc_{name}": tested["auc"],
        f"log_loss_{name}": tested["log_loss"],
        f"seconds_{name}": seconds,
    }


def _drafted(parts: Parts, label: str, seed: int) -> dict[str, Any]:
    """Return the recipe that `init` drafts for the rows that are not held out, with a seed and
    directories.
    """
    work = parts.seen.parent
    directories = {"data.path": str(work / "data"), "train.run": str(work / "run"), "train.report": False}
    seeds = {"data.split.seed": seed, "train.seed": seed, "train.threads": 1}
    return with_values(content_of((str(parts.seen),), label), {**directories, **seeds})


def _ours(parts: Parts, label: str, seed: int) -> tuple[dict[str, Any], float]:
    """Run `init`, `prepare` and `train`; return metrics of the held-out rows, and processor seconds
    before these.
    """
    start = processor_seconds()
    content = _drafted(parts, label, seed)
    Trainer(
        Recipe.from_dict(content), prepare(Recipe.from_dict(content).data), named=leaves(content)
    ).train()
    seconds = processor_seconds() - start
    with open_run(Path(content["train"]["run"])) as trained:
        metrics = evaluate_logs(RawLogs(trained, [str(parts.held_out)], labelled=True), SilentProgress())
    overall = metrics.overall[label]
    return {**overall.values, "samples": overall.samples, "positives": overall.positives}, seconds


def read_table(parts: Parts, label: str, seed: int) -> Table:
    """Return the columns that the drafted recipe selects, for the rows of both files."""
    schema = Recipe.from_dict(_drafted(parts, label, seed)).data.source.schema
    seen = pl.read_csv(parts.seen, infer_schema_length=None)
    frame = pl.concat([seen, pl.read_csv(parts.held_out, schema_overrides=seen.schema)])
    order = np.arange(seen.height)  # random
    if parts.seen.stem in BY_TIME:
        order = np.argsort(seen[BY_TIME[parts.seen.stem]].to_numpy(), kind="stable")
    split = {name: np.zeros(frame.height, dtype=np.bool_) for name in SPLITS}
    stopping = int(seen.height * (1 - STOPPING))
    split["train"][order[:stopping]] = split["valid"][order[stopping:]] = True
    split["test"][seen.height :] = True
    frame = frame.with_columns(pl.col(each.column).alias(each.name) for each in schema.dense if each.column)
    dates = replace(schema, dense=(), sparse=(), weight="", time=schema.scored_time, session="", user="")
    if dates.names:  # the features that are computed from dates
        columns = read_frame(frame, dates)
        frame = frame.with_columns(columns[name].alias(name) for name in dates.names)
    sparse = [each for each in schema.sparse if each.kind == "single"]
    ids = {
        each.name
        for each in sparse
        if not frame[each.name].dtype.is_numeric()
        or frame[each.name].n_unique() > _FEW
        or each.type != "integer"
    }
    names = [each.name for each in (*schema.dense, *sparse)]
    numbers = [frame[name].cast(pl.Float64).to_numpy() for name in names if name not in ids]
    codes = [_codes(frame[name], split["train"]) for name in names if name in ids]
    return Table(
        label=frame[label].cast(pl.Float64).to_numpy(),
        numbers=np.stack(numbers, axis=1) if numbers else np.zeros((frame.height, 0)),
        codes=np.stack(codes, axis=1) if codes else np.zeros((frame.height, 0), dtype=np.int64),
        split=split,
    )


def _codes(column: pl.Series, train: Mask) -> NDArray[np.int64]:
    text = column.cast(pl.String).fill_null("")
    known = text.filter(pl.Series(train)).unique().sort()
    codes: NDArray[np.int64] = text.replace_strict(
        known, np.arange(1, len(known) + 1), default=0
    ).to_numpy()
    return codes


def logits(probability: Floats) -> NDArray[np.float32]:
    bounded = np.clip(probability, 1e-7, 1 - 1e-7)
    return np.log(bounded / (1 - bounded)).astype(np.float32)


def _lightgbm(columns: Floats, table: Table, seed: int, categories: list[int]) -> NDArray[np.float32]:
    lightgbm = import_peer("lightgbm")
    train, valid, test = (table.split[name] for name in SPLITS)
    bins = lightgbm.Dataset(columns[train], table.label[train], categorical_feature=categories)
    settings = {
        "objective": "binary",
        "learning_rate": 0.05,
        "num_threads": 1,
        "verbosity": -1,
        "seed": seed,
    }
    booster = lightgbm.train(
        settings,
        bins,
        ROUNDS,
        valid_sets=[lightgbm.Dataset(columns[valid], table.label[valid], reference=bins)],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    scores: NDArray[np.float32] = booster.predict(columns[test], raw_score=True).astype(np.float32)
    return scores


def _native(table: Table, seed: int) -> NDArray[np.float32]:
    columns = np.concatenate([table.codes, table.numbers], axis=1)
    return _lightgbm(columns, table, seed, list(range(table.codes.shape[1])))


def _encoded(table: Table, seed: int) -> NDArray[np.float32]:
    train = np.flatnonzero(table.split["train"])
    fold = np.random.default_rng(seed).integers(0, FOLDS, len(train))
    rate = table.label[train].mean()
    columns = []
    for codes in table.codes.T:
        size = int(codes.max()) + 1

        def rates(rows: NDArray[np.int64], codes: NDArray[np.int64] = codes, size: int = size) -> Floats:
            clicks = np.bincount(codes[rows], table.label[rows], minlength=size)
            return (clicks + STRENGTH * rate) / (np.bincount(codes[rows], minlength=size) + STRENGTH)

        column = rates(train)[codes]
        for number in range(FOLDS):
            own = train[fold == number]
            column[own] = rates(train[fold != number])[codes[own]]
        columns.append(column)
    return _lightgbm(
        np.concatenate([np.stack(columns, 1), table.numbers], 1) if columns else table.numbers,
        table,
        seed,
        [],
    )


class _Deadline:
    """Callback of CatBoost that ends training after a number of processor seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = processor_seconds() + seconds

    def after_iteration(self, info: object) -> bool:
        """Return whether training continues."""
        return processor_seconds() < self._end


def fit_catboost(
    table: Table, seed: int, rounds: int = ROUNDS, most_seconds: float = math.inf
) -> NDArray[np.float32]:
    catboost, pandas = import_peer("catboost"), import_peer("pandas")
    frame = pandas.DataFrame({f"n{place}": column for place, column in enumerate(table.numbers.T)})
    names = [f"c{place}" for place in range(table.codes.shape[1])]
    for name, column in zip(names, table.codes.T, strict=True):
        frame[name] = column
    train, valid, test = (table.split[name] for name in SPLITS)
    model = catboost.CatBoostClassifier(
        iterations=rounds,
        od_type="Iter",
        od_wait=PATIENCE,
        thread_count=1,
        random_seed=seed,
        verbose=False,
        cat_features=names,
        allow_writing_files=False,
    )
    model.fit(
        frame[train],
        table.label[train],
        eval_set=(frame[valid], table.label[valid]),
        callbacks=[_Deadline(most_seconds)],
    )
    return logits(model.predict_proba(frame[test])[:, 1])


def _regression(table: Table, seed: int) -> NDArray[np.float32]:
    linear, preprocessing = import_peer("sklearn.linear_model"), import_peer("sklearn.preprocessing")
    sparse = import_peer("scipy.sparse")
    train, valid, test = (table.split[name] for name in SPLITS)
    parts = []
    if table.numbers.shape[1]:
        scaler = preprocessing.StandardScaler().fit(table.numbers[train])
        parts.append(sparse.csr_matrix(np.nan_to_num(scaler.transform(table.numbers))))
    if table.codes.shape[1]:
        parts.append(
            preprocessing.OneHotEncoder(handle_unknown="ignore")
            .fit(table.codes[train])
            .transform(table.codes)
        )
    columns = sparse.hstack(parts).tocsr()
    best = (math.inf, np.zeros(0))
    for penalty in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        model = linear.LogisticRegression(C=penalty, max_iter=500).fit(columns[train], table.label[train])
        scores = model.decision_function(columns[valid])
        loss = evaluate_logits(table.label[valid].astype(np.float32), scores.astype(np.float32)).values[
            "log_loss"
        ]
        best = min(best, (loss, model.decision_function(columns[test])), key=lambda each: each[0])
    return best[1].astype(np.float32)


RIVALS: dict[str, Callable[[Table, int], NDArray[np.float32]]] = {
    "lightgbm": _native,
    "lightgbm_encoded": _encoded,
    "catboost": fit_catboost,
    "regression": _regression,
}
METHODS = ("stratarec", *RIVALS)
