"""The embedding step in shapes that Criteo's tables do not have, against FBGEMM's operator at its best.

Many ids a bag, mean pooling, one giant table, hundreds of small ones, odd and large widths, tiny batches, and tables
that fit the cache.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.contenders import Contenders, Shape, best_threads, on_threads
from benchmarks.timing import alternate, spread

_MIXED = [200_000, 3_000, 50, 100_000, 700, 20_000, 10, 400_000]

SHAPES = {
    "bags of 20": Shape(sizes=_MIXED, width=64, batch=1024, ids=20),
    "bags of 50, uniform": Shape(sizes=_MIXED, width=32, batch=512, ids=50, skew="uniform"),
    "mean of 10": Shape(sizes=_MIXED, width=32, batch=2048, ids=10, mean=True),
    "giant, D 64": Shape(sizes=[4_000_000], width=64, batch=16384, skew="uniform"),
    "giant, D 16, skewed": Shape(sizes=[4_000_000], width=16, batch=32768),
    "giant, bags of 20": Shape(sizes=[4_000_000], width=32, batch=2048, ids=20, skew="uniform"),
    "hundreds": Shape(sizes=[2_000] * 300, width=16, batch=512),
    "hundreds, D 64": Shape(sizes=[5_000] * 200, width=64, batch=256, skew="uniform"),
    "D 20": Shape(sizes=_MIXED, width=20, batch=4096),
    "D 100": Shape(sizes=_MIXED, width=100, batch=4096),
    "D 512": Shape(sizes=[100_000, 20_000, 500, 50_000], width=512, batch=2048),
    "batch of 32": Shape(sizes=[100_000] * 26, width=64, batch=32, skew="uniform"),
    "batch of 4": Shape(sizes=[100_000] * 26, width=32, batch=4),
    "in the cache": Shape(sizes=[1_000] * 26, width=32, batch=4096),
}
"""What is looked at; every name is a line of the result."""


def compare(name: str, rounds: int, most: int) -> dict[str, Any]:
    """Ours and FBGEMM in alternation."""
    pair = Contenders(SHAPES[name])
    threads = best_threads(pair.step_fbgemm, most)
    times = alternate({"ours": pair.step_ours, "fbgemm": on_threads(pair.step_fbgemm, threads)}, rounds, warmup=4)
    ours, peer = (spread(times[side])["median_ms"] for side in ("ours", "fbgemm"))
    return {"shape": name, "ours_ms": ours, "fbgemm_ms": peer, "fbgemm_threads": threads, "ratio_fbgemm": peer / ours}


def run_shapes(quick: bool) -> dict[str, Any]:
    """All shapes; gated by some steps of each in small."""
    for shape in SHAPES.values():
        small = [min(rows, 2_000) for rows in shape.sizes[:8]]
        ids = Shape(
            sizes=small, width=shape.width, batch=64, ids=shape.ids, mean=shape.mean, skew=shape.skew
        )  # fmt: skip
        Contenders(ids).agree()
    rows = [compare(name, 10 if quick else 25, torch.get_num_threads()) for name in SHAPES]
    ratios = [row["ratio_fbgemm"] for row in rows]
    return {
        "metrics": {"ratio_fbgemm_shapes_median": median(ratios), "ratio_fbgemm_shapes_min": min(ratios)},
        "rows": rows,
    }
