"""Test scores of raw logs: they equal those of the prepared data set, in the order of the log, with
or without labels.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from numpy.typing import NDArray
from sklearn.metrics import ndcg_score, roc_auc_score

from errors import check_refusal, missing
from recipes import tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset

ROWS = 3000


def write_log(path: Path, rows: int = ROWS, seed: int = 0) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    item = draws.integers(0, 50, rows)
    frame = pl.DataFrame(
        {
            "click": (draws.random(rows) < 0.2 + 0.5 * (item % 2)).astype(int),
            "who": [f"u{number}" for number in draws.integers(0, 40, rows)],
            "at": draws.integers(0, 100_000, rows),
            "item": item,
            "price": np.where(draws.random(rows) < 0.1, np.nan, draws.normal(5, 2, rows).round(2)),
            "words": ["|".join(draws.choice(list("abcdef"), draws.integers(0, 4))) for _ in range(rows)],
            "country": draws.choice(["de", "fr", "it"], rows),
            "request": np.arange(rows) + 10**6,
        }
    ).with_columns(pl.col("price").fill_nan(None))
    frame.write_parquet(path.with_suffix(".parquet"))
    frame.write_csv(path)
    return frame


def make_config(root: Path, kind: str) -> dict[str, object]:
    content = tiny(root, max_steps=12, epochs=1)
    schema = {
        "label": "click",
        "user": "who",
        "time": "at",
        "dense": [{"name": "price"}],
        "sparse": [
            {"name": "item"},
            {"name": "country"},
            {"name": "words", "kind": "multi", "separator": "|"},
            {"name": "before", "kind": "history", "of": "item", "max_length": 5},
            {"name": "lately", "kind": "history", "of": "item", "max_length": 5, "within": "2h"},
        ],
    }
    name = "log.csv" if kind == "csv" else "log.parquet"
    source = {"kind": kind, "paths": [str(root / name)], "schema": schema}
    content["data"] |= {"source": source, "split": {"by": "fraction", "valid": 0, "test": 0.5}}
    return content


@pytest.fixture(scope="module", params=["csv", "parquet"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp(request.param)
    write_log(root / "log.csv")
    (root / "r.yaml").write_text(yaml.safe_dump(make_config(root, request.param)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for command in ("prepare", "train"):
            assert main([command, "-q", "r.yaml"]) == 0
    return root


def name(place: Path, stem: str) -> str:
    return f"{stem}.{'parquet' if 'parquet' in place.name else 'csv'}"


def run_of(place: Path) -> str:
    content = yaml.safe_load((place / "r.yaml").read_text())
    return str(content["train"].get("run") or place / "runs" / content["name"])


def test_a_raw_log_scores_like_its_data_set_in_its_own_order(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    run, output = run_of(place), place / "raw.parquet"
    parts = []
    for split in ("train", "test"):
        assert main(["predict", "-q", run, "--split", split, "-o", f"{split}.parquet"]) == 0
        parts.append(pl.read_parquet(f"{split}.parquet"))
    expected = pl.concat(parts).sort("row")
    assert main(["predict", "-q", run, name(place, "log"), "-o", str(output), "--keep", "request"]) == 0
    actual = pl.read_parquet(output)
    assert actual.columns == ["file", "row", "request", "label", "score"]
    assert actual["row"].to_list() == expected["row"].to_list()
    assert actual["request"].cast(pl.Int64).to_list() == [10**6 + row for row in range(ROWS)]
    np.testing.assert_array_equal(actual["label"], expected["label"])
    np.testing.assert_allclose(actual["score"], expected["score"], rtol=2e-6)
    assert actual["score"].n_unique() > 100


def fresh(place: Path, frame: pl.DataFrame) -> str:
    path = place / name(place, "fresh")
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return str(path)


def scores(place: Path, *arguments: str) -> pl.DataFrame:
    assert main(["predict", "-q", run_of(place), *arguments, "-o", str(place / "out.parquet")]) == 0
    return pl.read_parquet(place / "out.parquet")


def test_rows_without_a_label_are_scored_in_a_log_in_which_others_have_one(place: Path) -> None:
    log = pl.read_parquet(place / "log.parquet").head(90)
    number = pl.int_range(len(log))
    for known in (number % 3 > 0, number < 0):
        result = scores(place, fresh(place, log.with_columns(click=pl.when(known).then("click"))))
        expected = log.select(pl.when(known).then(pl.col("click").cast(pl.Int64))).to_series()
        assert result["label"].cast(pl.Int64).to_list() == expected.to_list()
        assert result["score"].is_finite().all()
    assert main(["evaluate", "-q", run_of(place), str(place / name(place, "fresh"))]) == 2


def test_a_directory_that_is_no_data_set_is_a_log(place: Path) -> None:
    log = Path(fresh(place, pl.read_parquet(place / "log.parquet").head(50)))
    (place / "day").mkdir(exist_ok=True)
    shutil.copy(log, place / "day")
    expected, actual = scores(place, str(log)), scores(place, str(place / "day"))
    assert actual["score"].to_list() == expected["score"].to_list()
    assert actual["file"].unique().to_list() == [str(place / "day" / log.name)]


def test_rows_without_labels_have_the_history_of_earlier_logs(place: Path) -> None:
    log = pl.read_parquet(place / "log.parquet")
    later = log.with_columns(at=pl.lit(100_500)).sample(200, seed=1, shuffle=True)
    with_history = scores(
        place, fresh(place, later.drop("click")), "--history", str(place / name(place, "log"))
    )
    assert "label" not in with_history.columns
    clicked = log.with_row_index("row").filter(pl.col("click") == 1).sort("at", "row")
    given = later.drop("click", "who", "at")
    for history, events in (
        ("before", clicked),
        ("lately", clicked.filter(pl.col("at") >= 100_500 - 7200)),
    ):
        last = {
            who: part["item"].tail(5).to_list()
            for (who,), part in events.group_by("who", maintain_order=True)
        }
        assert len({len(items) for items in last.values()}) > 1 or history == "before"
        lists = [last.get(who, []) for who in later["who"]]
        given = given.with_columns(pl.Series(history, lists, dtype=pl.List(pl.Int64)))
    if "parquet" in place.name:  # text files have no lists
        np.testing.assert_array_equal(scores(place, fresh(place, given))["score"], with_history["score"])
    bare = scores(place, fresh(place, later))
    assert (bare["score"] - with_history["score"]).abs().max() > 1e-4  # type: ignore[operator]


@pytest.mark.parametrize("ending", ["xlsx", "csv.zip", "gz", ""])
def test_scores_have_the_format_of_their_file_extension(
    place: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / f"scores.{ending}".rstrip(".")
    assert main(["predict", "-q", run_of(place), "-o", str(output)]) == 2
    assert not missing(f"{output}", capsys.readouterr().err)
    assert not output.exists()
    for target in ("a.CSV", "a.csv.gz", "b.csv.gz", "a.parquet"):
        assert main(["predict", "-q", run_of(place), "-o", str(place / target)]) == 0
    text, binary = pl.read_csv(place / "a.CSV"), pl.read_parquet(place / "a.parquet")
    packed = (place / "a.csv.gz").read_bytes()
    assert gzip.decompress(packed) == (place / "a.CSV").read_bytes()
    assert packed == (place / "b.csv.gz").read_bytes()
    assert text.columns == binary.columns
    np.testing.assert_allclose(text["score"], binary["score"], rtol=1e-6)


class Piped:
    """Standard input that another program writes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


def test_standard_input_and_output_are_logs_and_scores(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    later = pl.read_parquet(place / "log.parquet").head(50).drop("click")
    expected = scores(place, fresh(place, later), "--keep", "request")["score"]
    parquet = io.BytesIO()
    later.write_parquet(parquet)
    json_lines = later.with_columns(pl.col("who").str.slice(0)).write_ndjson().encode()
    text = later.write_csv().encode()
    for content in (
        text,
        gzip.compress(text),
        later.write_csv(separator=";").encode(),
        json_lines,
        parquet.getvalue(),
    ):
        monkeypatch.setattr(sys, "stdin", Piped(content))
        capfdbinary.readouterr()
        assert main(["predict", run_of(place), "-", "-o", "-", "--keep", "request"]) == 0
        frame = pl.read_csv(capfdbinary.readouterr().out)
        assert frame["file"].unique().to_list() == ["-"]
        assert frame["request"].to_list() == later["request"].to_list()
        np.testing.assert_allclose(frame["score"], expected, rtol=1e-6)
    monkeypatch.setattr(sys, "stdin", Piped(b""))
    assert main(["predict", run_of(place), "-", "-o", str(place / "never.csv")]) == 2
    assert b"standard input" in capfdbinary.readouterr().err
    assert not (place / "never.csv").exists()


def test_rows_without_a_user_have_an_empty_history(place: Path) -> None:
    """Visitors who are not logged in are scored as users without events, by files and with --top
    alike.
    """
    log = pl.read_parquet(place / "log.parquet")
    unlabelled = log.head(60).drop("click")
    later = unlabelled.with_columns(
        at=pl.col("at") + 200_000, who=pl.when(pl.col("request") % 2 == 0).then("who")
    )
    history = ("--history", str(place / name(place, "log")))
    result = scores(place, fresh(place, later), *history, "--keep", "request")
    stranger = later.with_columns(pl.col("who").fill_null("nobody"))
    np.testing.assert_array_equal(result["score"], scores(place, fresh(place, stranger), *history)["score"])
    known = unlabelled.with_columns(at=pl.col("at") + 200_000)
    differences = result["score"] - scores(place, fresh(place, known), *history)["score"]
    assert (differences != 0).to_numpy()[1::2].any()
    assert not differences.to_numpy()[::2].any()
    without = log.with_columns(who=pl.when(pl.col("request") % 3 > 0).then("who"))
    without.write_csv(place / "partly.csv")
    assert len(scores(place, str(place / "partly.csv"), "--history", str(place / "partly.csv"))) == len(log)
    top = scores(place, fresh(place, later[:1]), "--top", "3", "--by", "who")
    assert top["rank"].to_list() == [1]
    assert scores(place, fresh(place, later[1:2]), "--top", "3")["rank"].to_list() == []


def test_evaluate_counts_the_users_that_training_did_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "log.csv", 600)
    content = make_config(tmp_path, "csv")
    content["data"]["source"]["schema"]["sparse"] = [{"name": "who"}, {"name": "item"}]  # type: ignore[index]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    for command in ("prepare", "train"):
        assert main([command, "-q", "r.yaml"]) == 0
    who = pl.Series([None, "n1", "n1", "n2", *log["who"][4:90]])
    log.head(90).with_columns(who=who).write_csv("later.csv")
    trained = set(Dataset.open(content["data"]["path"]).vocabulary("who").values.drop_nulls())  # type: ignore[index]
    every = set(who.drop_nulls())
    new = every - trained
    assert 2 < len(new) < len(every)
    capsys.readouterr()
    assert main(["evaluate", "-q", run_of(tmp_path), "later.csv", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["users"] == {"all": len(every), "new": len(new)}
    # Rows without a user are not ranked among each other.
    of_none = log.head(90).with_columns(who=pl.when(pl.int_range(90) < 45).then(who))
    of_none.write_csv("some.csv")
    of_none.with_columns(pl.col("who").fill_null(pl.format("none{}", pl.int_range(90)))).write_csv(
        "own.csv"
    )
    grouped = []
    for file in ("some.csv", "own.csv"):
        assert main(["evaluate", "-q", run_of(tmp_path), file, "--json"]) == 0
        grouped.append(json.loads(capsys.readouterr().out)["log"]["grouped_auc"])
    assert grouped[0] == pytest.approx(grouped[1])
    assert main(["evaluate", "-q", run_of(tmp_path), "later.csv"]) == 0
    assert not missing(f"users {len(every)} {len(new)} not in the training split", capsys.readouterr().out)


def test_fields_for_reading_can_be_changed_as_errors_advise(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pl.read_parquet(place / "log.parquet").head(9).with_columns(pl.col("price").cast(pl.String))
    frame[3, "price"] = "dear"
    frame.write_csv(place / "odd.csv")
    command = ["predict", run_of(place), str(place / "odd.csv"), "-o", str(place / "odd.parquet")]
    assert main(command) == 2
    assert not missing("line 5 price dear data.on_bad_row=skip", capsys.readouterr().err)
    assert main([*command, "data.on_bad_row=skip"]) == 0
    assert pl.read_parquet(place / "odd.parquet")["row"].to_list() == [2, 3, 4, 6, 7, 8, 9, 10]
    assert main([*command, "data.source.nulls=[dear]"]) == (2 if "parquet" in place.name else 0)
    capsys.readouterr()
    assert main([*command, "data.source.schema.label=x"]) == 2
    assert not missing("data.source.schema.label=x no such file", capsys.readouterr().err)


def test_an_error_about_a_named_file_does_not_speak_of_the_recipe(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("predict", "evaluate"):
        for path in ("none.csv", "none*.csv", "foo://bucket/log", ""):
            assert main([command, run_of(place), path, "-q"]) == 2
            text = capsys.readouterr().err
            assert path in text
            assert "data.source.paths" not in text


CELLS = {
    "=1+1": "'=1+1", "+1": "'+1", "@SUM(1)": "'@SUM(1)", "-cmd|' /C calc'!A0": "'-cmd|' /C calc'!A0",
    "\t=1": "'\t=1", "\r=1": "'\r=1", "-1": "-1", "-.5e3": "-.5e3", "--1": "'--1", "a=1": "a=1", "'": "'",
}  # fmt: skip


def test_cells_that_a_spreadsheet_would_execute_become_text_on_request(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = (
        pl.read_parquet(place / "log.parquet").head(len(CELLS)).with_columns(pl.Series("=c", list(CELLS)))
    )
    log, target = fresh(place, frame), place / "cells.csv"
    command = ["predict", "-q", run_of(place), log, "--keep", "=c", "-o"]
    assert main([*command, str(target)]) == 0
    assert pl.read_csv(target, schema_overrides={"=c": pl.String})["=c"].to_list() == list(CELLS)
    assert main([*command, str(target), "--safe"]) == 0
    result = pl.read_csv(target, schema_overrides={"'=c": pl.String})
    assert result["'=c"].to_list() == list(CELLS.values())
    assert result["score"].dtype == pl.Float64
    assert main([*command, str(place / "cells.out.parquet"), "--safe"]) == 2
    assert not missing("--safe CSV", capsys.readouterr().err)


def test_metrics_of_a_raw_log_and_by_a_column(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, log = run_of(place), str(place / name(place, "log"))
    assert main(["evaluate", "-q", run, log, "--by", "country"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "model: step 12, the last one"
    assert not missing(f"log: {ROWS:,} samples", output[1])
    actual = scores(place, log)
    label, score = actual["label"].to_numpy(), actual["score"].to_numpy()
    order = score[:, None]
    positive, negative = order[label == 1], order[label == 0]
    auc = (positive > negative.T).mean() + (positive == negative.T).mean() / 2
    assert float(output[2].split()[1]) == pytest.approx(auc, abs=1e-6)
    rows = {line.split()[0]: line.split()[1:] for line in output if line[:2] in ("de", "fr", "it")}
    counts = pl.read_parquet(place / "log.parquet")["country"].value_counts()
    assert {value: int(each[0].replace(",", "")) for value, each in rows.items()} == dict(
        counts.iter_rows()
    )
    chosen = (pl.read_parquet(place / "log.parquet")["country"] == "de").to_numpy()
    loss = -np.mean(np.log(np.where(label == 1, score, 1 - score))[chosen])
    assert float(rows["de"][2]) == pytest.approx(loss, abs=1e-4)
    assert max(len(line) for line in output if "/" not in line) <= 80


def expected_ranks(log: pl.DataFrame, at: int) -> dict[str, tuple[float, int]]:
    """Return means over the groups of a column ``group``, computed by scikit-learn, and their
    number.
    """
    gain, recall, area, sizes = [], [], [], []
    for _, part in log.group_by("group"):
        label, score = part["label"].to_numpy(), part["score"].to_numpy()
        if label.any():
            gain.append(ndcg_score([label], [score], k=at))
            recall.append(label[np.argsort(-score)[:at]].sum() / label.sum())
        if 0 < label.sum() < len(label):
            area.append(roc_auc_score(label, score))
            sizes.append(len(label))
    return {
        f"NDCG@{at}": (float(np.mean(gain)), len(gain)),
        f"recall@{at}": (float(np.mean(recall)), len(recall)),
        "grouped AUC": (float(np.average(area, weights=sizes)), len(area)),
    }


def test_ranking_metrics_within_groups_are_reported(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups are any column of a raw log, or the users of a split."""
    run, log = run_of(place), str(place / name(place, "log"))
    raw = pl.read_parquet(place / "log.parquet")
    all_scores = scores(place, log).with_columns(raw["who"], raw["country"])
    capsys.readouterr()
    arguments = ["--rank-by", "user", "--rank-by", "country", "--at", "3", "--at", "20"]
    assert main(["evaluate", "-q", run, log, *arguments]) == 0
    output = capsys.readouterr().out.splitlines()
    assert main(["evaluate", "-q", run, "--rank-by", "user", "--split", "test"]) == 0
    split = capsys.readouterr().out.splitlines()
    part = scores(place, "--split", "test").with_columns(raw["who"].gather(pl.Series(rows_of(place) - 1)))
    for lines, head, frame, places in (
        (output, "log by who: 40 groups", all_scores.rename({"who": "group"}), (3, 20)),
        (output, "log by country: 3 groups", all_scores.rename({"country": "group"}), (3, 20)),
        (split, f"test by user: {part['who'].n_unique()} groups", part.rename({"who": "group"}), (10,)),
    ):
        table = lines[lines.index(head) + 1 :]
        rows = {line[2:22].strip(): line[22:].split() for line in reversed(table) if line[:2] == "  "}
        for at in places:
            for figure, (value, groups) in expected_ranks(frame, at).items():
                figure_text, interval, _, count = rows[figure]
                # Scores that round to one probability may have different logits.
                assert float(figure_text) == pytest.approx(value, abs=2e-4), figure
                low, high = map(float, interval.split("-"))
                assert low <= float(figure_text) <= high
                assert int(count) == groups


def rows_of(place: Path) -> NDArray[np.int64]:
    """Return the rows of the log that were in the last scored test split, counted from 1."""
    actual: NDArray[np.int64] = pl.read_parquet(place / "out.parquet")["row"].to_numpy()
    return actual - int("csv" in place.name)


def test_the_best_rows_of_each_group_are_written_in_order(place: Path) -> None:
    log = str(place / name(place, "log"))
    raw = pl.read_parquet(place / "log.parquet")
    all_scores = scores(place, log, "--keep", "who", "--keep", "country")
    for by, column in ((None, "who"), ("country", "country")):
        actual = scores(place, log, "--top", "4", *(["--by", by] if by else []))
        assert actual.columns == ["file", "row", column, "label", "score", "rank"]
        expected = [
            (row, rank)
            for value in dict.fromkeys(raw[column])
            for rank, row in enumerate(
                all_scores.filter(pl.col(column) == value).sort("score", "row", descending=[True, False])[
                    "row"
                ][:4],
                1,
            )
        ]
        assert list(zip(actual["row"], actual["rank"], strict=True)) == expected
    part, best = scores(place, "--split", "test"), scores(place, "--split", "test", "--top", "3")
    who = raw["who"].gather(pl.Series(rows_of(place) - 1))
    assert best.columns == [*part.columns, "rank"]
    assert best["rank"].to_list() == [1, 2, 3] * who.n_unique()
    part = part.with_columns(raw["who"].gather(part["row"] - 1 - int("csv" in place.name)))
    for (user,), rows in part.group_by("who"):
        mine = best.filter(pl.Series(who == user))["score"]
        assert mine.to_list() == rows["score"].sort(descending=True)[:3].to_list()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "RUN", "none.csv"], "none.csv"),
        (["predict", "RUN", "LOG", "--keep", "whp"], "whp who"),
        (["predict", "RUN", "SCORED", "--keep", "score"], "--keep score"),
        (["predict", "RUN", "LOG", "--split", "test"], "--split"),
        (["predict", "RUN", "--keep", "who"], "--keep"),
        (["evaluate", "RUN", "--by", "who"], "--by"),
        (["evaluate", "RUN", "--at", "3"], "--at --rank-by"),
        (["evaluate", "RUN", "--rank-by", "country"], "--rank-by"),
        (["evaluate", "RUN", "--rank-by", "session"], "--rank-by schema.session"),
        (["evaluate", "RUN", "LOG", "--rank-by", "session"], "session"),
        (["predict", "RUN", "--by", "user"], "--by --top"),
        (["predict", "RUN", "--top", "3", "--by", "x"], "--by"),
        (["predict", "RUN", "LOG", "--top", "3", "--by", "x"], "log 'x'"),
        (["evaluate", "RUN", "FRESH"], "click"),
        (["evaluate", "RUN", "LOG", "--by", "x"], "log 'x'"),
        (["predict", "RUN", "THIN"], "price"),
    ],
)
def test_input_that_cannot_be_scored_is_a_one_line_error_and_nothing_is_written(
    place: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    log = pl.read_parquet(place / "log.parquet").head(20)
    files = {
        "FRESH": log.drop("click"),
        "THIN": log.drop("price"),
        "SCORED": log.with_columns(score=pl.lit(1)),
    }
    names = {"RUN": run_of(place), "LOG": name(place, "log")}
    for key, frame in files.items():
        names[key] = name(place, key.lower())
        path = place / names[key]
        frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    target = place / "never.parquet"
    output = ["-o", str(target)] if arguments[0] == "predict" else []
    assert main([*(names.get(each, each) for each in arguments), "-q", *output]) == 2
    errors = capsys.readouterr().err
    check_refusal(message, errors)
    assert not target.exists()
