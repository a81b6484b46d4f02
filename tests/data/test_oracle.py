"""Compare `prepare` and the loader with an oracle in plain Python, on small random logs with
unusual columns.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stratarec.batch.batch import Batch
from stratarec.data.dataset import writer as storage
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import split_rows
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig

NAMES = [
    "label", "count", "value", "id", "row", "start", "__row", "__file", "__split", "__group", "__time", "__session",
    "__partition", "__place", "found_1", "history.events", "a.b", "a", "x.list.element", "index", "é ü", "sessions",
]  # fmt: skip
GROUPS = ["", "", "rows", "found_2", "sessions."]

# Kind of a sparse column -> Arrow type, and a strategy for the values of a cell.
SINGLES: dict[str, tuple[pa.DataType, Any]] = {
    "integers": (pa.int32(), st.one_of(st.none(), st.integers(-2, 4))),
    "texts": (pa.string(), st.one_of(st.none(), st.sampled_from(["", "a", "b", "ß", "10", "9"]))),
    "unsigned": (pa.uint64(), st.one_of(st.none(), st.sampled_from([0, 1, 2**63, 2**64 - 1]))),
    "nulls": (pa.null(), st.none()),
    "one": (pa.int64(), st.just(7)),
}
PAIRS = st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=2, max_size=2)
LISTS: dict[str, tuple[pa.DataType, Any]] = {
    "lists": (
        pa.list_(pa.int64()),
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=4)),
    ),
    # Earlier versions of pyarrow cannot read lists of fixed size of which some are null.
    "fixed": (
        pa.list_(pa.int64(), 2),
        st.one_of(st.none(), PAIRS) if int(pa.__version__.split(".")[0]) >= 26 else PAIRS,
    ),
    "none": (pa.list_(pa.null()), st.one_of(st.none(), st.just([]), st.just([None]))),
}
DENSE: dict[str, tuple[pa.DataType, Any]] = {
    "floats": (pa.float32(), st.one_of(st.none(), st.floats(-8, 8, width=32))),
    "seconds": (pa.int64(), st.integers(1_506_826_800, 1_506_830_400)),
    "milliseconds": (pa.int64(), st.one_of(st.none(), st.integers(1_506_826_800_000, 1_506_826_860_000))),
    "large": (pa.float64(), st.sampled_from([0.0, 1e37, -1e37, 2.5e38])),
    "constant": (pa.float64(), st.one_of(st.none(), st.just(0.1))),
    "nulls": (pa.null(), st.none()),
}


@dataclass(kw_only=True)
class Case:
    """A log, the roles of its columns, and the configuration of preparation and loader."""

    schema: Schema
    columns: dict[str, tuple[pa.DataType, list[Any]]]
    limits: VocabularyConfig
    split: SplitConfig
    groups: Any
    row_group: int
    """Rows of a row group in the data set."""
    files: int
    batch_size: int
    window: int
    seed: int
    rows: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        names = list(self.columns)
        cells = zip(*(values for _, values in self.columns.values()), strict=True)
        self.rows = [dict(zip(names, row, strict=True)) for row in cells]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(2, 50))
    names = draw(st.permutations(NAMES))
    keys = draw(
        st.sampled_from(["", "session", "user", "session user time", "user time", "time", "session time"])
    )
    grouped = draw(st.booleans())  # then every feature is in a group or is a history
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {}

    def column(kind: pa.DataType, cells: Any) -> str:
        name = names.pop()
        columns[name] = (kind, [draw(cells) for _ in range(size)])
        return name

    def group() -> str:
        return draw(st.sampled_from(GROUPS[2:] if grouped else GROUPS))

    sparse = []
    for kind in draw(st.lists(st.sampled_from([*SINGLES, *LISTS]), min_size=1, max_size=4)):
        name = column(*(SINGLES.get(kind) or LISTS[kind]))
        # List and single features share a table, and so do signed and unsigned integers.
        shared = draw(st.sampled_from(["", "", "shared"])) if kind not in ("texts", "nulls", "none") else ""
        sparse.append(
            SparseFeature(
                name=name,
                kind="single" if kind in SINGLES else "multi",
                vocabulary=shared,
                max_length=3,
                group=group(),
            )
        )
    singles = [feature for feature in sparse if feature.kind == "single"]
    if singles and "user" in keys and "time" in keys:
        of = draw(st.sampled_from(singles))
        own = draw(st.sampled_from(["", "", names[-1]]))
        limits = {"max_length": 3, "within": draw(st.sampled_from(["", "50s"]))}
        sparse.append(SparseFeature(name=names.pop(), kind="history", of=of.name, vocabulary=own, **limits))
    dense = tuple(
        DenseFeature(
            name=column(*DENSE[kind]),
            transform=draw(st.sampled_from(["log1p", "none"])),
            standardize=draw(st.booleans()),
            group=group(),
        )
        for kind in draw(st.lists(st.sampled_from([*DENSE]), max_size=3))
    )
    named = {"label": "click", **{key: f"@the {key}" for key in keys.split()}}
    columns["click"] = (pa.int8(), [0, 1, *(draw(st.integers(0, 1)) for _ in range(size - 2))])
    for key in keys.split():
        columns[named[key]] = (
            pa.int64(),
            [draw(st.integers(0, 300 if key == "time" else 3)) for _ in range(size)],
        )
    by_time = "time" in keys and draw(st.booleans())
    return Case(
        schema=Schema(dense=dense, sparse=tuple(sparse), **named),
        columns=columns,
        limits=VocabularyConfig(
            min_count=draw(st.integers(1, 3)),
            tail_buckets=draw(st.integers(1, 2)),
            max_rows=draw(st.integers(0, 3)),
        ),
        split=SplitConfig(by="time", valid="40s", test="40s")
        if by_time
        else SplitConfig(valid=0.0, test=0.0),
        groups=draw(st.sampled_from(["auto", "declared", "none"])),
        row_group=draw(st.integers(1, 12)),
        files=draw(st.integers(1, 2)),
        batch_size=draw(st.integers(1, 20)),
        window=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
    )


# Oracle


def splits(case: Case) -> list[str]:
    if case.split.by != "time":
        return ["train"] * len(case.rows)
    times = [row[case.schema.time] for row in case.rows]
    last = max(times)
    return ["test" if time > last - 40 else "valid" if time > last - 80 else "train" for time in times]


def bag(case: Case, feature: SparseFeature, number: int) -> list[Any]:
    """Return the values that a row looks up."""
    row = case.rows[number]
    if feature.kind == "single":
        return [] if row[feature.name] in (None, "") else [row[feature.name]]
    if feature.kind == "multi":
        return [value for value in row[feature.name] or [] if value is not None][: feature.max_length]
    user, time = case.schema.user, case.schema.time
    oldest = row[time] - int(feature.within.rstrip("s") or 300)
    earlier = [
        (other[time], place, other[feature.of])
        for place, other in enumerate(case.rows)
        if other[user] == row[user]
        and oldest <= other[time] < row[time]
        and other["click"]
        and other[feature.of] not in (None, "")
    ]
    return [value for _, _, value in sorted(earlier, key=lambda event: event[:2])][-feature.max_length :]


def sources(case: Case, feature: SparseFeature) -> pa.DataType:
    kind = case.columns[feature.of or feature.name][0]
    return kind.value_type if hasattr(kind, "value_type") else kind


def vocabulary(case: Case, features: tuple[SparseFeature, ...], train: list[int]) -> list[tuple[Any, int]]:
    """Return the values with rows of their own and their counts, in order of id."""
    counts = Counter(
        as_stored(case, features, v) for f in features for number in train for v in bag(case, f, number)
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = [item for item in ranked if item[1] >= case.limits.min_count]
    return kept[: case.limits.max_rows or None]


def held_out(
    case: Case, features: tuple[SparseFeature, ...], train: list[int], known: list[tuple[Any, int]]
) -> list[tuple[Any, int]]:
    """Return the values that only the refit gives rows, and their counts in training rows, in order
    of id.
    """
    others = [number for number in range(len(case.rows)) if number not in train]
    counted = Counter(
        as_stored(case, features, v) for f in features for number in train for v in bag(case, f, number)
    )
    more = Counter(
        as_stored(case, features, value)
        for feature in features
        for number in others
        for value in (bag(case, feature, number) if feature.kind != "history" else ())
    )
    least, room = case.limits.min_count, (case.limits.max_rows or len(counted | more)) - len(known)
    kept = [value for value in counted | more if counted[value] < least <= counted[value] + more[value]]
    return [
        (value, counted[value]) for value in sorted(kept, key=lambda v: (-counted[v], -more[v], v))[:room]
    ]


def as_stored(case: Case, features: tuple[SparseFeature, ...], value: Any) -> Any:
    """Convert signed and unsigned integers to text if they share a vocabulary."""
    kinds = {pa.types.is_uint64(sources(case, feature)) for feature in features}
    return str(value) if len(kinds) > 1 else value


def dense(case: Case, feature: DenseFeature, train: list[int]) -> list[float]:
    def number(row: dict[str, Any]) -> float | None:
        value = row[feature.name]
        if value is None or feature.transform == "none":
            return None if value is None else float(value)
        return math.copysign(math.log1p(abs(value)), value)

    values = [number(row) for row in case.rows]
    known = [value for value in (values[place] for place in train) if value is not None]
    if not feature.standardize:
        return [0.0 if value is None else value for value in values]
    mean = math.fsum(known) / len(known) if known else 0.0
    same = not known or min(known) == max(known)
    mean = known[0] if known and same else mean
    spread = 1.0 if same else statistics.pstdev(known)
    return [0.0 if value is None else (value - mean) / spread for value in values]


# Content of the data set


def expanded(batch: Batch, keys: list[str]) -> list[tuple[Any, ...]]:
    """Return label, dense values, bags and user of each sample."""
    plain = batch.expanded(keys)
    bags = [plain.sparse[key].to_list() for key in keys]
    users = [0] * batch.size if batch.user is None else batch.user.tolist()
    columns = (plain.label.tolist(), map(tuple, plain.dense.tolist()), users)
    return [
        (*row, tuple(tuple(values[place]) for values in bags))
        for place, row in enumerate(zip(*columns, strict=True))
    ]


def prepared(case: Case, root: Path) -> Dataset:
    cut = len(case.rows) // 2 if case.files == 2 else len(case.rows)
    paths = []
    for name, first, last in (("a", 0, cut), ("b", cut, len(case.rows))):
        if first < last:
            columns = {
                key: pa.array(values[first:last], kind) for key, (kind, values) in case.columns.items()
            }
            paths.append(str(root / f"{name}.parquet"))
            pq.write_table(pa.table(columns), paths[-1], row_group_size=9)
    config = PrepareConfig(
        source=ParquetConfig(paths=tuple(paths), schema=case.schema),
        path=str(root / "data"),
        split=case.split,
        vocabulary=case.limits,
        shard_samples=20,
        groups=case.groups,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ROW_GROUP", case.row_group)
        return prepare(config)


def row_places(case: Case, dataset: Dataset, split: str) -> list[int]:
    """Return the row of the log for each stored sample."""
    numbers = np.concatenate(list(dataset.row_numbers(split)))
    file, row = split_rows(numbers)
    return (file * (len(case.rows) // 2) + row - 1).tolist()


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(cases())
def test_any_log_gives_the_samples_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    dealt = splits(case)
    train = [place for place, split in enumerate(dealt) if split == "train"]
    assume(len({case.rows[place]["click"] for place in train}) == 2)
    assume(case.split.by != "time" or set(dealt) == {"train", "valid", "test"})
    dataset = prepared(case, tmp_path_factory.mktemp("oracle"))
    ranked = {
        name: vocabulary(case, features, train) for name, features in dataset.schema.vocabularies().items()
    }
    complete = {
        name: [*known, *held_out(case, dataset.schema.vocabularies()[name], train, known)]
        for name, known in ranked.items()
    }
    dense_columns = [dense(case, feature, train) for feature in case.schema.dense]
    for view, rows in ((dataset, ranked), (dataset.complete(), complete)):
        for name, known in rows.items():
            assert view.table_rows()[name] == len(known) + case.limits.tail_buckets
            assert view.access_counts(name)[case.limits.tail_buckets :].tolist() == [
                count for _, count in known
            ]
            features = dataset.schema.vocabularies()[name]
            assert view.access_counts(name).sum() == sum(
                len(bag(case, f, number)) for f in features for number in train
            )
            assert view.vocabulary(name).values.to_list() == [value for value, _ in known]
            assert view.vocabulary(name).digest == view.vocabularies[name].digest
        check_samples(case, view, rows, dealt, dense_columns)


def check_samples(
    case: Case,
    dataset: Dataset,
    ranked: dict[str, list[tuple[Any, int]]],
    dealt: list[str],
    dense_columns: list[list[float]],
) -> None:
    keys = [feature.name for feature in case.schema.sparse]
    shared: dict[tuple[str, Any], int] = {}
    users: dict[int, set[Any]] = {}
    for split in set(dealt):
        loader = Loader(
            dataset,
            split,
            LoaderConfig(batch_size=case.batch_size, shuffle_row_groups=case.window, shuffle=False),
        )
        samples = [sample for batch in loader.epoch(0) for sample in expanded(batch, keys)]
        places = row_places(case, dataset, split)
        assert sorted(places) == [place for place, name in enumerate(dealt) if name == split]
        for place, (label, numbers, user, bags) in zip(places, samples, strict=True):
            row = case.rows[place]
            assert label == row["click"]
            expected = [column[place] for column in dense_columns]
            assert numbers == pytest.approx(expected, rel=1e-5, abs=2e-5)
            for feature, ids in zip(dataset.schema.sparse, bags, strict=True):
                features = dataset.schema.vocabularies()[feature.vocabulary]
                known = [value for value, _ in ranked[feature.vocabulary]]
                values = [as_stored(case, features, value) for value in bag(case, feature, place)]
                assert len(ids) == len(values)
                for actual, value in zip(ids, values, strict=True):
                    if value in known:
                        assert actual == case.limits.tail_buckets + known.index(value)
                    else:
                        assert 0 <= actual < case.limits.tail_buckets
                        assert shared.setdefault((feature.vocabulary, value), actual) == actual
            users.setdefault(user, set()).add(row.get(case.schema.user, row.get(case.schema.session)))
        shuffled = LoaderConfig(batch_size=case.batch_size, shuffle_row_groups=case.window, seed=case.seed)
        again = [
            sample
            for batch in Loader(dataset, split, shuffled).epoch(1)
            for sample in expanded(batch, keys)
        ]
        assert Counter(again) == Counter(samples)
    assert all(len(same) == 1 for same in users.values())
