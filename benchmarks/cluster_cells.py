"""Compare replayed steps of forty small clusters with predicted steps, and with the choice of
``exchange: auto``.

A cell is a log (rows of tables, samples per session), a model (width, layers, compression of its
towers), a batch per rank, a number of hosts and of ranks per host, and the links between them.
`benchmarks.replay` measures its step with the flat exchange and with SPTT. First the replay itself
is compared with two processes on two cores that gloo connects.

The predicted step is that of ``plan --hosts``, which measures the rank with the largest load.
`auto` is the choice of a run: every rank measures itself, the slowest one counts, and latencies are
assumed.

Other programs, also those of other virtual machines, slow a processor down for seconds. So
predictions and replays measure all cells three times, and the shortest times count; in a whole
benchmark minutes lie between two measurements of a cell, while a run measures its ranks twice
within seconds. Replays of the same cell differ by some percent, so they do not tell exchanges apart
that differ less: `auto_near_share` is the share of cells where `auto` chooses the faster exchange,
or one that is at most 5 % slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.exchange import told_by_ranks, torchrun
from benchmarks.kept import FOLDER
from benchmarks.replay import Recording, play, record
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.distributed.measure import Collective
from stratarec.planning.machine import Cluster
from stratarec.recipe import Recipe
from stratarec.training.forecast import ASSUMED, choose_exchange, predict_step, rank_seconds
from stratarec.training.torch_setup import torch_settings

EXCHANGES = ("flat", "sptt")
STEPS, ROUNDS = 9, 3
NEAR, TIE = 0.15, 0.05
LOGS = {"small": (2_000, 1.0), "middle": (40_000, 1.0), "large": (200_000, 1.0), "sessions": (40_000, 8.0)}
"""Largest number of rows of a table, and mean number of samples of a session."""
LOGS_FOLDER = FOLDER / "cluster_cells"
"""Folder of the prepared logs, which later runs of the benchmark use again."""
_FEATURES = 26


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model, its log, and the ranks that train it."""

    log: str
    width: int
    layers: tuple[int, ...]
    batch: int
    """Samples of a rank."""
    hosts: int
    local: int
    """Number of ranks per host."""
    compression: float = 1.0
    """Compression of the towers, one per host; 1 for towers without modules."""

    def recipe(self, root: Path, exchange: str) -> Recipe:
        """Return the recipe of the cell with an exchange."""
        names = [f"C{place + 1}" for place in range(_FEATURES)]
        rows, session = LOGS[self.log]
        source = {"kind": "synthetic", "samples": 120_000, "scale": 1.0, "max_rows": rows, "session_length": session,
                  "seed": 7}  # fmt: skip
        return Recipe.from_dict(
            {
                "name": "cell",
                "data": {
                    "path": str(root / self.log),
                    "source": source,
                    "split": {"by": "fraction", "valid": 0.0, "test": 0.0},
                    "vocabulary": {"min_count": 1, "tail_buckets": 16},
                    "groups": "none",
                },
                "model": {
                    "kind": "dlrm",
                    "embedding_dim": self.width,
                    "bottom_mlp": list(self.layers),
                    "top_mlp": list(self.layers),
                    "towers": {
                        "plan": [names[host :: self.hosts] for host in range(self.hosts)],
                        "compression": self.compression,
                    },
                },
                "distributed": {"exchange": exchange, "hosts": self.hosts},
                "train": {
                    "run": str(root / "run"),
                    "batch_size": self.batch * self.hosts * self.local,
                    "epochs": 1,
                    "dense": {"kind": "adam", "learning_rate": 0.001},
                    "average": {"decay": 0},
                    "early_stopping": {"patience": 0},
                    "calibration": "none",
                },
            }
        )

    def recipes(self, root: Path) -> dict[str, Recipe]:
        """Return the recipe of the cell with each exchange."""
        return {exchange: self.recipe(root, exchange) for exchange in EXCHANGES}


CELLS = (
    Cell(log="small", width=16, layers=(64,), batch=512, hosts=2, local=1),
    Cell(log="large", width=64, layers=(256, 128), batch=1024, hosts=2, local=2, compression=4),
    Cell(log="large", width=128, layers=(64,), batch=1024, hosts=2, local=2, compression=2),
    Cell(log="middle", width=32, layers=(512, 256), batch=2048, hosts=2, local=2),
    Cell(log="sessions", width=32, layers=(128,), batch=1024, hosts=2, local=2, compression=4),
    Cell(log="middle", width=64, layers=(64,), batch=512, hosts=4, local=1, compression=8),
    Cell(log="large", width=32, layers=(128, 64), batch=512, hosts=4, local=2, compression=4),
    Cell(log="middle", width=16, layers=(256,), batch=1024, hosts=2, local=4, compression=2),
    Cell(log="large", width=128, layers=(128, 64), batch=256, hosts=2, local=2),
    Cell(log="small", width=64, layers=(128,), batch=2048, hosts=3, local=1, compression=4),
)
LINKS = {
    "100 Mbit/s": (100e6, 2e-4), "1 Gbit/s": (1e9, 1e-4), "10 Gbit/s": (10e9, 5e-5), "100 Gbit/s": (100e9, 2e-5),
}  # fmt: skip
"""Bits per second between hosts, and seconds of latency of a collective between hosts; a tenth of
it per peer.
"""


def cluster(cell: Cell, link: str) -> Cluster:
    """Return the hosts and links of a cell."""
    bits, alpha = LINKS[link]
    return Cluster(
        hosts=cell.hosts,
        ranks=cell.local,
        inside_bytes_per_second=4e9,
        between_bytes_per_second=bits / 8,
        inside=Collective(alpha=3e-5, alpha_peer=3e-6),
        between=Collective(alpha=alpha, alpha_peer=alpha / 10),
    )


def data_of(cell: Cell, root: Path) -> Dataset:
    """Return the log of a cell. The first call prepares it."""
    config = cell.recipe(root, "flat").data
    if not Path(config.path).exists():
        prepare(config)
    return Dataset.open(config.path)


Replayed = Mapping[tuple[Cell, str, str], dict[str, Any]]
"""Rows of `compared` in an earlier result, by cell, link and exchange."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One measurement of a cell, by exchange."""

    critical: dict[str, float]
    """Seconds that the rank with the largest load computes, measured alone."""
    ranks: dict[str, tuple[float, ...]]
    """The same for each rank."""
    recordings: dict[str, Recording]
    """Recorded steps; empty if they are taken from an earlier result."""

    @classmethod
    def of(cls, cell: Cell, root: Path, *, is_new: bool) -> Round:
        """Measure a cell. Its steps are recorded if `is_new`."""
        dataset, began = data_of(cell, root), time.perf_counter()
        measure = partial(rank_seconds, dataset=dataset, cluster=cluster(cell, "1 Gbit/s"))
        places, recipes = range(cell.hosts * cell.local), cell.recipes(root)
        measured = cls(
            critical={exchange: measure(recipe) for exchange, recipe in recipes.items()},
            ranks={
                exchange: tuple(measure(recipe, rank=place) for place in places)
                for exchange, recipe in recipes.items()
            },
            recordings={
                exchange: record(recipe, dataset, cell.hosts, cell.local, STEPS)
                for exchange, recipe in recipes.items()
                if is_new
            },
        )
        print(asdict(cell), f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        return measured

    @classmethod
    def least(cls, rounds: Sequence[Round]) -> Round:
        """Return the shortest time of each measurement in some rounds."""
        first = rounds[0]
        return cls(
            critical={
                exchange: min(each.critical[exchange] for each in rounds) for exchange in first.critical
            },
            ranks={
                exchange: tuple(
                    min(times) for times in zip(*(each.ranks[exchange] for each in rounds), strict=True)
                )
                for exchange in first.ranks
            },
            recordings={
                exchange: Recording.least([each.recordings[exchange] for each in rounds])
                for exchange in first.recordings
            },
        )


def compared(root: Path, cells: tuple[Cell, ...], replayed: Replayed) -> Iterator[dict[str, Any]]:
    """Yield a row with the replayed and the predicted step for each cell, link and exchange.

    A step in `replayed` is not replayed again.
    """
    new = {
        cell: any((cell, link, exchange) not in replayed for link in LINKS for exchange in EXCHANGES)
        for cell in cells
    }
    rounds = [[Round.of(cell, root, is_new=new[cell]) for cell in cells] for _ in range(ROUNDS)]
    for cell, *same in zip(cells, *rounds, strict=True):
        dataset, recipes, least = data_of(cell, root), cell.recipes(root), Round.least(same)
        slowest = {exchange: max(seconds) for exchange, seconds in least.ranks.items()}
        for link in LINKS:
            where = cluster(cell, link)
            assumed = replace(where, inside=ASSUMED, between=ASSUMED)
            auto = choose_exchange(
                recipes["flat"], dataset, assumed, partial(_given, list(slowest.values()))
            )
            for exchange, recipe in recipes.items():
                seconds = least.critical[exchange]
                step = predict_step(recipe, dataset, where, seconds).step
                schedule = least.recordings[exchange].schedule if new[cell] else []
                known = replayed.get((cell, link, exchange))
                step_ms = known["replayed_ms"] if known else 1e3 * play(schedule, where)
                yield {
                    **asdict(cell),
                    "link": link,
                    "exchange": exchange,
                    "auto": auto.distributed.exchange == exchange,
                    "replayed_ms": step_ms,
                    "predicted_ms": 1e3 * step.total,
                    "error": 1e3 * step.total / step_ms - 1,
                    "rank_ms": known["rank_ms"]
                    if known
                    else [1e3 * sum(piece.seconds for piece in pieces) for pieces in schedule],
                    "predicted_rank_ms": 1e3 * seconds,
                    "slowest_rank_ms": 1e3 * slowest[exchange],
                }


def _given(seconds: list[float], _: Sequence[Recipe]) -> list[float]:
    return seconds


def cell_of(row: dict[str, Any]) -> Cell:
    """Return the cell of a row of an earlier result."""
    values = {name: row[name] for name in Cell.__dataclass_fields__}
    return Cell(**{**values, "layers": tuple(values["layers"])})


VALIDATED = tuple(replace(cell, hosts=2, local=1) for cell in (CELLS[0], CELLS[1], CELLS[3], CELLS[4]))
"""Cells that two processes train on two cores."""
REAL_STEPS = 30


def validated(root: Path, cells: tuple[Cell, ...]) -> list[dict[str, Any]]:
    """Compare replayed steps of two ranks with steps of two processes that gloo connects on this
    machine.
    """
    for cell in cells:
        data_of(cell, root)
    recipes = [recipe for cell in cells for recipe in cell.recipes(root).values()]
    settings = {"recipes": [recipe.to_dict() for recipe in recipes], "steps": REAL_STEPS}
    measured = told_by_ranks("replay_ranks", settings, lambda arguments: torchrun(2, arguments))
    links = Collective(alpha=measured["alpha"], alpha_peer=0.0)
    where = Cluster(hosts=2, between=links, between_bytes_per_second=measured["bytes_per_second"])
    rows = []
    for recipe, real in zip(recipes, measured["runs"], strict=True):
        dataset = Dataset.open(recipe.data.path)
        recording = Recording.least([record(recipe, dataset, 2, 1, STEPS) for _ in range(ROUNDS)])
        seconds = play(recording.schedule, where)
        if recording.losses != real["losses"][: len(recording.losses)]:
            raise AssertionError(f"replayed losses {recording.losses}, measured ones {real['losses']}")
        rows.append(
            {
                "width": recipe.model.vector_width,
                "batch": recipe.train.batch_size,
                "exchange": recipe.distributed.exchange,
                "measured_ms": 1e3 * real["seconds"],
                "replayed_ms": 1e3 * seconds,
                "error": seconds / real["seconds"] - 1,
                "rank_ms": [1e3 * sum(piece.seconds for piece in pieces) for pieces in recording.schedule],
            }
        )
    return rows


def speed_errors(rows: list[dict[str, Any]]) -> list[float]:
    """Return, for each cell, the predicted speed of SPTT over the flat exchange, divided by the
    replayed one.
    """
    return [
        flat["predicted_ms"] / sptt["predicted_ms"] * sptt["replayed_ms"] / flat["replayed_ms"]
        for flat, sptt in zip(rows[::2], rows[1::2], strict=True)
    ]


def measured(quick: bool, earlier: dict[str, Any] | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics and samples of all cells; with `quick`, of eight cells.

    Replayed steps are taken from the samples of an `earlier` result, if it is given. Predictions
    and choices are always computed again.
    """
    replayed = {
        (cell_of(row), row["link"], row["exchange"]): row for row in (earlier or {}).get("cells", ())
    }
    with torch_settings(threads=1):
        rows = list(compared(LOGS_FOLDER, CELLS[:2] if quick else CELLS, replayed))
        real = (
            earlier["validated"]
            if earlier
            else validated(LOGS_FOLDER, VALIDATED[:1] if quick else VALIDATED)
        )
    return metrics_of(rows, real), {"cells": rows, "validated": real}


def metrics_of(rows: list[dict[str, Any]], real: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of the rows of `compared` and of `validated`."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    losses = [
        min(row["replayed_ms"] for row in pair if row["auto"]) / min(row["replayed_ms"] for row in pair) - 1
        for pair in pairs
    ]
    alike = [
        min(pair, key=lambda row: row["replayed_ms"]) is min(pair, key=lambda row: row["predicted_ms"])
        for pair in pairs
    ]
    errors, missed = ([abs(row["error"]) for row in some] for some in (rows, real))
    return {
        "auto_right_share": sum(not loss for loss in losses) / len(pairs),
        "auto_near_share": sum(loss <= TIE for loss in losses) / len(pairs),
        "auto_loss_max": max(losses),
        "predicted_choice_right_share": sum(alike) / len(pairs),
        "within_15_percent_share": sum(error <= NEAR for error in errors) / len(errors),
        "predicted_error_median": median(errors),
        "predicted_error_max": max(errors),
        "replay_error_median": median(missed),
        "replay_error_max": max(missed),
    }
