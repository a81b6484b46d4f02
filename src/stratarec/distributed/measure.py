"""What a collective costs on the ranks at hand: a time that is its own, more for each peer, and more for each byte.

``alpha + alpha_peer * peers + beta * bytes``: latency, what one more peer costs a processor, and the rate of a link.
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
    """What an exchange among ranks takes, in seconds."""

    alpha: float
    """Whatever it carries."""
    alpha_peer: float
    """More for each other rank."""

    def __post_init__(self) -> None:
        check_finite(self, "collective.")
        if min(self.alpha, self.alpha_peer) < 0:
            raise ConfigError(f"a collective takes {self.alpha:g} + {self.alpha_peer:g} s a peer, expected 0 or more")

    def latency(self, peers: int) -> float:
        """With so many other ranks, and nothing to carry."""
        return self.alpha + self.alpha_peer * peers if peers else 0.0


@dataclass(frozen=True, kw_only=True)
class NetworkFigures(Collective):
    """What was measured of a network."""

    beta: float
    """Seconds a byte that passes a link."""
    sharing: int
    """Ranks that share a link: those of a host, or one where there is one host."""

    def transfer(self, sent: float, ranks: int) -> float:
        """Seconds in which each of so many ranks sends `sent` bytes evenly to all, itself included."""
        return self.beta * self.sharing * sent * (ranks - self.sharing) / ranks


def measure_network(mesh: Mesh, local: int) -> NetworkFigures:
    """Measured by all ranks together, `local` of them on each host; takes about a second.

    Ranks here may share processors, which those of a cluster do not: what one more peer costs is taken from the
    processor time of a collective, and latency from two ranks alone.

    Raises
    ------
    ConfigError
        For less than three ranks: one cannot tell a peer's cost from a collective's.
    """
    if mesh.ranks < _FEWEST:
        raise ConfigError(
            f"a network is measured by at least {_FEWEST} ranks, not {mesh.ranks}: start more by torchrun"
        )
    hosts, far = mesh.ranks // local, mesh.ranks // 2
    # Made by all ranks, as every group is, though two use it.
    pair = dist.new_group([0, far])
    many, many_work = collective_times(mesh.rows, _SMALL, _SMALL_ROUNDS)
    full, _ = collective_times(mesh.rows, _LARGE, _LARGE_ROUNDS)
    two, two_work = 0.0, 0.0
    if mesh.rank in (0, far):
        two, two_work = collective_times(Channel(int(mesh.rank > 0), 2, pair), _SMALL, _SMALL_ROUNDS)
    two, two_work = (max(found) for found in zip(*mesh.rows.figures([two, two_work]), strict=True))
    # Processor time: ranks of this machine wait for its processors, which those of a cluster need not.
    peer = max((many_work - two_work) / (mesh.ranks - 2), 0.0)
    sharing = 1 if hosts == 1 else local
    passing = _LARGE * sharing * (mesh.ranks - sharing)
    # What a large exchange takes more than a small one is its bytes.
    beta = max(full - many, 0.0) / passing
    return NetworkFigures(alpha=max(two - peer, 0.0), alpha_peer=peer, beta=beta, sharing=sharing)


def network_at_hand(mesh: Mesh) -> NetworkFigures | None:
    """What `measure_network` finds; None where there are too few ranks to tell."""
    return measure_network(mesh, mesh.ranks // mesh.hosts) if mesh.ranks >= _FEWEST else None


def collective_times(channel: Channel, size: int, rounds: int) -> tuple[float, float]:
    """Seconds of one exchange of so many bytes with each other rank, and of a rank's processor in it; lower quartiles,
    of the slowest rank: what the exchange takes, not who came late."""
    given, even = torch.zeros(size * channel.ranks, dtype=torch.uint8), [size] * channel.ranks
    walls, works = [], []
    for _ in range(rounds):
        # All begin together: who came late would be taken for the network.
        channel.agree(None)
        wall, work = time.perf_counter(), time.process_time()
        channel.exchange(given, even, even)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    mine = [sorted(found)[rounds // 4] for found in (walls, works)]
    wall, work = (max(found) for found in zip(*channel.figures(mine), strict=True))
    return wall, work
