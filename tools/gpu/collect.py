"""Create result files from the output of `check.sh` in a folder: ``python -m tools.gpu.collect
FOLDER [RESULTS]``.

Writes a file for each benchmark of `GPU_BENCHMARKS` with cells, and prints the metrics without a
cell.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.__main__ import RESULTS
from benchmarks.report import GPU_BENCHMARKS, write_result
from benchmarks.sources import source_hash

Cells = list[dict[str, Any]]
PUBLISHED_CARD = "NVIDIA H100 80GB HBM3"
PUBLISHED = {"dynamicemb_sgd": 0.345 + 0.614, "dynamicemb_adam": 0.345 + 1.005}
"""Milliseconds of a forward and backward pass of FBGEMM's TBE on that card, in
`benchmark_results.json` of NVIDIA's recsys-examples: 10 tables of 1,677,721 rows, D = 128,
1,048,570 ids of a power law with exponent 1.05."""
TARGETS = {
    "gpu_embedding": {
        # Skewed bags are limited by the L2 cache, whose traffic these shares do not count.
        **{f"forward_share_{name}": 0.8 for name in ("bags_uniform", "wide_uniform")},
        **{f"update_share_{name}": 0.7 for name in ("bags_uniform", "wide_uniform")},
        **{f"ratio_fbgemm_published_{name}": 1.1 for name in PUBLISHED},
        **{
            f"ratio_torch_{name}": 2.0
            for name in ("criteo_4096", "bags_uniform", "bags_skewed", "wide_uniform")
        },
    },
    "gpu_train": {
        # A step of at most 0.8 ms.
        "steps_per_second_hbm_d16_b1024": 1250.0,
        **{
            f"ratio_{ratio}_{case}": target
            for ratio, target in (("hybrid_cpu", 2.0), ("hbm_hybrid", 3.0))
            for case in ("d16_b1024", "d16_b16384", "d64_b4096")
        },
    },
    "gpu_hot": {
        f"ratio_{ratio}_b{size}": target
        for ratio, target in (("cpu", 2.3), ("hybrid", 1.52))
        for size in (1024, 4096)
    },
    # As published: int8 rows in GPU memory compared with float32 rows in host memory, without
    # lookahead.
    "gpu_precision": {"ratio_int8_hbm_fp32_depth0": 1.16, "bytes_ratio_int8": 3.1, "bytes_ratio_int4": 7.1},
    "gpu_tiers": {"speed_at_8x": 0.9, "speed_at_37x": 0.74},
    "gpu_dedup": {"ratio_transformer": 2.49},
}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median speed of the second side over that of the first, over all rounds."""
    return median(one / other for one, other in zip(slow, fast, strict=True))


def embedding(cells: Cells) -> dict[str, float]:
    """Shares of a copy's bandwidth, and speed compared with torch and with FBGEMM's published
    times.
    """
    metrics: dict[str, float] = {}
    peers = {cell["name"]: cell["step_ms"] for cell in cells if "step_ms" in cell}
    if cells[0]["device"] == PUBLISHED_CARD:
        published = {f"fbgemm_published_{name}": (name, ms) for name, ms in PUBLISHED.items()}
    else:
        published = {}
    for cell in (cell for cell in cells if cell["cell"] == "kernels"):
        name, ours = cell["name"], cell["forward_ms"] + cell["group_ms"] + cell["update_ms"]
        metrics[f"forward_share_{name}"] = cell["forward_share_distinct"]
        metrics[f"update_share_{name}"] = cell["update_share"]
        if name in peers:
            metrics[f"ratio_torch_{name}"] = peers[name] / ours
        metrics |= {f"ratio_{key}": ms / ours for key, (case, ms) in published.items() if case == name}
    return metrics


def train(cells: Cells) -> dict[str, float]:
    """Speed of the hybrid over the CPU, and of rows in GPU memory over the hybrid; steps per second
    of the latter.
    """
    pairs = (("cpu", "hybrid"), ("hybrid", "hbm"), ("hybrid", "hbm_bf16"))
    ratios = {
        f"ratio_{fast}_{slow}_{cell['case']}": ratio(cell["ms"][slow], cell["ms"][fast])
        for slow, fast in pairs
        for cell in cells
    }
    return ratios | {
        f"steps_per_second_hbm_{cell['case']}": 1e3 / median(cell["ms"]["hbm"]) for cell in cells
    }


def hot(cells: Cells) -> dict[str, float]:
    """Speed of FAE over the CPU and the hybrid: for a log with hot and mixed batches, and for hot
    batches alone.
    """
    metrics = {}
    for cell in cells:
        ms, share = cell["ms"], cell["hot_inputs"]
        log = [
            share * one + (1 - share) * two
            for one, two in zip(ms["fae_hot"], ms["fae_others"], strict=True)
        ]
        for slow in ("cpu", "hybrid"):
            metrics[f"ratio_{slow}_{cell['case']}"] = ratio(ms[slow], log)
            metrics[f"ratio_{slow}_hot_batches_{cell['case']}"] = ratio(ms[slow], ms["fae_hot"])
    return metrics


def precision(cells: Cells) -> dict[str, float]:
    """Speed over float32 homes, share of the speed in GPU memory, and bytes of float32 rows over
    all bytes.
    """
    metrics = {}
    for cell in cells:
        ms, suffix = cell["ms"], "" if cell["case"] == "depth2" else f"_{cell['case']}"
        kinds = ("int8", "int4", "int8_hbm")
        metrics |= {f"ratio_{kind}_fp32{suffix}": ratio(ms["fp32"], ms[kind]) for kind in kinds}
        metrics |= {f"share_of_hbm_{kind}{suffix}": ratio(ms["hbm"], ms[kind]) for kind in ("fp32", *kinds)}
        used = {name: sum(parts.values()) - parts["outputs"] for name, parts in cell["bytes"].items()}
        metrics |= {f"bytes_ratio_{kind}": used["hbm"] / used[kind] for kind in ("int8", "int4")}
    return metrics


def tiers(cells: Cells) -> dict[str, float]:
    """Share of the speed with all rows in GPU memory."""
    metrics = {}
    for cell in cells:
        ms, suffix = cell["ms"], "" if cell["case"] == "depth2" else "_without_lookahead"
        metrics |= {f"speed_at_{times}x{suffix}": ratio(ms["hbm"], ms[f"{times}th"]) for times in (8, 37)}
    return metrics


def dedup(cells: Cells) -> dict[str, float]:
    """Speed with deduplication over the speed without, with rows in GPU memory and in host
    memory.
    """
    names = {"hbm": "ratio_transformer", "hybrid": "ratio_transformer_hybrid"}
    return {names[cell["case"]]: ratio(cell["ms"]["plain"], cell["ms"]["dedup"]) for cell in cells}


METRICS: dict[str, Callable[[Cells], dict[str, float]]] = {
    "gpu_embedding": embedding,
    "gpu_train": train,
    "gpu_hot": hot,
    "gpu_precision": precision,
    "gpu_tiers": tiers,
    "gpu_dedup": dedup,
}


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each benchmark, with its cells, and ratios as metrics."""
    cells = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    environment, results = (folder / "env.log").read_text(), {}
    for name, metrics in METRICS.items():
        # Cells of `kernels.py` have no benchmark name.
        mine = [
            cell
            for cell in cells
            if cell.get("benchmark", "gpu_embedding") == name and cell["cell"] != "stopped"
        ]
        right = [cell for cell in mine if cell["cell"] != "wrong"]
        if not right:
            continue
        card = right[0]
        results[name] = {
            "benchmark": name,
            "config": {"targets": TARGETS[name]},
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            # Wrong cells have no metrics.
            "gate": "passed" if len(right) == len(mine) else "failed",
            "hardware": {
                "processor": f"{card['device']}, {_value('Model name', environment)}",
                "avx512": "avx512f" in environment,
                "threads": int(_value("CPU(s)", environment)),
            },
            "metrics": metrics(right),
            "quick": card["device"] == "interpreter",
            "samples": {"rows": mine},
            "sources": source_hash(GPU_BENCHMARKS[name]),
            "versions": {package: card[package] for package in ("torch", "triton")},
        }
    return results


def _value(name: str, text: str) -> str:
    """Return the value of a line of `lscpu`."""
    match = re.search(rf"^{re.escape(name)}:\s+(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else "0"


if __name__ == "__main__":
    found = collect(Path(sys.argv[1]))
    for name, targets in TARGETS.items():
        metrics = found[name]["metrics"] if name in found else {}
        print(f"{name}: {found[name]['gate'] if name in found else 'no cells'}")
        for metric, value in metrics.items():
            print(f"  {metric:45} {value:8.3f}  {targets.get(metric, '')}")
        for metric in targets.keys() - metrics.keys():
            print(f"  {metric:45}  missing  {targets[metric]}")
        if name in found:
            write_result(
                (Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS) / f"{name}.json", found[name]
            )
