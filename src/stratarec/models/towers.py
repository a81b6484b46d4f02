"""Towers of features (Disaggregated Multi-Tower, arXiv 2403.00877): each tells the others less than all its vectors.

A tower is features whose tables one host holds. It computes what depends on them alone, and only its columns go on to
the network that sees all towers, so only they need to travel between hosts. Without modules the columns are the vectors
themselves, and the model is the one without towers.

Shapes: B samples, F vectors of a tower (its pooled features, then its histories), D width, W = F D / c columns with c
the compression.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.kernels.interaction import dot_interaction
from stratarec.models.layers import Cross
from stratarec.models.runs import Runs


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Features that one host looks up and sums up for all others."""

    plan: tuple[tuple[str, ...], ...]
    """Names of the features of each tower, each feature in one of them. `stratarec plan --towers N --write` makes
    one."""
    compression: float | None = 2.0
    """Columns of a tower's vectors over the columns that it tells the others; null: the vectors themselves."""
    cross_layers: int = 1
    """Crosses inside a tower of a dcnv2."""

    def __post_init__(self) -> None:
        if len(self.plan) < 2:
            raise ConfigError(f"model.towers.plan has {len(self.plan)} towers, expected at least two lists of features")
        for number, features in enumerate(self.plan):
            if not features:
                raise ConfigError(f"model.towers.plan: tower {number} has no features")
        if self.compression is not None and not 1 <= self.compression <= 1024:
            raise ConfigError(f"model.towers.compression is {self.compression:g}, expected 1 to 1024, or null")
        if self.cross_layers < 1:
            raise ConfigError(f"model.towers.cross_layers is {self.cross_layers}, expected at least 1")

    def columns(self, vectors: int, width: int) -> int:
        """W of a tower of so many vectors.

        Raises
        ------
        ConfigError
            When that is less than one.
        """
        found = int(vectors * width / (self.compression or 1))
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


class TowerModule(nn.Module):
    """Vectors ``[B, F, D]`` -> ``[B, vectors * D + numbers]``: vectors that interact with others', then numbers.

    It stands where a `Score` stands in a network without towers; dense features do not reach it.
    """

    vectors: int
    numbers: int

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """``[B, vectors * D + numbers]`` float32."""
        return self.told(vectors if runs is None else runs.expand(vectors)).float()

    def told(self, vectors: Tensor) -> Tensor:
        """What `forward` gives, of vectors that are each sample's."""
        raise NotImplementedError


class Plain(TowerModule):
    """The vectors themselves."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.vectors, self.numbers = count, 0

    def told(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class DotTower(TowerModule):
    """Of a DLRM: its pairs go on as numbers, and V mixtures of its vectors stand for it in pairs with others.

    With E ``[F, D]`` and z the P = F (F - 1) / 2 products of its lower triangle, the output is ::

        vectors_v = sum over f of A_vf E_f + (M z + m)_v
        numbers   = z, where they fit, else C z + c

    V is as many as leave room for the pairs, and one where there is room for one vector. The paper (section 4.2) has
    combinations of the vectors beside a linear map of all their columns. The map of products instead is ours: pairs
    inside a tower then count for as much as in a DLRM, and a column costs P products, not F D.
    """

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        columns, self.pairs = config.columns(count, width), count * (count - 1) // 2
        self.vectors = max((columns - self.pairs) // width, int(columns >= width))
        self.numbers = min(columns - self.vectors * width, self.pairs or columns)
        self.mixtures = nn.Linear(count, self.vectors, bias=False) if self.vectors else None
        self.map = nn.Linear(self.pairs, self.vectors * width) if self.vectors and self.pairs else None
        exact = self.numbers in (0, self.pairs)
        self.selection = None if exact else nn.Linear(self.pairs or count * width, self.numbers)

    def told(self, vectors: Tensor) -> Tensor:
        """See `TowerModule.told`."""
        products = dot_interaction(None, vectors.contiguous())[:, : self.pairs] if self.pairs else None
        parts = []
        if self.mixtures is not None:
            mixed = self.mixtures(vectors.transpose(1, 2)).transpose(1, 2).flatten(1)
            parts.append(mixed if self.map is None else mixed + self.map(products))
        if self.selection is not None:
            parts.append(self.selection(vectors.flatten(1) if products is None else products))
        elif self.numbers and products is not None:
            parts.append(products)
        return torch.cat([part.float() for part in parts], dim=1)


class CrossTower(TowerModule):
    """Of a DCN V2: crosses of its columns, x_{l+1} = x_0 * (W x_l + b) + x_l, projected to W numbers (section 4.2)."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.vectors, self.numbers = 0, config.columns(count, width)
        self.cross = Cross(count * width, config.cross_layers, 0)
        self.projection = nn.Linear(count * width, self.numbers)

    def told(self, vectors: Tensor) -> Tensor:
        """See `TowerModule.told`."""
        projected: Tensor = self.projection(self.cross(vectors.flatten(1)))
        return projected
