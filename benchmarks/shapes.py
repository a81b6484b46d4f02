"""The embedding step in shapes that Criteo's tables lack, compared with FBGEMM's operator at its
best.

Many ids per bag, mean pooling, one giant table, hundreds of small ones, odd and large widths, tiny
batches, and tables that fit the cache.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import Contenders, Shape, best_threads, on_threads
from benchmarks.registry import PeerMissing
from benchmarks.roof import Roof
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
"""Measured shapes by name."""


# Limits: bytes of one side's tables, ids of a batch, and bytes of its pooled output.
_TABLE_BYTES, _LOOKUPS, _OUTPUT_BYTES = 3 << 30, 1 << 21, 256 << 20


def compare(shape: Shape, rounds: int, most: int, batches: int = 8) -> dict[str, Any]:
    """Time StrataRec, FBGEMM and the roof in alternation."""
    pair = Contenders(shape, batches)
    threads = best_threads(pair.step_fbgemm, most)
    roof = Roof(pair.ours, pair.batches, pair.gradient)
    steps = {"ours": pair.step_ours, "fbgemm": on_threads(pair.step_fbgemm, threads), "roof": roof.step}
    times = alternate(steps, rounds, warmup=4)
    ours, peer, least = (spread(times[side])["median_ms"] for side in ("ours", "fbgemm", "roof"))
    return {
        "ours_ms": ours,
        "fbgemm_ms": peer,
        "roof_ms": least,
        "fbgemm_threads": threads,
        "ratio_fbgemm": peer / ours,
        "roof_share": least / ours,
    }


def small(shape: Shape) -> Shape:
    """Return the shape with few rows, tables and samples, for checks of correctness."""
    sizes = [min(rows, 2_000) for rows in shape.sizes[:8]]
    return replace(shape, sizes=sizes, batch=min(shape.batch, 64), ids=min(shape.ids, 20))


def run_shapes(quick: bool) -> dict[str, Any]:
    """Measure all shapes, after checking some steps of a small form of each."""
    for shape in SHAPES.values():
        Contenders(small(shape)).agree()
    rounds, most = 10 if quick else 25, torch.get_num_threads()
    rows = [{"shape": name, **compare(shape, rounds, most)} for name, shape in SHAPES.items()]
    ratios, shares = [row["ratio_fbgemm"] for row in rows], [row["roof_share"] for row in rows]
    return {
        "metrics": {
            "ratio_fbgemm_shapes_median": median(ratios),
            "ratio_fbgemm_shapes_min": min(ratios),
            "roof_share_shapes_median": median(shares),
            "roof_share_shapes_min": min(shares),
        },
        "rows": rows,
    }


def random_shape(draws: np.random.Generator) -> Shape:
    """Draw 1 to 300 tables of 100 to 5e7 rows and 4 to 512 floats, bags of 1 to 100 ids, 4 to
    16,384 samples.

    All but the skew are log-uniform. Shapes that do not fit memory are reduced: the largest tables
    first, then the batch. Widths are multiples of 4, as FBGEMM requires.
    """

    def between(least: float, most: float) -> float:
        return float(np.exp(draws.uniform(np.log(least), np.log(most))))

    width, tables = 4 * round(between(1, 128)), round(between(1, 300))
    largest = between(100, 5e7)
    sizes = [round(between(100, max(largest, 101))) for _ in range(tables - 1)] + [max(round(largest), 100)]
    while sum(sizes) * width * 4 > _TABLE_BYTES:
        cap = max(sizes) // 2
        sizes = [min(rows, cap) for rows in sizes]
    ids, batch = round(between(1, 100)), round(between(4, 16_384))
    while batch > 4 and (tables * batch * ids > _LOOKUPS or tables * batch * width * 4 > _OUTPUT_BYTES):
        batch //= 2
    return Shape(
        sizes=sizes,
        width=width,
        batch=batch,
        ids=ids,
        mean=bool(draws.integers(2)),
        skew=float(draws.uniform(0, 1.2)),
    )


def run_random(quick: bool, seed: int | None = None) -> dict[str, Any]:
    """Measure random shapes of a new seed, or of `seed`; without FBGEMM, return none."""
    seed = secrets.randbits(32) if seed is None else seed
    print(f"random shapes of seed {seed}", flush=True)
    draws, rows, most = np.random.default_rng(seed), [], torch.get_num_threads()
    for _ in range(4 if quick else 30):
        shape = random_shape(draws)
        try:
            Contenders(small(shape), batches=4).agree(4)
            figures = compare(shape, 5 if quick else 10, most, batches=4)
        except PeerMissing:
            return {"metrics": {}, "rows": [], "seed": seed}
        fields = {
            "tables": len(shape.sizes), "most_rows": max(shape.sizes), "width": shape.width, "batch": shape.batch,
            "ids": shape.ids, "pooling": "mean" if shape.mean else "sum", "skew": round(shape.skew, 2),
        }  # fmt: skip
        rows.append({**fields, **figures})
        print(
            " ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in rows[-1].items()
            ),
            flush=True,
        )
    ratios, shares = [row["ratio_fbgemm"] for row in rows], [row["roof_share"] for row in rows]
    return {
        "metrics": {
            "ratio_fbgemm_random_median": median(ratios),
            "ratio_fbgemm_random_min": min(ratios),
            "roof_share_random_median": median(shares),
            "roof_share_random_min": min(shares),
        },
        "rows": rows,
        "seed": seed,
    }
