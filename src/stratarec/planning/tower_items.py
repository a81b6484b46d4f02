"""What towers are made of: features that share a table, or are a history of one another, cannot be apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratarec.data.schema import Schema
from stratarec.models.towers import tied
from stratarec.planning.candidates import TableSpec


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
