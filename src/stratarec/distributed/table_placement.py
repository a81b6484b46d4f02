"""Chooses a place for every table: work, memory and traffic of the ranks as even as tables allow.

A step waits for its slowest rank, so what is minimised is the most that any rank has to do. Tables are dealt out
largest first to the rank that ends lowest (LPT, within 4/3 of the best where tables are whole), then moved one by one
as long as the slowest rank gets faster. A table that alone is more than a rank's fair share, or more than its memory,
is shared row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stratarec.config.units import readable
from stratarec.distributed.config import ShardingKind
from stratarec.distributed.sharding import Place
from stratarec.errors import ConfigError

# What a step does with a row, in bytes of memory touched: read and written by the update, read by the pooling.
_TOUCHES = 3
# A byte between ranks is worth so many bytes of a rank's own memory: 1 GB/s between them, 10 GB/s of random rows.
_WIRE_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """What a batch of all ranks asks of one table."""

    name: str
    width: int
    bytes: int
    """Memory of all its rows with what describes them."""
    lookups: float
    """Ids of a batch of all ranks."""
    bags: float
    """Pooled rows that such a batch asks for; ids, where it is looked up without pooling."""
    distinct: float
    """Distinct rows of the batch of one rank."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Places of all tables, and what each rank is expected to do."""

    places: Mapping[str, Place]
    bytes: tuple[int, ...]
    """Memory, by rank."""
    work: tuple[float, ...]
    """Bytes of rows touched a step, by rank."""
    sent: tuple[float, ...]
    """Bytes a step that a rank sends to others: rows to those who asked, gradients to the owners of rows."""

    @property
    def imbalance(self) -> float:
        """The slowest rank's cost over the mean."""
        costs = self.costs
        return max(costs) * len(costs) / max(sum(costs), 1e-9)

    @property
    def costs(self) -> list[float]:
        """Work and traffic of each rank as one number."""
        return [work + _WIRE_FACTOR * sent for work, sent in zip(self.work, self.sent, strict=True)]

    @property
    def critical(self) -> int:
        """The slowest rank, which every step waits for."""
        return max(range(len(self.costs)), key=lambda rank: (self.costs[rank], -rank))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "places": {name: asdict(place) for name, place in self.places.items()},
            "bytes": list(self.bytes),
            "work_bytes_a_step": list(self.work),
            "sent_bytes_a_step": list(self.sent),
            "imbalance": self.imbalance,
            "critical_rank": self.critical,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        shared = [name for name, place in self.places.items() if place.ranks > 1]
        rows = [name for name, place in self.places.items() if place.travel == "rows"]
        ranks = [
            f"rank {rank}: {sum(place.first == rank and place.ranks == 1 for place in self.places.values())} whole "
            f"tables, {readable(self.bytes[rank])}, {readable(round(self.work[rank]))} of rows touched and "
            f"{readable(round(self.sent[rank]))} sent a step"
            for rank in range(len(self.bytes))
        ]
        return [
            *ranks,
            f"shared row by row: {', '.join(shared) or 'none'}; distinct rows travel of {', '.join(rows) or 'none'}, "
            "pooled rows of the others",
            f"imbalance {self.imbalance:.2f}; every step waits for rank {self.critical}",
        ]


def plan_sharding(
    loads: Sequence[TableLoad], ranks: int, kind: ShardingKind = "auto", budget_bytes: int | None = None
) -> ShardingPlan:
    """Places for tables.

    Parameters
    ----------
    budget_bytes : int
        Memory for tables on each rank; None for no limit.

    Raises
    ------
    ConfigError
        When a rank has not enough memory; names it, and what would do.
    """
    share = sum(_work(load) for load in loads) / ranks
    limit = float("inf") if budget_bytes is None else budget_bytes
    places: dict[str, Place] = {}
    whole = []
    for load in loads:
        alone = kind == "auto" and (_work(load) > 1.25 * share or load.bytes > limit)
        if ranks > 1 and (kind == "row" or alone):
            places[load.name] = Place(first=0, ranks=ranks, travel="rows")
        else:
            whole.append(load)
    found = _Ranks(loads, places, ranks, limit)
    for load in sorted(whole, key=lambda load: (-_cost(load, ranks), load.name)):
        found.put(load, found.lowest(load))
    found.refine(whole)
    if budget_bytes is not None:
        _check_budget(found.plan(), budget_bytes)
    return found.plan()


def beside(parts: Sequence[ShardingPlan], order: Sequence[str]) -> ShardingPlan:
    """Plans of one host each as one plan of all their ranks, host after host; tables come in `order`."""
    places: dict[str, Place] = {}
    first = 0
    for part in parts:
        places |= {name: replace(place, first=place.first + first) for name, place in part.places.items()}
        first += len(part.bytes)
    return ShardingPlan(
        places={name: places[name] for name in order},
        bytes=tuple(size for part in parts for size in part.bytes),
        work=tuple(size for part in parts for size in part.work),
        sent=tuple(size for part in parts for size in part.sent),
    )


def travel(load: TableLoad, ranks: int) -> Place:
    """What travels of a whole table: whichever is fewer bytes, pooled rows or distinct ones; on rank 0 for now."""
    return Place(first=0, travel="pooled" if load.bags <= load.distinct * ranks else "rows")


def rows_sent(loads: Sequence[TableLoad], ranks: int) -> float:
    """Rows that owners send to all ranks together for a batch: of each table bags, or distinct ones where fewer."""
    return sum(min(load.bags, load.distinct * ranks) for load in loads)


def _work(load: TableLoad) -> float:
    return load.lookups * load.width * 4 * _TOUCHES


def _rows_sent(load: TableLoad, place: Place, ranks: int) -> float:
    """Bytes of rows a step from all owners of a table to all ranks; gradients come back by as many."""
    rows = load.bags if place.travel == "pooled" else load.distinct * ranks
    return rows * load.width * 4 * (ranks - 1) / ranks


def _cost(load: TableLoad, ranks: int) -> float:
    return _work(load) + _WIRE_FACTOR * _rows_sent(load, travel(load, ranks), ranks)


class _Ranks:
    """What ranks have been given so far."""

    def __init__(self, loads: Sequence[TableLoad], places: dict[str, Place], ranks: int, limit: float) -> None:
        self._loads, self._places, self._ranks, self._limit = loads, places, ranks, limit
        self._costs, self._bytes = [0.0] * ranks, [0.0] * ranks
        for load in loads:
            if load.name in places:
                cost = _work(load) + _WIRE_FACTOR * _rows_sent(load, places[load.name], ranks)
                for rank in range(ranks):
                    self._costs[rank] += cost / ranks
                    self._bytes[rank] += load.bytes / ranks

    def put(self, load: TableLoad, rank: int) -> None:
        place = travel(load, self._ranks)
        self._places[load.name] = Place(first=rank, travel=place.travel)
        self._costs[rank] += _cost(load, self._ranks)
        self._bytes[rank] += load.bytes

    def lowest(self, load: TableLoad) -> int:
        """The rank that ends lowest with the table, among those with room for it; else the one with most room."""
        # A rank that is full takes none while another has room, however little that one does.
        room = [rank for rank in range(self._ranks) if self._bytes[rank] + load.bytes <= self._limit]
        if not room:
            return min(range(self._ranks), key=lambda rank: (self._bytes[rank], rank))
        return min(room, key=lambda rank: (self._costs[rank], self._bytes[rank], rank))

    def refine(self, whole: Sequence[TableLoad]) -> None:
        """Move single tables from the slowest rank as long as that makes the slowest of the two faster."""
        # Every move makes the slowest faster, so this ends anyway; the bound is for many equal tables.
        for _ in range(4 * len(whole)):
            slowest = max(range(self._ranks), key=lambda rank: self._costs[rank])
            moves = [
                (max(self._costs[slowest] - cost, self._costs[rank] + cost), load, rank)
                for load in whole
                if self._places[load.name].first == slowest
                for cost in (_cost(load, self._ranks),)
                for rank in range(self._ranks)
                if rank != slowest and self._bytes[rank] + load.bytes <= self._limit
            ]
            best = min(moves, key=lambda move: (move[0], move[1].name, move[2]), default=None)
            if best is None or best[0] >= self._costs[slowest] * (1 - 1e-9):
                return
            _, load, rank = best
            self._costs[slowest] -= _cost(load, self._ranks)
            self._bytes[slowest] -= load.bytes
            self.put(load, rank)

    def plan(self) -> ShardingPlan:
        order = {load.name: self._places[load.name] for load in self._loads}
        work, sent, held = [0.0] * self._ranks, [0.0] * self._ranks, [0.0] * self._ranks
        for load in self._loads:
            place = order[load.name]
            rows = _rows_sent(load, place, self._ranks)
            for rank in range(place.first, place.first + place.ranks):
                work[rank] += _work(load) / place.ranks
                held[rank] += load.bytes / place.ranks
                sent[rank] += rows / place.ranks
            for rank in range(self._ranks):  # every rank has gradients for the owner
                sent[rank] += rows / self._ranks
        return ShardingPlan(
            places=order, bytes=tuple(round(each) for each in held), work=tuple(work), sent=tuple(sent)
        )  # fmt: skip


def _check_budget(plan: ShardingPlan, budget_bytes: int) -> None:
    fullest = max(range(len(plan.bytes)), key=lambda rank: plan.bytes[rank])
    if plan.bytes[fullest] > budget_bytes:
        raise ConfigError(
            f"rank {fullest} needs {plan.bytes[fullest]} bytes ({readable(plan.bytes[fullest])}) for tables, and "
            f"memory.dram leaves each rank {budget_bytes} ({readable(budget_bytes)}): raise memory.dram, set "
            "distributed.sharding to row, or start more ranks"
        )
