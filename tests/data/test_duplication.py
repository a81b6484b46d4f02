"""What `profile` prints is what is in the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recipes import log_config
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.duplication import profile
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.vocabulary import VocabularyConfig

SIZE = 12


def made(root: Path, groups: str) -> Dataset:
    """Sessions of 12 samples: the city never changes, the page changes every third sample, the item always."""
    rows = np.arange(SIZE * 300)
    frame = pl.DataFrame(
        {
            "label": rows % 2,
            "session": rows // SIZE,
            "city": rows // SIZE,
            "page": rows // 3,
            "item": rows,
            "tags": [[int(row) // SIZE, int(row) // SIZE + 1] for row in rows],
        }
    )
    schema = Schema(
        sparse=(
            *(SparseFeature(name=name) for name in ("city", "page", "item")),
            SparseFeature(name="tags", kind="multi"),
        ),
        session="session",
    )
    limits = VocabularyConfig(min_count=1)
    return prepare(log_config(root, schema, frame, path=str(root / groups), groups=groups, vocabulary=limits))


def test_factors_are_those_of_the_data(tmp_path: Path) -> None:
    dataset = made(tmp_path, "auto")
    found = profile(dataset, batch_size=20 * SIZE, batches=5)
    rows = {row.features: row for row in found.rows}
    assert found.samples_per_session == SIZE
    assert found.batch_samples_per_session == SIZE
    assert set(rows) == {("city", "tags"), ("page",), ("item",)}
    assert rows["city", "tags"].stays == 1
    assert rows["city", "tags"].whole_factor == rows["city", "tags"].predicted == SIZE
    assert 3 <= rows["city", "tags"].batch_factor < SIZE
    assert rows["city", "tags"].ids == 3
    assert rows["page",].session_factor == pytest.approx(3)
    assert rows["page",].batch_factor == pytest.approx(3)
    assert rows["item",].batch_factor == 1
    assert not rows["item",].grouped
    assert rows["city", "tags"].shuffled_factor < 2
    assert found.lookups_saved == pytest.approx((3 * rows["city", "tags"].saved + 2 / 3) / 5)
