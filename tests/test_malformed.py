"""Test malformed inputs and recipes of a user who starts with a new log.

Each gives one line that says what to change and exit code 2, and no file is lost or incomplete.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from cli.test_cli import tree

from errors import missing
from stratarec.cli import main

HEAD = "click,who,at,item,price,words\n"
ROWS = "".join(
    f"{row % 2},u{row % 7},{1_577_836_800 + row * 600},{row % 5},{row}.5,a|b\n" for row in range(400)
)
LOG = (HEAD + ROWS).encode()
LINE = b"1,u1,1577836900,3,2.5,a\n"


def make_content() -> dict[str, Any]:
    return {
        "name": "own",
        "data": {
            "path": "data/own",
            "source": {
                "kind": "csv",
                "paths": ["log.csv"],
                "schema": {
                    "label": "click",
                    "user": "who",
                    "time": "at",
                    "dense": [{"name": "price"}],
                    "sparse": [
                        {"name": "item", "type": "integer"},
                        {"name": "words", "kind": "multi", "separator": "|"},
                        {"name": "before", "kind": "history", "of": "item"},
                    ],
                },
            },
            "split": {"by": "time", "valid": "6h", "test": "6h"},
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"batch_size": 64},
    }


def bad(good: bytes, wrong: bytes) -> bytes:
    """Write the log and append an invalid line."""
    return LOG + LINE.replace(good, wrong)


LOGS: list[tuple[str, bytes, str]] = [
    ("an empty file", b"", "log.csv"),
    ("a header alone", HEAD.encode(), "log.csv"),
    ("no header", ROWS.encode(), "log.csv click data.source.columns"),
    ("a name misspelt", LOG.replace(b"item", b"itme", 1), "item itme"),
    ("a name twice", LOG.replace(b"words", b"item", 1), "item 2"),
    ("a field too few", LOG + b"1,u1,1577836900,3\n", "log.csv line 402 4 fields 6"),
    ("a field too many", LOG + LINE[:-1] + b",9\n", "line 402 7 fields 6"),
    ("a label that is none", LOG + b"2" + LINE[1:], "line 402 click 2 0 1"),
    ("no label", LOG + LINE[1:], "line 402 click 0 1"),
    ("no user", bad(b"u1", b""), "line 402 who"),
    ("no time", bad(b"1577836900", b""), "line 402 'at'"),
    ("a time in words", bad(b"1577836900", b"noon"), "line 402 'at' noon"),
    ("a number in words", bad(b"2.5", b"dear"), "line 402 price dear"),
    ("a word for a label", bad(b"1,u1", b"yes,u1"), "line 402 click yes"),
    ("a way to go on", bad(b"2.5", b"dear"), "dear data.on_bad_row=skip"),
    ("infinity", bad(b"2.5", b"1e999"), "line 402 price inf"),
    ("a decimal comma", bad(b"2.5", b'"2,5"'), "line 402 price 2,5"),
    ("an id in words", bad(b",3,", b",x3,"), "line 402 item 'x3'"),
    ("half an id", bad(b",3,", b",3.5,"), "line 402 item 3.5"),
    ("an open quote", LOG + b'"' + LINE, "line 402 data.source.quote"),
    ("a quote inside", bad(b"u1", b'u"1"'), "line 402"),
    ("no UTF-8", bad(b"u1", b"\xe9"), "line 402 byte 3 0xe9 UTF-8 data.source.encoding"),
    ("UTF-16", LOG.decode().encode("utf-16"), "log.csv line 1 byte 4 UTF-16 UTF-8"),
    ("a zero byte", bad(b"u1", b"u\0"), "log.csv line 402 byte 4"),
    ("a header in Latin-1", LOG.replace(b"words", b"w\xf6rds", 1), "line 1 byte 26 0xf6 UTF-8"),
    ("returns for line ends", LOG.replace(b"\n", b"\r"), "line 1"),
    ("a damaged Parquet file", b"PAR1" + bytes(99), "log.csv"),
    (
        "a stray quote where others are closed",
        HEAD.encode() + b'1,u1,1577836900,3,2.5,"a\n' + LINE.replace(b"a", b'"a"') * 9,
        "line 2",
    ),
    (
        "an open quote behind one over two lines",
        LOG + LINE.replace(b"a", b'"a\nb"') + LINE.replace(b"a", b'"a'),
        "line 404",
    ),
    ("a stray return", bad(b"u1", b"u\r1"), "line 402"),
    ("one class", LOG.replace(b"\n1,", b"\n0,"), "samples 0"),
    ("a short log", HEAD.encode() + ROWS[:900].encode().rpartition(b"\n")[0] + b"\n", "data.split.valid"),
    ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "log.csv line 3 byte 1"),
]

CHANGES: list[tuple[str, str]] = [
    ("data.source.paths=[none.csv]", "none.csv data.source.paths"),
    ("data.source.paths=[log.csv, ./log.csv]", "data.source.paths"),
    ("data.source.paths=[cut.csv.gz]", "cut.csv.gz"),
    ("data.source.paths=['gs://bucket/log.csv']", "gs:// gcsfs"),
    ("data.source.encoding=latin-l", "data.source.encoding latin-l utf-8 latin-1"),

    ("data.source.delimiter='||'", "data.source.delimiter '||' ASCII"),
    ("data.source.quote=','", "data.source.quote ',' log.csv"),
    ("data.source.format=jsonl", "log.csv line 1 JSON"),
    ("data.source.paths=[array.json]", "array.json line 1 JSON"),
    ("data.path=/proc/own", "/proc/own directory"),
    ("data.source.columns=[a, b]", "log.csv click"),
    ("data.source.max_line_bytes=10", "log.csv line 1 10 data.source.max_line_bytes"),
    ("data.source.schema.label=clck", "log.csv clck click"),
    ("data.source.schema.label={column: who, equals: yes}", "schema.label.equals True"),
    ("data.source.schema.label={column: words2, at_least: 3}", "log.csv words2 words"),
    ("data.source.schema.time_unit=ms", "'at' time_unit"),
    ("data.source.schema.time_format='%d.%m.%Y'", "line 2 'at' 1577836800"),
    ("data.source.schema.time_format='%M'", "schema.time_format '%M' %d/%m/%Y"),
    ("data.source.schema.sparse=[{name: who, type: integer}]", "line 2 who 'u0'"),
    ("data.source.schema.sparse=[{name: words, kind: multi}]", "words  "),
    ("data.split.test=9d", "data.split.test 9d"),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_bytes(LOG)
    Path("cut.csv.gz").write_bytes(gzip.compress(LOG)[:-400])
    Path("array.json").write_text('[\n {"click": 1}\n]')
    Path("folder").mkdir()
    Path("own.yaml").write_text(yaml.safe_dump(make_content()))
    return tmp_path


def prepare_refused(place: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of `prepare`. It must leave no data set and change no other file."""
    before = tree(place)
    assert main(["prepare", "-q", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("stratarec: ")
    assert output.err.count("\n") == 1
    after = tree(place)
    # Work of an interrupted reading is in a directory of its own, because a corrected log cannot
    # use it.
    assert {name: after[name] for name in after if not name.startswith("data")} == before
    assert not (place / "data" / "own").exists()
    return output.err


@pytest.mark.parametrize(
    ("content", "message"), [each[1:] for each in LOGS], ids=[each[0] for each in LOGS]
)
def test_a_malformed_log(
    place: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    Path("log.csv").write_bytes(content)
    assert not missing(message, prepare_refused(place, capsys, "own.yaml"))


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[each[0] for each in CHANGES])
def test_a_malformed_recipe(
    place: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    assert not missing(message, prepare_refused(place, capsys, "own.yaml", change))


FRAMES: list[tuple[str, Callable[[pl.DataFrame], pl.DataFrame], str]] = [
    ("text for a number", lambda log: log.with_columns(price=pl.lit("x")), "row 1 price 'x'"),
    ("a list for an id", lambda log: log.with_columns(item=pl.lit([1])), "item List"),
    ("a fraction for an id", lambda log: log.with_columns(item=pl.lit(0.5)), "row 1 item 0.5"),
    ("a time of day", lambda log: log.with_columns(at=pl.time(1)), "'at' Time"),
    ("a name misspelt", lambda log: log.rename({"item": "itme"}), "item itme"),
    ("no rows", lambda log: log.clear(), "log.parquet"),
]


@pytest.mark.parametrize(
    ("change", "message"), [each[1:] for each in FRAMES], ids=[each[0] for each in FRAMES]
)
def test_a_malformed_parquet_file(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pl.DataFrame], pl.DataFrame],
    message: str,
) -> None:
    content = make_content()
    content["data"]["source"] |= {"kind": "parquet", "paths": ["log.parquet"]}
    Path("own.yaml").write_text(yaml.safe_dump(content))
    change(pl.read_csv("log.csv")).write_parquet("log.parquet")
    assert not missing(message, prepare_refused(place, capsys, "own.yaml"))
