"""Test that a scorer computes the scores of `stratarec predict` from raw values and an export
alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file
from serving.reference_scorer import ReferenceScorer

from errors import refuses
from recipes import tiny
from stratarec import Scorer
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.columns.frames import read_frame
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.vocabulary import Vocabulary, VocabularyLimits
from stratarec.errors import DataError
from stratarec.models.base import probabilities
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.serving.features import FeatureEncoder
from stratarec.training.export.export import export
from stratarec.training.predict import predict
from stratarec.training.raw_logs import RawLogs
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

MODELS: dict[str, Any] = {
    "dlrm": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
    "cat": {
        "kind": "dlrm",
        "embedding_dim": 4,
        "bottom_mlp": [8],
        "top_mlp": [16, 8],
        "interaction": "cat",
        "dropout": 0.3,
    },
    "dcnv2": {
        "kind": "dcnv2",
        "embedding_dim": 4,
        "cross_layers": 2,
        "low_rank": 3,
        "deep_mlp": [8],
        "batch_norm": True,
    },
}

FIELDS: dict[str, Any] = {
    "lr": {"embedding_dim": 1},
    # With a first-order weight a row has four columns, the width that kernels are compiled for.
    "fm": {"embedding_dim": 3},
    "wide_deep": {"embedding_dim": 3, "deep_mlp": [8]},
    "deepfm": {"embedding_dim": 3, "deep_mlp": [8], "dropout": 0.2, "batch_norm": True},
    "finalmlp": {
        "first_mlp": [8],
        "second_mlp": [6],
        "fusion_heads": 2,
        "gate_features": [["city"], ["item", "left"]],
        "gate_vectors": "own",
    },
    "din": {"deep_mlp": [8]},
}
# Each combination of a model, a pooling of histories and groups.
CASES = [
    ("dlrm", "mean", "auto"), ("dlrm", "target_attention", "none"), ("dlrm", "transformer", "auto"),
    ("dcnv2", "mean", "none"), ("dcnv2", "target_attention", "auto"), ("dcnv2", "transformer", "none"),
    ("cat", "mean", "auto"),
]  # fmt: skip


def write_log(path: Path, rows: int = 1500) -> pl.DataFrame:
    """Write a log with every kind of feature, missing values of each, and rare values."""
    draws = np.random.default_rng(5)
    item, city = draws.integers(0, 60, rows) ** 2, draws.integers(0, 9, rows)
    hidden = draws.random((4, rows)) < 0.1
    frame = pl.DataFrame(
        {
            "label": (draws.random(rows) < 0.2 + 0.5 * (item % 2)).astype(np.int64),
            "who": draws.integers(0, 40, rows),
            "time": draws.integers(0, 3000, rows),
            "visit": draws.integers(0, 200, rows),
            "price": pl.Series(draws.lognormal(2, 2, rows)).set(pl.Series(hidden[0]), None),
            "age": pl.Series(draws.integers(-3, 40, rows)).set(pl.Series(hidden[1]), None),
            "item": pl.Series(item).set(pl.Series(hidden[2]), None),
            "city": pl.Series([f"é{place}" for place in city]).set(pl.Series(hidden[3]), None),
            "tags": [
                [f"t{tag}" for tag in draws.integers(0, 30, count)] for count in draws.integers(0, 6, rows)
            ],
            "words": [" ".join(f"w{word}" for word in draws.integers(0, 30, count)) for count in item % 5],
            "left": draws.integers(-5, 20, rows),
            "right": draws.integers(2**63 - 5, 2**63 + 5, rows, dtype=np.uint64),
            "twin": pl.Series((item + 1) % 400),
            "seen": pl.Series(draws.integers(2**63, 2**63 + 50, rows, dtype=np.uint64)),
        }
    )
    frame.write_parquet(path)
    return frame


SPARSE: list[dict[str, Any]] = [
    {"name": "item"},
    {"name": "city"},
    {"name": "tags", "kind": "multi", "max_length": 3},
    {"name": "words", "kind": "multi", "separator": " "},
    {"name": "seen"},
    {"name": "twin", "vocabulary": "item"},
    {"name": "left", "vocabulary": "both"},
    {"name": "right", "vocabulary": "both"},
    {"name": "history", "kind": "history", "of": "item", "max_length": 4},
]


def with_histories(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the items that a user clicked before a row, by time and then by position in the log,
    computed by a plain loop.
    """
    rows = frame.to_dicts()
    order = sorted(range(len(rows)), key=lambda place: (rows[place]["time"], place))
    clicks = [
        rows[place] for place in order if rows[place]["label"] == 1 and rows[place]["item"] is not None
    ]
    results = [
        [click["item"] for click in clicks if click["who"] == row["who"] and click["time"] < row["time"]]
        for row in rows
    ]
    return frame.with_columns(pl.Series("history", results, dtype=pl.List(pl.Int64)))


def content(root: Path, model: dict[str, Any], groups: str, **train: Any) -> dict[str, Any]:
    config = tiny(root, epochs=1, eval_every=0, **train)
    schema = {
        "label": "label",
        "user": "who",
        "time": "time",
        "session": "visit",
        "dense": [{"name": "price"}, {"name": "age", "transform": "none"}],
        "sparse": SPARSE,
    }
    config["model"] = model
    config["data"] |= {
        "path": str(root / f"data-{groups}"),
        "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema},
        "groups": groups,
        "vocabulary": {"min_count": 3, "tail_buckets": 4},
    }
    return config


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scorer")


@pytest.fixture(scope="module")
def log(root: Path) -> pl.DataFrame:
    return with_histories(write_log(root / "log.parquet"))


def exported(root: Path, name: str, config: dict[str, Any], **options: Any) -> pl.DataFrame:
    """Train, export, and predict every split. Return the scores by row of the log."""
    recipe = Recipe.from_dict(config | {"train": config["train"] | {"run": str(root / f"run-{name}")}})
    Trainer(recipe, prepare(recipe.data)).train()
    parts = []
    with open_run(root / f"run-{name}") as trained:
        export(trained, root / name, **options)
        for split in ("train", "valid", "test"):
            predict(trained, split, root / "scores.parquet", SilentProgress())
            parts.append(pl.read_parquet(root / "scores.parquet"))
    return pl.concat(parts).sort("row")


@pytest.mark.parametrize(("kind", "pooling", "groups"), CASES)
def test_scores_match_predict(root: Path, log: pl.DataFrame, kind: str, pooling: str, groups: str) -> None:
    model = MODELS[kind] | {
        "history": {"pooling": pooling},
        "pooling": "sum" if kind == "dcnv2" else "mean",
    }
    name = f"{kind}-{pooling}-{groups}"
    # One case of each pooling is calibrated.
    kinds = {"mean": "isotonic", "target_attention": "platt"}
    calibration = kinds.get(pooling, "none") if groups == "none" else "none"
    scores = exported(root, name, content(root, model, groups, calibration=calibration))
    shutil.rmtree(root / f"run-{name}")  # an export needs no run
    state = torch.get_rng_state()
    scorer = Scorer.open(root / name)
    actual = scorer.score(log)
    assert torch.equal(state, torch.get_rng_state())
    assert actual.dtype == np.float32
    assert scores["row"].to_list() == list(range(1, len(log) + 1))
    assert scores["score"].n_unique() > 1000
    np.testing.assert_allclose(actual, scores["score"].to_numpy(), rtol=2e-6, atol=1e-7)
    # A scorer that follows README.txt and does not use StrataRec.
    reference = ReferenceScorer(root / name)
    theirs = [reference.score(row) for row in log[:60].to_dicts()]
    np.testing.assert_allclose(theirs, scores["score"].to_numpy()[:60], rtol=1e-5, atol=1e-7)
    # A few samples alone, as in a request to a service.
    few = scorer.score(log[100:103])
    np.testing.assert_allclose(few, actual[100:103], rtol=2e-6, atol=1e-7)
    assert scorer.score(log[:0]).shape == (0,)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_model_is_exported(root: Path, log: pl.DataFrame, kind: str) -> None:
    """Prepare with automatic groups, and compare the scorer and the reference scorer."""
    model = {"embedding_dim": 4, **FIELDS[kind], "kind": kind}
    config = content(root, model, "auto", max_steps=30)
    scores = exported(root, kind, config)["score"].to_numpy()
    np.testing.assert_allclose(Scorer.open(root / kind).score(log), scores, rtol=2e-6, atol=1e-7)
    reference = ReferenceScorer(root / kind)
    theirs = [reference.score(row) for row in log[:20].to_dicts()]
    np.testing.assert_allclose(theirs, scores[:20], rtol=2e-6, atol=1e-7)
    assert len(np.unique(scores)) > 200


def test_scores_match_predict_bit_for_bit_in_batches_of_the_same_samples(
    root: Path, log: pl.DataFrame
) -> None:
    config = content(root, MODELS["dlrm"] | {"history": {"pooling": "target_attention"}}, "none")
    config["data"]["path"] = str(root / "one")
    scores = exported(root, "bits", config)
    with open_run(root / "run-bits") as trained:
        predict(trained, "test", root / "s.parquet", SilentProgress())
    test = pl.read_parquet(root / "s.parquet")
    actual = Scorer.open(root / "bits", runtime="torch").score(log[(test["row"] - 1).to_list()])
    np.testing.assert_array_equal(actual, test["score"].to_numpy())
    assert len(scores) == len(log)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "fp32"])
def test_tables_keep_the_precision_of_training(root: Path, log: pl.DataFrame, precision: str) -> None:
    config = content(
        root, MODELS["dlrm"] | {"history": {"pooling": "target_attention"}}, "none", batch_size=4
    )
    config["memory"] = {"precision": precision, "cache": {"fraction": 0.05}, "lookahead": 0}
    config["data"] |= {
        "path": str(root / "coded"),
        "vocabulary": {"overrides": {"item": {"tail_buckets": 1000}}},
    }
    config["train"] |= {"max_steps": 60}
    scores = exported(root, f"tiered-{precision}", config)["score"].to_numpy()
    scorer = Scorer.open(root / f"tiered-{precision}")
    # Rows that training never looked up are rounded to nearest.
    near = {"rtol": 2e-6, "atol": 1e-7} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    np.testing.assert_allclose(scorer.score(log), scores, **near)
    np.testing.assert_allclose(scorer.score(log[7:8]), scores[7:8], **near)
    reference = ReferenceScorer(root / f"tiered-{precision}")
    theirs = [reference.score(row) for row in log[:60].to_dicts()]
    np.testing.assert_allclose(theirs, scorer.score(log)[:60], rtol=2e-6, atol=1e-7)
    table = scorer.manifest.tables["item"]
    assert table.codec == precision
    if precision == "fp32":
        return
    assert load_file(root / f"tiered-{precision}" / "tables.safetensors")["item"].dtype == np.uint8
    actual = np.empty((table.rows, table.width), dtype=np.float32)
    scorer._model.tables._encoded["item"].decode(np.arange(table.rows, dtype=np.int32), actual)
    with open_run(root / f"run-tiered-{precision}") as trained:
        expected = trained.model.embeddings.rows("item", 0, table.rows)["weight"].numpy()
        tables = trained.model.embeddings.engine.tables_of("item")
        home = tables.read_records("item", 0, table.rows)[1]
        slots = tables.rows_in_slots("item", 0, table.rows)
    assert len(slots) == table.float32_rows > 10
    np.testing.assert_array_equal(actual[slots], expected[slots])
    assert home.sum() > 10
    np.testing.assert_array_equal(actual[home], expected[home])


@pytest.fixture(scope="module")
def scorer(root: Path, log: pl.DataFrame) -> Scorer:
    exported(root, "plain", content(root, MODELS["dlrm"], "none"))
    return Scorer.open(root / "plain")


def test_any_frame_gives_the_same_scores(scorer: Scorer, log: pl.DataFrame) -> None:
    expected = scorer.score(log)
    columns = log.to_dict(as_series=False)
    floats = columns | {
        "item": np.array([np.nan if value is None else value for value in columns["item"]]),
        "age": np.array([np.nan if value is None else value for value in columns["age"]]),
        "seen": np.array(columns["seen"], dtype=np.uint64),
    }
    for frame in (
        columns,
        floats,
        log.to_arrow(),
        log.with_columns(pl.col("city").cast(pl.Categorical)),
        log[:, ::-1],
    ):
        np.testing.assert_array_equal(scorer.score(frame), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: log.drop("item"), "the frame: no column 'item'; it has label, who"),
        (lambda log: log.drop("item", "price"), "the frame: no columns 'price', 'item'; it has label, who"),
        (lambda log: log.rename({"price": "prize"}), "no column 'price'; did you mean 'prize'"),
        (
            lambda log: log.with_columns(pl.lit("x").alias("price")),
            "row 1: column 'price': got 'x', expected a finite",
        ),
        (
            lambda log: log.with_columns(pl.lit(float("inf")).alias("price")),
            "row 1: column 'price': got inf",
        ),
        (
            lambda log: log.with_columns(pl.lit("x").alias("item")),
            "column 'item' is String, with values that are no",
        ),
        (
            lambda log: log.with_columns(pl.lit(0.5).alias("item")),
            "row 1: column 'item': got 0.5, expected a whole",
        ),
        (lambda log: log.with_columns(pl.lit(-1).alias("seen")), "column 'seen' is Int"),
        (
            lambda log: log.with_columns(pl.lit(3).alias("history")),
            "column 'history' is Int32, expected lists",
        ),
        (
            lambda log: log.with_columns(pl.lit(3).alias("words")),
            "column 'words' is Int32, expected lists, or text",
        ),
        (lambda log: log.lazy(), "got LazyFrame, expected a DataFrame"),
        (lambda log: 3, "got int, expected a DataFrame"),
        (lambda log: log.to_dict(as_series=False) | {"city": ["a"]}, "columns of different lengths"),
        (lambda log: log.to_dict(as_series=False) | {"city": [object()] * len(log)}, "column 'city'"),
        (lambda log: log.to_dict(as_series=False) | {"item": [2**70] * len(log)}, "column 'item'"),
        (lambda log: log.to_dict(as_series=False) | {"item": [1, "x"] * (len(log) // 2)}, "column 'item'"),
    ],
)
def test_frames_that_are_no_log_are_refused(
    scorer: Scorer, log: pl.DataFrame, change: Any, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        scorer.score(change(log))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("tags", ["t1", "t2", "t3", 4]),
        ("tags", ["t1", "t2", "t3", "\ud800"]),
        ("words", "w1 " * 600 + "\ud800"),
        ("history", [2**70, *range(600)]),
        ("history", ["x", *range(600)]),
    ],
)
def test_values_beyond_the_maximum_length_are_checked(
    scorer: Scorer, log: pl.DataFrame, name: str, cell: Any
) -> None:
    for rows in (1, 2000):  # plain rows, and columns
        with pytest.raises(DataError):
            scorer.score({**log[[0] * rows].to_dict(as_series=False), name: [cell] * rows})


def test_bytes_that_are_not_text_are_refused(scorer: Scorer, log: pl.DataFrame) -> None:
    table = log[:1].to_arrow()
    bad = pa.Array.from_buffers(pa.large_string(), 1, pa.array([b"\xff"], pa.large_binary()).buffers())
    with refuses(DataError, "city UTF8"):
        scorer.score(table.set_column(table.column_names.index("city"), "city", bad))


def test_threads_share_a_scorer(scorer: Scorer, log: pl.DataFrame) -> None:
    asked = [log, *(log[place : place + 1].to_dict(as_series=False) for place in range(40)), log[:100]] * 4
    expected = [scorer.score(frame) for frame in asked]
    with ThreadPoolExecutor(4) as pool:
        for actual, one in zip(pool.map(scorer.score, asked), expected, strict=True):
            np.testing.assert_array_equal(actual, one)


def test_words_for_missing_values_are_missing_in_frames(tmp_path: Path) -> None:
    """Scores equal those of `predict`, for any kind of frame and number of rows."""
    numbers = np.random.default_rng(0).integers(0, 9, 1200)
    log = {
        "y": (numbers % 3 == 0).astype(int).tolist(),
        "price": ["NA" if number == 7 else f"{number / 4}" for number in numbers],
        "item": ["-" if number == 4 else f"i{number}" for number in numbers],
    }
    pl.DataFrame(log).write_csv(tmp_path / "log.csv")
    config = tiny(tmp_path, epochs=2, batch_size=64, eval_every=0)
    schema = {"label": "y", "dense": [{"name": "price"}], "sparse": [{"name": "item"}]}
    config["data"]["source"] = {
        "kind": "csv",
        "paths": [str(tmp_path / "log.csv")],
        "nulls": ["NA", "-"],
        "schema": schema,
    }
    config["data"]["vocabulary"] = {"min_count": 1}
    recipe = Recipe.from_dict(config)
    Trainer(recipe, prepare(recipe.data), SilentProgress()).train()
    with open_run(recipe.train.run) as trained:
        export(trained, tmp_path / "exported")
        logs = RawLogs(trained, [str(tmp_path / "log.csv")])
        expected = probabilities(np.concatenate([part.logits for part in logs.scored(SilentProgress())]))
    scorer, columns = Scorer.open(tmp_path / "exported"), {name: log[name] for name in ("price", "item")}
    floats = columns | {"price": [None if cell == "NA" else float(cell) for cell in columns["price"]]}
    mixed = columns | {"price": [cell if cell == "NA" else float(cell) for cell in columns["price"]]}
    arrays = {name: np.array(cells, dtype=object) for name, cells in mixed.items()}
    table = pl.DataFrame(columns)
    coded = table.with_columns(pl.col("item").cast(pl.Categorical))
    for frame in (columns, floats, mixed, arrays, table, table.to_arrow(), coded, coded.to_arrow()):
        np.testing.assert_allclose(scorer.score(frame), expected, atol=1e-6)
    for row in range(20):
        one = {name: values[row : row + 1] for name, values in floats.items()}
        np.testing.assert_allclose(scorer.score(one), expected[row : row + 1], atol=1e-6)


def few_rows(scorer: Scorer, frame: Any) -> tuple[torch.Tensor, KeyedJagged] | None:
    """Encode a frame by the fast path for a few rows, if it can."""
    encoder = scorer._model.encoder
    rows = encoder.encode_rows(frame)
    return None if rows is None else encoder.tensors(rows)


def plain(log: pl.DataFrame) -> dict[str, list[Any]]:
    """Return rows whose values need no conversion: the vocabulary of `left` and `right` has
    text.
    """
    return log.with_columns(pl.col("left", "right").cast(pl.String)).to_dict(as_series=False)


def whole_columns(scorer: Scorer, frame: Any) -> Any:
    """Encode a frame without the fast path for a few rows."""
    encoder = scorer._model.encoder
    return outcome_of(lambda: encoder.encode_columns(read_frame(frame, encoder._schema), "the frame"))


def outcome_of(encode: Callable[[], tuple[torch.Tensor, KeyedJagged]]) -> Any:
    try:
        dense, sparse = encode()
    except DataError as error:
        return str(error)
    return dense.numpy().tobytes(), sparse.values.tolist(), sparse.bag_offsets().tolist()


NUMBER = st.one_of(st.none(), st.floats(), st.integers(-(2**70), 2**70), st.booleans(), st.just("1"))
WHOLE = st.one_of(
    st.none(), st.integers(0, 400), st.integers(-(2**65), 2**65), st.sampled_from(["1", 2.0, True])
)
WORD = st.one_of(st.none(), st.sampled_from(["é1", "t3", "w2 w3", "\ud800", 3]), st.text(max_size=4))
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "price": NUMBER, "age": NUMBER, "item": WHOLE, "city": WORD, "words": WORD,
    "tags": st.one_of(st.none(), st.lists(WORD, max_size=5)),
    "seen": WHOLE, "twin": WHOLE, "left": WHOLE, "right": WHOLE,
    "history": st.one_of(st.none(), st.lists(WHOLE, max_size=7)),
}  # fmt: skip


@settings(deadline=None, max_examples=75)
@given(st.data())
def test_a_few_rows_are_read_like_full_columns(
    scorer: Scorer, log: pl.DataFrame, data: st.DataObject
) -> None:
    """Replace columns of a few rows of the log by any cells.

    The bits and ids must be the same, or both paths fail with the same error.
    """
    rows, first = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1000))
    frame = plain(log[first : first + rows])
    assert few_rows(scorer, frame) is not None
    for name in data.draw(st.lists(st.sampled_from(sorted(CELLS)), max_size=3)):
        frame[name] = [data.draw(CELLS[name]) for _ in range(rows)]
    actual, expected = few_rows(scorer, frame), whole_columns(scorer, frame)
    if actual is not None and not isinstance(expected, str):
        dense, sparse = actual
        pooled = scorer._model.encoder.encode_rows(frame).pooled  # type: ignore[union-attr]
        assert pooled.tobytes() == scorer._model.tables.look_up(sparse)[0].numpy().tobytes()
        assert (dense.numpy().tobytes(), sparse.values.tolist(), sparse.bag_offsets().tolist()) == expected
    elif actual is not None:
        # Columns of Python integers from 2^63 on, for which Polars has no type.
        assert "cannot be read" in expected


def test_many_rows_are_read_like_full_columns(scorer: Scorer, log: pl.DataFrame) -> None:
    for rows in (1, 30, 1024):
        frame = plain(log[:rows])
        few, features = few_rows(scorer, frame), scorer._model.encoder.encode_rows(frame)
        assert few is not None
        assert features is not None
        dense, sparse = few
        assert (
            dense.numpy().tobytes(),
            sparse.values.tolist(),
            sparse.bag_offsets().tolist(),
        ) == whole_columns(scorer, frame)
        np.testing.assert_array_equal(features.pooled, scorer._model.tables.look_up(sparse)[0].numpy())
    assert scorer._model.encoder.encode_rows(log[[0] * 1025].to_dict(as_series=False)) is None


def nested(depth: int) -> list[Any]:
    cell: list[Any] = [1]
    for _ in range(depth):
        cell = [cell]
    return cell


OBJECTS: dict[str, list[tuple[Any, Any]]] = {
    "price": [
        (np.longdouble(2), 2.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (Decimal("NaN"), None),
        (1j, ...), (10**400, ...), (Decimal("1e400"), ...), (Fraction(1, 2), ...), (timedelta(1), ...),
    ],
    "item": [
        (np.int8(3), 3), (2.0, 2), (float("nan"), None), (Decimal(2), 2), (2**64, ...), (Decimal("sNaN"), ...),
        (b"a", ...), ({1}, ...), (date(2020, 1, 1), ...), (object(), ...), (np.array([1]), ...), (pl.Series([1]), ...),
        (nested(100_000), ...),
    ],
    "city": [(np.str_("é1"), "é1"), (b"a", ...), (bytearray(b"a"), ...), (print, ...), (["é1"], ...), ("\ud800", ...)],
    "tags": [
        (("t1", None), ["t1", None]), (np.array(["t3"]), ["t3"]), (pl.Series(["t1"]), ["t1"]), ([], []),
        ([["t1"]], ...), ({"t1"}, ...), (iter("ab"), ...), (frozenset("a"), ...), ([b"a"], ...), (nested(900), ...),
    ],
    "history": [
        (pl.Series([1, None]), [1, None]), (np.array([None, 4], dtype=object), [None, 4]), ((1, None), [1, None]),
        ([2.5], ...), ([1, "a"], ...), (range(3), ...), ({"a": 1}, ...), (np.zeros((1, 1), int), ...), ("1", ...),
    ],
}  # fmt: skip
"""Dictionary from a column to pairs of a cell and the equal plain value, or ``...`` if the cell is
refused.
"""


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("name", OBJECTS)
def test_python_objects_are_read_as_plain_values_or_refused(
    scorer: Scorer, log: pl.DataFrame, name: str, rows: int
) -> None:
    """Test both a few rows and enough rows to be read column by column."""
    frame = log[:rows].to_dict(as_series=False)

    def scores(cell: Any) -> NDArray[np.float32]:
        return scorer.score(frame | {name: [cell, None] * (rows // 2)})

    for cell, plain in OBJECTS[name]:
        if plain is ...:
            with refuses(DataError, name) as caught:
                scores(cell)
            assert "\n" not in str(caught.value)
        else:
            np.testing.assert_array_equal(scores(cell), scores(plain), err_msg=f"{type(cell)} {cell}")


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("item", range(2), [0, 1]),
        ("item", array("q", [3, 4]), [3, 4]),
        ("item", np.array([3, 4], dtype=">i4"), [3, 4]),
        ("item", np.ma.array([3, 4], mask=[0, 1]), [3, None]),
        ("item", torch.tensor([3, 4]), [3, 4]),
        ("item", pa.chunked_array([[3], [4]]), [3, 4]),
        ("price", [1, 2.5], [1.0, 2.5]),
        ("price", np.array([1, 2], dtype=np.longdouble), [1.0, 2.0]),
        ("city", np.array(["é1", "é2"]), ["é1", "é2"]),
        ("city", ["é1", float("nan")], ["é1", None]),
        ("tags", np.array([["t1", "t2"], ["t3", "t4"]]), [["t1", "t2"], ["t3", "t4"]]),
        ("history", np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("history", [np.array([1], dtype=np.int32), np.array([2, 3])], [[1], [2, 3]]),
        ("history", [[1], [2.5]], None),
        ("history", np.zeros((2, 2, 2), dtype=int), None),
        ("item", [range(2), [1]], None),
        ("item", np.array(3), None),
        ("item", np.zeros(2, dtype=[("a", "i4")]), None),
        ("item", np.array([1, 2], dtype="M8[ns]"), None),
        ("item", "12", None),
        ("item", b"12", None),
        ("item", 3, None),
        ("item", None, None),
        ("item", {1: 2, 3: 4}, None),
        ("item", pl.DataFrame({"a": [1, 2]}), None),
        ("item", pa.array([[[1]], [[2]]]), None),
        ("item", pa.array([{"a": 1}, None]), None),
        ("city", pa.array([b"a", b"b"]), None),
        ("city", pl.Series(["a", "b"]).cast(pl.Binary), None),
    ],
)
def test_columns_of_any_type_are_read_or_refused(
    scorer: Scorer, log: pl.DataFrame, name: str, column: Any, expected: list[Any] | None
) -> None:
    frame = log[:2].to_dict(as_series=False)
    if expected is None:
        with refuses(DataError, name):
            scorer.score(frame | {name: column})
    else:
        np.testing.assert_array_equal(
            scorer.score(frame | {name: column}), scorer.score(frame | {name: expected})
        )


@pytest.mark.parametrize(
    "values",
    [
        pl.Series("value", [5, -3, 2**62, 0, 7]),
        pl.Series("value", [2**64 - 1, 3, 0], dtype=pl.UInt64),
        pl.Series("value", ["b", "c", "é", "a\0", "a", "zz", "𐍈"]),
        pl.Series("value", [], dtype=pl.String),
    ],
)
def test_binary_search_gives_the_ids_of_a_join(values: pl.Series) -> None:
    counted = pl.DataFrame({"value": values, "count": np.arange(len(values)) + 2})
    vocabulary = Vocabulary.rank(
        counted.with_columns(held_out=pl.lit(0, pl.Int64)), VocabularyLimits(tail_buckets=3)
    )
    strange = ["q", "aa"] if values.dtype == pl.String else [1, 9, 2**40]
    asked = pl.concat([values, pl.Series("value", [*strange, *strange], dtype=values.dtype), values])
    name = {pl.Int64: "integer", pl.UInt64: "integer", pl.String: "text"}[values.dtype.base_type()]
    schema = Schema(sparse=(SparseFeature(name="value", type=name),))  # type: ignore[arg-type]
    encoder = FeatureEncoder(schema, {}, {"value": vocabulary})
    expected = vocabulary.encode(asked)
    for encoded in (
        encoder.encode({"value": asked.to_list()}),
        encoder.encode_columns({"value": asked}, "x"),
    ):
        np.testing.assert_array_equal(encoded[1].values.numpy(), expected)


@pytest.mark.slow
def test_tables_stay_in_their_file(root: Path, log: pl.DataFrame) -> None:
    config = content(root, MODELS["dlrm"] | {"embedding_dim": 32}, "none", max_steps=1)
    config["data"] |= {
        "path": str(root / "wide"),
        "vocabulary": {"overrides": {"item": {"tail_buckets": 1_000_000}}},
    }
    scores = exported(root, "wide-export", config)
    script = (
        "import sys, polars as pl, numpy as np\n"
        "from stratarec import Scorer\n"
        "from stratarec.models import build_model\n"
        "from onnx import helper, numpy_helper\n"
        "import onnxruntime\n"
        "frame = pl.read_parquet(sys.argv[2])\n"
        "def own():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) >> 10\n"
        "before = own()\n"
        "scorer = Scorer.open(sys.argv[1])\n"
        "found = scorer.score(frame)\n"
        "np.save(sys.argv[3], found)\n"
        "print(own() - before)\n"
    )
    log.write_parquet(root / "frame.parquet")
    command = [
        sys.executable,
        "-c",
        script,
        str(root / "wide-export"),
        str(root / "frame.parquet"),
        str(root / "s.npy"),
    ]
    assert (root / "wide-export" / "tables.safetensors").stat().st_size > 128e6
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Vocabularies and the modules that scoring imports take less memory than the tables (128 MB).
    assert int(done.stdout) < 100, f"{done.stdout} MiB"
    np.testing.assert_allclose(np.load(root / "s.npy"), scores["score"].to_numpy(), rtol=2e-6, atol=1e-7)
