"""Make a result file of what `check.sh` left in a folder: ``python tools/gpu/collect.py FOLDER RESULT.json``."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import GPU_CHECKS, write_result
from benchmarks.sources import source_hash


def collect(folder: Path) -> dict[str, Any]:
    """Return the result: cells as they were written, and the ratios that matter as metrics."""
    cells = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    environment = (folder / "env.log").read_text()
    copy = next(cell for cell in cells if cell["cell"] == "copy")
    kernels, peers = ({cell["name"]: cell for cell in cells if cell["cell"] == kind} for kind in ("kernels", "torch"))
    steps = [cell for cell in cells if cell["cell"] == "step"]
    metrics = {}
    for name, cell in kernels.items():
        metrics[f"forward_share_{name}"] = cell["forward_share_distinct"]
        metrics[f"update_share_{name}"] = cell["update_share"]
        if "step_ms" in peers.get(name, {}):
            ours = cell["forward_ms"] + cell["group_ms"] + cell["update_ms"]
            metrics[f"ratio_torch_{name}"] = peers[name]["step_ms"] / ours
    times = {(cell["name"], cell["width"], cell["batch"], cell["depth"]): cell["median_ms"] for cell in steps}
    for (name, width, batch, depth), milliseconds in times.items():
        reference = times.get(("hybrid" if batch < 16_384 or width == 16 else "hybrid, same ids", width, batch, 0))
        if not name.startswith("hybrid") and reference:
            words = re.sub("[^a-z0-9]+", "_", name)
            metrics[f"ratio_hybrid_{words}_d{width}_b{batch}_depth{depth}"] = reference / milliseconds
    phases = dict(re.findall(r"(\w+): exit (\d+)", (folder / "summary.txt").read_text()))
    return {
        "benchmark": "gpu_checks",
        "config": {
            "peers": "nn.EmbeddingBag(sparse=True) with optim.Adagrad; the network alone on the GPU (hybrid)",
            "phases": {name: f"exit {code}" for name, code in phases.items()},
        },
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # Kernels are timed only where they are right; a step must not be of a network that is wrong.
        "gate": "passed" if all(phases.get(name) == "0" for name in ("doctor", "pytest", "kernels")) else "failed",
        "hardware": {
            "processor": f"{copy['device']}, {_value('Model name', environment)}",
            "avx512": "avx512f" in environment,
            "threads": int(_value("CPU(s)", environment)),
        },
        "metrics": metrics,
        "quick": False,
        "samples": {"rows": cells},
        "sources": source_hash(GPU_CHECKS),
        "versions": {name: copy[name] for name in ("torch", "triton")},
    }


def _value(name: str, text: str) -> str:
    """Return the value of a line of `lscpu`."""
    match = re.search(rf"^{re.escape(name)}:\s+(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else "0"


if __name__ == "__main__":
    write_result(Path(sys.argv[2]), collect(Path(sys.argv[1])))
