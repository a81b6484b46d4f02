"""Test that the notebooks of `examples/` run completely and are committed without outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NEEDS = {"torchrec_model": ("torchrec",), "service": ("fastapi", "httpx")}
"""Packages that readers of a notebook have but the test environment may lack."""


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text())["cells"] if each["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_committed(path: Path) -> None:
    assert all(not each["outputs"] and each["execution_count"] is None for each in cells(path))
    assert "".join(cells(path, "markdown")[0]["source"]).startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# A kernel is a process with sockets, whose libraries may warn.
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", *NEEDS.get(path.stem, ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{path.name} needs {package}, which is not installed")
    import nbformat
    from nbclient import NotebookClient

    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps(book)
    assert "Traceback" not in shown
    if path.stem == "csv_log":
        curves = re.findall(r"<svg", shown)
        assert curves, "no curve was drawn while it trained"
        assert "<b>Result</b>" in shown
        assert "<b>Recipe clicks" in shown
        assert (tmp_path / "runs" / "clicks" / "report.html").exists()
    if path.stem == "service":
        assert '"scores"' in shown or "'scores'" in shown
        assert "422" in shown
