"""Validation and test samples that repeat a training sample, label included.

A model that memorizes scores such samples well, so their metrics say little about new samples. Samples are compared by
64-bit hashes of their columns. Of a large log only hashes that are divisible by a number are kept: all copies of a row
are kept, or none.

Rows of few values are equal by chance, too. A copy always has the label of its original, while labels of other equal
rows agree only as far as the columns predict them: repeats are reported where labels agree much more than at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.schema import UNKNOWN, Schema
from stratarec.data.splits import SPLITS, SplitConfig

HeldOut = Literal["valid", "test"]

# Rows that are compared: 20 MB of hashes, half a second.
_MOST_ROWS = 2_000_000
# Share of a split from which repeats are reported, and Cohen's kappa of the labels of equal rows.
_LEAST_SHARE, _AGREEMENT = 0.01, 0.5
# Disagreements that labels at random would have; with fewer, their absence says nothing.
_LEAST_EXPECTED = 20


def hashed_share(schema: Schema, split: SplitConfig, rows: int) -> int:
    """Return m where every m-th hash is kept, or 0 where no sample can have a copy in another split.

    Copies have the same time and the same user or session, which a split by them keeps together.
    """
    together = split.by == "time" or (split.by == "fraction" and bool(schema.user or schema.session))
    features = bool(schema.dense or schema.sparse)
    return -(-rows // _MOST_ROWS) if features and not together else 0


def hash_rows(frame: pl.DataFrame, schema: Schema, split: NDArray[np.int8], share: int) -> pl.DataFrame:
    """Return hash, split and first label of the samples whose hash is divisible by `share`."""
    features = [name for name in schema.names if name in frame.columns]
    names = dict.fromkeys((*features, *filter(None, (schema.time, schema.user, schema.session))))
    # Not by `select`, to which a column called * is all of them.
    hashes = pl.DataFrame([frame[name] for name in names]).hash_rows()
    label = frame[schema.label_column]
    kept = (hashes % share == 0) & pl.Series(split >= 0) & (label != UNKNOWN).fill_null(False)
    return pl.DataFrame({"hash": hashes, "split": split, "label": label.cast(pl.Int8)}).filter(kept)


def repeated_shares(hashes: Sequence[pl.DataFrame]) -> dict[HeldOut, float]:
    """Return the share of each held-out split that repeats training samples; empty where that may be by chance."""
    rows = pl.concat(hashes)
    training = rows.filter(pl.col("split") == 0).group_by("hash").agg(pl.col("label").mean().alias("rate"))
    held_out = rows.filter(pl.col("split") != 0)
    equal = held_out.join(training, on="hash")
    if not _agree(equal["label"].to_numpy().astype(np.float64), equal["rate"].to_numpy()):
        return {}
    repeated = equal.filter(pl.when(pl.col("label") == 1).then(pl.col("rate") > 0).otherwise(pl.col("rate") < 1))
    names: dict[int, HeldOut] = {SPLITS.index("valid"): "valid", SPLITS.index("test"): "test"}
    shares: dict[HeldOut, float] = {}
    for number, name in names.items():
        share = int((repeated["split"] == number).sum()) / max(int((held_out["split"] == number).sum()), 1)
        if share >= _LEAST_SHARE:
            shares[name] = round(share, 4)
    return shares


def _agree(labels: NDArray[np.float64], rates: NDArray[np.float64]) -> bool:
    """Whether labels agree much more than by chance with equal training rows, whose share of positives is `rates`."""
    if not len(labels):
        return False
    label, rate = labels.mean(), rates.mean()
    differ = float((labels * (1 - rates) + (1 - labels) * rates).mean())
    expected = float(label * (1 - rate) + (1 - label) * rate)
    return expected * len(labels) >= _LEAST_EXPECTED and 1 - differ / expected >= _AGREEMENT
