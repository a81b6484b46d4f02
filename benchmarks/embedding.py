"""The embedding step (forward, backward, row-wise Adagrad) against FBGEMM's CPU operator and
`torch.nn.EmbeddingBag`.

The 26 tables have Criteo's sizes, capped, and one id per bag. FBGEMM runs in the same process with
tuned memory settings (huge pages, malloc that keeps freed blocks), and with its default settings in
a child process (`plain_peer`). Each cell is also timed after a pause, and while another process
keeps one processor busy. `shapes` measures shapes that Criteo lacks and random shapes. `roof` is
the least time that memory bandwidth allows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import Contenders, Shape, best_threads, on_threads
from benchmarks.plain_peer import PlainPeer
from benchmarks.roof import Roof
from benchmarks.shapes import run_random, run_shapes
from benchmarks.timing import alternate, spread
from stratarec.data.sources.synthetic import CRITEO_ROWS

# Idle OpenMP workers spin for some milliseconds, up to 16 after long pauses.
REST = 0.03

Steps = dict[str, Callable[[int], object]]


def gate(sizes: list[int]) -> None:
    """Check that the weights of StrataRec and FBGEMM agree after ten steps."""
    Contenders(Shape(sizes=[min(rows, 5000) for rows in sizes], width=16, batch=256)).agree()


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that keeps one processor busy."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        child.kill()
        child.wait()


def rested(step: Callable[[int], object]) -> Callable[[int], float]:
    """Wrap `step` so that it runs after a pause and returns its seconds."""

    def run(number: int) -> float:
        time.sleep(REST)
        began = time.perf_counter()
        step(number)
        return time.perf_counter() - began

    return run


def disturbed(steps: Steps, rounds: int) -> dict[str, float]:
    """Time StrataRec and FBGEMM in alternation, after a pause and next to a busy process."""
    pauses: dict[str, list[float]] = {name: [] for name in steps}
    after = {name: rested(step) for name, step in steps.items()}
    for round_ in range(rounds):
        for name in list(after) if round_ % 2 else list(reversed(after)):
            pauses[name].append(after[name](round_))
    with busy_process():
        busy = alternate(steps, rounds)
    ours, peer = median(pauses["ours"]), median(pauses["fbgemm"])
    ours_busy, peer_busy = median(busy["ours"]), median(busy["fbgemm"])
    return {
        "ours_rested_ms": 1e3 * ours,
        "fbgemm_rested_ms": 1e3 * peer,
        "ratio_fbgemm_rested": peer / ours,
        "ours_busy_ms": 1e3 * ours_busy,
        "fbgemm_busy_ms": 1e3 * peer_busy,
        "ratio_fbgemm_busy": peer_busy / ours_busy,
    }


def against_default(pair: Contenders, rounds: int, most: int) -> dict[str, float]:
    """Time StrataRec and FBGEMM with default settings in alternation.

    Both rest first, until the threads of the other have stopped spinning.
    """
    plain = PlainPeer(pair.shape, most)
    ours = rested(pair.step_ours)
    seconds: dict[str, list[float]] = {"ours": [], "fbgemm": []}
    for round_ in range(-2, rounds):
        for name in ("ours", "fbgemm") if round_ % 2 else ("fbgemm", "ours"):
            time.sleep(REST)
            spent = plain.step(round_ + 2) if name == "fbgemm" else ours(round_ + 2)
            if round_ >= 0:
                seconds[name].append(spent)
    plain.close()
    peer = median(seconds["fbgemm"])
    return {"fbgemm_default_ms": 1e3 * peer, "ratio_fbgemm_default": peer / median(seconds["ours"])}


def cell(pair: Contenders, rounds: int, most: int) -> dict[str, Any]:
    """Time all libraries in alternation on one shape; FBGEMM uses its best number of threads."""
    threads = best_threads(pair.step_fbgemm, most)
    steps: Steps = {"ours": pair.step_ours, "fbgemm": on_threads(pair.step_fbgemm, threads)}
    roof = Roof(pair.ours, pair.batches, pair.gradient)
    times = alternate({**steps, "bags": pair.step_bags, "roof": roof.step}, rounds)
    ours, peer, bags, least = (spread(times[name]) for name in ("ours", "fbgemm", "bags", "roof"))
    return {
        "width": pair.shape.width,
        "batch": pair.shape.batch,
        "skew": pair.shape.skew,
        "ours_ms": ours["median_ms"],
        "ours_low_ms": ours["low_ms"],
        "ours_high_ms": ours["high_ms"],
        "fbgemm_ms": peer["median_ms"],
        "fbgemm_threads": threads,
        "embeddingbag_ms": bags["median_ms"],
        "roof_ms": least["median_ms"],
        "roof_share": least["median_ms"] / ours["median_ms"],
        "ratio_fbgemm": peer["median_ms"] / ours["median_ms"],
        "ratio_embeddingbag": bags["median_ms"] / ours["median_ms"],
        **disturbed(steps, rounds),
        **against_default(pair, rounds, most),
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure all widths, batch sizes and skews, then the other shapes."""
    cap, rounds = (100_000, 8) if quick else (1_000_000, 25)
    sizes = [min(rows, cap) for rows in CRITEO_ROWS]
    gate(sizes)
    most = torch.get_num_threads()
    cells = [
        cell(Contenders(Shape(sizes=sizes, width=width, batch=batch, skew=skew)), rounds, most)
        for width in (16, 64, 128)
        for batch in (2048, 16384)
        for skew in ("uniform", "criteo")
    ]
    shapes, random = run_shapes(quick), run_random(quick)
    metrics = {}
    for name in ("ratio_fbgemm", "ratio_fbgemm_default", "ratio_embeddingbag", "roof_share"):
        metrics[f"{name}_median"] = median(row[name] for row in cells)
        metrics[f"{name}_min"] = min(row[name] for row in cells)
    metrics["ratio_fbgemm_rested_min"] = min(row["ratio_fbgemm_rested"] for row in cells)
    metrics["ratio_fbgemm_busy_min"] = min(row["ratio_fbgemm_busy"] for row in cells)
    return {
        "config": {
            "sizes": sizes,
            "cap": cap,
            "rounds": rounds,
            "optimizer": "row-wise Adagrad",
            "ids": "int64",
            "seed": random["seed"],
        },
        "metrics": metrics | shapes["metrics"] | random["metrics"],
        "samples": {"rows": cells, "shapes": shapes["rows"], "random": random["rows"]},
    }
