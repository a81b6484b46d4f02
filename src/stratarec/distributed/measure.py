"""Measure the latency of collectives, and run one rank of a cluster without its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from stratarec.config.validate import check_finite
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError

_FEWEST = 3
_SIZE, _ROUNDS = 8, 60


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Seconds of latency of an exchange among ranks: `alpha`, plus `alpha_peer` per other rank."""

    alpha: float
    alpha_peer: float

    def __post_init__(self) -> None:
        check_finite(self, "collective.")
        if min(self.alpha, self.alpha_peer) < 0:
            raise ConfigError(
                f"collective latency is {self.alpha:g} + {self.alpha_peer:g} s a peer, expected >= 0"
            )

    def latency(self, peers: int) -> float:
        """Return the seconds of an exchange of no bytes with `peers` other ranks."""
        return self.alpha + self.alpha_peer * peers if peers else 0.0


def measure_latency(mesh: Mesh) -> Collective | None:
    """Measure the latency of collectives with all ranks of `mesh`, in about a second; None with
    less than three ranks.

    With fewer ranks, the cost of a peer cannot be separated from the latency. Ranks of a test may
    share processors, unlike ranks of a cluster. So the cost of a peer is measured as processor
    time, and the latency with two ranks only.
    """
    if mesh.ranks < _FEWEST:
        return None
    far = mesh.ranks // 2
    # All ranks must create a group, although only two use this one.
    pair = dist.new_group([0, far])
    _, many_work = collective_times(mesh.rows, _SIZE, _ROUNDS)
    two, two_work = 0.0, 0.0
    if mesh.rank in (0, far):
        two, two_work = collective_times(Channel(int(mesh.rank > 0), 2, pair), _SIZE, _ROUNDS)
    two, two_work = map(max, zip(*mesh.rows.gather_floats([two, two_work]), strict=True))
    peer = max((many_work - two_work) / (mesh.ranks - 2), 0.0)
    return Collective(alpha=max(two - peer, 0.0), alpha_peer=peer)


def collective_times(channel: Channel, size: int, rounds: int) -> tuple[float, float]:
    """Return the seconds and the processor seconds of an exchange with each other rank.

    Each rank takes the lower quartile of its times, so that late ranks do not count. The results
    are the maxima over all ranks.

    Parameters
    ----------
    channel : Channel
        Channel to measure; all its ranks call this function.
    size : int
        Bytes to send to each rank.
    rounds : int
        Number of exchanges.
    """
    message, even = torch.zeros(size * channel.ranks, dtype=torch.uint8), [size] * channel.ranks
    walls, works = [], []
    for _ in range(rounds):
        # All ranks start together. Otherwise waiting for a late rank would count as time of the
        # exchange.
        channel.agree(None)
        wall, work = time.perf_counter(), time.process_time()
        channel.exchange(message, even, even)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    mine = [sorted(seconds)[rounds // 4] for seconds in (walls, works)]
    wall, work = map(max, zip(*channel.gather_floats(mine), strict=True))
    return wall, work


class EchoChannel(Channel):
    """Channel for measurements in one process. Messages of peers are the rank's messages to itself,
    or zeros.

    With this channel a rank computes what it would compute among `ranks` ranks with the same batch,
    but never waits.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, cast(Any, self) if ranks > 1 else None)

    def exchange(
        self,
        message: Tensor,
        sent_sizes: Sequence[int],
        sizes: Sequence[int],
        stopped: Callable[[], bool] = never,
    ) -> Tensor:
        if {sent_sizes[self.rank]} == set(sizes):
            mine: Tensor = message.split(list(sent_sizes))[self.rank]  # type: ignore[no-untyped-call]
            return mine.repeat(self.ranks)
        return message.new_zeros(sum(sizes))


def emulated_mesh(
    rank: int,
    hosts: int,
    local: int,
    *,
    by_towers: bool,
    channel: Callable[[int, list[int]], Channel] = lambda rank, members: EchoChannel(rank, len(members)),
) -> Mesh:
    """Return the mesh of one rank of a cluster, without other processes.

    Parameters
    ----------
    rank : int
        Number of the rank in the cluster.
    hosts, local : int
        Number of hosts, and of ranks on each host.
    by_towers : bool
        Whether the mesh is for the exchange by towers.
    channel : callable
        Returns a channel from the index of the rank among the members of the channel, and the
        numbers of the members.
    """
    grid = torch.arange(hosts * local).view(hosts, local)
    devices: Any = SimpleNamespace(mesh=grid, size=grid.size)

    def part(members: list[int]) -> Mesh:
        place = members.index(rank)
        ids, rows, files = (channel(place, members) for _ in range(3))
        return Mesh(rank=place, ranks=len(members), ids=ids, rows=rows, files=files, devices=None)

    mesh, (host, place) = replace(part(grid.flatten().tolist()), devices=devices), divmod(rank, local)
    if not by_towers:
        return mesh
    return replace(mesh, inside=part(grid[host].tolist()), between=part(grid[:, place].tolist()))
