"""An alpha-beta model of the flat exchange: steps of the embedding part by more ranks than there are here.

Weak scaling: every rank keeps its batch. A step of N ranks takes ::

    compute + split(N) + collectives * (alpha + alpha_peer * (N - 1)) + beta * sharing * bytes * (N - sharing) / N

with ``compute`` that of one rank by itself, ``split`` the time in which a rank sorts its ids by owner (measured at
that N, there is no network in it), ``bytes`` what a rank sends in a step: ids, distinct rows and their gradients, all
tables row by row, so owners stay balanced. Ranks here share processors, which those of a cluster do not: what one
more peer costs is taken from the processor time of a collective, and latency from two ranks alone. Assumed: a
processor of this kind and a link of this rate for every rank, a network that carries all links at once, no
stragglers, none of the exchange hidden behind other work.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.contenders import Shape
from benchmarks.sharded import batch_of, loads_of, tables_of
from stratarec.distributed.input_dist import Requests
from stratarec.distributed.measure import NetworkFigures, measure_network
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharding import Sharding, plan_sharding

# Announcements, ids, agreement, rows, gradients.
COLLECTIVES = 5
_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Constants(NetworkFigures):
    """What was measured of a network, and of a rank."""

    compute: float
    """Seconds of a step of one rank by itself."""


def network_constants(mesh: Mesh, local: int, compute: float) -> Constants:
    """Measured by all ranks together, `local` of them on each host."""
    return Constants(**asdict(measure_network(mesh, local)), compute=compute)


def split_seconds(shape: Shape, ranks: int, rounds: int = 5) -> tuple[float, float]:
    """Seconds in which one rank sorts a batch by owner among so many, and the bytes that it then sends a step."""
    places = plan_sharding(loads_of(shape, ranks), ranks, "row").places
    requests, batch = Requests(Sharding(tables_of(shape), places, ranks)), batch_of(shape, 1)
    found, distinct = [], {}
    for _ in range(rounds):
        began = time.perf_counter()
        asked, distinct = requests.split(batch)
        torch.cat([requests.message(part) for part in asked])
        found.append(time.perf_counter() - began)
    rows = sum(each.rows for each in distinct.values())
    return min(found), rows * (_ID_BYTES + 2 * 4 * shape.width)


def predicted(shape: Shape, ranks: int, constants: Constants) -> dict[str, Any]:
    """A step of the embedding part by so many ranks."""
    split, sent = split_seconds(shape, ranks)
    latency = COLLECTIVES * constants.latency(ranks - 1)
    transfer = constants.transfer(sent, ranks)
    step = constants.compute + split + latency + transfer
    return {
        "ranks": ranks,
        "step_ms": 1e3 * step,
        "split_ms": 1e3 * split,
        "latency_ms": 1e3 * latency,
        "transfer_ms": 1e3 * transfer,
        "samples_s": ranks * shape.batch / step,
    }
