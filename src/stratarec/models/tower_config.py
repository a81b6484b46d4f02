"""Configuration of towers (Disaggregated Multi-Tower, arXiv 2403.00877).

A tower is a group of features whose tables are on one host. The host computes everything that
depends only on these features, and only the output columns of the tower are sent to other hosts, as
inputs of the network over all towers. Without tower modules, the output columns are the vectors of
the features, and the model is the same as without towers. A model with tower modules can also be
trained in one process, or with the flat exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratarec.config.validate import check_finite
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Division of the features into towers, and the size of tower outputs."""

    plan: tuple[tuple[str, ...], ...] = ()
    """Names of the features of each tower; each feature is in one tower. A recipe may instead name
    a file in the same directory that `stratarec plan --towers N --write` has written."""
    compression: float = 2.0
    """Number of columns of a tower's vectors divided by the number of its output columns. With 1
    the outputs are the vectors, and the model is the same as without towers."""
    cross_layers: int = 1
    """Number of cross layers in each tower of a dcnv2."""

    def __post_init__(self) -> None:
        check_finite(self, "model.towers.")
        if not 1 <= self.compression <= 1024:
            raise ConfigError(f"model.towers.compression is {self.compression:g}, expected 1 to 1024")
        if len(self.plan) < 2:
            raise ConfigError(
                f"model.towers.plan has {len(self.plan)} towers, expected at least two lists of features"
            )
        for number, features in enumerate(self.plan):
            if not features:
                raise ConfigError(f"model.towers.plan: tower {number} has no features")
        if self.cross_layers < 1:
            raise ConfigError(f"model.towers.cross_layers is {self.cross_layers}, expected at least 1")

    @property
    def plain(self) -> bool:
        """Whether towers have no modules: each outputs the vectors of its features unchanged."""
        return self.compression == 1

    def columns(self, vectors: int, width: int) -> int:
        """Return the number of output columns of a tower with `vectors` vectors; `ConfigError` if
        it is less than one.
        """
        columns = int(vectors * width / self.compression)
        if not columns:
            raise ConfigError(
                f"model.towers.compression is {self.compression:g}, which leaves less than one column for "
                f"a tower of {vectors} vectors of {width}; expected {vectors * width} at most"
            )
        return columns


def check_plan(config: TowersConfig, schema: Schema) -> None:
    """Raise `ConfigError` unless each sparse feature is in exactly one tower, and no table is in
    two towers.
    """
    tower_of: dict[str, int] = {}
    for number, features in enumerate(config.plan):
        for name in features:
            if name in tower_of:
                raise ConfigError(
                    f"model.towers.plan: {name!r} is in tower {tower_of[name]} and in tower {number}"
                )
            tower_of[name] = number
    names = {feature.name for feature in schema.sparse}
    unknown, missing = sorted(set(tower_of) - names), sorted(names - set(tower_of))
    if unknown:
        raise ConfigError(
            f"model.towers.plan: the data has no sparse feature {unknown[0]!r}; it has "
            f"{', '.join(sorted(names))}"
        )
    if missing:
        raise ConfigError(
            f"model.towers.plan: {missing[0]!r} is in no tower; every sparse feature must be in one"
        )
    for first, second, reason in _pairs(schema):
        if tower_of[first] != tower_of[second]:
            raise ConfigError(
                f"model.towers.plan: {first!r} is in tower {tower_of[first]} and {second!r} in tower "
                f"{tower_of[second]}, but {reason}: put them into one tower"
            )


def tied(schema: Schema) -> list[tuple[str, ...]]:
    """Return groups of sparse features that must be in the same tower.

    Features must be in the same tower if they share a table, or if one is a history of the other.
    """
    sets = {feature.name: {feature.name} for feature in schema.sparse}
    for first, second, _ in _pairs(schema):
        joined = sets[first] | sets[second]
        for name in joined:
            sets[name] = joined
    order = [feature.name for feature in schema.sparse]
    distinct = {id(names): names for names in sets.values()}.values()
    return [tuple(name for name in order if name in names) for names in distinct]


def _pairs(schema: Schema) -> list[tuple[str, str, str]]:
    """Return pairs of features that must be in the same tower, with the reason."""
    pairs = []
    for name, features in schema.vocabularies().items():
        pairs += [
            (features[0].name, other.name, f"they share the table {name!r}") for other in features[1:]
        ]
    return pairs + [
        (feature.name, feature.of, "one is a history of the other") for feature in schema.histories
    ]
