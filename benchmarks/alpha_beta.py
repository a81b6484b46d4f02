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
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.contenders import Shape
from benchmarks.sharded import batch_of, loads_of, tables_of
from stratarec.distributed.collectives import Channel
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.planning import plan_sharding
from stratarec.distributed.requests import Requests
from stratarec.distributed.sharding import Sharding

# Announcements, ids, agreement, rows, gradients.
COLLECTIVES = 5
_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What was measured of a network, and of a rank."""

    alpha: float
    """Seconds of a collective whatever it carries."""
    alpha_peer: float
    """Seconds more for each other rank."""
    beta: float
    """Seconds a byte that passes a link."""
    sharing: int
    """Ranks that share a link: those of an emulated host."""
    compute: float
    """Seconds of a step of one rank by itself."""


def _times(channel: Channel, size: int, rounds: int) -> tuple[float, float]:
    """Seconds of one exchange of so many bytes with each other rank, and of a rank's processor in it; lower quartiles,
    of the slowest rank: what the exchange takes, not who came late."""
    given, even = torch.zeros(size * channel.ranks, dtype=torch.uint8), [size] * channel.ranks
    walls, works = [], []
    for _ in range(rounds):
        channel.agree(None)
        wall, work = time.perf_counter(), time.process_time()
        channel.exchange(given, even, even)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    mine = [sorted(found)[rounds // 4] for found in (walls, works)]
    wall, work = (max(found) for found in zip(*channel.figures(mine), strict=True))
    return wall, work


def network_constants(mesh: Mesh, local: int, compute: float) -> Constants:
    """Measured by all ranks together, `local` of them on each host."""
    hosts, far, large = mesh.ranks // local, mesh.ranks // 2, 1 << 20
    pair = dist.new_group([0, far])
    many, many_work = _times(mesh.rows, 8, 60)
    full, _ = _times(mesh.rows, large, 9)
    two, two_work = 0.0, 0.0
    if mesh.rank in (0, far):
        two, two_work = _times(Channel(int(mesh.rank > 0), 2, pair), 8, 60)
    two, two_work = (max(found) for found in zip(*mesh.rows.figures([two, two_work]), strict=True))
    peer = max((many_work - two_work) / (mesh.ranks - 2), 0.0)
    sharing = 1 if hosts == 1 else local
    passing = large * sharing * (mesh.ranks - sharing)
    return Constants(
        alpha=max(two - peer, 0.0), alpha_peer=peer, beta=(full - many) / passing, sharing=sharing, compute=compute
    )


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
    latency = COLLECTIVES * (constants.alpha + constants.alpha_peer * (ranks - 1))
    shared = constants.sharing
    transfer = constants.beta * shared * sent * (ranks - shared) / ranks
    step = constants.compute + split + latency + transfer
    return {
        "ranks": ranks,
        "step_ms": 1e3 * step,
        "split_ms": 1e3 * split,
        "latency_ms": 1e3 * latency,
        "transfer_ms": 1e3 * transfer,
        "samples_s": ranks * shape.batch / step,
    }
