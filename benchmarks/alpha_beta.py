"""An alpha-beta model of the flat exchange: steps of the embedding part by more ranks than there are here.

Weak scaling: every rank keeps its batch. A step of N ranks takes ::

    compute + split(N) + collectives * (alpha + alpha_peer * (N - 1)) + beta * bytes * (N - 1) / N

with ``compute`` that of one rank by itself, ``split`` the time in which a rank sorts its ids by owner (measured at
that N, there is no network in it), ``bytes`` what a rank sends in a step: ids, distinct rows and their gradients, all
tables row by row, so owners stay balanced. Assumed: a processor of this kind and a link of this rate for every rank, a
network that carries all links at once, no stragglers, none of the exchange hidden behind other work.
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
    """Seconds a byte that a rank sends."""
    compute: float
    """Seconds of a step of one rank by itself."""


def _seconds(channel: Channel, size: int, rounds: int) -> float:
    """Of one exchange of so many bytes with each other rank, the fastest: what the network takes, not who came late."""
    given, even = torch.zeros(size * channel.ranks, dtype=torch.uint8), [size] * channel.ranks
    found = []
    for _ in range(rounds):
        channel.agree(None)
        began = time.perf_counter()
        channel.exchange(given, even, even)
        found.append(time.perf_counter() - began)
    return max(seconds for (seconds,) in channel.figures([sorted(found)[len(found) // 4]]))


def network_constants(mesh: Mesh, compute: float) -> Constants:
    """Measured by all ranks together; ranks 0 and N / 2 (of two hosts, where there are) tell one peer from many."""
    far = mesh.ranks // 2
    pair = dist.new_group([0, far])
    many, large = _seconds(mesh.rows, 8, 40), 1 << 20
    full = _seconds(mesh.rows, large, 9)
    two = 0.0
    if mesh.rank in (0, far):
        two = _seconds(Channel(int(mesh.rank > 0), 2, pair), 8, 40)
    two = max(seconds for (seconds,) in mesh.rows.figures([two]))
    peer = max((many - two) / (mesh.ranks - 2), 0.0)
    return Constants(
        alpha=max(two - peer, 0.0), alpha_peer=peer, beta=(full - many) / (large * (mesh.ranks - 1)), compute=compute
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
    transfer = constants.beta * sent * (ranks - 1) / ranks
    step = constants.compute + split + latency + transfer
    return {
        "ranks": ranks,
        "step_ms": 1e3 * step,
        "split_ms": 1e3 * split,
        "latency_ms": 1e3 * latency,
        "transfer_ms": 1e3 * transfer,
        "samples_s": ranks * shape.batch / step,
    }
