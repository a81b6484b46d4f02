"""Test that exchanges between ranks match one process bit for bit, up to the rounding of their wire
formats.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.jobs import (
    TABLES,
    Setup,
    batch,
    join_ranks,
    places,
    train_ahead,
    train_sharded,
    train_single,
    train_with_small_cache,
)
from distributed.ranks import Ranks

from errors import refuses
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.wire import Wire
from stratarec.errors import ConfigError, TrainingError


def compare(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compare two results, bit for bit if `tolerance` is 0."""
    assert actual["step"] == expected["step"]
    pairs = [
        *zip(actual["pooled"], expected["pooled"], strict=True),
        *zip(actual["rows"], expected["rows"], strict=True),
        (actual["read"], expected["read"]),
        *(
            (actual["tables"][name][part], parts[part])
            for name, parts in expected["tables"].items()
            for part in parts
        ),
    ]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        if tolerance:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("count", "singles"), [(4, False), (2, True)])
def test_pooling_at_the_owner_matches_one_process_bit_for_bit(
    ranks: Ranks, count: int, singles: bool, tmp_path: Path
) -> None:
    setup = Setup("whole", singles=singles, steps=16)
    compare(join_ranks(ranks.run(count, train_sharded, setup, tmp_path)), train_single(setup, tmp_path), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("home", "codec"), [("dram", "int8"), ("log", "fp32"), ("log", "int8")])
def test_tables_with_homes_match_one_process_bit_for_bit_at_one_owner(
    ranks: Ranks, home: str, codec: str, tmp_path: Path
) -> None:
    """Evictions and rounding depend only on the batches."""
    setup = Setup("whole", home=home, codec=codec, steps=16)
    compare(join_ranks(ranks.run(2, train_sharded, setup, tmp_path)), train_single(setup, tmp_path), 0)


@pytest.mark.parametrize(
    ("count", "layout", "home"),
    [(2, "rows", ""), (2, "rows", "dram"), (2, "split", "log"), (4, "split", "dram"), (2, "mixed", "log")],
)
def test_exchanged_rows_differ_only_by_the_order_of_sums(
    ranks: Ranks, count: int, layout: str, home: str, tmp_path: Path
) -> None:
    setup = Setup(layout, home=home, steps=16)
    compare(
        join_ranks(ranks.run(count, train_sharded, setup, tmp_path)), train_single(setup, tmp_path), 1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "layout", "optimizer"),
    [("mapped", "split", "adam of all rows"), ("log", "mixed", "rowwise_adagrad")],
)
def test_float32_homes_match_resident_tables_bit_for_bit(
    ranks: Ranks, home: str, layout: str, optimizer: str, tmp_path: Path
) -> None:
    without = Setup(layout, optimizer=optimizer, steps=16)
    expected = join_ranks(ranks.run(2, train_sharded, without, tmp_path))
    compare(join_ranks(ranks.run(2, train_sharded, replace(without, home=home), tmp_path)), expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["whole", "rows", "split"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adam", "adam of all rows"])
def test_one_rank_matches_an_unsharded_collection_bit_for_bit(
    layout: str, optimizer: str, tmp_path: Path
) -> None:
    setup = Setup(layout, optimizer=optimizer)
    compare(join_ranks([train_sharded(Mesh.alone(), setup, tmp_path)]), train_single(setup, tmp_path), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "layout", "tolerance"), [(2, "whole", 0), (4, "mixed", 1e-6)])
def test_ranks_may_have_few_samples_or_none(
    ranks: Ranks, count: int, layout: str, tolerance: float, tmp_path: Path
) -> None:
    setup = Setup(layout, home="dram", uneven=True, steps=16)
    compare(
        join_ranks(ranks.run(count, train_sharded, setup, tmp_path)),
        train_single(setup, tmp_path),
        tolerance,
    )


INT8 = Setup("mixed", home="dram", codec="int8")


@pytest.fixture(scope="module")
def exact(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train with float32 on the wire."""
    return join_ranks(ranks.run(2, train_sharded, INT8, tmp_path_factory.mktemp("exact")))


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_narrow_wires_are_deterministic_and_close(
    ranks: Ranks, exact: dict[str, Any], wire: Any, tmp_path: Path
) -> None:
    setup = replace(INT8, exchange=DistributedConfig(wire=wire, gradient_wire=wire))
    first, second = (
        join_ranks(ranks.run(2, train_sharded, setup, tmp_path / str(time))) for time in range(2)
    )
    compare(first, second, 0)
    compare(first, exact, {"fp16": 5e-3, "bf16": 5e-2, "int8": 5e-2}[wire])
    assert any(
        not torch.equal(mine, theirs) for mine, theirs in zip(first["pooled"], exact["pooled"], strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_lookahead_on_ranks_matches_lookahead_in_one_process_bit_for_bit(
    ranks: Ranks, codec: str, tmp_path: Path
) -> None:
    """Ids are exchanged on the thread that prepares batches, rows and gradients on the thread that
    trains.
    """
    setup = Setup("whole", home="dram", codec=codec, steps=16)
    actual = join_ranks(ranks.run(2, train_ahead, setup, tmp_path, 2))
    compare(actual, train_ahead(Mesh.alone(), setup, tmp_path, 2), 0)


@pytest.mark.slow
def test_lookahead_changes_no_row_of_sharded_tables(ranks: Ranks, tmp_path: Path) -> None:
    setup = Setup("split", home="dram", steps=16)
    results = [
        join_ranks(ranks.run(2, train_ahead, setup, tmp_path / str(depth), depth)) for depth in (0, 3)
    ]
    compare(*results, 0)


def test_a_bad_id_on_one_rank_ends_all_ranks_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """The error occurs on the preparing thread while the other ranks train. No rank waits for the
    timeout.
    """
    began = time.monotonic()
    messages = ranks.refused(3, train_ahead, Setup("mixed", home="dram"), tmp_path, 2, 9)
    assert messages == {"rank 1: feature 'page': id 40 is outside table 'page', expected 0 to 39"}
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_cache_that_is_too_small_on_one_rank_is_an_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    setup = Setup("whole", home="dram", steps=3)
    (message,) = ranks.refused(2, train_with_small_cache, setup, tmp_path)
    assert message.startswith("rank 1: table 'user': a batch with")


def test_weights_of_samples_are_refused() -> None:
    features = batch(0, True)
    weighted = replace(features, weights=torch.ones(features.values.numel()))
    sharding = Sharding(TABLES, places("whole", 1), 1)
    with refuses(ConfigError, "weights"):
        ShardedCollection(sharding, Mesh.alone())(weighted)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tolerance"), [("whole", 0), ("rows", 1e-4)])
def test_rows_that_a_batch_lacks_change_on_their_owner(
    ranks: Ranks, layout: str, tolerance: float, tmp_path: Path
) -> None:
    setup = Setup(layout, optimizer="adam of all rows", home="dram", steps=16)
    compare(
        join_ranks(ranks.run(2, train_sharded, setup, tmp_path)), train_single(setup, tmp_path), tolerance
    )


SPANS = [(5, 8), (3, 8), (0, 4), (7, 3)]
FLOATS = sum(rows * width for rows, width in SPANS)


@pytest.mark.parametrize(
    ("kind", "bits", "size", "scale"), [("fp32", 24, 4, 0), ("fp16", 11, 2, 2), ("bf16", 8, 2, 0)]
)
def test_float_wires_round_to_nearest_for_rows_of_any_size(
    kind: Any, bits: int, size: int, scale: int
) -> None:
    """Rows range from 1e-30 to 1e30, and numbers in a row down to a thousandth of its largest."""
    draws, wire = torch.Generator().manual_seed(1), Wire(kind, 1, 0)
    signs = torch.randint(0, 2, (60, 8), generator=draws) * 2 - 1
    rows = signs * 10 ** (torch.arange(-30.0, 30)[:, None] - 3 * torch.rand(60, 8, generator=draws))
    rows[7] = 0
    encoded = wire.encode(rows.view(-1), [(60, 8)], "rows", 3)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == wire.bytes_of([(60, 8)]) == 60 * (8 * size + scale)
    assert wire.bytes_of(SPANS) == sum(count * (width * size + scale) for count, width in SPANS)
    decoded = wire.decode(encoded, [(60, 8)]).view(60, 8)
    assert bool(((decoded - rows).abs() <= rows.abs() * 2.0**-bits).all())


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
def test_int8_is_within_one_step_of_its_row_and_unbiased(size: float) -> None:
    wire, rows = Wire("int8", 1, 0), torch.randn(64, 16) * size
    decoded = torch.stack(
        [
            wire.decode(wire.encode(rows.view(-1), [(64, 16)], "rows", step), [(64, 16)])
            for step in range(400)
        ]
    )
    step = (rows.max(1).values - rows.min(1).values) / 255
    errors = decoded.view(400, 64, 16) - rows
    assert bool((errors.abs() <= step.view(1, 64, 1) * 1.01 + 1e-3 * size).all())
    # The mean of 400 draws must be within five standard errors. The deviation of one draw is at
    # most half a step.
    assert bool((errors.mean(0).abs() <= step.view(64, 1) * 0.5 * 5 / 20 + 1e-3 * size).all())


def test_noise_depends_only_on_seed_rank_direction_step_and_position() -> None:
    rows, spans = torch.linspace(0, 1, 16).repeat(4), [(4, 16)]

    def encoded(seed: int = 1, rank: int = 0, direction: str = "rows", step: int = 5) -> torch.Tensor:
        return Wire("int8", seed, rank).encode(rows, spans, direction, step)

    assert torch.equal(encoded(), encoded())
    records = encoded().view(4, -1)
    assert len({record.numpy().tobytes() for record in records}) == 4
    for other in ({"seed": 2}, {"rank": 1}, {"direction": "gradients"}, {"step": 6}):
        assert not torch.equal(encoded(), encoded(**other))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_a_wire_cannot_represent_are_refused(kind: Any, bad: float) -> None:
    rows = torch.zeros(FLOATS)
    rows[11] = bad
    with refuses(TrainingError, f"step 9 {kind}"):
        Wire(kind, 1, 0).encode(rows, SPANS, "gradients", 9)
