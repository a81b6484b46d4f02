"""Measure the cost of collectives: ``alpha + alpha_peer * peers + beta * bytes`` seconds.

`alpha` is the latency, `alpha_peer` the processor time for each other rank, and `beta` the time of a byte on a link.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import distributed as dist

from stratarec.config.validate import check_finite
from stratarec.distributed.collectives import Channel
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError

_FEWEST = 3
_SMALL, _LARGE = 8, 1 << 20
_SMALL_ROUNDS, _LARGE_ROUNDS = 60, 9


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Latency of an exchange among ranks in seconds: `alpha`, plus `alpha_peer` for each other rank."""

    alpha: float
    alpha_peer: float

    def __post_init__(self) -> None:
        check_finite(self, "collective.")
        if min(self.alpha, self.alpha_peer) < 0:
            raise ConfigError(f"collective latency is {self.alpha:g} + {self.alpha_peer:g} s a peer, expected >= 0")

    def latency(self, peers: int) -> float:
        """Return the seconds of an exchange of no bytes with `peers` other ranks."""
        return self.alpha + self.alpha_peer * peers if peers else 0.0


@dataclass(frozen=True, kw_only=True)
class NetworkFigures(Collective):
    """Measured network: latency, and `beta`, the seconds per byte on a link that `sharing` ranks share.

    The ranks of a host share a link. With a single host, `sharing` is 1.
    """

    beta: float
    sharing: int

    def transfer(self, sent: float, ranks: int) -> float:
        """Return the seconds in which each of `ranks` ranks sends `sent` bytes.

        A rank sends equal parts to all ranks, including itself.
        """
        return self.beta * self.sharing * sent * (ranks - self.sharing) / ranks


def measure_network(mesh: Mesh, local: int) -> NetworkFigures:
    """Measure the network with all ranks, `local` of them on each host; takes about a second.

    Ranks of a test may share processors, unlike ranks of a cluster. So the cost of a peer is measured as processor
    time, and the latency with two ranks only.

    Raises
    ------
    ConfigError
        If there are less than three ranks, with which the cost of a peer cannot be separated from the latency.
    """
    if mesh.ranks < _FEWEST:
        raise ConfigError(
            f"to measure a network, at least {_FEWEST} ranks are needed; got {mesh.ranks}: start more by torchrun"
        )
    hosts, far = mesh.ranks // local, mesh.ranks // 2
    # All ranks must create a group, although only two use this one.
    pair = dist.new_group([0, far])
    many, many_work = collective_times(mesh.rows, _SMALL, _SMALL_ROUNDS)
    full, _ = collective_times(mesh.rows, _LARGE, _LARGE_ROUNDS)
    two, two_work = 0.0, 0.0
    if mesh.rank in (0, far):
        two, two_work = collective_times(Channel(int(mesh.rank > 0), 2, pair), _SMALL, _SMALL_ROUNDS)
    two, two_work = map(max, zip(*mesh.rows.gather_floats([two, two_work]), strict=True))
    # Processor time, because ranks on this machine may wait for processors, unlike ranks of a cluster.
    peer = max((many_work - two_work) / (mesh.ranks - 2), 0.0)
    sharing = 1 if hosts == 1 else local
    passing = _LARGE * sharing * (mesh.ranks - sharing)
    # A large exchange takes longer only because of its bytes.
    beta = max(full - many, 0.0) / passing
    return NetworkFigures(alpha=max(two - peer, 0.0), alpha_peer=peer, beta=beta, sharing=sharing)


def network_at_hand(mesh: Mesh) -> NetworkFigures | None:
    """Measure the network of the mesh by `measure_network`; return None if it has too few ranks."""
    return measure_network(mesh, mesh.ranks // mesh.hosts) if mesh.ranks >= _FEWEST else None


def collective_times(channel: Channel, size: int, rounds: int) -> tuple[float, float]:
    """Return the seconds and the processor seconds of an exchange of `size` bytes with each other rank.

    Each rank takes the lower quartile of its times over `rounds` rounds, so that late ranks do not count. The results
    are the maxima over all ranks.
    """
    message, even = torch.zeros(size * channel.ranks, dtype=torch.uint8), [size] * channel.ranks
    walls, works = [], []
    for _ in range(rounds):
        # All ranks start together. Otherwise waiting for a late rank would count as time of the network.
        channel.agree(None)
        wall, work = time.perf_counter(), time.process_time()
        channel.exchange(message, even, even)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    mine = [sorted(seconds)[rounds // 4] for seconds in (walls, works)]
    wall, work = map(max, zip(*channel.gather_floats(mine), strict=True))
    return wall, work
