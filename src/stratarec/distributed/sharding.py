"""Which rank holds which row: one formula, which exchange, initial values, checkpoints and planning all ask.

A table lies on one rank, or row by row on several that follow one another: row r is on rank ``first + r % ranks``, as
row ``r // ranks`` there. Ids are ranked by frequency, so this deals popular rows out evenly, and each rank's rows are
ranked by frequency again, which its caches and stores rely on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.config import EmbeddingBagConfig, RowPart, check_tables
from stratarec.errors import ConfigError

Rows = NDArray[np.int64]
Travel = Literal["pooled", "rows"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one table is, and what of it travels."""

    first: int
    """The first rank that holds rows of it."""
    ranks: int = 1
    """How many ranks share its rows."""
    travel: Travel = "pooled"
    """``pooled``: whole bags go to the owner, who pools them. ``rows``: each distinct row of a rank's batch comes to
    that rank once and is pooled there; always so where several ranks share the table."""

    def __post_init__(self) -> None:
        if self.first < 0 or self.ranks < 1:
            raise ConfigError(f"a table on {self.ranks} ranks from rank {self.first} on, expected at least one from 0")
        if self.ranks > 1 and self.travel != "rows":
            raise ConfigError("a table of several ranks cannot pool at its owner, there is more than one: travel: rows")


def rows_key(table: str) -> str:
    """The feature by which distinct rows of a table are asked for; ``@`` begins no name of a user's."""
    return f"@rows:{table}"


@dataclass(frozen=True, kw_only=True)
class IdStream:
    """One kind of ids that a rank is asked for: of a pooled feature, of a sequence, or distinct rows of a table."""

    key: str
    table: EmbeddingBagConfig
    """The whole table."""
    kind: Literal["pooled", "sequence", "rows"]


class Sharding:
    """Tables over ranks.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Whole tables.
    places : mapping of str to Place
        One for each table.
    ranks : int
        N.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], places: Mapping[str, Place], ranks: int) -> None:
        self.tables, self.ranks = tuple(tables), ranks
        check_tables(self.tables)
        names = [table.name for table in self.tables]
        wrong = sorted(set(names) ^ set(places))
        if wrong:
            raise ConfigError(f"table {wrong[0]!r} has a place and is no table, or is one and has no place")
        self.places = {name: places[name] for name in names}
        for name, place in self.places.items():
            if place.first + place.ranks > ranks:
                raise ConfigError(
                    f"table {name!r} is placed on ranks {place.first} to {place.first + place.ranks - 1}, expected 0 "
                    f"to {ranks - 1}; plan for {ranks} ranks"
                )

    def owner(self, table: str, rows: Rows) -> tuple[Rows, Rows]:
        """The rank that holds each row of a table, and its number there."""
        place = self.places[table]
        return place.first + rows % place.ranks, rows // place.ranks

    def whole(self, table: str, rank: int, rows: Rows) -> Rows:
        """Rows of the table by their numbers on a rank: the inverse of `owner`."""
        place = self.places[table]
        return rows * place.ranks + (rank - place.first)

    def held(self, table: EmbeddingBagConfig, rank: int) -> int:
        """How many rows of a table a rank holds."""
        place = self.places[table.name]
        behind = rank - place.first
        if not 0 <= behind < place.ranks:
            return 0
        return max(-(-(table.num_embeddings - behind) // place.ranks), 0)

    def configs(self, rank: int) -> list[EmbeddingBagConfig]:
        """The tables of a rank, as its own collection has them: in the order of all tables."""
        found = []
        for table in self.tables:
            rows = self.held(table, rank)
            if rows:
                found.append(self._config(table, rank, rows))
        return found

    def _config(self, table: EmbeddingBagConfig, rank: int, rows: int) -> EmbeddingBagConfig:
        place = self.places[table.name]
        if place.travel == "rows":
            table = replace(table, feature_names=(), sequence_features=(rows_key(table.name),))
        if place.ranks == 1:
            return table
        part = RowPart(first=rank - place.first, stride=place.ranks, rows=table.num_embeddings)
        return replace(table, num_embeddings=rows, part=part)

    def streams(self, rank: int) -> list[IdStream]:
        """What a rank is asked for, in the order in which it travels."""
        found = []
        for table in self.tables:
            if not self.held(table, rank):
                continue
            if self.places[table.name].travel == "rows":
                found.append(IdStream(key=rows_key(table.name), table=table, kind="rows"))
                continue
            found += [IdStream(key=key, table=table, kind="pooled") for key in table.feature_names]
            found += [IdStream(key=key, table=table, kind="sequence") for key in table.sequence_features]
        return found

    def within(self, first: int, ranks: int) -> Sharding:
        """The tables that lie whole on ranks `first` to ``first + ranks - 1``, over those ranks alone.

        Raises
        ------
        ConfigError
            For a table that lies on some of them and on others.
        """
        places = {}
        for name, place in self.places.items():
            inside = [first <= rank < first + ranks for rank in (place.first, place.first + place.ranks - 1)]
            # By towers no row leaves its host.
            if any(inside) and not all(inside):
                raise ConfigError(
                    f"table {name!r} is on ranks {place.first} to {place.first + place.ranks - 1}, expected ranks of "
                    f"one host, as {first} to {first + ranks - 1}"
                )
            if all(inside):
                places[name] = replace(place, first=place.first - first)
        return Sharding([table for table in self.tables if table.name in places], places, ranks)
