"""Registry and runner of all benchmarks."""

from __future__ import annotations

import datetime
import importlib
import inspect
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.sources import source_hash
from stratarec.errors import ConfigError, StrataError

BENCHMARKS = {
    "blockstore": "benchmarks.blockstore",
    "clicks": "benchmarks.clicks",
    "continual": "benchmarks.continual",
    "cores": "benchmarks.cores",
    "csv": "benchmarks.csv_log",
    "dedup_quality": "benchmarks.dedup_quality",
    "dedup_reader": "benchmarks.dedup_reader",
    "dedup_storage": "benchmarks.dedup_storage",
    "dedup_train": "benchmarks.dedup_train",
    "embedding": "benchmarks.embedding",
    "exchange": "benchmarks.exchange",
    "first_minute": "benchmarks.first_minute",
    "globo": "benchmarks.globo",
    "growth": "benchmarks.growth",
    "host_counts": "benchmarks.host_counts",
    "hot_drift": "benchmarks.hot_drift",
    "hot_published": "benchmarks.hot_published",
    "hot_quality": "benchmarks.hot_quality",
    "hot_single": "benchmarks.hot_single",
    "large_logs": "benchmarks.large_logs",
    "neighbours": "benchmarks.neighbours",
    "plans": "benchmarks.plans",
    "precision": "benchmarks.precision",
    "precision_quality": "benchmarks.precision_quality",
    "precision_quality_frappe": "benchmarks.precision_quality_frappe",
    "precision_quality_globo": "benchmarks.precision_quality_globo",
    "ranks": "benchmarks.ranks",
    "quality": "benchmarks.quality",
    "simulator": "benchmarks.simulator",
    "scorer": "benchmarks.scorer",
    "sizes": "benchmarks.sizes",
    "small_logs": "benchmarks.small_logs",
    "tier_alternatives": "benchmarks.tier_alternatives",
    "tiers": "benchmarks.tiers",
    "tower_blocks": "benchmarks.tower_blocks",
    "tower_quality": "benchmarks.tower_quality",
    "towers": "benchmarks.towers",
    "train": "benchmarks.train",
}


class PeerMissing(StrataError):
    """A library to compare with is not installed."""


def import_peer(name: str) -> Any:
    """Import the module of a peer, or raise `PeerMissing`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissing(
            f"{name} cannot be imported ({error}); `make bench NAME=...` installs the peers"
        ) from error


def run(name: str, *, quick: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a benchmark: the ``run(quick, **options)`` of its module checks correctness, measures,
    and returns results.

    Raises `ConfigError` if the benchmark does not exist or does not support an option.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    body: Callable[..., dict[str, Any]] = importlib.import_module(BENCHMARKS[name]).run
    unsupported = [option for option in options if option not in inspect.signature(body).parameters]
    if unsupported:
        raise ConfigError(f"benchmark {name!r} does not support --{unsupported[0]}; omit the option")
    result = body(quick, **options)
    return {
        "benchmark": name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "hardware": hardware(),
        "versions": versions(),
        "sources": source_hash(BENCHMARKS[name]),
        "gate": "passed",
        **result,
    }


def hardware() -> dict[str, Any]:
    """Return processor, cores and memory of this machine."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), ""
    )
    memory = Path("/proc/meminfo").read_text().split()[1] if Path("/proc/meminfo").exists() else "0"
    return {
        "processor": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "avx512": "avx512f" in text,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of all installed libraries that affect results."""
    versions_of = {"python": platform.python_version()}
    installed = {str(entry.metadata["Name"]).lower() for entry in metadata.distributions()}
    names = (
        "stratarec",
        "torch",
        "numba",
        "numpy",
        "polars",
        "pyarrow",
        "torchrec",
        "fbgemm-gpu-cpu",
        "rocksdict",
        "onnxruntime",
        "lightgbm",
        "river",
        "catboost",
    )
    return versions_of | {
        name: metadata.version(name)
        for name in names
        if name in installed or name.replace("-", "_") in installed
    }
