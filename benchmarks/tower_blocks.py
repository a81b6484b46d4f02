"""Whether the learned towers are the planted blocks of made-up logs, and what that is worth in AUC.

Logs of 26 features whose clicks depend on products inside blocks: several numbers of blocks and samples, strong and
weak effects (standard deviations of the log-odds), with 20 seeds each; in one cell pairs of features share their ids
and their table. On the logs of one cell, DLRMs with a tower for each block are tested with the planted towers, with
the learned ones and with random ones within the same bounds, at `COMPRESSION`. Nothing is timed.

What a log or a run gave is kept in ``data/benchmarks``, so that a benchmark that was ended goes on: remove it when code
has changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
COMPRESSION, LOGS, TESTED = 4.0, 20, 8
Towers = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Logs that differ by their seed."""

    blocks: int = 4
    samples: int = 200_000
    signal: float = STRONG
    shared: bool = False
    """Whether pairs of features of a block share their ids."""

    @property
    def name(self) -> str:
        strength = "strong" if self.signal == STRONG else "weak"
        return f"{self.blocks}_blocks_{self.samples // 1000}k_{strength}" + "_shared" * self.shared


TESTED_CELL = Cell()
CELLS = (
    TESTED_CELL,
    *(Cell(blocks=blocks, samples=100_000) for blocks in (2, 4, 8)),
    Cell(shared=True),
    *(Cell(blocks=blocks, samples=500_000, signal=signal) for signal in (STRONG, WEAK) for blocks in (2, 4, 8)),
    *(Cell(blocks=blocks, samples=100_000, signal=WEAK) for blocks in (2, 4, 8)),
    *(Cell(samples=2_000_000, signal=signal) for signal in (WEAK, STRONG)),
)  # fmt: skip
FEWER = {2_000_000: 3}
"""Number of logs of large cells."""


def named_blocks(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """The planted blocks as towers, in the order of their first features."""
    config = SyntheticConfig(blocks=recipe.data.source.blocks, seed=recipe.data.source.seed)  # type: ignore[union-attr]
    return tuple(tuple(f"C{feature + 1}" for feature in block) for block in sorted(config.feature_blocks()))


def log_of(cell: Cell, seed: int, folder: Path) -> tuple[Recipe, Dataset, Towers]:
    """A recipe with its prepared log and the planted towers."""
    made = planted(folder, cell.samples, seed, blocks=cell.blocks, signal=cell.signal)
    blocks = named_blocks(made)
    if cell.shared:
        made = with_shared_ids(made, blocks, folder)
    return made, prepare(made.data), blocks


def with_shared_ids(made: Recipe, blocks: Towers, folder: Path) -> Recipe:
    """The recipe with its log as a file in which the first and second, third and fourth ... feature of each block have
    one vocabulary, and ids from the same range."""
    import polars as pl

    source = SyntheticSource(made.data.source)  # type: ignore[arg-type]
    frame = pl.concat(chunk.frame for chunk in source.chunks(folder))
    shared = {name: block[place - place % 2] for block in blocks for place, name in enumerate(block)}
    ranks = (pl.col(name).rank("dense") for name in shared)
    folder.mkdir(exist_ok=True)
    frame.with_columns(*ranks).write_parquet(folder / "log.parquet")
    schema = source.schema
    fields = made.to_dict()
    fields["data"]["source"] = {
        "kind": "parquet", "paths": [str(folder / "log.parquet")],
        "schema": {
            "label": schema.label, "dense": [{"name": dense.name} for dense in schema.dense],
            "sparse": [{"name": sparse.name, "vocabulary": shared[sparse.name]} for sparse in schema.sparse],
        },
    }  # fmt: skip
    return Recipe.from_dict(fields)


def random_towers(base: Recipe, dataset: Dataset, towers: int, seed: int) -> Towers:
    """Dealt by chance within the same bounds; what these do not allow costs one an item, so that it is seldom."""
    recipe = changed(base, dataset, "dlrm", seed)
    items, bounds = items_of(recipe, dataset), bounds_of(recipe, TowerRequest(towers=towers))
    costs = np.ones((len(items), towers))
    costs[np.random.default_rng(seed).permutation(len(items)), np.arange(len(items)) % towers] = 0
    labels = tightest(items, bounds, lambda limits: assign(costs, limits))
    return tuple(
        tuple(name for item, label in zip(items, labels, strict=True) if label == tower for name in item.features)
        for tower in range(towers)
    )


def one_log(cell: Cell, seed: int, tested: bool) -> dict[str, Any]:
    """Plan the towers of one log as `plan --towers` does; if `tested`, also train with planted, learned and random
    ones."""

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            base, dataset, blocks = log_of(cell, seed, Path(folder) / "log")
            plan = make_towers(changed(base, dataset, "dlrm", 0), dataset, TowerRequest(towers=cell.blocks))
            sets = set(map(frozenset, blocks))
            row = {
                "seed": seed, "blocks_found": sum(frozenset(tower) in sets for tower in plan.plan) / len(sets),
                "structure": plan.structure, "agreement": plan.agreement, "measured_samples": plan.samples,
            }  # fmt: skip
            if tested:
                towers = {
                    "planted": blocks, "learned": plan.plan, "random": random_towers(base, dataset, cell.blocks, seed),
                }  # fmt: skip
                for key, each in towers.items():
                    row[key] = auc(changed(base, dataset, "dlrm", seed, each, COMPRESSION), dataset)
                row["flat"] = auc(changed(base, dataset, "dlrm", seed), dataset)
            return row

    about = {**asdict(cell), "seed": seed, "tested": tested, "compression": COMPRESSION}
    row = kept(FOLDER / "tower_blocks" / f"{cell.name}-{seed}{'-auc' * tested}.json", about, measured)
    say(f"{cell.name}, log {seed}: {row}")
    return row


def error(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def gains(rows: Sequence[dict[str, Any]], towers: str, than: str) -> dict[str, float]:
    """Mean difference of test AUC over logs, and its standard error."""
    found = [row[towers] - row[than] for row in rows]
    return {f"auc_{towers}_minus_{than}": mean(found), f"auc_{towers}_minus_{than}_error": error(found)}


def run(quick: bool) -> dict[str, Any]:
    """All cells; `quick` has one log of the first."""
    logs = {cell: 1 if quick else FEWER.get(cell.samples, LOGS) for cell in CELLS[: 1 if quick else None]}
    rows = {
        cell: [one_log(cell, seed, cell == TESTED_CELL and seed <= TESTED) for seed in range(1, count + 1)]
        for cell, count in logs.items()
    }  # fmt: skip
    found = {cell: mean(row["blocks_found"] for row in each) for cell, each in rows.items()}
    tested = [row for row in rows[TESTED_CELL] if "random" in row]
    return {
        "config": {
            "compression": COMPRESSION, "logs": {cell.name: count for cell, count in logs.items()},
            "logs_tested": len(tested), "signals": {"strong": STRONG, "weak": WEAK},
            "targets": {"planted_blocks_found": 0.9, "auc_learned_minus_random": 0.002},
        },
        "metrics": {
            "planted_blocks_found": found[TESTED_CELL],
            **{f"planted_blocks_found_{cell.name}": share for cell, share in found.items()},
            **gains(tested, "learned", "random"), **gains(tested, "planted", "random"),
            **gains(tested, "random", "flat"),
            **gains(tested, "learned", "flat"),
        },
        "samples": {"rows": [{"cell": cell.name, **row} for cell, each in rows.items() for row in each]},
    }  # fmt: skip
