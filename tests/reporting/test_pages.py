"""The HTML reports as people see them: looked at in a browser where there is one, and as text everywhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from recipes import tiny
from stratarec.cli import main
from stratarec.planning import machine

NAME = 'a <b>run & "more"'
FEATURE = "<u>item"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (400, 640, 900, 1200)
PAGES = ("run", "short", "explain", "plan", "towers", "profile")

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here to look at the reports with")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind, made by the command line; names hold markup."""
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, value in (("_SECONDS", 0.02), ("_FILE_BYTES", 8 << 20), ("_DRAM_BYTES", 16 << 20)):
            patch.setattr(machine, name, value)
        recipe = str(write(root / "recipe.yaml", {**tiny(root, max_steps=40, report=True), "name": NAME}))
        short = str(write(root / "short.yaml", few(root)))
        for command in (
            ["prepare", recipe],
            ["train", recipe, "memory.precision=int8"],
            ["plan", recipe, f"memory.block.path={root / 'rows'}", "--report", str(root / "plan.html")],
            ["plan", recipe, "--towers", "2", "--steps", "2", "--report", str(root / "towers.html")],
            ["prepare", short],
            ["train", short],
            ["explain", str(root / "short"), "-o", str(root / "explain.html")],
            ["prepare", short, "data.source.schema.session=visit", f"data.path={root / 'visits'}"],
            ["profile", str(root / "visits"), "--batch-size", "64", "-o", str(root / "profile.html")],
        ):
            assert main([command[0], "-q", *command[1:]]) == 0
    found = {"run": root / "run" / "report.html", "short": root / "short" / "report.html"}
    return found | {name: root / f"{name}.html" for name in ("explain", "plan", "towers", "profile")}


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def few(root: Path) -> dict[str, Any]:
    """A run of few steps on few samples without users: no curves, no grouped AUC, a feature with a strange name."""
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
            "source": {
                "kind": "parquet",
                "paths": [str(root / "few.parquet")],
                "schema": features,
            },
            "vocabulary": {"min_count": 1},
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"run": str(root / "short"), "batch_size": 128, "epochs": 1},
    }


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_look_and_loads_nothing(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert len(re.findall(r"\{[^{}]+:[^{}]+\}", style[1])) > 20, "the page has next to no style"
    assert "prefers-color-scheme: dark" in style[1]
    assert not re.search(r"https?:|<link|<img|@import|url\((?!#)", text)
    assert text.count("<html") == text.count("</html>") == text.count("<main>") == text.count("</main>") == 1


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_its_own_script_alone(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1
    assert len(re.findall(r"(?i)<script", text)) == 1
    assert not missing(f"none unsafe-inline sha256-{digest}", text)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_user_wrote_is_escaped(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    assert "<b>run" not in text
    assert "<u>" not in text
    assert html.escape(FEATURE if name == "profile" else NAME).replace("&quot;", "&#34;") in text


def test_features_are_named_as_they_are_called(pages: dict[str, Path]) -> None:
    for name in ("short", "explain"):
        assert f">{html.escape(FEATURE)}<" in pages[name].read_text()


def test_a_short_run_says_what_its_page_lacks(pages: dict[str, Path]) -> None:
    long, short = (pages[name].read_text() for name in ("run", "short"))
    assert not missing("train.log_every = 50", short)
    assert "<svg" not in short
    assert "grouped AUC" not in short
    assert "grouped AUC" in long
    assert [part.split("<")[0].strip() for part in long.split("<figcaption>")[1:]] == [
        "Training loss", "Validation log loss", "Validation AUC", "Calibration", "Throughput",
    ]  # fmt: skip
    assert "used / predicted" in long
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z-]+", "", f"{long} {short}".lower())


def browse(folder: Path, *options: str) -> str:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


LOOK = """
const found = [...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, style = element => frame.contentWindow.getComputedStyle(element);
  const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.right, b.width, b.height] };
  return {
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
    font: style(page.body).fontFamily, padding: style(page.querySelector("td")).paddingRight,
    numbers: style(page.querySelector("td:nth-child(n+2):not(.text)")).textAlign,
    blocks: [...page.querySelectorAll(
      "main > *, figure, figure > .plot > svg, .card, .scroll, .level, .flow")].map(box),
    folded: style(page.querySelector("tbody td")).display,
    figures: [...page.querySelectorAll("figure svg")].map(box),
    letters: [...page.querySelectorAll("figure svg text")].map(text => parseFloat(style(text).fontSize)
      * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width),
    read: [...page.querySelectorAll("figure")].map(figure => {
      const [plot, tip, slider] = [".plot", ".tip", "input"].map(each => figure.querySelector(each));
      const area = plot.getBoundingClientRect(), window = frame.contentWindow;
      plot.dispatchEvent(new window.PointerEvent("pointermove", {clientX: area.right, clientY: area.top + 9}));
      const pointed = [tip.textContent, slider.getAttribute("aria-valuetext"), slider.hidden || tip.hidden, box(tip)];
      plot.dispatchEvent(new window.PointerEvent("pointerleave"));
      const left = tip.hidden;
      slider.value = 0;
      slider.dispatchEvent(new window.Event("input"));
      return {pointed, left, moved: [tip.textContent, slider.getAttribute("aria-valuetext"), tip.hidden, box(tip)]};
    }),
  };
});
document.body.textContent = JSON.stringify(found);
"""


# What is read at the left and at the right end of each chart.
_SHARE, _RATES = r"[\d.]+ %", "rows of the cache {}: lru {s}; lfu {s}; rank {s}"
READ = {
    "run": [
        *(
            (f"step {first}: {name} [\\d.,]+", f"step 40: {name} [\\d.,]+")
            for first, name in ((5, "Training loss"), (20, "Validation log loss"), (20, "Validation AUC"))
        ),
        (r"predicted click rate 0\.\d+: (test|validation) [\d.]+",) * 2,
        (r"step 5: Throughput [\d.,]+", r"step 40: Throughput [\d.,]+"),
    ],
    "explain": [(r"x \d+: mean prediction 0\.\d+", r"x 299.5: mean prediction 0\.\d+")],
    "towers": [(r"\w+, tower 0: most with (\w+ 0\.\d+(, )?){4}", r"\w+, tower 1: most with (\w+ 0\.\d+(, )?){4}")],
    "profile": [
        *((_RATES.format(1, s=_SHARE), _RATES.format(rows, s=_SHARE)) for rows in (r"\d\d\d", r"\d\d")),
        (r"hot bytes, % of all rows' [\d.]+: .*need no others [\d.]+ %; .*",) * 2,
    ],
}


@needs_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_windows_of_any_width(pages: dict[str, Path], tmp_path: Path, name: str) -> None:
    text = html.escape(pages[name].read_text())
    frames = "".join(
        f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{text}"></iframe>' for width in WIDTHS
    )
    (tmp_path / "frames.html").write_text(f"<body>{frames}<script>onload = () => {{{LOOK}}}</script></body>")
    dom = browse(tmp_path, "--dump-dom", f"file://{tmp_path / 'frames.html'}")
    found = json.loads(html.unescape(re.search(r"<body>(.*)</body>", dom, re.DOTALL)[1]))  # type: ignore[index]
    assert [look["width"] for look in found] == list(WIDTHS)
    for look in found:
        assert look["scroll"] <= look["width"], "the page is wider than its window"
        assert "sans-serif" in look["font"]
        assert float(look["padding"].removesuffix("px")) > 5
        assert look["numbers"] == "right"
        assert all(left >= 0 and right <= look["width"] for left, right, _, _ in look["blocks"])
        assert look["folded"] == ("block" if look["width"] <= 640 else "table-cell")
        assert len(look["figures"]) == {"run": 5, "explain": 1, "towers": 1, "profile": 3}.get(name, 0)
        assert all(width > 250 and height > 80 for _, _, width, height in look["figures"])
        for read, title in zip(look["read"], READ.get(name, ()), strict=True):
            assert read["left"]
            for seen, (text, value, hidden, (left, right, *_)) in zip(
                title, (read["moved"], read["pointed"]), strict=True
            ):
                assert re.fullmatch(seen, text), text
                assert text == value
                assert not hidden
                assert left >= 0
                assert right <= look["width"]
        least = 5 if name == "towers" else 7  # two sides of a matrix have the names of all features
        assert all(least < size < 18 for size in look["letters"])


@needs_browser
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("run", "light"),
        ("run", "dark"),
        ("short", "light"),
        ("explain", "dark"),
        ("plan", "dark"),
        ("towers", "light"),
        ("profile", "light"),
    ],
)
def test_a_page_is_drawn(pages: dict[str, Path], tmp_path: Path, name: str, scheme: str) -> None:
    picture = tmp_path / "page.png"
    chosen = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browse(tmp_path, *chosen, "--window-size=1200,700", f"--screenshot={picture}", f"file://{pages[name]}")
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    ground, accent = {
        "light": ((255, 255, 255), (42, 111, 176)),
        "dark": ((18, 24, 29), (106, 174, 230)),
    }[scheme]
    empty = (pixels == ground).all(axis=2)
    assert empty[0].all(), "the page's ground is not of its colour"
    assert 0.5 < empty.mean() < 0.97
    if name in ("run", "profile"):
        assert (np.abs(pixels - accent).sum(axis=2) < 12).sum() > 500, "no curve or bar is to be seen"
    if name == "towers":
        for colour in ((68, 1, 84), (253, 231, 37)):  # the least and the greatest of its picture
            assert (np.abs(pixels - colour).sum(axis=2) < 12).sum() > 200, "the matrix is not to be seen"
