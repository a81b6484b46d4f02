"""Test measurements of tiers: they are positive, saved, and repeated on request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stratarec.planning.config import BlockConfig, MappedConfig, MemoryConfig
from stratarec.planning.machine import Tiers, measure_tiers


def memory(root: Path) -> MemoryConfig:
    return MemoryConfig(
        block=BlockConfig(path=str(root / "block")), mapped=MappedConfig(path=str(root / "mapped"))
    )


def without_time(tiers: Tiers) -> Tiers:
    """Remove the fields that change between two measurements."""
    assert tiers.block is not None
    assert tiers.mapped is not None
    return replace(
        tiers,
        age_seconds=0,
        block=replace(tiers.block, free_bytes=0),
        mapped=replace(tiers.mapped, free_bytes=0),
    )


def test_every_figure_is_positive_and_no_file_is_left(tmp_path: Path) -> None:
    result = measure_tiers(memory(tmp_path), cache=tmp_path / "tiers.json")
    assert result.block is not None
    assert result.mapped is not None
    for tier, names in (
        (result.dram, ("sequential_bytes_per_second", "row_bytes_per_second", "bytes")),
        (result.block, ("write_bytes_per_second", "reads_per_second", "parallel", "free_bytes")),
        (result.mapped, ("write_bytes_per_second", "row_bytes_per_second", "free_bytes")),
    ):
        assert all(getattr(tier, name) > 0 for name in names)
    assert result.dram.sequential_bytes_per_second > 1e8
    assert not list((tmp_path / "block").iterdir())
    assert not list((tmp_path / "mapped").iterdir())


def test_measurements_are_kept_until_new_ones_are_requested(tmp_path: Path) -> None:
    cache = tmp_path / "tiers.json"
    first = measure_tiers(memory(tmp_path), cache=cache)
    second = measure_tiers(memory(tmp_path), cache=cache)
    assert without_time(first) == without_time(second)
    assert second.age_seconds > first.age_seconds
    third = measure_tiers(memory(tmp_path), cache=cache, again=True)
    assert without_time(third) != without_time(second)
    assert third.age_seconds < second.age_seconds + 1
    assert without_time(measure_tiers(memory(tmp_path), cache=cache)) == without_time(third)
