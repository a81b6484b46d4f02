"""The exchange between ranks compared with TorchRec's, on one machine and between two emulated
hosts, and its scaling.

Four ranks of one thread each run forward, backward and row-wise Adagrad of the embedding part, with
one id per bag and Criteo's sizes and skew. TorchRec is represented by its fastest sharding
(`sharded`). Without traffic shaping, all ranks run on this machine. At 1 Gbit/s, two ranks run on
each of two emulated hosts (`hosts`), and the bytes between hosts are counted by the hosts'
interfaces. Whole training runs use `stratarec train` under torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.contenders import Shape
from benchmarks.hosts import Hosts, end_with_parent
from stratarec.data.sources.synthetic import CRITEO_ROWS
from stratarec.errors import TrainingError

RANKS, MBIT = 4, 1000
_LIMIT_SECONDS = 400.0
# One thread per rank, because four ranks share two processors. Warnings on import of peers are
# suppressed.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}


def measured(shape: Shape, rounds: int, steps: int, hosts: Hosts | None) -> list[dict[str, Any]]:
    """Return the results of `exchange_ranks`, run on `hosts` or, without hosts, on this machine."""
    settings = {"shape": asdict(shape), "rounds": rounds, "steps": steps}

    def launch(arguments: list[str]) -> int:
        if hosts is None:
            return torchrun(RANKS, arguments)
        return hosts.torchrun(RANKS // hosts.count, arguments, ENVIRONMENT, _LIMIT_SECONDS)

    rows: list[dict[str, Any]] = told_by_ranks("exchange_ranks", settings, launch)
    return rows


def told_by_ranks(module: str, settings: Mapping[str, Any], launch: Callable[[list[str]], int]) -> Any:
    """Start the ranks of a module of this package by `launch` and return the results that they
    write to ``out``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        status = launch(["-m", f"benchmarks.{module}", json.dumps({**settings, "out": str(out)})])
        if status or not out.exists():
            raise TrainingError(f"a rank of the benchmark ended with status {status}; see its error above")
        return json.loads(out.read_text())


def torchrun(ranks: int, arguments: list[str]) -> int:
    """Run `ranks` ranks on this machine and return the exit status."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *arguments,
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        check=False,
        timeout=_LIMIT_SECONDS,
        preexec_fn=end_with_parent,
    )
    return done.returncode


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compare StrataRec, with and without deduplication, with the fastest sharding of TorchRec."""
    step = {row["contender"]: row["step_ms"] for row in rows}
    best = min(ms for name, ms in step.items() if name.startswith("torchrec"))
    return {
        "ratio_torchrec": best / step["ours"],
        "without_dedup": best / step["ours_without_dedup"],
        "dedup_gain": step["ours_without_dedup"] / step["ours"],
    }


def recipe(folder: Path, samples: int, steps: int, ranks: int, round_: int) -> Path:
    """Write the recipe of a DLRM as in the published benchmark, with a global batch of 8,192."""
    content = {
        "name": f"ranks-{ranks}-{round_}",
        "data": {
            "path": str(folder / "data"),
            "source": {"kind": "synthetic", "samples": samples, "scale": 0.01, "seed": 1},
            "split": {"by": "fraction", "valid": 0.01, "test": 0.01},
            "vocabulary": {"min_count": 1, "tail_buckets": 16},
        },
        "model": {"kind": "dlrm", "embedding_dim": 32, "bottom_mlp": [256, 128], "top_mlp": [256, 128]},
        "train": {
            "run": str(folder / f"run-{ranks}-{round_}"), "batch_size": 8192, "max_steps": steps, "epochs": 100,
            "dense": {"kind": "adam", "learning_rate": 0.001}, "eval_every": 10 * steps,
            "early_stopping": {"patience": 0}, "average": {"decay": 0},
        },
    }  # fmt: skip
    path = folder / f"ranks-{ranks}-{round_}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def scaling(quick: bool) -> list[dict[str, Any]]:
    """Measure the samples per second of training on 1, 2 and 4 ranks of one thread, in
    alternation.
    """
    speeds: dict[int, list[float]] = {1: [], 2: [], 4: []}
    waits: dict[int, list[float]] = {1: [0.0], 2: [], 4: []}
    samples, steps = (100_000, 20) if quick else (400_000, 80)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for round_ in range(1 if quick else 2):
            for ranks in speeds if round_ % 2 == 0 else reversed(speeds):
                path = recipe(folder, samples, steps, ranks, round_)
                if not (folder / "data").exists():
                    _checked(torchrun(1, ["-m", "stratarec", "prepare", str(path), "-q"]))
                _checked(torchrun(ranks, ["-m", "stratarec", "train", str(path), "-q"]))
                result = json.loads((folder / f"run-{ranks}-{round_}" / "result.json").read_text())
                speeds[ranks].append(result["samples_per_second"])
                waits[ranks] += [
                    each["exposed_seconds"] / each["step_seconds"] for each in result.get("ranks", [])
                ]
    return [
        {
            "ranks": ranks,
            "samples_s": median(measured_speeds),
            "over_one_rank": median(measured_speeds) / median(speeds[1]),
            "share_waiting_for_others": median(waits[ranks]),
        }
        for ranks, measured_speeds in speeds.items()
    ]


def _checked(status: int) -> None:
    if status:
        raise TrainingError(f"stratarec ended with status {status}; see its error above")


def run(quick: bool) -> dict[str, Any]:
    """Measure without traffic shaping, at 1 Gbit/s, and scaling."""
    cap, batch, rounds, steps = (20_000, 512, 3, 2) if quick else (200_000, 2048, 6, 4)
    shape = Shape(sizes=[min(rows, cap) for rows in CRITEO_ROWS], width=64, batch=batch)
    with Hosts(2, MBIT):  # fail early if hosts cannot be emulated
        pass
    here = measured(shape, rounds, steps, None)
    with Hosts(2, MBIT) as hosts:
        apart = measured(shape, rounds, max(steps // 2, 1), hosts)
    rows = [{"network": network, **row} for network, results in (("unshaped", here), ("1 Gbit/s", apart))
            for row in results]  # fmt: skip
    whole = scaling(quick)
    one, gbit = ratios(here), ratios(apart)
    wire = {row["contender"]: row["wire_mb_a_step"] for row in apart}
    least = min(mb for name, mb in wire.items() if name.startswith("torchrec"))
    return {
        "config": {
            "sizes": list(shape.sizes),
            "width": shape.width,
            "batch_a_rank": batch,
            "ranks": RANKS,
            "rounds": rounds,
            "threads_a_rank": 1,
            "hosts_at_1gbit": 2,
            "optimizer": "row-wise Adagrad",
            "wire": "fp32",
            "ids": "int64",
            "targets": {"ratio_torchrec": 1.25, "ratio_torchrec_1gbit": 1.5},
        },
        "metrics": {
            "ratio_torchrec": one["ratio_torchrec"],
            "ratio_torchrec_without_dedup": one["without_dedup"],
            "ratio_torchrec_1gbit": gbit["ratio_torchrec"],
            "ratio_torchrec_1gbit_without_dedup": gbit["without_dedup"],
            "dedup_gain": one["dedup_gain"],
            "dedup_gain_1gbit": gbit["dedup_gain"],
            "ratio_wire_bytes_1gbit": least / wire["ours"],
            **{f"samples_s_{row['ranks']}_ranks": row["samples_s"] for row in whole},
        },
        "samples": {"rows": rows, "whole_training": whole},
    }
