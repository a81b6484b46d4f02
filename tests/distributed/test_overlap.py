"""Rows that travel early are those that would have travelled late, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.jobs import TABLES, Setup, ahead, batch, loss, places, share, tiers
from distributed.ranks import Ranks

from stratarec.distributed.collection import ShardedCollection
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.courier import Courier, Parcel
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Sharding
from stratarec.embedding import RowOptimizerConfig
from stratarec.embedding.prepared import Flight
from stratarec.errors import RankError, TrainingError

EARLY = DistributedConfig(overlap=True)
NARROW = DistributedConfig(overlap=True, wire="int8", gradient_wire="int8")


def same(one: Any, other: Any) -> bool:
    """Whether nested results have the same bits."""
    if isinstance(one, torch.Tensor):
        # As whole numbers: -0.0 is not 0.0 here.
        return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def counted(mesh: Mesh, *arguments: Any) -> tuple[dict[str, Any], int]:
    """What `ahead` finds, and the bytes that this rank sent early."""
    before = mesh.early.sent_bytes
    return ahead(mesh, *arguments), mesh.early.sent_bytes - before


@pytest.mark.parametrize(
    ("count", "depth", "setup"),
    [
        (2, 1, Setup("whole", home="dram", codec="int8", exchange=EARLY)),
        (2, 2, Setup("whole", singles=True, exchange=EARLY)),
        (2, 4, Setup("split", home="log", exchange=EARLY)),
        (2, 2, Setup("mixed", home="log", codec="int8", exchange=NARROW)),
        (4, 2, Setup("mixed", home="dram", codec="int8", uneven=True, exchange=NARROW)),
        (2, 1, Setup("one", singles=True, uneven=True, exchange=DistributedConfig(overlap=True, wire="bf16"))),
    ],
    ids=lambda value: f"{value.layout}-{value.home}-{value.codec}" if isinstance(value, Setup) else str(value),
)
def test_early_rows_have_the_bits_of_late_ones(
    ranks: Ranks, count: int, depth: int, setup: Setup, tmp_path: Path
) -> None:
    found = ranks.run(count, counted, setup, tmp_path / "early", depth)
    without = replace(setup, exchange=replace(setup.exchange, overlap=False))
    want = ranks.run(count, counted, without, tmp_path / "late", depth)
    assert [sent > 0 for _, sent in found] == [setup.layout != "one" or rank == 0 for rank in range(count)]
    assert all(sent == 0 for _, sent in want)
    for (mine, _), (theirs, _) in zip(found, want, strict=True):
        assert same(mine, theirs)


def test_without_lookahead_nothing_is_early(ranks: Ranks, tmp_path: Path) -> None:
    setup = Setup("mixed", home="dram", steps=3, exchange=EARLY)
    assert [sent for _, sent in ranks.run(2, counted, setup, tmp_path, 0)] == [0, 0]


def features(mesh: Mesh, setup: Setup, step: int) -> Any:
    mine = share(step, mesh.rank, mesh.ranks, setup.uneven)
    return batch(step, setup.singles).take(torch.arange(mine.start, mine.stop))


def collection(mesh: Mesh, setup: Setup) -> ShardedCollection:
    return ShardedCollection(
        Sharding(TABLES, places(setup.layout, mesh.ranks), mesh.ranks), mesh, seed=7, config=setup.exchange,
        optimizer=RowOptimizerConfig(learning_rate=0.05), tiers=tiers(setup, None),
    )  # fmt: skip


def handled(mesh: Mesh, setup: Setup) -> list[Any]:
    """Handles in every order that is allowed, and in some that are not; outputs, errors and tables."""
    found: list[Any] = []
    with contextlib.closing(collection(mesh, setup)) as made:
        engine = made.engine

        def prepared(step: int) -> Any:
            return engine.prepare_ahead(features(mesh, setup, step), 8, never)

        def looked_up(handle: Any) -> Any:
            outputs = made(handle)
            found.append(outputs.pooled.detach().clone())
            return loss(outputs, handle.features)

        def refused(work: Callable[[], Any], kind: type[Exception]) -> None:
            with pytest.raises(kind) as caught:
                work()
            found.append(str(caught.value))

        # Looked up before those before them are trained.
        losses = [looked_up(handle) for handle in [prepared(step) for step in range(4)]]
        for each in losses:
            each.backward()
        # Let go unused, out of order, a bad batch between them, and twice.
        first, unused, last = (prepared(step) for step in range(4, 7))
        refused(lambda: made(last), TrainingError)
        bad = features(mesh, setup, 7)
        if mesh.rank == 1:
            bad.values[0] = 40
        refused(lambda: engine.prepare_ahead(bad, 8, never), RankError)
        looked_up(first).backward()
        unused.release()
        following = prepared(8)
        looked_up(last).backward()
        refused(lambda: made(last), TrainingError)
        # Not prepared ahead, and read without being prepared.
        looked_up(following).backward()
        looked_up(engine.prepare(features(mesh, setup, 9))).backward()
        after = [prepared(step) for step in (9, 10)]
        with torch.no_grad():
            found.append(made(features(mesh, setup, 3)).pooled.clone())
        for handle in after:
            looked_up(handle).backward()
        found += [{k: v.clone() for k, v in made.table(table.name).items()} for table in TABLES]
        waiting = [prepared(step) for step in range(3)]
    refused(lambda: made(waiting[0]), TrainingError)
    return found


@pytest.mark.parametrize("layout", ["whole", "mixed"])
def test_handles_in_any_order_give_the_same(ranks: Ranks, layout: str) -> None:
    setup = Setup(layout, exchange=NARROW)
    without = replace(setup, exchange=replace(setup.exchange, overlap=False))
    assert same(ranks.run(2, handled, setup), ranks.run(2, handled, without))


def test_parcels_wait_for_what_trains_before_them() -> None:
    """In their order, each when all batches before its horizon are done or it is looked up; not after an error."""
    flight, sent = Flight(), []
    courier = Courier(Channel(0, 1), flight)

    def parcel(name: str, horizon: int | None, error: Exception | None = None) -> Parcel:
        def send(stopped: Callable[[], bool]) -> list[torch.Tensor]:
            sent.append((name, flight.oldest(9)))
            if error is not None:
                raise error
            return [torch.tensor([1.0])]

        given = Parcel(horizon, send)
        courier.give(given)
        return given

    for number in range(3):
        flight.start(number)
    first = parcel("first", None)
    assert len(courier.take(first)) == 1
    second = parcel("second", 1)
    parcel("released", 2)
    fourth = parcel("fourth", 2, ValueError("lost"))
    fifth = parcel("fifth", None)
    assert not second.done
    flight.done(0)
    courier.take(second)
    courier.hurry(fourth)
    for each in (fourth, fifth):
        with pytest.raises(ValueError, match="lost"):
            courier.take(each)
    assert sent == [("first", 0), ("second", 1), ("released", 1), ("fourth", 1)]
    courier.close()
