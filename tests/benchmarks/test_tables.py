"""What the benchmarks print can be read on a terminal of 80 columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


SCRIPT = """
import sys
from pathlib import Path
from benchmarks import report
for name in sys.argv[1:]:
    report.print_result(report.read_result(Path(name)))
    print("=====")
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def printed() -> dict[Path, str]:
    """Every result file as it is printed."""
    done = bench("-c", SCRIPT, *map(str, RESULTS))
    assert done.returncode == 0, done.stderr
    return dict(zip(RESULTS, done.stdout.split("=====\n"), strict=False))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_fit_80_columns_with_whole_words(printed: dict[Path, str], path: Path) -> None:
    text = printed[path]
    assert max(map(len, text.splitlines())) <= 80
    content = json.loads(path.read_text())
    for name in content["metrics"]:
        assert re.search(rf"^{name} +\S+$", text, re.MULTILINE)
    words = re.findall(r"[a-z]+", text)
    for row in content["samples"]["rows"]:
        for name, value in row.items():
            if isinstance(value, list) and any(isinstance(part, dict) for part in value):
                continue  # in the file alone
            # Neither a word of a head nor a cell is broken.
            assert set(re.findall(r"[a-z]+", name.replace("_", " "))) <= set(words)
            assert not isinstance(value, str) or value in text
