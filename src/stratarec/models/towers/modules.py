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
    """Vectors ``[B, F, D]`` -> ``[B, columns]``, of which the first are `vectors` vectors that interact with others'.

    It stands where a `Score` stands in a network without towers; dense features do not reach it.
    """

    columns: int
    """W."""
    vectors: int
    direct = True
    """Whether all columns reach the last layers of the network, too."""
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

    direct = False

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        self.columns, self.vectors = count * width, count

    def told(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1)


class DotTower(TowerModule):
    """Of a DLRM: its pairs go on as numbers, and V mixtures of its vectors stand for it in pairs with others.

    With E ``[F, D]`` and z the P = F (F - 1) / 2 products of its lower triangle, the columns are ::

        vectors_v = sum over f of A_vf E_f + (M z + m)_v
        numbers   = z, where they fit, else C z + c

    V is as many as leave room for the pairs, and one where there is room for one vector. Where there is none, the
    columns are a map of E and z, and those who hear them make a vector of them. The paper (section 4.2) has
    combinations of the vectors beside a linear map of all their columns. The map of products instead is ours: pairs
    inside a tower then count for as much as in a DLRM, and a column costs P products, not F D.
    """

    def __init__(self, config: TowersConfig, count: int, width: int) -> None:
        super().__init__()
        columns, self.pairs = config.columns(count, width), count * (count - 1) // 2
        self.vectors = max((columns - self.pairs) // width, int(columns >= width))
        self.opened = not self.vectors
        self.numbers = columns if self.opened else min(columns - self.vectors * width, self.pairs)
        self.columns = self.vectors * width + self.numbers
        self.mixtures = nn.Linear(count, self.vectors, bias=False) if self.vectors else None
        self.map = nn.Linear(self.pairs, self.vectors * width) if self.vectors and self.pairs else None
        given = count * width + self.pairs if self.opened else self.pairs
        exact = not self.opened and self.numbers in (0, self.pairs)
        self.selection = None if exact else nn.Linear(given, self.numbers)

    def told(self, vectors: Tensor) -> Tensor:
        """See `TowerModule.told`."""
        products = dot_interaction(None, vectors.contiguous())[:, : self.pairs] if self.pairs else None
        parts = []
        if self.mixtures is not None:
            # As a linear layer of the transposed vectors, but without transposing them: thrice as fast.
            mixed = torch.einsum("vf,bfd->bvd", self.mixtures.weight, vectors).flatten(1)
            parts.append(mixed if self.map is None else mixed + self.map(products))
        given = [products] if products is not None else []
        if self.selection is not None:
            given = [*given, vectors.flatten(1)] if self.opened else given
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
