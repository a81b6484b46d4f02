"""Run README, docs and examples as a reader would: every `shell` and `python` block, in a separate
folder.

The commands of pages about the reader's own log run on drafts of several sizes, because `init` and
`train` choose model, schedule and batch size by the number of rows. `console` blocks cannot be
tested: installation, several hosts, a service. A `yaml` block that begins with the name of a file
is that file.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import forked
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TUTORIAL = "docs/tutorial.md"
FEW, MANY = 5_000, 30_000
"""Numbers of rows of the log. Drafts of both sizes train an ensemble, with constant learning rates
and with a schedule."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(language, text) for language, text in BLOCK.findall(page.read_text()) if language in RUN]


RUN = {"shell", "python", "yaml"}
PACKAGE = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'models' / 'package')!r})\n"
"""Code with which the package of the page about models can be imported."""
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if blocks(path)
}


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that creates a folder with the logs that pages name, by the number of rows
    of `clicks.csv`.
    """

    @cache
    def folder(rows: int) -> Path:
        folder = tmp_path_factory.mktemp("logs")
        code = "from make_log import make_clicks, make_log\nfrom pathlib import Path\n"
        run_python(
            f"{code}make_log(Path(), {rows * 6 // 5})\nmake_clicks(Path('news.parquet'), 3000)", folder
        )
        return folder

    return folder


@pytest.fixture(scope="session")
def runs(logs: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that creates a folder with the logs and a run of `clicks.csv`, by its
    number of rows.
    """

    @cache
    def folder(rows: int) -> Path:
        folder = tmp_path_factory.mktemp("run") / "work"
        shutil.copytree(logs(rows), folder)
        for line in ("init clicks.csv --label clicked", "prepare -q clicks.yaml", "train -q clicks.yaml"):
            command(f"stratarec {line}", folder)
        return folder

    return folder


def run_python(
    code: str, folder: Path, before: str = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
) -> str:
    result = forked.python(before + code, cwd=folder)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def command(line: str, folder: Path) -> None:
    name, *arguments = shlex.split(line, comments=True)
    assert name == "stratarec", f"{line}: tests run stratarec alone; write other commands as console"
    result = forked.run(arguments, cwd=folder)
    assert result.returncode == 0, f"{line}\n{result.stderr[-2000:]}"
    if arguments[0] == "init":
        shorten(folder / "clicks.yaml")


def shorten(recipe: Path) -> None:
    """Shorten the training of a drafted recipe to a few steps without other changes."""
    text = recipe.read_text()
    assert text.count("\ntrain:\n") == 1
    recipe.write_text(text.replace("\ntrain:\n", "\ntrain:\n  max_steps: 40\n"))


SHORT = """
import functools, stratarec
stratarec.ClickModel = functools.partial(stratarec.ClickModel, train__max_steps=40)
"""
"""Python code that shortens the training of the estimator."""


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def execute(page: Path, folder: Path, languages: set[str]) -> None:
    for language, text in blocks(page):
        if language not in languages:
            continue
        if language == "shell":
            for line in commands(text):
                command(line, folder)
        elif language == "python":
            before = {"ClickModel": SHORT, "import NFM": PACKAGE}
            run_python(text, folder, next((code for word, code in before.items() if word in text), ""))
        else:
            name = re.match(r"# ([\w.-]+\.yaml)\n", text)
            if name:
                (folder / name[1]).write_text(text)


def has_commands(name: str) -> bool:
    return any(language == "shell" for language, _ in blocks(PAGES[name]))


@pytest.mark.parametrize("name", [name for name in PAGES if not has_commands(name)])
def test_the_python_of_a_page_runs(name: str, tmp_path: Path) -> None:
    execute(PAGES[name], tmp_path, RUN)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if has_commands(name) and name != TUTORIAL])
def test_every_command_of_a_page_runs_on_a_drafted_recipe(
    name: str, tmp_path: Path, logs: Callable[[int], Path], runs: Callable[[int], Path]
) -> None:
    folder = tmp_path / "work"
    shutil.copytree((logs if name == "README.md" else runs)(FEW), folder)
    execute(PAGES[name], folder, RUN)


def shape(line: str) -> str:
    """Return a line without the values of its numbers, the folders of its files and its runs of
    spaces.
    """
    return " ".join(re.sub(r"[+-]?\d[\d,]*(\.\d+)?", "#", re.sub(r'"/[^"]*/', '"', line)).split())


@pytest.mark.slow
def test_the_tutorial_shows_what_its_commands_print(tmp_path: Path) -> None:
    run_python("from make_log import make_log\nfrom pathlib import Path\nmake_log(Path())", tmp_path)
    steps: list[tuple[list[str], str]] = []
    for language, text in BLOCK.findall(PAGES[TUTORIAL].read_text()):
        if language == "shell":
            steps.append((commands(text), ""))
        elif language == "text" and steps:
            steps[-1] = (steps[-1][0], text)
        elif language == "python":
            run_python(text, tmp_path, SHORT)
    compared = 0
    for lines, expected in steps:
        output = ""
        for line in lines:
            result = forked.run(
                shlex.split(line)[1:], cwd=tmp_path, environment={**os.environ, "COLUMNS": "80"}
            )
            assert result.returncode == 0, f"{line}\n{result.stderr[-2000:]}"
            output += result.stderr + result.stdout
        if '"rank"' in expected:
            output += (tmp_path / "lists.csv").read_text()
        # Figures decide the words of the verdict, and which features are in the explanation of a
        # row.
        shown = [
            line
            for line in expected.splitlines()
            if line and not line.startswith(("...", " " * 17, "verdict"))
        ]
        missing = {shape(line) for line in shown} - {shape(line) for line in output.splitlines()}
        assert len(missing) <= ("(base)" in expected), f"{lines}: {missing}, got {output[-3000:]}"
        aucs = [
            [float(auc) for auc in re.findall(r"^  AUC +([\d.]+)", text, re.M)]
            for text in (expected, output)
        ]
        if aucs[0]:
            np.testing.assert_allclose(
                *aucs, atol=0.02, err_msg="the figures of the page are those of another version"
            )
            compared += 1
    assert compared == 2


@pytest.mark.slow
def test_a_draft_with_a_schedule_trains(tmp_path: Path, logs: Callable[[int], Path]) -> None:
    """Run the first commands of README.md: `init`, `prepare` and `train`."""
    folder = tmp_path / "work"
    shutil.copytree(logs(MANY), folder)
    first = next(text for language, text in blocks(PAGES["README.md"]) if language == "shell")
    for line in commands(first)[:3]:
        command(line, folder)


def test_pages_are_listed_and_their_python_is_valid() -> None:
    assert {"README.md", TUTORIAL, "docs/how-to/serving.md"} < PAGES.keys()
    for page in PAGES.values():
        for language, text in blocks(page):
            if language == "python":
                ast.parse(text)


def test_pages_name_only_existing_fields() -> None:
    """Fields are written as `section.field` or section.field=value."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    known = generate.paths()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*/*.md"), *(ROOT / "docs").glob("*.md")]
    skipped = ("log.md", "benchmarks.md", "architecture.md")
    field = re.compile(r"`((?:data|train|memory|model|hot|distributed)(?:\.[a-z_]+)+)\b")
    texts = {
        page.name: page.read_text()
        for page in pages
        if page.name not in skipped and page.parent.name != "reference"
    }
    wrong = [
        f"{name}: {field_name}"
        for name, text in texts.items()
        for field_name in field.findall(text)
        if field_name not in known
    ]
    assert not wrong


@pytest.mark.slow
def test_the_service_scores(runs: Callable[[int], Path], tmp_path: Path) -> None:
    run = runs(FEW)
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    command(f"stratarec export -q runs/clicks -o {tmp_path / 'exported'}", run)
    shutil.copy(run / "tomorrow.csv", tmp_path)
    run_python(
        """
import warnings
warnings.simplefilter("ignore")
from fastapi.testclient import TestClient
import polars as pl
import service
from stratarec import Scorer
client = TestClient(service.app)
frame = pl.read_csv("tomorrow.csv").head(20)
columns = {name: frame[name].to_list() for name in frame.columns} | {"item_history": [["i1"]] * len(frame)}
found = client.post("/score", json={"columns": columns})
assert found.status_code == 200, found.text
assert found.json()["scores"] == [float(x) for x in Scorer.open("exported").score(columns)]
refused = client.post("/score", json={"columns": {"user": ["u1"]}})
assert refused.status_code == 422 and "no column" in refused.text, refused.text
assert client.get("/health").json()["labels"] == ["clicked"]
""",
        tmp_path,
    )


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    options = [
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(tmp_path / "trees"),
        str(tmp_path / "docs"),
        str(tmp_path / "site"),
    ]
    result = forked.python(f"import sys\nfrom sphinx.cmd.build import main\nsys.exit(main({options!r}))")
    assert result.returncode == 0, result.stderr[-3000:]
    site = tmp_path / "site"
    assert (site / "searchindex.js").stat().st_size > 10_000
    for page in site.rglob("*.html"):
        assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//", page.read_text()), (
            page
        )
