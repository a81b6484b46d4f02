"""What a tower tells the others, by model: a `TowerModule` in the place of a score.

Shapes: B samples, F vectors of a tower (its pooled features, then its histories), D width, W = F D / c columns with c
the compression.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stratarec.kernels.interaction import dot_interaction
from stratarec.models.layers import Cross
from stratarec.models.runs import Runs
from stratarec.models.towers.tower_config import TowersConfig


class TowerModule(nn.Module):
    """Vectors ``[B, F, D]`` -> ``[B, columns]``: `vectors` vectors that interact with others', then numbers that reach
    the last layers of the network as they are.

    It stands where a `Score` stands in a network without towers; dense features do not reach it.
    """

    columns: int
    """W."""
    vectors: int
    opened = False
    """Whether whoever hears the columns makes one more vector of them, by a linear map of his own."""

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """``[B, columns]`` float32."""
        return self.told(vectors if runs is None else runs.expand(vectors)).float()

    def told(self, vectors: Tensor) -> Tensor:
        """What `forward` gives, of vectors that are each sample's."""
        raise NotImplementedError


class Plain(TowerModule):
    """The vectors themselves."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.columns, self.vectors = count * width, count

    def told(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class DotTower(TowerModule):
    """Of a DLRM: its pairs go on as numbers, and V vectors stand for it in pairs with others.

    With E ``[F, D]`` and z the P = F (F - 1) / 2 products of its lower triangle, the columns are ::

        vectors = A E + a, of all F D columns
        numbers = z, where they fit, else C z + c

    V is as many as leave room for the pairs, and one where there is room for one vector. Where there is none, the
    columns are a map of E and z, and those who hear them make a vector of them. Mixtures of whole vectors with a map of
    z in the place of A are fewer products, but some seeds then end 0.03 to 0.06 AUC below the others.
    """

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        columns, self.pairs = config.columns(count, width), count * (count - 1) // 2
        self.vectors = max((columns - self.pairs) // width, int(columns >= width))
        self.opened = not self.vectors
        self.numbers = columns if self.opened else min(columns - self.vectors * width, self.pairs)
        self.columns = self.vectors * width + self.numbers
        self.map = nn.Linear(count * width, self.vectors * width) if self.vectors else None
        given = count * width + self.pairs if self.opened else self.pairs
        exact = not self.opened and self.numbers in (0, self.pairs)
        self.selection = None if exact else nn.Linear(given, self.numbers)

    def told(self, vectors: Tensor) -> Tensor:
        """See `TowerModule.told`."""
        flat = vectors.flatten(1)
        given = [dot_interaction(None, vectors.contiguous())[:, : self.pairs]] if self.pairs else []
        parts = [] if self.map is None else [self.map(flat)]
        if self.selection is not None:
            given = [*given, flat] if self.opened else given
            parts.append(self.selection(torch.cat([part.to(vectors.dtype) for part in given], dim=1)))
        elif self.numbers:
            parts += given
        return torch.cat([part.float() for part in parts], dim=1)


class CrossTower(TowerModule):
    """Of a DCN V2: crosses of its columns, x_{l+1} = x_0 * (W x_l + b) + x_l, projected to W (section 4.2)."""

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.vectors, self.columns = 0, config.columns(count, width)
        self.cross = Cross(count * width, config.cross_layers, 0)
        self.projection = nn.Linear(count * width, self.columns)

    def told(self, vectors: Tensor) -> Tensor:
        """See `TowerModule.told`."""
        projected: Tensor = self.projection(self.cross(vectors.flatten(1)))
        return projected
