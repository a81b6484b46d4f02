"""Marked are figures of other code, by the hash of what a benchmark measures; each benchmark can be imported."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.registry import BENCHMARKS
from benchmarks.sources import source_hash
from errors import missing

FILES = {
    "benchmarks/speed.py": "from benchmarks.tools import go\nfrom stratarec.kernels import pool\n",
    "benchmarks/tools.py": "import stratarec.more\n\ndef go():\n    import stratarec.late\n",
    "src/stratarec/__init__.py": "",
    "src/stratarec/kernels/__init__.py": "from stratarec.kernels.pool import f\n",
    "src/stratarec/kernels/pool.py": "# fast\nf = 1\n",
    "src/stratarec/more.py": "m = 1\n",
    "src/stratarec/late.py": "g = 1\n",
    "src/stratarec/other.py": "h = 1\n",
}
CHANGES = [
    ("src/stratarec/kernels/pool.py", "f = 2\n", True),
    ("src/stratarec/late.py", "g = 2\n", False),
    ("src/stratarec/more.py", "m = 2\n", True),
    ("src/stratarec/__init__.py", "x = 0\n", True),
    ("src/stratarec/kernels/pool.py", "# faster\n\nf = 1\n", False),
    ("src/stratarec/kernels/pool.py", '"""Says more."""\n\nf = (1)\n', False),
    ("src/stratarec/other.py", "h = 2\n", False),
    ("benchmarks/tools.py", "import stratarec.more\n", False),
]


@pytest.mark.parametrize(("name", "text", "differs"), CHANGES)
def test_the_hash_is_of_the_modules_that_are_imported(tmp_path: Path, name: str, text: str, differs: bool) -> None:
    for file, content in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    before = source_hash("benchmarks.speed", tmp_path)
    (tmp_path / name).write_text(text)
    source_hash.cache_clear()
    assert (source_hash("benchmarks.speed", tmp_path) != before) == differs


@pytest.mark.parametrize("older", [False, True])
def test_a_figure_of_other_code_is_marked(tmp_path: Path, older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MATTER", report.MATTER[:1])
    result = {
        "benchmark": "embedding", "quick": False, "config": {}, "metrics": {report.MATTER[0][2]: 2.0},
        "hardware": {"processor": "Intel(R) Xeon(R) Processor", "avx512": True},
        "sources": "0" if older else source_hash(BENCHMARKS["embedding"]),
    }  # fmt: skip
    (tmp_path / "embedding.json").write_text(json.dumps(result))
    pages = [tmp_path / "README.md", tmp_path / "page.md"]
    for page in pages:
        page.write_text(f"a\n{report.BEGIN}\n{report.END}\nb\n")
    for _ in range(2):
        report.update_documents(*pages, tmp_path / "figures.svg", tmp_path)
    assert ("2.00\\* |" in pages[0].read_text()) == older
    for page in pages:
        assert not missing("AVX-512", page.read_text())
        assert ("easured before the code" in page.read_text()) == older
        assert page.read_text().endswith(f"{report.END}\nb\n")


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_a_benchmark_can_be_imported_without_its_peers(module: str) -> None:
    assert callable(importlib.import_module(module).run)
