"""From tables of different widths to vectors of one width.

Shapes: B samples, F pooled features, D width of every vector that the network takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stratarec.data.schema import Schema
from stratarec.models.runs import Runs


class Projections(nn.ModuleList):
    """Linear layers from the tables that are not D wide: one a vocabulary, in the order of the schema, without bias.

    Parameters
    ----------
    schema : Schema
    table_width : callable
        Of a vocabulary.
    width : int
        D.
    pooled_keys : tuple of str
        The features of pooled embeddings, in order.
    """

    def __init__(
        self, schema: Schema, table_width: Callable[[str], int], width: int, pooled_keys: tuple[str, ...]
    ) -> None:
        other = [name for name in schema.vocabularies() if table_width(name) != width]
        super().__init__(nn.Linear(table_width(name), width, bias=False) for name in other)
        self.width = width
        vocabularies = {feature.name: feature.vocabulary for feature in schema.sparse}
        self._widths = {name: table_width(vocabulary) for name, vocabulary in vocabularies.items()}
        self._places = {name: other.index(each) for name, each in vocabularies.items() if each in other}
        self._pooled = pooled_keys

    def of_rows(self, name: str, rows: Tensor) -> Tensor:
        """``[..., D]`` of rows of a feature's table."""
        if name not in self._places:
            return rows
        wide: Tensor = self[self._places[name]](rows)
        return wide.float()

    def of_pooled(self, pooled: Tensor, runs: Runs | None = None) -> Tensor:
        """``[B, F, D]`` of pooled embeddings side by side; of shared ones the rows of runs alone mean anything."""
        if not len(self):
            return pooled.view(pooled.shape[0], -1, self.width)
        parts = list(torch.split(pooled, [self._widths[name] for name in self._pooled], dim=1))
        for place, name in enumerate(self._pooled):
            if name in self._places:
                shared = runs is not None and runs.shared[place]
                parts[place] = self._of_runs(name, parts[place], runs) if shared else self.of_rows(name, parts[place])
        return torch.stack(parts, dim=1)

    def _of_runs(self, name: str, part: Tensor, runs: Runs | None) -> Tensor:
        """What lies behind the rows of runs is undefined, and would be NaN in the gradient of the layer."""
        assert runs is not None
        count = runs.starts.numel() - 1
        wide = self.of_rows(name, part[:count])
        return torch.cat([wide, wide.new_zeros(len(part) - count, self.width)])
