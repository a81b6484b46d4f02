"""Test the HTML reports, in a browser if there is one, and as text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from recipes import measure_briefly, tiny
from stratarec.cli import main

NAME = 'a <b>run & "more"'
FEATURE = "<u>item"
PAGES = ("run", "short", "explain", "towers")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a page of every kind with the command line. Names contain markup."""
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        measure_briefly(patch)
        recipe = str(write(root / "recipe.yaml", {**tiny(root, max_steps=40, report=True), "name": NAME}))
        short = str(write(root / "short.yaml", few(root)))
        for command in (
            ["prepare", recipe],
            ["train", recipe, "memory.precision=int8"],
            ["plan", recipe, "--towers", "2", "--steps", "2", "--report", str(root / "towers.html")],
            ["prepare", short],
            ["train", short],
            ["explain", str(root / "short"), "-o", str(root / "explain.html")],
        ):
            assert main([command[0], "-q", *command[1:]]) == 0
    results = {"run": root / "run" / "report.html", "short": root / "short" / "report.html"}
    return results | {name: root / f"{name}.html" for name in ("explain", "towers")}


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def few(root: Path) -> dict[str, Any]:
    """Train a run of few steps on few samples without users: no curves, no grouped AUC, a feature
    with a strange name.
    """
    rows = np.arange(600)
    frame = pl.DataFrame(
        {"label": rows % 2, "visit": rows // 6, FEATURE: rows // 3, "city": rows // 6, "x": rows * 0.5}
    )
    frame.write_parquet(root / "few.parquet")
    features = {"dense": [{"name": "x"}], "sparse": [{"name": FEATURE}, {"name": "city"}]}
    return {
        "name": NAME,
        "data": {
            "path": str(root / "few"),
            "source": {"kind": "parquet", "paths": [str(root / "few.parquet")], "schema": features},
            "vocabulary": {"min_count": 1},
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"run": str(root / "short"), "batch_size": 128, "epochs": 1},
    }


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_layout_and_loads_nothing(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert len(re.findall(r"\{[^{}]+:[^{}]+\}", style[1])) > 20, "the page has next to no style"
    assert "prefers-color-scheme: dark" in style[1]
    assert not re.search(r"https?:|<link|<img|@import|url\((?!#)", text)
    assert (
        text.count("<html") == text.count("</html>") == text.count("<main>") == text.count("</main>") == 1
    )


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_no_script(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    assert "<script" not in text.lower()
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", PAGES)
def test_user_text_is_escaped(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    assert "<b>run" not in text
    assert "<u>" not in text
    assert html.escape(NAME).replace("&quot;", "&#34;") in text


def test_a_short_run_names_what_its_page_lacks(pages: dict[str, Path]) -> None:
    long, short = (pages[name].read_text() for name in ("run", "short"))
    assert not missing("train.log_every = 50", short)
    assert "<svg" not in short
    assert "grouped AUC" not in short
    assert "grouped AUC" in long
    assert [part.split("<")[0].strip() for part in long.split("<figcaption>")[1:]] == [
        "Training loss",
        "Validation log loss",
        "Validation AUC",
        "Calibration",
        "Throughput",
    ]
    assert "used / predicted" in long
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z-]+", "", f"{long} {short}".lower())
