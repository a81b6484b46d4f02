"""What towers are made of, what each of them may hold, and why that cannot be where it cannot.

Features that share a table, or are a history of one another, cannot be apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stratarec.config.units import readable
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.models.towers.tower_config import tied
from stratarec.planning.candidates import TableSpec
from stratarec.planning.towers.clustering import Labels, Limits


@dataclass(frozen=True, kw_only=True)
class Item:
    """Features that must share a tower, and what they cost its host."""

    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int
    """float32 rows and their optimizer state."""
    lookups: float
    """Ids of a batch."""


def tied_items(schema: Schema, tables: Sequence[TableSpec]) -> list[Item]:
    """The items of a schema, in its order; `tables` has the spec of every vocabulary."""
    specs, vocabulary = {spec.name: spec for spec in tables}, {each.name: each.vocabulary for each in schema.sparse}
    found = []
    for features in tied(schema):
        names = tuple(dict.fromkeys(vocabulary[name] for name in features))
        rows = sum(specs[name].rows * specs[name].shape.slot_bytes for name in names)
        lookups = sum(specs[name].lookups for name in names)
        found.append(Item(features=features, tables=names, bytes=rows, lookups=lookups))
    return found


# Lookups are kept as even as items allow: bounds of so much more, one after the other, until there is a partition.
_WIDER = 1.25


@dataclass(frozen=True, kw_only=True)
class TowerBounds:
    """Limits of each tower."""

    towers: int
    ratio: float = 1.5
    """Features of a tower: at most so many times the mean, and at least the mean over it."""
    dram: int | None = None
    """Bytes for tables in each process, as `MemoryConfig.dram`; None for no limit."""
    ranks: int = 1
    """Processes of the host of a tower."""

    def __post_init__(self) -> None:
        if self.towers < 2:
            raise ConfigError(f"--towers is {self.towers}, expected at least 2: one tower is the model itself")
        if not 1 <= self.ratio <= 1000:
            raise ConfigError(f"--balance is {self.ratio:g}, expected 1 to 1000")

    @property
    def bytes(self) -> int | None:
        """Bytes for tables on the host of a tower; None for no limit."""
        return None if self.dram is None else self.dram * self.ranks

    def features(self, count: int) -> tuple[int, int]:
        """The fewest and the most features of a tower, of `count` in all."""
        mean = count / self.towers
        return max(int(mean / self.ratio), 1), -int(-mean * self.ratio // 1)


def check_bounds(items: Sequence[Item], bounds: TowerBounds) -> None:
    """Refuse bounds that no partition can meet, as far as that can be seen at once.

    Raises
    ------
    ConfigError
        Naming the feature or table that is too much, or too few.
    """
    count = sum(len(item.features) for item in items)
    if count < bounds.towers:
        raise ConfigError(f"{bounds.towers} towers of {count} sparse features: expected at most as many towers")
    largest = max(items, key=lambda item: len(item.features))
    if len(items) < bounds.towers:
        raise ConfigError(
            f"{bounds.towers} towers, but only {len(items)} sets of features can be apart: "
            f"{', '.join(largest.features)} share a table or are a history of one another"
        )
    _, most = bounds.features(count)
    if len(largest.features) > most:
        raise ConfigError(
            f"{', '.join(largest.features)} must be in one tower (they share a table or are a history of one another), "
            f"which may have at most {most} of the {count} features: ask for fewer towers or a larger --balance"
        )
    _check_bytes(items, bounds)


def _check_bytes(items: Sequence[Item], bounds: TowerBounds) -> None:
    if bounds.bytes is None or bounds.dram is None:
        return
    processes = f" in each of {bounds.ranks} processes" if bounds.ranks > 1 else ""
    heaviest, total = max(items, key=lambda item: item.bytes), sum(item.bytes for item in items)
    if heaviest.bytes > bounds.bytes:
        raise ConfigError(
            f"table {' and '.join(map(repr, heaviest.tables))} of {', '.join(heaviest.features)} takes "
            f"{readable(heaviest.bytes)} with its optimizer state, more than memory.dram of the host of a tower, which "
            f"is {readable(bounds.dram)}{processes}: raise memory.dram or --ranks"
        )
    if total > bounds.bytes * bounds.towers:
        raise ConfigError(
            f"the tables take {readable(total)} with their optimizer state, more than memory.dram of {bounds.towers} "
            f"hosts, which is {readable(bounds.dram)}{processes} of a host (the largest table is "
            f"{heaviest.tables[0]!r}, {readable(heaviest.bytes)}): ask for more towers, or raise memory.dram or --ranks"
        )


def tightest(items: Sequence[Item], bounds: TowerBounds, labels: Callable[[Limits], Labels | None]) -> Labels:
    """What `labels` gives within the bounds, with lookups spread over towers as evenly as that leaves room for."""
    heaviest = max(item.lookups for item in items)
    total = sum(item.lookups for item in items)
    most = _WIDER * max(heaviest, total / bounds.towers)
    while True:
        found = labels(_limits(items, bounds, most))
        if found is not None:
            return found
        if most >= total:
            heavy = max(items, key=lambda item: item.bytes)
            raise ConfigError(
                f"no {bounds.towers} towers keep within a balance of {bounds.ratio:g} and the memory of a host (the "
                f"largest table is {heavy.tables[0]!r}, {readable(heavy.bytes)}): ask for fewer towers or a larger "
                "--balance, or raise memory.dram"
            )
        most *= _WIDER


def _limits(items: Sequence[Item], bounds: TowerBounds, lookups: float) -> Limits:
    weights = np.array([(len(item.features), item.bytes, item.lookups) for item in items], dtype=float)
    fewest, most = bounds.features(int(weights[:, 0].sum()))
    host = np.inf if bounds.bytes is None else float(bounds.bytes)
    return Limits(weights=weights, least=np.array([fewest, 0.0, 0.0]), most=np.array([most, host, lookups]))
