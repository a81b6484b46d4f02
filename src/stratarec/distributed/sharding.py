"""Placement of tables and rows on ranks, used by the exchange, initial values, checkpoints and the
planner.

A table is on one rank, or its rows are divided among several consecutive ranks: row r is on rank
``first + r % ranks``, as row ``r // ranks`` there. As ids are ranked by frequency, frequent rows
are spread evenly, and the rows of each rank are again ranked by frequency, on which its caches and
stores rely.

`plan_sharding` balances the work, memory and traffic of ranks, because a step waits for the slowest
rank. Tables are assigned in descending order of load, each to the rank with the least load (LPT,
within 4/3 of the optimum for complete tables). Then single tables are moved as long as the slowest
rank gets faster. The rows of a table are divided among ranks if the table exceeds a rank's fair
share or its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.distributed.config import ShardingKind
from stratarec.embedding.config import EmbeddingBagConfig, RowPart, check_tables
from stratarec.errors import ConfigError

Rows = NDArray[np.int64]
Travel = Literal["pooled", "rows"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Placement of one table: its ranks, and how its lookups are exchanged.

    Parameters
    ----------
    first, ranks : int
        First rank with rows of the table, and number of ranks that share it.
    travel : str
        ``pooled``: complete bags are sent to the owner, which pools them. ``rows``: the owner sends
        each distinct row of a rank's batch once to that rank, which pools; required if rows of the
        table are on several ranks.
    """

    first: int
    ranks: int = 1
    travel: Travel = "pooled"

    def __post_init__(self) -> None:
        if self.first < 0 or self.ranks < 1:
            raise ConfigError(
                f"a table has {self.ranks} ranks from rank {self.first}, expected at least 1 from 0"
            )
        if self.ranks > 1 and self.travel != "rows":
            raise ConfigError(
                "a table of several ranks has no single owner that could pool it; set travel to rows"
            )


def rows_key(table: str) -> str:
    """Return the key of requests for distinct rows of a table. It begins with ``@``, unlike any
    feature's name.
    """
    return f"@rows:{table}"


@dataclass(frozen=True, kw_only=True)
class IdStream:
    """Ids that are sent to a rank."""

    key: str
    """Name of the feature; `rows_key` of the table for distinct rows."""
    table: EmbeddingBagConfig
    """Complete table that the ids are rows of."""
    kind: Literal["pooled", "sequence", "rows"]
    """Ids of a pooled feature, ids of a sequence feature, or distinct rows of the table."""


class Sharding:
    """Placement of tables on ranks.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Complete tables.
    places : mapping of str to Place
        Placement of each table, by name.
    ranks : int
        Number of all ranks.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], places: Mapping[str, Place], ranks: int
    ) -> None:
        self.tables = tuple(tables)
        self.ranks = ranks
        check_tables(self.tables)
        names = [table.name for table in self.tables]
        wrong = sorted(set(names) ^ set(places))
        if wrong:
            raise ConfigError(
                f"table {wrong[0]!r} has a place but does not exist, or exists and has no place"
            )
        self.places = {name: places[name] for name in names}
        for name, place in self.places.items():
            if place.first + place.ranks > ranks:
                raise ConfigError(
                    f"table {name!r} is placed on ranks {place.first} to {place.first + place.ranks - 1}, "
                    f"expected 0 to {ranks - 1}; plan for {ranks} ranks"
                )

    def owner(self, table: str, rows: Rows) -> tuple[Rows, Rows]:
        """Return the rank of each row of a table, and the row's number on that rank; both are
        ``[n]`` int64.

        Parameters
        ----------
        table : str
            Name of the table.
        rows : ndarray
            ``[n]`` int64 rows of the complete table.
        """
        place = self.places[table]
        return place.first + rows % place.ranks, rows // place.ranks

    def rows_on(self, table: EmbeddingBagConfig, rank: int) -> int:
        """Return the number of rows of `table` on rank `rank`; 0 if the rank has none."""
        place = self.places[table.name]
        behind = rank - place.first
        if not 0 <= behind < place.ranks:
            return 0
        return max(-(-(table.num_embeddings - behind) // place.ranks), 0)

    def configs(self, rank: int) -> list[EmbeddingBagConfig]:
        """Return the configurations of tables with rows on rank `rank`, in the order of tables."""
        configs = []
        for table in self.tables:
            rows = self.rows_on(table, rank)
            if rows:
                configs.append(self._config(table, rank, rows))
        return configs

    def _config(self, table: EmbeddingBagConfig, rank: int, rows: int) -> EmbeddingBagConfig:
        place = self.places[table.name]
        if place.travel == "rows":
            table = replace(table, feature_names=(), sequence_features=(rows_key(table.name),))
        if place.ranks == 1:
            return table
        part = RowPart(first=rank - place.first, stride=place.ranks, rows=table.num_embeddings)
        return replace(table, num_embeddings=rows, part=part)

    def streams(self, rank: int) -> list[IdStream]:
        """Return the streams of ids to rank `rank`, in the order of messages."""
        streams = []
        for table in self.tables:
            if not self.rows_on(table, rank):
                continue
            if self.places[table.name].travel == "rows":
                streams.append(IdStream(key=rows_key(table.name), table=table, kind="rows"))
                continue
            streams += [IdStream(key=key, table=table, kind="pooled") for key in table.feature_names]
            streams += [IdStream(key=key, table=table, kind="sequence") for key in table.sequence_features]
        return streams

    def within(self, first: int, ranks: int) -> Sharding:
        """Return the placement of the tables on ranks `first` to ``first + ranks - 1``; these
        become ranks 0, 1, ...

        Raises
        ------
        ConfigError
            If one of these tables also has rows on other ranks.
        """
        places = {}
        for name, place in self.places.items():
            inside = [
                first <= rank < first + ranks for rank in (place.first, place.first + place.ranks - 1)
            ]
            # The exchange by towers sends no rows between hosts.
            if any(inside) and not all(inside):
                raise ConfigError(
                    f"table {name!r} is on ranks {place.first} to {place.first + place.ranks - 1}, "
                    f"expected ranks of one host, such as ranks {first} to {first + ranks - 1}"
                )
            if all(inside):
                places[name] = replace(place, first=place.first - first)
        return Sharding([table for table in self.tables if table.name in places], places, ranks)


# Number of accesses of a row in a step: a read in pooling, and a read and a write in the update.
_TOUCHES = 3
# Cost of a byte between ranks in bytes of local memory: 1 GB/s between ranks, 10 GB/s for random
# rows.
_WIRE_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """Load of one table in a batch of all ranks.

    Parameters
    ----------
    name : str
        Name of the table.
    width : int
        Floats per row.
    bytes : int
        Memory of all rows with their metadata.
    lookups : float
        Ids in a batch of all ranks.
    bags : float
        Bags in a batch of all ranks; for lookups without pooling, ids.
    distinct : float
        Distinct rows in the batch of one rank.
    """

    name: str
    width: int
    bytes: int
    lookups: float
    bags: float
    distinct: float


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Places of all tables, and the expected load of each rank.

    Parameters
    ----------
    places : mapping of str to Place
        Placement of each table, by name.
    bytes : tuple of int
        Bytes of tables, by rank.
    work : tuple of float
        Bytes of rows that are accessed in a step, by rank.
    sent : tuple of float
        Bytes that a rank sends to others in a step: requested rows, and gradients to owners.
    """

    places: Mapping[str, Place]
    bytes: tuple[int, ...]
    work: tuple[float, ...]
    sent: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank divided by the mean cost."""
        costs = self.costs
        return max(costs) * len(costs) / max(sum(costs), 1e-9)

    @property
    def costs(self) -> list[float]:
        """Cost of each rank: its work and traffic as one number."""
        return [work + _WIRE_FACTOR * sent for work, sent in zip(self.work, self.sent, strict=True)]

    @property
    def critical(self) -> int:
        """The slowest rank, for which every step waits."""
        return max(range(len(self.costs)), key=lambda rank: (self.costs[rank], -rank))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "places": {name: asdict(place) for name, place in self.places.items()},
            "bytes": list(self.bytes),
            "work_bytes_a_step": list(self.work),
            "sent_bytes_a_step": list(self.sent),
            "imbalance": self.imbalance,
            "critical_rank": self.critical,
        }

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        sharded = [name for name, place in self.places.items() if place.ranks > 1]
        rows = [name for name, place in self.places.items() if place.travel == "rows"]
        ranks = [
            f"rank {rank}: "
            f"{sum(place.first == rank and place.ranks == 1 for place in self.places.values())} whole "
            f"tables, {format_bytes(self.bytes[rank])}, {format_bytes(round(self.work[rank]))} of rows "
            f"accessed and {format_bytes(round(self.sent[rank]))} sent a step"
            for rank in range(len(self.bytes))
        ]
        return [
            *ranks,
            f"tables sharded by rows: {', '.join(sharded) or 'none'}; tables that send distinct rows: "
            f"{', '.join(rows) or 'none'}; the others send pooled rows",
            f"imbalance {self.imbalance:.2f}; every step waits for rank {self.critical}",
        ]


def plan_sharding(
    loads: Sequence[TableLoad], ranks: int, kind: ShardingKind = "auto", budget_bytes: int | None = None
) -> ShardingPlan:
    """Choose the ranks of each table.

    Parameters
    ----------
    loads : sequence of TableLoad
        Load of each table.
    ranks : int
        Number of ranks.
    kind : str
        ``row`` divides the rows of every table among all ranks; ``table`` keeps every table on one
        rank; ``auto`` divides only tables that are too large or too costly for one rank.
    budget_bytes : int
        Memory for tables on each rank; None for no limit.

    Raises
    ------
    ConfigError
        If the tables do not fit in the memory of the ranks.
    """
    share = sum(_work(load) for load in loads) / ranks
    limit = float("inf") if budget_bytes is None else budget_bytes
    places: dict[str, Place] = {}
    unsplit = []
    for load in loads:
        alone = kind == "auto" and (_work(load) > 1.25 * share or load.bytes > limit)
        if ranks > 1 and (kind == "row" or alone):
            places[load.name] = Place(first=0, ranks=ranks, travel="rows")
        else:
            unsplit.append(load)
    assigned = _Ranks(loads, places, ranks, limit)
    for load in sorted(unsplit, key=lambda load: (-_cost(load, ranks), load.name)):
        assigned.put(load, assigned.lowest(load))
    assigned.refine(unsplit)
    if budget_bytes is not None:
        _check_budget(assigned.plan(), budget_bytes)
    return assigned.plan()


def join_plans(parts: Sequence[ShardingPlan], order: Sequence[str]) -> ShardingPlan:
    """Combine the plans of single hosts into one plan for all ranks.

    Parameters
    ----------
    parts : sequence of ShardingPlan
        Plan of the tables of each host, in the order of hosts.
    order : sequence of str
        Names of all tables in the order of the result.
    """
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


def place_whole(load: TableLoad, ranks: int) -> Place:
    """Return the placement of a complete table on rank 0, with the exchange that sends fewer bytes.

    Parameters
    ----------
    load : TableLoad
        Load of the table.
    ranks : int
        Number of ranks that look it up.
    """
    return Place(first=0, travel="pooled" if load.bags <= load.distinct * ranks else "rows")


def rows_sent(loads: Sequence[TableLoad], ranks: int) -> float:
    """Return how many rows owners send for a batch of all `ranks` ranks, given the load of each
    table.

    For each table this is the number of bags, or of the distinct rows of all ranks if that is
    smaller.
    """
    return sum(min(load.bags, load.distinct * ranks) for load in loads)


def _work(load: TableLoad) -> float:
    return load.lookups * load.width * 4 * _TOUCHES


def _rows_sent(load: TableLoad, place: Place, ranks: int) -> float:
    """Return the bytes of rows that the owners of a table send in a step; gradients need the same
    number of bytes.
    """
    rows = load.bags if place.travel == "pooled" else load.distinct * ranks
    return rows * load.width * 4 * (ranks - 1) / ranks


def _cost(load: TableLoad, ranks: int) -> float:
    return _work(load) + _WIRE_FACTOR * _rows_sent(load, place_whole(load, ranks), ranks)


class _Ranks:
    """Tables assigned to ranks so far."""

    def __init__(
        self, loads: Sequence[TableLoad], places: dict[str, Place], ranks: int, limit: float
    ) -> None:
        self._loads = loads
        self._places = places
        self._ranks = ranks
        self._limit = limit
        self._costs = [0.0] * ranks
        self._bytes = [0.0] * ranks
        for load in loads:
            if load.name in places:
                cost = _work(load) + _WIRE_FACTOR * _rows_sent(load, places[load.name], ranks)
                for rank in range(ranks):
                    self._costs[rank] += cost / ranks
                    self._bytes[rank] += load.bytes / ranks

    def put(self, load: TableLoad, rank: int) -> None:
        place = place_whole(load, self._ranks)
        self._places[load.name] = Place(first=rank, travel=place.travel)
        self._costs[rank] += _cost(load, self._ranks)
        self._bytes[rank] += load.bytes

    def lowest(self, load: TableLoad) -> int:
        """Return the rank with the least load among the ranks that have enough memory for the
        table.

        If no rank has enough, return the rank with the most free memory.
        """
        # A rank without enough memory gets the table only if no other rank has enough.
        room = [rank for rank in range(self._ranks) if self._bytes[rank] + load.bytes <= self._limit]
        if not room:
            return min(range(self._ranks), key=lambda rank: (self._bytes[rank], rank))
        return min(room, key=lambda rank: (self._costs[rank], self._bytes[rank], rank))

    def refine(self, unsplit: Sequence[TableLoad]) -> None:
        """Move single tables away from the slowest rank while both ranks get faster than it was."""
        # Every move makes the slowest rank faster, so the loop terminates. The limit bounds its
        # time if many tables are equal.
        for _ in range(4 * len(unsplit)):
            slowest = max(range(self._ranks), key=lambda rank: self._costs[rank])
            moves = [
                (max(self._costs[slowest] - cost, self._costs[rank] + cost), load, rank)
                for load in unsplit
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
        work, sent, memory = [0.0] * self._ranks, [0.0] * self._ranks, [0.0] * self._ranks
        for load in self._loads:
            place = order[load.name]
            rows = _rows_sent(load, place, self._ranks)
            for rank in range(place.first, place.first + place.ranks):
                work[rank] += _work(load) / place.ranks
                memory[rank] += load.bytes / place.ranks
                sent[rank] += rows / place.ranks
            for rank in range(self._ranks):  # every rank sends gradients to the owner
                sent[rank] += rows / self._ranks
        return ShardingPlan(
            places=order, bytes=tuple(round(size) for size in memory), work=tuple(work), sent=tuple(sent)
        )


def _check_budget(plan: ShardingPlan, budget_bytes: int) -> None:
    fullest = max(range(len(plan.bytes)), key=lambda rank: plan.bytes[rank])
    if plan.bytes[fullest] > budget_bytes:
        raise ConfigError(
            f"rank {fullest} needs {plan.bytes[fullest]} bytes ({format_bytes(plan.bytes[fullest])}) for "
            "tables, and "
            f"memory.dram leaves each rank {budget_bytes} ({format_bytes(budget_bytes)}): raise "
            "memory.dram, set distributed.sharding to row, or start more ranks"
        )
