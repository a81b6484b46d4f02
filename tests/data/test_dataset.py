"""What a data set tells of its vocabularies."""

from __future__ import annotations

from pathlib import Path

from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig


def test_access_counts_are_one_number_a_row_and_fall(tmp_path: Path) -> None:
    dataset = prepare(PrepareConfig(source=SyntheticConfig(samples=2000, scale=0.001), path=str(tmp_path / "d")))
    for name, info in dataset.vocabularies.items():
        counts = dataset.access_counts(name)
        assert len(counts) == info.rows
        assert (counts[: info.values][:-1] >= counts[: info.values][1:]).all()
    missing = 0.1 * dataset.samples("train")
    assert dataset.access_counts("C1").sum() == dataset.samples("train")
    assert abs(dataset.access_counts("C3").sum() - (dataset.samples("train") - missing)) < 0.3 * missing
