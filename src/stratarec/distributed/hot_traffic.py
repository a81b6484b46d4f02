"""What copies of hot rows save: an alpha-beta model of the flat exchange of distinct rows, with copies and without.

T hosts of L ranks, G = T L. A row that a rank's batch looks up k times on average is looked up by one of n ranks with a
chance of q(n) = 1 - exp(-n k). With b bytes of it on the wire and 4 D as float32, a step sends, for each such row ::

               a host to the others                       a rank to those of its host
    flat       L q(1) (2 b + 4) (T - 1) / T               q(1) (2 b + 4) (L - 1) / G
    a copy     q(L) b (T - 1) + (T - 1) / 8               (q(1) + q(G)) 4 D (L - 1) / L + (L - 1) / (4 L)

The row and its gradient travel, and its id: a copy sends the gradient alone, once a host and not once a rank, and a bit
in place of the id. So between two hosts it saves up to 1 - 1 / L of the bytes of rows that all ranks look up, nothing
where a host has one rank, and it costs bytes where L is less than half of T. Every rank adds and updates what others
look up, too: memory that is touched. Where there are hosts of several ranks a step has one more collective.

Assumed, beyond what `simulate` does: lookups are independent, and every rank's follow the same law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.distributed.machines import Calibration, Cluster, Workload
from stratarec.distributed.simulate import StepTime, reduction_seconds
from stratarec.distributed.wire import Wire, WireKind

Floats = NDArray[np.float64]
_ID_BYTES = 4
# Passes over a row: into the buffer, pooled, summed, packed and unpacked, read and written by the update.
_TOUCHES = 8
# Passes over a copy's gradient: picked, added for its host, encoded, added for all, told, put in order, updated.
_COPY_TOUCHES = 8


class Rates(NamedTuple):
    """Bytes a second."""

    inside: float
    """From a rank to others of its host."""
    between: float
    """From a host to others."""
    rows: float
    """Of a rank's memory, random rows."""


class Flows(NamedTuple):
    """Bytes a step: floats, or arrays with an entry a row."""

    inside: Floats
    """From a rank to others of its host."""
    between: Floats
    """From a host to others."""
    touched: Floats
    """Of a rank's own memory."""

    def sum(self) -> Flows:
        """Of all rows together."""
        return Flows(*(np.asarray(part.sum()) for part in self))

    def seconds(self, rates: Rates) -> Floats:
        """What they take."""
        found: Floats = self.inside / rates.inside + self.between / rates.between + self.touched / rates.rows
        return found


@dataclass(frozen=True, kw_only=True)
class RowWires:
    """Formats of rows and of gradients between ranks."""

    rows: WireKind = "fp32"
    gradients: WireKind = "fp32"

    def bytes(self, width: int) -> tuple[int, int]:
        """Of a row and of a gradient."""
        return Wire(self.rows, 0, 0).row_bytes(width), Wire(self.gradients, 0, 0).row_bytes(width)


def flat_flows(lookups: Floats, width: int, hosts: int, ranks: int, wires: RowWires) -> Flows:
    """Of rows that lie with their owners.

    Parameters
    ----------
    lookups : ndarray
        ``[R]`` of each row in the batch of one rank.
    hosts, ranks : int
        T and L.
    """
    everyone = hosts * ranks
    asked = -np.expm1(-lookups)
    each = asked * (sum(wires.bytes(width)) + _ID_BYTES)
    return Flows(
        inside=each * (ranks - 1) / everyone, between=each * ranks * (hosts - 1) / hosts,
        touched=asked * 4 * width * _TOUCHES,
    )  # fmt: skip


def copy_flows(lookups: Floats, width: int, hosts: int, ranks: int, wires: RowWires) -> Flows:
    """Of rows that every rank has; parameters as those of `flat_flows`."""
    asked, by_host, by_all = (-np.expm1(-many * lookups) for many in (1, ranks, hosts * ranks))
    _, gradient = wires.bytes(width)
    return Flows(
        inside=(asked + by_all) * 4 * width * (ranks - 1) / ranks + (ranks - 1) / (4 * ranks),
        between=(by_host * gradient + 1 / 8) * (hosts - 1),
        touched=(asked * _TOUCHES / 2 + by_all * _COPY_TOUCHES) * 4 * width,
    )


def more_collectives(hosts: int, ranks: int) -> int:
    """Of a step with copies, beyond those of the flat exchange, on which what else they tell rides."""
    return int(ranks > 1 and hosts > 1)


def flat_step(
    cluster: Cluster, workload: Workload, calibration: Calibration, flows: Sequence[Flows], *, copies: bool
) -> StepTime:  # fmt: skip
    """A step by the flat exchange of distinct rows, given what all its rows take."""
    inside, between, touched = (float(sum(part.sum() for part in parts)) for parts in zip(*flows, strict=True))
    latency = (calibration.between if cluster.hosts > 1 else calibration.inside).latency(cluster.all_ranks - 1)
    collectives = 2 + copies * more_collectives(cluster.hosts, cluster.ranks)
    return StepTime(
        compute=calibration.fixed_seconds + workload.batch * workload.flops / calibration.flops_per_second
        + touched / calibration.row_bytes_per_second,
        reduction=reduction_seconds(cluster, workload, calibration),
        inside=inside / cluster.inside_bytes_per_second,
        between=latency * collectives + between / cluster.between_bytes_per_second,
    )  # fmt: skip
