"""Test that dense columns keep their digits: they are standardized in float64, for any size, spread
and order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import log_config
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, DenseTransform, Schema, SparseFeature
from stratarec.data.splits import SplitConfig
from stratarec.data.transforms import Moments

HOUR = np.unique(np.random.default_rng(0).integers(1_506_826_800, 1_506_830_400, 2000))
MINUTE = np.unique(np.random.default_rng(1).integers(1_506_826_800_000, 1_506_826_860_000, 2000))


def prepare_columns(
    root: Path, columns: dict[str, object], transform: DenseTransform, split: SplitConfig
) -> pl.DataFrame:
    """Return the columns of the batches, training samples before test samples."""
    frame = pl.DataFrame(columns)
    rows = len(frame)
    frame = frame.with_columns(label=pl.int_range(rows) % 2, c=pl.lit("c"), time=pl.int_range(rows))
    frame.write_parquet(root / "log.parquet", row_group_size=300)
    schema = Schema(
        dense=tuple(DenseFeature(name=name, transform=transform) for name in columns),
        sparse=(SparseFeature(name="c"),),
        time="time",
    )
    dataset = prepare(log_config(root, schema, split=split, shard_samples=400))
    batches = [
        batch.dense.numpy()
        for name in dataset.splits
        if dataset.samples(name)
        for batch in Loader(dataset, name, LoaderConfig(shuffle=False)).epoch(0)
    ]
    return pl.DataFrame(np.concatenate(batches), schema=list(columns))


@pytest.mark.parametrize("transform", ["none", "log1p"])
@pytest.mark.parametrize("times", [HOUR, MINUTE], ids=["seconds of an hour", "milliseconds of a minute"])
def test_times_keep_their_values(tmp_path: Path, times: np.ndarray, transform: DenseTransform) -> None:
    values = prepare_columns(tmp_path, {"t": times}, transform, SplitConfig(valid=0.0, test=0.0))[
        "t"
    ].to_numpy()
    assert len(np.unique(values)) == len(times)
    # Computed in exact integers; the logarithm is linear over such a short time.
    away = (times - times[0]).astype(np.float64)
    np.testing.assert_allclose(values, (away - away.mean()) / away.std(), atol=2e-5)
    assert values.dtype == np.float32


def test_large_standardized_values_are_finite(tmp_path: Path) -> None:
    small = np.linspace(0, 1e-6, 400)
    small[-1] = 1e37  # in the test split, with a deviation of 3e-7
    columns = {"small": small, "huge": np.where(np.arange(400) % 2, 1e37, -2.9e38)}
    columns_by_name = prepare_columns(
        tmp_path, columns, "none", SplitConfig(by="time", valid="1s", test="1s")
    )
    assert np.isfinite(columns_by_name.to_numpy()).all()
    assert columns_by_name["small"][-1] == np.finfo(np.float32).max
    assert abs(columns_by_name["small"][:398].to_numpy().std() - 1) < 1e-5
    assert columns_by_name["huge"].n_unique() == 2


def exact_moments(values: list[float]) -> tuple[float, float]:
    """Return mean and standard deviation, computed with fractions."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    return float(mean), math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers))


@settings(deadline=None, max_examples=75)
@given(
    st.sampled_from([0.0, 1.0, 1.5e9, 1.5e18, -3e38]),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.randoms(),
)
def test_moments_of_parts_combine_to_the_moments_of_all(
    center: float, away: list[float], cuts: list[int], draws: object
) -> None:
    values = [center + value for value in away]
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    parts = [Moments.of(np.array([*values[a:b], math.nan])) for a, b in pairwise(edges)]
    draws.shuffle(parts)  # type: ignore[attr-defined]
    total = sum([*parts, Moments()], Moments())
    mean, deviation = exact_moments(values)
    ulp = np.spacing(abs(center) + 1e6)
    assert total.count == len(values)
    assert total.mean == pytest.approx(mean, abs=4 * ulp)
    if min(values) == max(values):
        assert total.mean == values[0]
        assert total.deviation == 1.0
    else:
        assert total.deviation == pytest.approx(deviation, rel=1e-9, abs=4 * ulp)
