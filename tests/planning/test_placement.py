"""Test placement: budgets hold, a required precision is kept, pinned tables fit, and an error says
what to change.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planning.popular import zipf

from errors import refuses
from stratarec.errors import ConfigError
from stratarec.hot.config import HotConfig
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import RowShape
from stratarec.planning.candidates import PIN_MARGIN, TableSpec, cache_sizes
from stratarec.planning.config import BlockConfig, CacheConfig, MappedConfig, MemoryConfig
from stratarec.planning.machine import BlockTier, DramTier, HbmTier, MappedTier, Tiers
from stratarec.planning.placement import place
from stratarec.planning.plan import Plan, tier_config

MIB = 1 << 20
BATCH = 1024
TIERS = Tiers(
    dram=DramTier(sequential_bytes_per_second=2e10, row_bytes_per_second=1e10, bytes=32 << 30),
    threads=2,
    block=BlockTier(
        path="rows",
        write_bytes_per_second=5e8,
        reads_per_second=7e4,
        read_bytes=4096,
        parallel=32,
        direct=True,
        free_bytes=64 << 30,
    ),
    mapped=MappedTier(
        path="far", write_bytes_per_second=1e9, row_bytes_per_second=2e9, free_bytes=64 << 30
    ),
)


def table(
    name: str, rows: int, *, width: int = 16, lookups: float = BATCH, exponent: float = 1.05
) -> TableSpec:
    return TableSpec(
        name=name,
        rows=rows,
        shape=RowShape(width=width, row_state=True, full_state=0),
        lookups=lookups,
        popularity=zipf(rows, exponent),
    )


TABLES = [table("large", 2_000_000), table("middle", 200_000), table("small", 300), table("tiny", 3)]


def plan(tables: list[TableSpec] | None = None, **section: Any) -> Plan:
    return place(tables or TABLES, MemoryConfig(**section), TIERS, batch_size=BATCH)


WORKSPACE = plan().workspace_bytes
HBM = HbmTier(
    row_bytes_per_second=1e12, bytes=80 << 30, up_bytes_per_second=2e10, down_bytes_per_second=2e10
)
ON_GPU = replace(TIERS, hbm=HBM)


def gpu_plan(**section: Any) -> Plan:
    return place(TABLES, MemoryConfig(**section), ON_GPU, batch_size=BATCH)


def test_tables_that_fit_are_entirely_in_gpu_memory() -> None:
    gpu_placed = gpu_plan(hbm=1 << 30)
    assert {placed.tier for placed in gpu_placed.tables} == {"level0"}
    assert gpu_placed.used("hbm") == gpu_placed.float32_bytes + gpu_placed.workspace_bytes <= 1 << 30
    assert gpu_placed.used("dram") == 0
    assert gpu_placed.summary.count("GPU memory") == 1
    assert tier_config(gpu_placed, MemoryConfig(hbm=1 << 30), "run", "cuda:1").device == "cuda:1"
    # If the run is opened without a GPU, the same rows are in DRAM.
    assert tier_config(gpu_placed, MemoryConfig(hbm=1 << 30), "run").device == "cpu"


def test_a_table_larger_than_gpu_memory_has_a_cache_there_and_float32_rows_in_dram() -> None:
    little, more = (gpu_plan(hbm=size << 20) for size in (16, 48))
    for placed, size in ((little, 16), (more, 48)):
        large = placed["large"]
        assert (large.tier, large.codec.kind) == ("dram", "fp32")
        assert placed.used("hbm") <= size << 20
        assert large.bytes["dram"]["record weights"] == 4 * 16 * large.rows
        assert not {"slot weights", "slot state"} & large.bytes["dram"].keys()
        assert Plan.from_dict(json.loads(json.dumps(placed.to_dict()))) == placed
    assert more.hit_rate > little.hit_rate
    assert more.step_seconds < little.step_seconds
    # Rows that do not fit DRAM get a lower precision or go to the block device.
    lowered = gpu_plan(hbm=16 << 20, dram=64 << 20)
    assert lowered["large"].codec.kind != "fp32"
    assert lowered.used("dram") <= 64 << 20
    assert gpu_plan(hbm=16 << 20, precision="int8")["large"].codec.kind == "int8"


def test_int8_rows_are_in_gpu_memory_if_they_fit_there() -> None:
    memory = MemoryConfig(hbm=80 << 20, precision="int8")
    placed = place(TABLES, memory, ON_GPU, batch_size=BATCH)
    large = placed["large"]
    assert (large.tier, large.codec.kind) == ("hbm", "int8")
    # 16 codes, scale and offset as float16, and the state of a row as bfloat16 are 22 bytes, padded
    # to 24.
    assert (
        sum(size for part, size in large.bytes["hbm"].items() if part.startswith("record "))
        == 24 * large.rows
    )
    assert placed.used("hbm") <= 80 << 20
    assert large.seconds.total < gpu_plan(hbm=16 << 20, precision="int8")["large"].seconds.total
    assert tier_config(placed, memory, "run", "cuda").tables["large"].home == "hbm"
    # If the run is opened without a GPU, the same records are in DRAM.
    assert tier_config(placed, memory, "run").tables["large"].home == "dram"


def test_a_precision_that_a_gpu_cannot_encode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "int8", replace(KINDS["int8"], on_gpu=False))
    with refuses(ConfigError, "memory.precision 'large' int8 memory.hbm 0"):
        gpu_plan(hbm=16 << 20, precision={"large": "int8"})


def test_an_error_for_too_little_gpu_memory_says_how_much_is_enough() -> None:
    with refuses(ConfigError, "memory.hbm GPU memory") as caught:
        gpu_plan(hbm=700_000)
    least = int(re.search(r"memory.hbm to at least (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert gpu_plan(hbm=least).used("hbm") <= least
    with refuses(ConfigError, "memory.hbm"):
        gpu_plan(hbm=least - 1)


CHANGES: dict[str, Callable[[str], tuple[dict[str, Any], int]]] = {
    "set memory.precision": lambda words: ({"precision": "auto"}, BATCH),
    "name a block": lambda words: ({"block": BlockConfig(path="rows")}, BATCH),
    "lower train.batch_size": lambda words: ({}, int(words.rpartition(" ")[2])),
    "set memory.lookahead": lambda words: ({"lookahead": 0}, BATCH),
}
"""Advice -> fields of the memory section, and the batch size."""


@pytest.mark.parametrize(
    ("share", "tables", "precision"),
    [
        (share, tables, ("auto", "fp32")[(number + place) % 2])
        for number, share in enumerate((0.2, 0.6, 0.9, 0.999))
        for place, tables in enumerate((TABLES, [table("only", 20_000)]))
    ],
)
def test_each_advice_for_tables_that_do_not_fit_works(
    share: float, tables: list[TableSpec], precision: str
) -> None:
    def tried(dram: int, batch: int = BATCH, **section: Any) -> str:
        scaled = [replace(each, lookups=each.lookups * batch / BATCH) for each in tables]
        memory = MemoryConfig(**{"dram": dram, "precision": precision, **section})
        tiers = replace(TIERS, block=TIERS.block if memory.block else None)
        try:
            place(scaled, memory, tiers, batch_size=batch)
        except ConfigError as error:
            return str(error)
        return ""

    least = int(re.search(r"memory.dram to at least (\d+)", tried(1000))[1])  # type: ignore[index]
    dram = int(least * share)
    error = tried(dram)
    given = {words.strip() for words in error.partition("Set ")[2].split(", or ")[1:]}
    assert not tried(least)
    for begin, change in CHANGES.items():
        words = next((words for words in given if words.startswith(begin)), "")
        if words:
            section, batch = change(words)
            assert not tried(dram, batch, **section), words
        elif begin not in ("lower train.batch_size", "set memory.precision") or precision == "fp32":
            section, batch = change("1")
            assert begin == "lower train.batch_size" or tried(dram, batch, **section), f"missing: {begin}"
    assert not given or any(words.startswith(begin) for words in given for begin in CHANGES)


def test_hot_rows_take_part_of_the_gpu_memory() -> None:
    config = HotConfig(budget=4 << 20)
    memory = MemoryConfig(hbm=16 << 20, dram=1 << 40)
    assert memory.with_level0_budget(config.remaining(memory.level0_budget, "memory.hbm")).hbm == 12 << 20
    with refuses(ConfigError, "hot.budget memory.hbm"):
        config.remaining(4 << 20, "memory.hbm")


def kinds(placed: Plan) -> dict[str, tuple[str, str]]:
    return {each.table: (each.tier, each.codec.kind) for each in placed.tables}


def test_without_a_budget_every_table_is_float32_in_level_0() -> None:
    placed = plan()
    assert set(kinds(placed).values()) == {("level0", "fp32")}
    assert placed.hit_rate == 1
    assert placed.float32_bytes == sum(each.rows for each in TABLES) * 17 * 4
    assert placed.used("dram") == placed.float32_bytes + WORKSPACE


def test_precision_is_reduced_only_as_far_as_the_budget_requires() -> None:
    full_bytes = plan().float32_bytes
    lowest = []
    for share in (1.0, 0.7, 0.45, 0.27):
        placed = plan(dram=WORKSPACE + int(share * full_bytes))
        assert placed.used("dram") <= WORKSPACE + share * full_bytes
        lowest.append(max(KINDS[each.codec.kind].penalty for each in placed.tables))
    assert lowest == [KINDS[kind].penalty for kind in ("fp32", "fp16", "int8", "int4")]


@pytest.mark.parametrize("lookahead", [0, 1, 4])
@pytest.mark.parametrize("fraction", [None, 0.001])
def test_sets_have_slots_for_the_rows_of_all_batches_in_flight(
    lookahead: int, fraction: float | None
) -> None:
    placed = plan(precision="int8", lookahead=lookahead, cache=CacheConfig(fraction=fraction))
    for each, spec in zip(placed.tables, TABLES, strict=True):
        expected = spec.popularity.distinct(spec.lookups * (lookahead + 1))
        assert each.pinned == min(spec.rows, math.ceil(PIN_MARGIN * expected))
        if each.tier != "level0":
            assert each.slots.in_sets >= each.pinned
            assert each.slots.total == each.cache_rows < each.rows
    assert bool(fraction) == any("more cache than memory.cache.fraction" in note for note in placed.notes)


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("lookups", [16.0, 90.0, 2000.0])
def test_the_smallest_cache_fits_a_batch_for_any_distribution_over_sets(ways: int, lookups: float) -> None:
    """Sets with few ways fill unevenly: 29 rows did not always fit into 64 slots in sets of 4."""
    spec, draws = table("large", 2_000_000, lookups=lookups), np.random.default_rng(0)
    least = cache_sizes(spec, MemoryConfig(lookahead=0, cache=CacheConfig(ways=ways, fraction=1e-9)))[0]
    for _ in range(3000):
        filled = np.bincount(draws.integers(0, least.sets, math.ceil(spec.distinct)), minlength=least.sets)
        assert np.maximum(filled - ways, 0).sum() <= least.overflow


def test_pinned_rows_at_the_margin_overflow_into_less_than_a_sixteenth() -> None:
    ways = 32
    load = ways / PIN_MARGIN
    rows = np.arange(ways + 1, 200)
    from scipy import stats  # importing it takes half a second

    overflow = float(((rows - ways) * stats.poisson.pmf(rows, load)).sum())
    assert overflow / load < 0.02 < 1 / 16


def test_a_block_device_takes_rows_that_do_not_fit_dram() -> None:
    placed = plan(dram=30 * MIB, block=BlockConfig(path="rows"), precision="fp32")
    assert kinds(placed)["large"] == ("log", "fp32")
    assert placed.used("dram") <= 30 * MIB
    at_home = sum(each.rows for each in placed.tables if each.tier == "log")
    assert placed.bytes["block"]["record weights"] == at_home * 64
    assert placed.bytes["dram"]["locations"] == at_home * 4
    assert placed.step_seconds == max(
        placed.seconds.compute + placed.seconds.staging, placed.seconds.device
    )


def test_dram_smaller_than_any_table_caches_frequent_rows_of_a_log() -> None:
    section = {"block": BlockConfig(path="rows"), "precision": "fp32"}
    less, more = (plan(dram=size * MIB, **section)["large"] for size in (50, 100))
    assert less.tier == more.tier == "log"
    assert 0 < less.dram_rows < more.dram_rows < more.rows
    assert less.seconds.device > more.seconds.device
    assert more.bytes["dram"]["record weights"] == more.dram_rows * 64
    tiers = tier_config(plan(dram=100 * MIB, **section), MemoryConfig(**section), "x")
    assert tiers.tables["large"].dram_rows == more.dram_rows


def test_rank_is_chosen_if_the_ids_of_all_tables_are_ranked() -> None:
    ranked = [replace(each, is_ranked=True) for each in TABLES]
    section = {"dram": 100 * MIB, "block": BlockConfig(path="rows")}
    chosen = plan(ranked, **section)
    assert chosen.policy == "rank"
    assert plan([replace(ranked[0], is_ranked=False), *ranked[1:]], **section).policy == "lru"
    recent = plan(ranked, **section, cache=CacheConfig(policy="lru"))
    assert recent.policy == "lru"
    assert chosen.hit_rate > recent.hit_rate
    assert " (rank)" in chosen.summary


def test_mapped_memory_is_preferred_to_a_slower_block_device() -> None:
    section = {"dram": 30 * MIB, "block": BlockConfig(path="rows"), "precision": "fp32"}
    assert kinds(plan(**section, mapped=MappedConfig(path="far")))["large"] == ("mapped", "fp32")
    full = MappedConfig(path="far", budget=MIB)
    assert kinds(plan(**section, mapped=full))["large"] == ("log", "fp32")


def test_more_memory_is_never_predicted_to_be_slower() -> None:
    section = {"block": BlockConfig(path="rows"), "precision": "fp32"}
    seconds = [plan(dram=size * MIB, **section).seconds.total for size in (26, 32, 40, 80, 120)]
    assert seconds == sorted(seconds, reverse=True)


def least(message: str, field: str) -> int:
    result = re.search(rf"{re.escape(field)} to at least (\d+)", message)
    assert result, message
    return int(result[1])


@pytest.mark.parametrize("precision", ["auto", "fp32", "int8"])
def test_an_error_for_too_little_dram_names_the_table_and_the_minimum(precision: str) -> None:
    with refuses(ConfigError, "large") as error:
        plan(dram=MIB, precision=precision)
    needed = least(str(error.value), "memory.dram")
    assert plan(dram=needed, precision=precision).used("dram") <= needed
    with pytest.raises(ConfigError):
        plan(dram=int(needed * 0.999), precision=precision)
    with refuses(ConfigError, "device memory.block") as half:
        plan(dram=needed // 2, precision=precision)
    assert ("memory.precision to auto" in str(half.value)) == (precision == "fp32")


def test_twenty_six_tables_up_to_a_billion_rows_are_placed_in_seconds() -> None:
    tables = [table(f"t{place}", int(3 * 2.15**place), width=64) for place in range(26)]
    assert tables[-1].rows > 5e8
    began = time.process_time()
    placed = plan(tables, dram=16 << 30, block=BlockConfig(path="rows", budget=1 << 40), precision="int8")
    assert time.process_time() - began < 20
    assert placed.used("dram") <= 16 << 30


def test_a_plan_survives_json() -> None:
    placed = plan(dram=60 * MIB, block=BlockConfig(path="rows", budget=1 << 30), state="bf16")
    content = json.loads(json.dumps(placed.to_dict()))
    assert Plan.from_dict(content) == placed
    assert content["predicted"]["bytes"]["dram"] == placed.used("dram")
