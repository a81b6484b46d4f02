"""Test the state after failures: every row is unchanged or the collection refuses to run, and
checkpoints stay complete.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from errors import refuses
from store_conformance import largest_file, make_failing, make_failing_array
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.embedding import engine as engine_module
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import HomeKind, TableTier, TierConfig
from stratarec.errors import CheckpointError, ConfigError, StorageError, TrainingError

ROWS, BATCH = 5000, 60


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=(name,))
        for name in "ab"
    ]


def collection(
    home: HomeKind | None = "dram", path: Path | None = None, codec: str = "fp32", **options: Any
) -> TieredEmbeddingBagCollection:
    """Create two tables with small caches, or two tables in memory if `home` is None."""
    kind: Any = codec
    tier = TableTier(home=home or "dram", codec=CodecConfig(kind=kind), cache_rows=200)
    tables = {"a": tier, "b": tier} if home else {}
    tiers = TierConfig(**{"tables": tables, "ways": 8, "mapped_path": path, "log_path": path, **options})
    return TieredEmbeddingBagCollection(
        configs(), optimizer=RowOptimizerConfig(learning_rate=0.1), tiers=tiers
    )


def batch(number: int) -> KeyedJagged:
    generator = np.random.default_rng(number)
    ids = torch.from_numpy(np.minimum(generator.zipf(1.2, 2 * BATCH) - 1, ROWS - 1))
    return KeyedJagged(keys=("a", "b"), values=ids, offsets=None, batch_size=BATCH)


def step(module: TieredEmbeddingBagCollection, number: int) -> None:
    module(batch(number)).pooled.square().sum().backward()


def train(module: TieredEmbeddingBagCollection, first: int, last: int) -> TieredEmbeddingBagCollection:
    """Train the steps from `first` to `last` that the collection has not done yet."""
    for number in range(max(first, module.step), last):
        step(module, number)
    return module


def rows_of(module: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.clone() for name in "ab" for part, rows in module.table(name).items()}


def assert_same(one: TieredEmbeddingBagCollection, other: TieredEmbeddingBagCollection) -> None:
    left, right = rows_of(one), rows_of(other)
    assert left.keys() == right.keys()
    for name, rows in left.items():
        assert torch.equal(rows, right[name]), name


def cached(module: TieredEmbeddingBagCollection) -> CachedTables:
    return next(tables for tables in module.engine.tables if isinstance(tables, CachedTables))


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("home", ["dram", "log"])
def test_a_storage_error_while_rows_move_changes_no_row(
    tmp_path: Path, operation: str, share: float, home: HomeKind
) -> None:
    plain, module = collection(None), collection(home, tmp_path)
    store = make_failing(cached(module))
    for number in range(60):
        if number % 7 == 5:
            before = rows_of(module)
            store.fail(operation, StorageError("no space"), share=share)
            with pytest.raises(StorageError, match="no space"):
                module(batch(1000 + number))
            for name, rows in rows_of(module).items():
                assert torch.equal(rows, before[name]), name
        step(plain, number)
        step(module, number)
    assert_same(plain, module)
    manifest = module.save(tmp_path / "saved")
    again = collection(home, tmp_path / "again")
    again.load(tmp_path / "saved", manifest)
    assert_same(plain, again)
    for each in (module, again):
        each.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_interrupt_while_rows_move_blocks_the_tables_until_they_are_loaded(
    tmp_path: Path, operation: str
) -> None:
    plain, module = collection(None), collection()
    store = make_failing(cached(module))
    for number in range(20):
        step(plain, number)
        step(module, number)
    manifest = module.save(tmp_path / "saved")
    store.fail(operation, KeyboardInterrupt(), share=0.5)
    with pytest.raises(KeyboardInterrupt):
        module(batch(1000))
    refused = (
        lambda: module(batch(20)),
        lambda: module.stage(batch(20)),
        lambda: module.save(tmp_path / "b"),
        lambda: module.table("a"),
        lambda: module.rows("a", 0, 3),
        lambda: reading(module, batch(20)),
    )
    for action in refused:
        with refuses(TrainingError, "incomplete rows 0"):
            action()
    assert not (tmp_path / "b").exists()
    module.load(tmp_path / "saved", manifest)
    assert_same(plain, module)
    step(plain, 20)
    step(module, 20)
    assert_same(plain, module)


def swap_failing(tables: CachedTables, error: BaseException, *, after: bool) -> None:
    """Make the next swap of slots and records raise `error`, before or after it has moved the
    rows.
    """
    memory = tables.memory
    swap = memory.swap

    def failing(*given: Any) -> Any:
        del memory.swap  # type: ignore[method-assign]
        if after:
            swap(*given)
        raise error

    memory.swap = failing  # type: ignore[method-assign]


ERRORS: dict[str, BaseException] = {
    "storage": StorageError("gone"),
    "system": OSError(5, "no"),
    "memory": MemoryError(),
    "stop": KeyboardInterrupt(),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("home", ["dram", "mapped"])
def test_any_error_in_addressable_homes_keeps_rows_right_or_blocks_the_tables(
    tmp_path: Path, error: str, home: HomeKind
) -> None:
    """After an error the tables match tables without errors bit for bit, or refuse to run until
    they are loaded.
    """
    # With few ways and small caches rows leave the overflow area. This is the only move that calls
    # the store.
    plain, module = collection(None), collection(home, tmp_path / "home", ways=2)
    tables, caught, refused = cached(module), ERRORS[error], 0
    store = make_failing_array(tables)
    manifest = module.save(tmp_path / "step-0")
    for number in range(90):
        before = rows_of(module)
        if number % 6 == 5:
            place = number // 6 % 3
            if place == 0:
                store.fail("mark_written", caught)
            else:
                swap_failing(tables, caught, after=place == 2)
            try:
                module(batch(1000 + number)).pooled.sum()
            except type(caught):
                with suppress(TrainingError):
                    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(module).items())
            store.forget()
            tables.memory.__dict__.pop("swap", None)
            if module.engine.health.state == "failed":
                refused += 1
                for action in (
                    lambda: module(batch(0)),
                    lambda: module.save(tmp_path / "no"),
                    lambda: rows_of(module),
                ):
                    with refuses(TrainingError, "incomplete"):
                        action()
                module.load(tmp_path / f"step-{number - number % 6}", manifest)
                train(module, number - number % 6, number)
            else:
                module.engine.in_flight.end()
        step(plain, number)
        step(module, number)
        if number % 6 == 5:
            manifest = module.save(tmp_path / f"step-{number + 1}")
    assert refused
    assert_same(plain, module)
    module.close()


def mixed(path: Path) -> TieredEmbeddingBagCollection:
    """Create one table in each home, and one in memory."""
    homes: dict[str, HomeKind] = {"a": "dram", "b": "mapped", "c": "log"}
    return TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=(name,))
            for name in (*homes, "d")
        ],
        optimizer=RowOptimizerConfig(learning_rate=0.1),
        tiers=TierConfig(
            tables={name: TableTier(home=home, cache_rows=200) for name, home in homes.items()},
            ways=8,
            mapped_path=path,
            log_path=path,
        ),
    )


def mixed_step(module: TieredEmbeddingBagCollection, number: int) -> None:
    ids = np.minimum(np.random.default_rng(number).zipf(1.2, 4 * BATCH) - 1, ROWS - 1)
    features = KeyedJagged(keys=tuple("abcd"), values=torch.from_numpy(ids), offsets=None, batch_size=BATCH)
    module(features).pooled.square().sum().backward()


def all_rows(module: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    return {name: module.table(name)["weight"].clone() for name in "abcd"}


def test_a_full_disk_during_save_loses_only_that_checkpoint(tmp_path: Path) -> None:
    plain, module, previous, failed = mixed(tmp_path / "plain"), mixed(tmp_path / "homes"), None, 0
    for number in range(40):
        for each in (plain, module):
            mixed_step(each, number)
        if number % 4 != 3:
            continue
        path = tmp_path / f"step-{number}"
        for size in (0, 300, 3000, 20_000):
            with largest_file(size):
                try:
                    module.save(tmp_path / f"failed-{number}-{size}", previous)
                except StorageError:
                    failed += 1
        manifest = module.save(path, previous)
        previous = path
        again = mixed(tmp_path / f"again-{number}")
        assert again.load(path, manifest) == ""
        for one, other in ((plain, module), (plain, again)):
            left, right = all_rows(one), all_rows(other)
            assert all(torch.equal(left[name], right[name]) for name in left), number
        again.close()
    assert failed > 10
    for each in (plain, module):
        each.close()


def test_a_failed_load_in_any_home_blocks_the_tables(tmp_path: Path) -> None:
    module = mixed(tmp_path / "homes")
    for number in range(20):
        mixed_step(module, number)
    manifest, before = module.save(tmp_path / "saved"), all_rows(module)
    files = sorted(path for path in (tmp_path / "saved").rglob("*.safetensors"))
    assert len({path.relative_to(tmp_path / "saved").parts[0] for path in files}) == 4
    for path in files:
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1]), None):
            mixed_step(module, 20)
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                module.load(tmp_path / "saved", manifest)
            with pytest.raises(TrainingError, match=r"loading .* did not finish"):
                mixed_step(module, 21)
            with pytest.raises(TrainingError, match=r"loading .* did not finish"):
                module.save(tmp_path / "no")
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            module.load(tmp_path / "saved", manifest)
            assert all(torch.equal(rows, before[name]) for name, rows in all_rows(module).items())
    module.close()


def reading(module: TieredEmbeddingBagCollection, features: KeyedJagged) -> Tensor:
    with torch.no_grad():
        return module(features).pooled


@pytest.mark.parametrize("home", ["dram", "log"])
def test_a_row_that_its_codec_cannot_represent_ends_training(tmp_path: Path, home: HomeKind) -> None:
    """In addressable homes the evicted row has already been swapped with the new one when the error
    is detected.
    """
    module = collection(home, tmp_path, "fp16")
    module(batch(0)).pooled.backward(torch.full((BATCH, 8), float("nan")))
    with refuses(TrainingError, "fp16"):
        train(module, 1, 60)
    if home == "dram":
        with refuses(TrainingError, "incomplete finite"):
            module.save(tmp_path / "saved")
    module.close()


@pytest.mark.parametrize("home", [None, "dram", "mapped", "log"])
def test_nothing_works_after_close(tmp_path: Path, home: HomeKind | None) -> None:
    module = collection(home, tmp_path)
    step(module, 0)
    manifest = module.save(tmp_path / "saved")
    pending = module(batch(1)).pooled.sum()
    module.close()
    module.close()
    refused = (
        lambda: module(batch(0)),
        lambda: reading(module, batch(0)),
        lambda: module.stage(batch(0)),
        lambda: module.save(tmp_path / "b"),
        lambda: module.load(tmp_path / "saved", manifest),
        lambda: module.table("a"),
        lambda: module.rows("a", 0, 3),
        lambda: module.state_dict() if home is None else module.table("b"),
        lambda: module.engine.nbytes,
        pending.backward,
    )
    for action in refused:
        with refuses(TrainingError, "closed"):
            action()
    assert "closed" in repr(module)


def test_a_table_with_more_rows_than_tags_is_refused_before_allocation(tmp_path: Path) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=2**31 - 1, embedding_dim=4, feature_names=("f",))
    tiers = TierConfig(tables={"t": TableTier(home="log", cache_rows=64)}, log_path=tmp_path / "log")
    with refuses(ConfigError, "'t' 2,147,483,647 2,147,483,646"):
        TieredEmbeddingBagCollection([table], tiers=tiers)
    assert not (tmp_path / "log").exists()


# Content of checkpoints


@pytest.mark.parametrize("policy", ["lru", "rank"])
@pytest.mark.parametrize("home", ["dram", "log"])
def test_successive_checkpoints_each_restore_and_continue_bitwise(
    tmp_path: Path, policy: str, home: HomeKind
) -> None:
    """int8 rounds evicted rows, so tags, stamps and noise must all equal those of the saved run."""
    uninterrupted = collection(home, tmp_path / "whole", "int8", policy=policy)
    previous, manifests = None, []
    for number in range(60):
        step(uninterrupted, number)
        if number % 4 == 3:
            path = tmp_path / f"step-{number}"
            manifests.append((number, path, uninterrupted.save(path, previous)))
            previous = path
    for number, path, manifest in manifests[::5]:
        restored = collection(home, tmp_path / f"part-{number}", "int8", policy=policy)
        assert restored.load(path, manifest) == ""
        for later in range(number + 1, 60):
            step(restored, later)
        assert_same(uninterrupted, restored)
        restored.close()
    uninterrupted.close()


def test_a_checkpoint_loads_under_another_policy_with_every_row_in_its_slot(tmp_path: Path) -> None:
    """Rows that were transferred would be at home: rounded to int8."""
    module = train(collection(codec="int8"), 0, 20)
    again = collection(codec="int8", policy="rank")
    assert again.load(tmp_path / "saved", module.save(tmp_path / "saved")) == ""
    assert_same(module, again)
    slots = np.arange(cached(module).directory.slots)
    directories = [cached(each).directory for each in (module, again)]
    np.testing.assert_array_equal(*(directory.rows_in(slots) for directory in directories))
    np.testing.assert_array_equal(*(directory.stamps_in(slots) for directory in directories))


@pytest.mark.parametrize("ways", [2, 8])
def test_any_checkpoint_of_a_chain_loads_under_other_tiers(tmp_path: Path, ways: int) -> None:
    """Rows change slots between checkpoints, so an older file can hold a row that a newer one has
    in another slot.
    """
    plain, module, previous, overflowed = collection(None), collection(ways=ways), None, False
    for number in range(80):
        step(plain, number)
        step(module, number)
        overflowed |= bool(cached(module).directory.state.reach.any())
        if number % 3 == 2:
            path = tmp_path / f"step-{number}"
            manifest = module.save(path, previous)
            previous = path
            if number % 9 == 8:
                other = collection(None)
                assert "other tiers" in other.load(path, manifest)
                assert_same(plain, other)
                again = collection(ways=ways)
                assert again.load(path, manifest) == ""
                assert_same(plain, again)
    assert overflowed == (ways == 2)


def test_an_emptied_slot_is_empty_in_the_next_checkpoint(tmp_path: Path) -> None:
    """A row leaves the overflow area, is trained in another slot and is evicted. The old slot must
    not restore it.
    """

    def small_collection() -> TieredEmbeddingBagCollection:
        table = EmbeddingBagConfig(name="t", num_embeddings=4000, embedding_dim=4, feature_names=("f",))
        tiers = TierConfig(tables={"t": TableTier(cache_rows=1600)}, ways=1)
        return TieredEmbeddingBagCollection([table], tiers=tiers)

    def look_up(module: TieredEmbeddingBagCollection, ids: list[int]) -> None:
        values = torch.tensor(ids)
        embeddings = module(KeyedJagged(keys=("f",), values=values, offsets=None, batch_size=len(ids)))
        embeddings.pooled.square().sum().backward()

    module = small_collection()
    sets = int(cached(module).directory.layout.sets[0])
    one, other = next(
        (row, later)
        for row in range(1000, 4000)
        for later in range(row + 1, 4000)
        if row * 0x9E3779B1 % 2**32 * sets >> 32 == later * 0x9E3779B1 % 2**32 * sets >> 32
    )
    look_up(module, [*range(300), one, other])
    in_overflow = cached(module).directory.locate(np.array([one, other])) >= sets
    assert in_overflow.tolist() == [False, True]
    module.save(tmp_path / "a")
    for ids in ([5], [other], [one]):
        look_up(module, ids)
    assert cached(module).directory.locate(np.array([one, other])).tolist()[1] == -1, "it did not go home"
    manifest = module.save(tmp_path / "b", tmp_path / "a")
    assert len(manifest["groups"][0]["slots"]["files"]) == 2, "the delta was written as a base"
    again = small_collection()
    again.load(tmp_path / "b", manifest)
    for part, rows in module.table("t").items():
        assert torch.equal(rows, again.table("t")[part]), part


def test_changes_by_a_batch_in_flight_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    plain, module = collection(None), collection()
    for each in (plain, module):
        step(each, 0)
    first = module.save(tmp_path / "a")
    assert first
    losses = [each(batch(1)).pooled.square().sum() for each in (plain, module)]
    module.save(tmp_path / "b", tmp_path / "a")
    for loss in losses:
        loss.backward()
    manifest = module.save(tmp_path / "c", tmp_path / "b")
    again = collection()
    again.load(tmp_path / "c", manifest)
    assert_same(plain, again)


# Stamps and noise counters


def test_stamps_restart_and_noise_counters_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stamps have 32 bits and wrap around. The counter that determines the noise must never
    repeat.
    """
    monkeypatch.setattr(engine_module, "_LAST_STAMP", 20)
    monkeypatch.setattr(engine_module, "_SHIFT", 10)
    plain, module, previous = collection(None), collection(), None
    for number in range(100):
        step(plain, number)
        step(module, number)
        assert int(cached(module).directory.state.stamps.max()) <= 20
        if number % 6 == 5:
            path = tmp_path / f"step-{number}"
            manifest = module.save(path, previous)
            previous = path
    assert module.engine.batches == 100
    assert_same(plain, module)
    again = collection()
    again.load(previous, manifest)
    assert_same(plain, train(again, 96, 100))
