"""Test the checks for a machine with a GPU, at tiny sizes on the CPU, with kernels in Triton's
interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "gpu"

if not TOOLS.is_dir():
    pytest.skip("an installed package has no tools", allow_module_level=True)
pytest.importorskip("triton")


def run(tool: str, *arguments: str, **variables: str) -> str:
    """Return the output of a tool."""
    places = [str(each) for each in (TOOLS, ROOT / "src", ROOT / "tests", ROOT)]
    code = f"import runpy, sys\nsys.path[:0] = {places!r}\nrunpy.run_path({str(TOOLS / tool)!r}, run_name='__main__')"
    done = forked.python(code, arguments, cwd=ROOT, environment=variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_compile_for_a_gpu_without_spilling_and_with_exact_division() -> None:
    # The interpreter accepts Python code that the compiler refuses.
    lines = run("compile.py", TRITON_INTERPRET="0").splitlines()
    assert len(lines) == 36, lines


@pytest.mark.slow
def test_slots_of_a_gpu_match_those_of_the_cpu() -> None:
    """`embedding/test_device_slots.py` compares the other workloads."""
    (line,) = run("slots.py", "1").splitlines()
    assert line.split(": ")[1].split()[0] == "0", line


@pytest.mark.slow
def test_measurements_run_at_small_sizes_and_become_results(tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    run("kernels.py", str(out), "tiles")
    run("costs.py", str(out))
    for benchmark in ("train", "graph", "cached", "hot", "dedup"):
        run("steps.py", str(out), benchmark, SECONDS_LEFT="900")
    for part in ("anatomy", "directory", "moves"):
        run("parts.py", str(out), part, SECONDS_LEFT="900")
    kinds = {json.loads(line)["cell"] for line in out.read_text().splitlines()}
    assert kinds == {"copy", "kernels", "tiles", "records", "costs", "steps", "parts"}
    (tmp_path / "env.log").write_text("Model name:  a processor\nCPU(s):  16\n")
    run("collect.py", str(tmp_path), str(tmp_path))
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("gpu_*.json")}
    assert len(results) == 6
    assert all(result["gate"] == "passed" and result["metrics"] for result in results.values())
