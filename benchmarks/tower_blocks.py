"""Test whether learned towers are the planted blocks of synthetic logs, and how much AUC they gain
over random towers.

The logs have 26 features, and their clicks depend on products inside blocks of features. Cells
differ in the number of blocks, the number of samples and the strength of effects (standard
deviation of the log-odds). In one cell, pairs of features share their ids and their table.

Cells have 10 logs, the first one 20, and those of two million samples 1. The reported share of a
cell is the mean over its logs of the share of blocks that are exactly one tower. With few logs this
share is coarse: if all blocks of 10 logs are found, a log with missing blocks may still occur in up
to 26 of 100 logs (95 % confidence; 14 of 100 for 20 logs). For a single log the share only shows
that the size can be handled.

`AUC_CELL` compares DLRMs with planted, learned and random towers, one per block, and without
towers, on `AUC_LOGS` logs. Random towers have the same sizes as learned ones may have. They lose
AUC only if a tower must reduce unrelated features to few numbers. A validation run with seed 99,
which is not among the logs, had planted minus random towers at -0.0010 for compression 4, +0.0020
for 8 and +0.0032 for 16 on 500,000 samples with 4 blocks, +0.0015, +0.0021 and +0.0029 with 8
blocks, and -0.0001 and -0.0004 for 4 and 8 on 200,000 samples with 8 blocks. So the metric is at
compression 16, the largest of the paper (arXiv 2403.00877); `MILD_COMPRESSION` is reported next to
it. Nothing is timed.

Results of finished logs and runs are stored in ``data/benchmarks``, so an interrupted benchmark
resumes. Remove them when the code has changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.kept import FOLDER, kept
from benchmarks.tower_quality import auc, changed, planted, say
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig, SyntheticSource
from stratarec.planning.towers import assign, tightest
from stratarec.recipe import Recipe
from stratarec.training.tower_partition import TowerRequest, bounds_of, items_of, make_towers

STRONG, WEAK = 1.8, 1.0
COMPRESSION, MILD_COMPRESSION = 16.0, 4.0
LOGS, AUC_LOGS = 10, 6
"""Number of logs of a cell, and of logs with models in `AUC_CELL`."""
Towers = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A kind of log. The logs of a cell differ only in their seed."""

    blocks: int = 4
    samples: int = 200_000
    signal: float = STRONG
    shared: bool = False
    """Whether pairs of features of a block share their ids."""

    @property
    def name(self) -> str:
        strength = "strong" if self.signal == STRONG else "weak"
        return f"{self.blocks}_blocks_{self.samples // 1000}k_{strength}" + "_shared" * self.shared


FIRST_CELL, AUC_CELL = Cell(), Cell(samples=500_000)
CELLS = (
    FIRST_CELL, AUC_CELL, Cell(shared=True),
    *(Cell(blocks=blocks, samples=500_000) for blocks in (2, 8)),
    *(Cell(blocks=blocks, samples=500_000, signal=WEAK) for blocks in (2, 4, 8)),
    *(Cell(blocks=blocks, samples=100_000, signal=signal) for signal in (STRONG, WEAK) for blocks in (2, 4, 8)),
    *(Cell(samples=2_000_000, signal=signal) for signal in (WEAK, STRONG)),
)  # fmt: skip


def log_count(cell: Cell) -> int:
    """Return the number of logs of a cell."""
    return 20 if cell == FIRST_CELL else 1 if cell.samples == 2_000_000 else LOGS


def named_blocks(recipe: Recipe) -> Towers:
    """Return the planted blocks as towers, in the order of their first features."""
    config = SyntheticConfig(blocks=recipe.data.source.blocks, seed=recipe.data.source.seed)  # type: ignore[union-attr]
    return tuple(tuple(f"C{feature + 1}" for feature in block) for block in sorted(config.feature_blocks()))


def make_log(cell: Cell, seed: int, folder: Path) -> tuple[Recipe, Dataset, Towers]:
    """Return a recipe, its prepared log, and the planted towers."""
    recipe = planted(folder, cell.samples, seed, blocks=cell.blocks, signal=cell.signal)
    blocks = named_blocks(recipe)
    if cell.shared:
        recipe = with_shared_ids(recipe, blocks, folder)
    return recipe, prepare(recipe.data), blocks


def with_shared_ids(recipe: Recipe, blocks: Towers, folder: Path) -> Recipe:
    """Return the recipe with its log as a file in which pairs of features share a vocabulary.

    The pairs are the first and second, third and fourth ... feature of each block. Their ids are
    from the same range.
    """
    import polars as pl

    source = SyntheticSource(recipe.data.source)  # type: ignore[arg-type]
    frame = pl.concat(chunk.frame for chunk in source.chunks(folder))
    shared = {name: block[place - place % 2] for block in blocks for place, name in enumerate(block)}
    ranks = (pl.col(name).rank("dense") for name in shared)
    folder.mkdir(exist_ok=True)
    frame.with_columns(*ranks).write_parquet(folder / "log.parquet")
    schema = source.schema
    fields = recipe.to_dict()
    fields["data"]["source"] = {
        "kind": "parquet", "paths": [str(folder / "log.parquet")],
        "schema": {
            "label": schema.label, "dense": [{"name": dense.name} for dense in schema.dense],
            "sparse": [{"name": sparse.name, "vocabulary": shared[sparse.name]} for sparse in schema.sparse],
        },
    }  # fmt: skip
    return Recipe.from_dict(fields)


def random_towers(base: Recipe, dataset: Dataset, towers: int, seed: int) -> Towers:
    """Return random towers within the bounds of learned ones.

    Each feature that cannot be in its random tower costs one, so few features are moved to another
    tower.
    """
    recipe = changed(base, dataset, "dlrm", seed)
    items, bounds = items_of(recipe, dataset), bounds_of(recipe, TowerRequest(towers=towers))
    costs = np.ones((len(items), towers))
    costs[np.random.default_rng(seed).permutation(len(items)), np.arange(len(items)) % towers] = 0
    labels = tightest(items, bounds, lambda limits: assign(costs, limits))
    return tuple(
        tuple(
            name
            for item, label in zip(items, labels, strict=True)
            if label == tower
            for name in item.features
        )
        for tower in range(towers)
    )


def measure_log(cell: Cell, seed: int, *, with_models: bool) -> dict[str, Any]:
    """Learn the towers of one log as `plan --towers` does; with `with_models`, also train and test
    models.
    """

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            base, dataset, blocks = make_log(cell, seed, Path(folder) / "log")
            plan = make_towers(changed(base, dataset, "dlrm", 0), dataset, TowerRequest(towers=cell.blocks))
            sets = set(map(frozenset, blocks))
            row = {
                "seed": seed,
                "blocks_found": sum(frozenset(tower) in sets for tower in plan.plan) / len(sets),
                "structure": plan.structure,
                "agreement": plan.agreement,
                "measured_samples": plan.samples,
            }
            if with_models:
                row["flat"] = auc(changed(base, dataset, "dlrm", seed), dataset)
                towers = {
                    "planted": blocks,
                    "learned": plan.plan,
                    "random": random_towers(base, dataset, cell.blocks, seed),
                }
                for (key, each), ratio in product(towers.items(), (COMPRESSION, MILD_COMPRESSION)):
                    row[f"{key}_{ratio:g}"] = auc(
                        changed(base, dataset, "dlrm", seed, each, ratio), dataset
                    )
            return row

    about = {
        **asdict(cell),
        "seed": seed,
        "compressions": [COMPRESSION, MILD_COMPRESSION] if with_models else [],
    }
    row = kept(FOLDER / "tower_blocks" / f"{cell.name}-{seed}{'-auc' * with_models}.json", about, measured)
    say(f"{cell.name}, log {seed}: {row}")
    return row


def gains(rows: Sequence[dict[str, Any]], towers: str, other: str, name: str) -> dict[str, float]:
    """Return the mean difference of two test AUCs over logs, and the standard error of this
    mean.
    """
    deltas = [row[towers] - row[other] for row in rows]
    error = stdev(deltas) / len(deltas) ** 0.5 if len(deltas) > 1 else 0.0
    return {f"auc_{name}": mean(deltas), f"auc_{name}_error": error}


def run(quick: bool) -> dict[str, Any]:
    """Run all cells; with `quick`, one log of `AUC_CELL`."""
    logs = {AUC_CELL: 1} if quick else {cell: log_count(cell) for cell in CELLS}
    rows = {
        cell: [
            measure_log(cell, seed, with_models=cell == AUC_CELL and seed <= AUC_LOGS)
            for seed in range(1, count + 1)
        ]
        for cell, count in logs.items()
    }
    shares = {cell: mean(row["blocks_found"] for row in each) for cell, each in rows.items()}
    tested, mild = [row for row in rows[AUC_CELL] if "flat" in row], f"{MILD_COMPRESSION:g}"
    of_ratio = {towers: f"{towers}_{COMPRESSION:g}" for towers in ("planted", "learned", "random")}
    return {
        "config": {
            "compression": COMPRESSION,
            "logs": {cell.name: count for cell, count in logs.items()},
            "auc_cell": AUC_CELL.name,
            "auc_logs": len(tested),
            "signals": {"strong": STRONG, "weak": WEAK},
            "targets": {"planted_blocks_found": 0.9, "auc_learned_minus_random": 0.002},
        },
        "metrics": {
            "planted_blocks_found": shares[AUC_CELL if quick else FIRST_CELL],
            "planted_blocks_found_min": min(shares.values()),
            **{f"planted_blocks_found_{cell.name}": share for cell, share in shares.items()},
            **gains(tested, of_ratio["learned"], of_ratio["random"], "learned_minus_random"),
            **gains(tested, of_ratio["planted"], of_ratio["random"], "planted_minus_random"),
            **gains(tested, of_ratio["learned"], "flat", "learned_minus_flat"),
            **gains(tested, of_ratio["random"], "flat", "random_minus_flat"),
            **gains(
                tested, f"learned_{mild}", f"random_{mild}", f"learned_minus_random_compression_{mild}"
            ),
            **gains(tested, f"learned_{mild}", "flat", f"learned_minus_flat_compression_{mild}"),
        },
        "samples": {"rows": [{"cell": cell.name, **row} for cell, each in rows.items() for row in each]},
    }
