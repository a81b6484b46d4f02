"""Scores of raw rows from an export: `stratarec.Scorer` compared with ONNX Runtime and torch on the
exported program.

All contenders start from raw columns as Python lists and end with probabilities. The peers'
features are computed as the README.txt of the export suggests: by a dictionary for each vocabulary,
and NumPy arrays. Building the dictionaries is not timed; they take some hundred bytes per value,
which is too much for vocabularies that outgrow memory, and the peers check no input. Each contender
uses one thread, as in a service that scores several requests at once, and all alternate. The scorer
computes the network by ONNX Runtime, as if the extra is installed; `p50_ms_1_torch` is one row
without it. `scaling_8` is the speed of single rows on eight threads over the speed on one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.registry import import_peer
from benchmarks.timing import alternate
from stratarec import Scorer
from stratarec.data.prepare.prepare import prepare
from stratarec.recipe import Recipe
from stratarec.serving.export_manifest import TABLES, ExportManifest
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

DENSE, CATEGORIES, VALUES = 13, 26, 50_000
PROGRAM = "program.pt2"
Columns = dict[str, list[Any]]
Network = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]


def make_log(path: Path, rows: int) -> pl.DataFrame:
    """Write a log of Criteo's shape: numbers, and categories (half integers, half text) with a
    Zipf-like skew.
    """
    draws = np.random.default_rng(3)
    columns: dict[str, Any] = {"label": draws.integers(0, 2, rows)}
    columns |= {f"I{number}": draws.lognormal(1, 2, rows) for number in range(DENSE)}
    for number in range(CATEGORIES):
        ids = (VALUES * draws.random(rows) ** 4).astype(np.int64)
        columns[f"C{number}"] = ids * 7919 if number % 2 else [f"value-{each:x}" for each in ids]
    frame = pl.DataFrame(columns)
    frame.write_parquet(path)
    return frame


def make_export(root: Path, steps: int) -> Path:
    """Train and export a DLRM with the default hidden sizes."""
    schema = {
        "label": "label",
        "dense": [{"name": f"I{number}"} for number in range(DENSE)],
        "sparse": [{"name": f"C{number}"} for number in range(CATEGORIES)],
    }
    source = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema}
    recipe = Recipe.from_dict(
        {
            "name": "scorer",
            "data": {
                "path": str(root / "data"),
                "source": source,
                "split": {"by": "fraction", "valid": 0.01, "test": 0.01},
                "vocabulary": {"min_count": 2},
            },
            "model": {"kind": "dlrm"},
            "train": {"run": str(root / "run"), "max_steps": steps, "eval_every": 0},
        }
    )
    Trainer(recipe, prepare(recipe.data)).train()
    with open_run(root / "run") as trained:
        network = trained.model.network.eval()
        batch = {0: torch.export.Dim("batch", min=1)}
        inputs = torch.zeros(3, DENSE), torch.zeros(3, sum(trained.model.embeddings.dims))
        program = torch.export.export(Probability(network), inputs, dynamic_shapes=((batch, batch),))
        torch.export.save(program, root / PROGRAM)
        return export(trained, root / "export", onnx=True)


class Probability(torch.nn.Module):
    """A network with probabilities as its output."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.network.padded(*inputs))  # type: ignore[operator]


class Plain:
    """The peers: features by dictionaries, then a network."""

    def __init__(self, folder: Path, manifest: ExportManifest, network: Network) -> None:
        self._network = network
        self._schema = manifest.columns
        self._tables = load_file(folder / TABLES)
        self._ids: dict[str, dict[Any, int]] = {}
        for name, entry in manifest.vocabularies.items():
            values = pl.read_parquet(folder / entry.path)["value"][: entry.values]
            self._ids[name] = {value: position for position, value in enumerate(values.to_list())}
        dense = [manifest.moments[feature.name] for feature in self._schema.dense]
        self._mean = np.array([each.mean for each in dense])
        self._deviation = np.array([each.deviation for each in dense])

    def score(self, columns: Columns) -> NDArray[np.float32]:
        raw = np.array([columns[feature.name] for feature in self._schema.dense], dtype=np.float64).T
        dense = ((np.sign(raw) * np.log1p(np.abs(raw)) - self._mean) / self._deviation).astype(np.float32)
        pooled = []
        for feature in self._schema.sparse:
            ids = self._ids[feature.vocabulary]
            pooled.append(self._tables[feature.vocabulary][[ids[value] for value in columns[feature.name]]])
        return self._network(dense, np.concatenate(pooled, axis=1))


def onnx_network(folder: Path, threads: int) -> Network:
    """Return the network in ONNX Runtime at its highest optimization level."""
    runtime = import_peer("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(folder / "network.onnx", options, providers=["CPUExecutionProvider"])
    return lambda dense, pooled: session.run(None, {"dense": dense, "pooled": pooled})[0]


def torch_network(folder: Path) -> Network:
    """Return the exported program of the network in torch."""
    program = torch.export.load(folder.parent / PROGRAM).module()

    def run(dense: NDArray[np.float32], pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            scores: NDArray[np.float32] = program(torch.from_numpy(dense), torch.from_numpy(pooled)).numpy()
        return scores

    return run


def gate(contenders: Mapping[str, Any], batch: Columns) -> float:
    """Check that all contenders return the same scores."""
    expected = contenders["ours"].score(batch)
    worst = max(float(np.abs(each.score(batch) - expected).max()) for each in contenders.values())
    if worst > 1e-6:
        raise AssertionError(f"scores differ by {worst}, expected at most 1e-6")
    return worst


def batches(frame: pl.DataFrame, size: int, count: int) -> list[Columns]:
    return [
        frame.sample(size, with_replacement=True, seed=seed).to_dict(as_series=False)
        for seed in range(count)
    ]


def single_rows(
    scorer: Scorer, without: Scorer, frame: pl.DataFrame, rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds of a row in each kind of frame, and as a dict `without` ONNX
    Runtime.
    """
    frames = [frame.sample(1, seed=seed) for seed in range(200)]
    kinds: dict[str, Sequence[Any]] = {
        "dict": [each.to_dict(as_series=False) for each in frames],
        "polars": frames,
        "arrow": [each.to_arrow() for each in frames],
    }
    kinds["torch"] = kinds["dict"]
    milliseconds: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(-50, rounds):
        for name, rows in kinds.items():
            used = without if name == "torch" else scorer
            began = time.perf_counter()
            used.score(rows[round_ % len(rows)])
            if round_ >= 0:
                milliseconds[name].append(1e3 * (time.perf_counter() - began))
    return milliseconds


def rows_per_second(scorer: Scorer, requests: Sequence[Columns], threads: int, calls: int) -> float:
    """Return the throughput of single rows that several threads score concurrently."""

    def score(first: int) -> None:
        for number in range(first, calls, threads):
            scorer.score(requests[number % len(requests)])

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(score, range(threads)))
        return calls / (time.perf_counter() - began)


def scaling(scorer: Scorer, frame: pl.DataFrame, threads: int, rounds: int) -> float:
    """Return the throughput of several threads over that of one, in alternation."""
    requests, calls = batches(frame, 1, 200), 200
    runs = [
        [rows_per_second(scorer, requests, count, calls) for count in (1, threads)]
        for _ in range(rounds + 1)
    ]
    return median(many / one for one, many in runs[1:])


def run(quick: bool) -> dict[str, Any]:
    """Measure requests of 1, 100 and 1,000 rows."""
    threads = 1
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        frame = make_log(root / "log.parquet", 50_000 if quick else 300_000)
        exported = make_export(root, 5 if quick else 50)
        scorer = Scorer.open(exported, runtime="onnxruntime")
        without = Scorer.open(exported, runtime="torch")
        # Use only values in the vocabularies, because the peers do not support the tail.
        for name, entry in scorer.manifest.vocabularies.items():
            known = pl.read_parquet(exported / entry.path)["value"][: entry.values]
            frame = frame.filter(pl.col(name).is_in(known.implode()))
        contenders: dict[str, Any] = {
            "ours": scorer,
            "onnx": Plain(exported, scorer.manifest, onnx_network(exported, threads)),
            "torch": Plain(exported, scorer.manifest, torch_network(exported)),
        }
        difference = gate({**contenders, "without": without}, frame[:2000].to_dict(as_series=False))
        singles = single_rows(scorer, without, frame, 100 if quick else 2000)
        scale = scaling(scorer, frame, 8, 3 if quick else 25)
        rows = [
            _timed(contenders, batches(frame, size, 8), size, 20 if quick else 200)
            for size in (1, 100, 1000)
        ]
    ordered = {name: sorted(each) for name, each in singles.items()}
    return {
        "config": {"threads": threads, "dense": DENSE, "categories": CATEGORIES, "values": VALUES},
        "metrics": {
            "p50_ms_1": median(ordered["dict"]),
            "p99_ms_1": ordered["dict"][len(ordered["dict"]) * 99 // 100],
            **{f"p50_ms_1_{name}": median(ordered[name]) for name in ("arrow", "polars", "torch")},
            "scaling_8": scale,
            **{
                f"ratio_{peer}_{row['batch']}": row[f"{peer}_ms"] / row["ours_ms"]
                for row in rows
                for peer in ("onnx", "torch")
            },
            "largest_difference": difference,
        },
        "samples": {"rows": rows},
    }


def _timed(
    contenders: Mapping[str, Any], requests: Sequence[Columns], size: int, rounds: int
) -> dict[str, Any]:
    def call(scorer: Any) -> Callable[[int], object]:
        return lambda number: scorer.score(requests[number % len(requests)])

    seconds = alternate({name: call(each) for name, each in contenders.items()}, rounds, warmup=20)
    return {"batch": size, **{f"{name}_ms": 1e3 * median(each) for name, each in seconds.items()}}
