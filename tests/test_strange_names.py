"""Test names that are paths, patterns, markup or worse, from log to scores, on the terminal and in
pages.
"""

from __future__ import annotations

import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import forked
import numpy as np
import polars as pl
import pytest
import yaml

from recipes import tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.errors import ConfigError, DatasetError, StorageError, StrataError

NAMES = (
    "C*", "C1", "[", "[/x]", "a/b", "../../../evil", "<script>alert(1)</script>", "{{ 7*7 }}", "*", "a.b", "'\"&",
    "汉 字", "$x^2$", ":smile:", "pa\u202eth", "-rf",
)  # fmt: skip
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def write(root: Path, names: tuple[str, ...]) -> Path:
    """Write a log and a recipe whose features, group, vocabulary and history have these names."""
    root.mkdir()
    draws = np.random.default_rng(0)
    visit = draws.integers(0, 80, 1200)
    columns = {
        name: [f"{place}-{value % (place + 3)}" for value in visit] for place, name in enumerate(names)
    }
    dense = draws.random(1200)
    frame = {
        "y": draws.integers(0, 2, 1200),
        "v": visit,
        "w": visit % 19,
        "t": np.arange(1200),
        names[0] + "d": dense,
    }
    pl.DataFrame({**frame, **columns}).write_parquet(root / "log.parquet")
    content = tiny(root, max_steps=6, epochs=1, report=True)
    content["name"] = f"<b>{names[0]} [/x]</b>".replace("/", "")
    content["data"]["source"] = {
        "kind": "parquet",
        "paths": [str(root / "log.parquet")],
        "schema": {
            "label": "y", "session": "v", "user": "w", "time": "t",
            "dense": [{"name": names[0] + "d"}],
            "sparse": [
                {"name": names[0], "group": "g/" + names[0]},
                {"name": names[1], "group": "g/" + names[0], "vocabulary": "v" + names[1]},
                *({"name": name} for name in names[2:]),
                {"name": "h/" + names[0], "kind": "history", "of": names[2], "max_length": 4},
            ],
        },
    }  # fmt: skip
    content["data"]["vocabulary"] = {"overrides": {names[2]: {"min_count": 1}}}
    content["model"]["history"] = {"pooling": "target_attention"}
    content["memory"] = {"precision": {names[3]: "int8"}, "block": {"path": str(root / "block")}}
    (root / "r.yaml").write_text(yaml.safe_dump(content, allow_unicode=False))
    return root


def with_history(log: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    """Return the log with the items that each user clicked before."""
    clicked: dict[int, list[str]] = {}
    histories = []
    for user, value, label in zip(log["w"], log[names[2]], log["y"], strict=True):
        histories.append(clicked.setdefault(user, [])[-4:])
        if label:
            clicked[user].append(value)
    return log.with_columns(pl.Series("h/" + names[0], histories, dtype=pl.List(pl.String)))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"


def test_strange_names_from_log_to_scores(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = tuple(f"n{place}" for place in range(len(NAMES)))
    results, pages = {}, []
    for kind, names in (("odd", NAMES), ("plain", plain)):
        root = write(tmp_path / kind, names)
        for command in (
            ["prepare", f"{root}/r.yaml"],
            ["train", f"{root}/r.yaml"],
            ["evaluate", f"{root}/run"],
            ["predict", f"{root}/run"],
            ["export", f"{root}/run"],
            ["profile", f"{root}/data", "--batch-size", "64"],
            ["plan", f"{root}/r.yaml", "-o", f"{root}/plan.json"],
        ):
            assert main(command) == 0, (kind, command)
        pages.append(root / "run" / "report.html")
        scores = pl.read_parquet(root / "run" / "predictions-test.parquet")
        results[kind] = scores.drop("file", "score").rows()
        # The exported model finds the same values by the same names in the log itself.
        rows = with_history(pl.read_parquet(root / "log.parquet"), names)[scores["row"].to_numpy() - 1]
        again = Scorer.open(root / "run" / "export").score({name: rows[name] for name in rows.columns})
        np.testing.assert_allclose(again, scores["score"], rtol=1e-5)
        assert scores["score"].n_unique() > 50
    output = capfd.readouterr()
    assert not CONTROL.search(output.out + output.err.replace("\n", ""))
    assert "[/x]" in output.out
    assert r"pa\u202eth" in output.out
    # Initial weights depend on the names, the samples do not.
    assert results["odd"] == results["plain"]
    tags = {}
    for page in pages:
        parser = Tags()
        text = page.read_text()
        parser.feed(text)
        tags[page] = parser.tags
        assert parser.scripts <= 1, "more than the one of the page's charts"
        assert "49" not in re.findall(r"\{\{ 7\*7 \}\}|>(49)</td>", text)
    odd, plain_page = pages
    assert "&lt;script&gt;alert(1)" in odd.read_text()
    assert tags[odd] == tags[plain_page]
    # All files are where they belong.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "plain"]
    tops = [{path.name for path in (tmp_path / kind).iterdir()} for kind in ("odd", "plain")]
    assert tops[0] == tops[1]
    assert not list((tmp_path / "odd" / "block").iterdir())


def code_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as leaving:  # the format of argparse
        return leaving.code


def test_control_characters_do_not_reach_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m"
    folder = tmp_path / f"f{evil}"
    folder.mkdir()
    pl.DataFrame({"y": [0, 1], f"c{evil}": [1, 2], "s": ["x", f"y{evil}"]}).write_parquet(
        folder / "log.parquet"
    )
    content = tiny(folder)
    schema = {"label": "y", "sparse": [{"name": "missing"}]}
    content["data"]["source"] = {
        "kind": "parquet",
        "paths": [str(folder / "log.parquet")],
        "schema": schema,
    }
    recipe = folder / "r.yaml"
    recipe.write_text(yaml.safe_dump(content))
    label = yaml.safe_dump({"label": "s", "sparse": [{"name": "y"}]}, default_flow_style=True).strip()
    for arguments in (
        ["prepare", "-q", str(recipe)],  # a path, and columns of a file
        ["prepare", "-q", str(recipe), f"data.source.schema={label}"],
        ["prepare", "-q", str(recipe), f"name={evil}"],
        ["prepare", "-q", str(recipe), f"data.{evil}=1"],
        ["prepare", "-q", str(recipe), f"--{evil}"],
        ["prepare", "-q", str(recipe), f"data.source.paths=['{evil}']"],
        ["train", "-q", str(recipe), f"--plan={evil}"],
        ["evaluate", str(folder)],
    ):
        assert code_of(arguments) == 2
        result = capfd.readouterr()
        assert result.err.startswith("stratarec: ")
        assert result.err.count("\n") == 1
        assert not CONTROL.search(result.err), arguments


def test_a_warning_is_a_line_without_control_characters(tmp_path: Path) -> None:
    code = """
import sys, warnings
from stratarec.cli import main, run_command
warn = lambda args: warnings.warn("from \\x1b[31m there")
run_command.COMMANDS = tuple(command._replace(run=warn) for command in run_command.COMMANDS)
main(["evaluate", "x"])
"""
    done = forked.python(code, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "stratarec: UserWarning: from \\x1b[31m there\n"


@pytest.mark.parametrize("kind", [ConfigError, DatasetError, StorageError])
def test_a_message_is_one_line_and_ends_with_its_advice(kind: type[StrataError]) -> None:
    error = kind(f"field is {'x' * 100_000}\nof a file; prepare the data again")
    assert len(str(error)) < 1500
    assert str(error).startswith("field is xxx")
    assert str(error).endswith("x\\nof a file; prepare the data again")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind("as it is")) == "as it is"
