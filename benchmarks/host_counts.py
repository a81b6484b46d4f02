"""Number of hosts for models of five sizes, with and without an SSD per host: the question of
MTrainS (2305.01515).

The paper trains five models of terabytes, whose tables are not published, on 4 to 8 times fewer
nodes. The models here are synthetic: the 26 tables of Criteo with its skew, D = 128, row-wise
Adagrad, float32 at rest, scaled to the given bytes. Rates of DRAM, block device and one core are
measured on this machine; the size of a host is assumed (`HOST`), and the network is modelled by its
rate. Without SSDs, the bytes determine the number of hosts. Hosts with SSDs must reach a share
(`SHARES`) of the throughput of those hosts.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kept import FOLDER
from stratarec.data.sources.synthetic import CRITEO_ROWS, EXPONENT
from stratarec.distributed.measure import Collective
from stratarec.embedding import RowOptimizerConfig
from stratarec.planning.bytes import RowShape
from stratarec.planning.candidates import TableSpec
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.host_count import fewest_hosts
from stratarec.planning.machine import Cluster, Machine, NetworkRates, Tiers, measure_tiers
from stratarec.planning.popularity import Popularity
from stratarec.planning.step_model import StepWork

TERABYTES = (0.5, 1.0, 2.0, 4.0, 8.0)
SHARES = (1.0, 0.25)
"""Required shares of the throughput of the hosts without SSDs."""
WIDTH, BATCH = 128, 65_536
HOST = {"dram_gb": 256, "ssd_gb": 4000, "cores": 32, "memory_times": 8, "drives": 8, "network_gbit": 100}
"""One host: bytes for tables, cores (each as fast as the measured one), and multiples of measured
DRAM and drives.
"""
_BINS = 200
_PUBLISHED = 4.0, 8.0


def specs(nbytes: float) -> list[TableSpec]:
    """Return Criteo's tables, scaled to `nbytes` bytes."""
    shape = RowShape.of(WIDTH, RowOptimizerConfig())
    times = nbytes / (sum(CRITEO_ROWS) * 4 * (WIDTH + 1))
    tables = []
    for place, rows in enumerate(CRITEO_ROWS):
        rows = max(int(rows * times), 3)
        edges = np.unique(np.concatenate([[0], np.geomspace(1, rows, _BINS).round()]))
        in_bin = np.diff(edges)
        share = np.diff((edges / rows) ** (1 / EXPONENT)) / in_bin
        popularity = Popularity(rows=in_bin, share=share, by_id=True)
        tables.append(
            TableSpec(
                name=f"C{place + 1}",
                rows=rows,
                shape=shape,
                lookups=float(BATCH),
                popularity=popularity,
                outputs=float(WIDTH * BATCH),
            )
        )
    return tables


def host(measured: Tiers) -> Machine:
    """Return the rates of a host, derived from the measured ones."""
    assert measured.block is not None
    dram, block, drives = measured.dram, measured.block, HOST["drives"]
    tiers = replace(
        measured,
        threads=HOST["cores"],
        dram=replace(dram, row_bytes_per_second=dram.row_bytes_per_second * HOST["memory_times"]),
        block=replace(
            block,
            reads_per_second=block.reads_per_second * drives,
            write_bytes_per_second=block.write_bytes_per_second * drives,
        ),
    )
    latency = Collective(alpha=5e-5, alpha_peer=5e-6)
    cluster = Cluster(
        inside=latency, between=latency, between_bytes_per_second=HOST["network_gbit"] * 1e9 / 8
    )
    return Machine(
        tiers=tiers, network=NetworkRates(flops_per_second=_flops() * HOST["cores"]), cluster=cluster
    )


def dlrm() -> StepWork:
    """Describe a training step of a DLRM (bottom 512-256, top 512-256) on all hosts."""
    features = len(CRITEO_ROWS)
    pairs = (features + 1) * features // 2
    weights = 13 * 512 + 512 * 256 + 256 * WIDTH + (WIDTH + pairs) * 512 + 512 * 256 + 256
    return StepWork(
        batch=BATCH,
        features=features,
        width=WIDTH,
        lookups=float(features),
        flops=6.0 * weights + 3.0 * features**2 * WIDTH,
        parameters=weights,
    )


@cache
def _flops() -> float:
    """Measure the operations per second of one thread in a layer of 512 x 512 at 1,024 samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right, seconds = torch.rand(1024, 512), torch.rand(512, 512), []
    for _ in range(20):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return float(2 * 1024 * 512 * 512 / min(seconds))


def run(quick: bool) -> dict[str, Any]:
    """Predict the hosts of five sizes at two speeds; `quick` has two sizes."""
    rows = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        block = BlockConfig(path=str(Path(folder)), budget=HOST["ssd_gb"] * 10**9)
        memory = MemoryConfig(dram=HOST["dram_gb"] * 10**9, block=block, precision="fp32")
        measured = measure_tiers(memory)
        machine, work = host(measured), dlrm()
        for size in TERABYTES[:2] if quick else TERABYTES:
            tables = specs(size * 1e12)
            alone = replace(memory, block=None)
            dram = fewest_hosts(tables, alone, machine, work, rate=0.0)
            for share in SHARES:
                rate = share * dram.samples_per_second
                fewest = fewest_hosts(tables, memory, machine, work, rate=rate)
                rows.append(
                    {
                        "terabytes": size,
                        "share_of_speed": share,
                        "samples_s": rate,
                        "hosts_dram": dram.hosts,
                        "hosts_ssd": fewest.hosts,
                        "hosts_ssd_for_bytes": fewest.for_bytes,
                        "times_fewer": dram.hosts / fewest.hosts,
                        "waits_for": fewest.waits_for,
                    }
                )
    assert measured.block is not None
    return {
        "config": {
            "predicted": True,
            "host": HOST,
            "width": WIDTH,
            "batch": BATCH,
            "published_times_fewer": _PUBLISHED,
            "measured": {
                "row_bytes_per_second": measured.dram.row_bytes_per_second,
                "reads_per_second": measured.block.reads_per_second,
                "write_bytes_per_second": measured.block.write_bytes_per_second,
                "flops_per_second": _flops(),
            },
        },
        "metrics": {
            f"times_fewer_{row['terabytes']:g}tb_at_{row['share_of_speed']:g}": row["times_fewer"]
            for row in rows
        },
        "samples": {"rows": rows},
    }
