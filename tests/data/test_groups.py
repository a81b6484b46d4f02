"""Test deduplicated data sets: they contain exactly the samples of plain ones, for any sessions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import refuses
from recipes import log_config
from stratarec.batch.batch import Batch
from stratarec.data.column_names import ROW, SPLIT
from stratarec.data.dataset import writer as storage
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dedup_groups import Repeats, dedup_factor
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.partition import Partition
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError, DataError
from stratarec.kernels.segments import find_segments


def schema(*, user: bool = True, **groups: str) -> Schema:
    """Return a schema of items, an operating system and a city per session, tags, the price of the
    item and the session's age.
    """
    sparse = [
        SparseFeature(name="item"),
        SparseFeature(name="os", group=groups.get("os", "")),
        SparseFeature(name="city", group=groups.get("city", "")),
        SparseFeature(name="tags", kind="multi", max_length=3, group=groups.get("tags", "")),
    ]
    if user:
        sparse.append(SparseFeature(name="history", kind="history", of="item", max_length=4))
    dense = (DenseFeature(name="price"), DenseFeature(name="age", group=groups.get("age", "")))
    return Schema(
        dense=dense,
        sparse=tuple(sparse),
        session="session",
        user="user" if user else "",
        time="time" if user else "",
    )


def write_log(path: Path, sessions: int = 80, longest: int = 20, seed: int = 0) -> pl.DataFrame:
    """Write a log whose sessions are scattered over the file. Some are longer than a row group."""
    draws = np.random.default_rng(seed)
    sizes = draws.integers(1, longest, sessions)
    session = np.repeat(np.arange(sessions), sizes)
    rows = len(session)
    kinds = [None, [], ["a"], ["a", "b", "a", "c"], ["d"]]
    frame = pl.DataFrame(
        {
            "label": draws.integers(0, 2, rows),
            "session": session,
            "user": session % 17,
            "time": 1000 * session + draws.integers(0, 5, rows),
            "item": draws.integers(0, 30, rows),
            "os": pl.Series([None, "x", "y"])[(session % 3).tolist()],
            "city": [f"c{s % 11}" for s in session],
            "tags": pl.Series([kinds[s % 5] for s in session], dtype=pl.List(pl.String)),
            "price": draws.random(rows).astype(np.float32),
            "age": (session % 7).astype(np.float32),
        }
    )
    frame = frame.sample(fraction=1, shuffle=True, seed=seed)
    frame.write_parquet(path, row_group_size=200)
    return frame


def config(root: Path, name: str, schema: Schema, **changes: Any) -> PrepareConfig:
    usual = {"split": SplitConfig(), "vocabulary": VocabularyConfig(tail_buckets=2), "shard_samples": 300}
    return log_config(root, schema, path=str(root / name), **{**usual, **changes})


@pytest.fixture(scope="module")
def plain_samples(pair: tuple[Dataset, Dataset]) -> Counter[str]:
    """Return the training split of the data set without groups."""
    batches = Loader(pair[1], "train", LoaderConfig(batch_size=50)).epoch(0)
    return samples_of(list(batches), names(pair[1]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    """Prepare the same log with groups and without, in row groups of 40 samples."""
    root = tmp_path_factory.mktemp("groups")
    write_log(root / "log.parquet", longest=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ROW_GROUP", 40)
        patch.setattr(storage, "_FEW_BYTES", 0)
        return prepare(config(root, "grouped", schema())), prepare(
            config(root, "plain", schema(), groups="none")
        )


def samples_of(batches: list[Batch], keys: list[str]) -> Counter[str]:
    samples: Counter[str] = Counter()
    for batch in batches:
        plain = batch.expanded(keys)
        bags = [plain.sparse[key].to_list() for key in keys]
        assert batch.user is not None
        samples.update(
            str(
                (
                    plain.label[b].item(),
                    plain.dense[b].tolist(),
                    batch.user[b].item(),
                    [bag[b] for bag in bags],
                )
            )
            for b in range(batch.size)
        )
    return samples


def names(dataset: Dataset) -> list[str]:
    return [feature.name for feature in dataset.schema.sparse]


def test_no_distinct_value_is_stored_twice_in_a_row_group(pair: tuple[Dataset, Dataset]) -> None:
    grouped, _ = pair
    for number, shard in enumerate(grouped.shards("train")):
        for group in range(len(shard.row_groups)):
            block = grouped.row_group("train", number, group)
            values = [str(row) for row in block.tables["found_1"].to_pylist()]
            windows = [str(row) for row in block.tables["history"].to_pylist() if row["length"]]
            assert len(values) == len(set(values))
            assert len(windows) == len(set(windows))
            used = block.pointers("found_1")
            assert list(dict.fromkeys(used.tolist())) == list(range(len(values)))


@settings(deadline=None, max_examples=8)
@given(
    st.integers(15, 300),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from(["session", "run", "sample"]),
)
def test_batches_expand_to_exactly_the_samples_of_the_plain_data_set(
    pair: tuple[Dataset, Dataset], plain_samples: Counter[str], size: int, window: int, seed: int, unit: Any
) -> None:
    grouped, _ = pair
    keys = names(grouped)
    options: dict[str, Any] = {"batch_size": size, "shuffle_row_groups": window, "seed": seed}
    loader = Loader(grouped, "train", LoaderConfig(unit=unit, **options))
    batches = list(loader.epoch(0))
    assert samples_of(batches, keys) == plain_samples
    expanded = list(Loader(grouped, "train", LoaderConfig(unit=unit, expand=True, **options)).epoch(0))
    for one, other in zip(batches, expanded, strict=True):
        assert not other.groups
        plain_batch = one.expanded(keys).sparse
        assert plain_batch.values.tolist() == other.sparse.values.tolist()
        assert plain_batch.bag_offsets().tolist() == other.sparse.bag_offsets().tolist()
        for group in one.groups:
            assert len(set(group.inverse.tolist())) == group.unique.batch_size
    tail = list(loader.epoch(0, len(batches) // 2))
    assert [b.label.tolist() for b in tail] == [b.label.tolist() for b in batches[len(batches) // 2 :]]
    assert all(
        a.unique.batch_size == b.unique.batch_size and a.inverse.tolist() == b.inverse.tolist()
        for one, other in zip(tail, batches[len(batches) // 2 :], strict=True)
        for a, b in zip(one.groups, other.groups, strict=True)
    )


@pytest.mark.parametrize("unit", ["auto", "run"])
def test_segments_stay_together_and_sessions_do_not(pair: tuple[Dataset, Dataset], unit: Any) -> None:
    grouped, _ = pair

    def runs(shuffle: bool) -> tuple[int, int]:
        """Return runs of samples that agree in every group with ids and in the user."""
        options: dict[str, Any] = {
            "batch_size": 10_000,
            "unit": unit,
            "shuffle_row_groups": 100,
            "shuffle": shuffle,
        }
        (batch,) = Loader(grouped, "train", LoaderConfig(**options)).epoch(0)
        assert batch.user is not None
        starts = np.array([0, batch.size])
        for group in batch.groups:
            starts = find_segments(group.inverse.numpy(), starts)
        return len(starts), int((batch.user.diff() != 0).sum())

    stored, shuffled = runs(False), runs(True)
    # Shuffling can place runs with equal values next to each other and separate runs that were
    # neighbors.
    assert shuffled[0] == pytest.approx(stored[0], rel=0.05)
    assert shuffled[1] > 1.5 * stored[1]


def test_sessions_stay_together_unless_samples_are_shuffled(pair: tuple[Dataset, Dataset]) -> None:
    grouped, plain = pair

    def switches(unit: Any) -> int:
        loader = Loader(
            grouped, "train", LoaderConfig(batch_size=10_000, unit=unit, shuffle_row_groups=100)
        )
        (batch,) = loader.epoch(0)
        assert batch.user is not None
        return int((batch.user.diff() != 0).sum())

    assert switches("session") < 0.2 * switches("sample")
    for unit in ("session", "run"):
        with refuses(ConfigError, unit):
            Loader(plain, "train", LoaderConfig(unit=unit))  # type: ignore[arg-type]


def test_a_session_without_a_name_is_a_bad_row(tmp_path: Path) -> None:
    frame = write_log(tmp_path / "log.parquet")
    frame[5, "session"] = None
    frame.write_parquet(tmp_path / "log.parquet")
    with refuses(DataError, "row 6 session"):
        prepare(config(tmp_path, "strict", schema()))
    skipped = prepare(config(tmp_path, "skipping", schema(), on_bad_row="skip"))
    assert skipped.about.bad_rows == 1
    assert sum(skipped.samples(split) for split in skipped.splits) == len(frame) - 1


def test_the_formula_matches_the_measurement_on_synthetic_sessions() -> None:
    draws = np.random.default_rng(5)
    sizes = draws.integers(10, 24, 4000)
    session = np.repeat(np.arange(len(sizes)), sizes)
    stays = draws.random(len(session)) < 0.9
    value = np.cumsum(~stays | (np.diff(session, prepend=-1) != 0))
    frame = pl.DataFrame({"session": session, "x": value, "y": draws.integers(0, 10**9, len(session))})
    pair_schema = Schema(sparse=(SparseFeature(name="x"), SparseFeature(name="y")), session="session")
    frame = frame.with_columns(
        pl.lit(0).alias("label"), pl.int_range(pl.len()).alias(ROW), pl.lit(0, pl.Int8).alias(SPLIT)
    )
    repeats = Partition(frame, pair_schema).repeats()
    assert repeats.samples_per_session == pytest.approx(sizes.mean())
    assert repeats.stays("x") == pytest.approx(0.9, abs=0.005)
    assert repeats.factor("x") == pytest.approx(len(frame) / frame["x"].n_unique(), rel=1e-6)
    assert repeats.stays("x", "y") == 0.0
    assert repeats.propose() == {"found_1": ("x",)}
    assert repeats.propose(grouped=("x",)) == {}
    assert dedup_factor(16.5, 0.9) == pytest.approx(6.47, abs=0.01)
    assert Repeats.from_dict(repeats.to_dict()).same.tolist() == repeats.same.tolist()
