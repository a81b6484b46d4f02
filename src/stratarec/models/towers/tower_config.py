"""Towers of features (Disaggregated Multi-Tower, arXiv 2403.00877): each tells the others less than all its vectors.

A tower is features whose tables one host holds. It computes what depends on them alone, and only its columns go on to
the network that sees all towers, so only they need to travel between hosts. Without modules the columns are the vectors
themselves, and the model is the one without towers. In one process, and with the flat exchange, one with modules is a
model as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratarec.config.validate import check_finite
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Features that one host looks up and sums up for all others."""

    plan: tuple[tuple[str, ...], ...] = ()
    """Names of the features of each tower, each feature in one of them; in a recipe also the name of a file beside it
    that has them, as `stratarec plan --towers N --write` writes."""
    compression: float = 2.0
    """Columns of a tower's vectors over the columns that it tells the others; 1: the vectors themselves,
    which is the model without towers."""
    cross_layers: int = 1
    """Crosses inside a tower of a dcnv2."""

    def __post_init__(self) -> None:
        check_finite(self, "model.towers.")
        if not 1 <= self.compression <= 1024:
            raise ConfigError(f"model.towers.compression is {self.compression:g}, expected 1 to 1024")
        if len(self.plan) < 2:
            raise ConfigError(f"model.towers.plan has {len(self.plan)} towers, expected at least two lists of features")
        for number, features in enumerate(self.plan):
            if not features:
                raise ConfigError(f"model.towers.plan: tower {number} has no features")
        if self.cross_layers < 1:
            raise ConfigError(f"model.towers.cross_layers is {self.cross_layers}, expected at least 1")

    @property
    def plain(self) -> bool:
        """Whether towers tell their vectors, which takes no modules."""
        return self.compression == 1

    def columns(self, vectors: int, width: int) -> int:
        """W of a tower of so many vectors.

        Raises
        ------
        ConfigError
            When that is less than one.
        """
        found = int(vectors * width / self.compression)
        if not found:
            raise ConfigError(
                f"model.towers.compression is {self.compression:g}: of a tower of {vectors} vectors of {width} that "
                f"leaves less than one column; expected {vectors * width} at most"
            )
        return found


def check_plan(config: TowersConfig, schema: Schema) -> None:
    """Refuse towers that are not exactly the sparse features of a schema, or share a table.

    Raises
    ------
    ConfigError
        Naming the feature, and the one that it must be beside.
    """
    tower_of: dict[str, int] = {}
    for number, features in enumerate(config.plan):
        for name in features:
            if name in tower_of:
                raise ConfigError(f"model.towers.plan: {name!r} is in tower {tower_of[name]} and in tower {number}")
            tower_of[name] = number
    names = {feature.name for feature in schema.sparse}
    unknown, missing = sorted(set(tower_of) - names), sorted(names - set(tower_of))
    if unknown:
        raise ConfigError(
            f"model.towers.plan: the data has no sparse feature {unknown[0]!r}; it has {', '.join(sorted(names))}"
        )
    if missing:
        raise ConfigError(f"model.towers.plan: {missing[0]!r} is in no tower; every sparse feature must be in one")
    for first, second, reason in _pairs(schema):
        if tower_of[first] != tower_of[second]:
            raise ConfigError(
                f"model.towers.plan: {first!r} is in tower {tower_of[first]} and {second!r} in tower "
                f"{tower_of[second]}, but {reason}: put them into one tower"
            )


def tied(schema: Schema) -> list[tuple[str, ...]]:
    """Sparse features by which of them must be in one tower: they share a table, or one is a history of the other."""
    sets = {feature.name: {feature.name} for feature in schema.sparse}
    for first, second, _ in _pairs(schema):
        joined = sets[first] | sets[second]
        for name in joined:
            sets[name] = joined
    order = [feature.name for feature in schema.sparse]
    distinct = {id(found): found for found in sets.values()}.values()
    return [tuple(name for name in order if name in found) for found in distinct]


def _pairs(schema: Schema) -> list[tuple[str, str, str]]:
    """Features that must be together, and why."""
    found = []
    for name, features in schema.vocabularies().items():
        found += [(features[0].name, other.name, f"they share the table {name!r}") for other in features[1:]]
    return found + [
        (feature.name, feature.of, "the one is a history of the other, which it is compared with")
        for feature in schema.histories
    ]
