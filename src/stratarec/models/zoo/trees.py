"""Members of an ensemble that are boosted trees.

Trees select sharp effects of numbers, and interactions, that networks learn slowly (Grinsztajn et al. 2022, arXiv
2207.08815). They are fitted once, while networks train (`training/steps/trees.py`), and are not trained further. Their
logits are columns behind the numbers of a network's dense input, so everything that computes the network can add them.

A tree compares numbers: dense features, and for each sparse feature either its code, the id plus 1 (0 if there is none;
ids are ordered by frequency), or the click rate of the code. For a list, both are its length.

Shapes: B samples, F numbers, S sparse features, M members, T trees of a member, N nodes of a tree.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.batch.jagged import KeyedJagged
from stratarec.errors import TrainingError
from stratarec.kernels.trees import FIELDS, PackedTrees, pack_trees, sum_trees

MEMBERS = 4
"""M, number of members that are trees (`training/steps/trees.py` says how they differ)."""
RATED = 8192
"""Number of codes of a feature that have a click rate; all larger codes have the rate of code 0."""
LEAVES = 31
"""Maximum number of leaves of a tree."""


class TreeMembers(nn.Module):
    """Boosted trees, stored as tensors of fixed shapes; unused trees at the end have no nodes.

    Parameters
    ----------
    trees : int
        T, maximum number of trees of a member.
    """

    nodes: Tensor
    leaves: Tensor
    rates: Tensor

    def __init__(self, trees: int) -> None:
        super().__init__()
        self.set_features(())
        self._packed: tuple[Tensor, int, PackedTrees] | None = None
        self.register_buffer("nodes", torch.full((MEMBERS, trees, LEAVES - 1, FIELDS), -1.0))
        self.register_buffer("leaves", torch.zeros(MEMBERS, trees, LEAVES))

    def set_features(self, features: tuple[tuple[str, bool], ...]) -> None:
        """Set the names of sparse features in order, and whether each is a list."""
        self.features = features
        self.register_buffer("rates", torch.zeros(len(features), RATED))

    @property
    def fitted(self) -> int:
        """Number of members that have trees; they are the first ones."""
        return int((self.nodes[:, 0, 0, 3] != -1).sum())

    def columns(self, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
        """Return the numbers that trees compare: codes, dense features and click rates, ``[B, S + F + S]``."""
        values, offsets = sparse.values.cpu().numpy(), sparse.bag_offsets().cpu().numpy()
        # Arrays of all features at once: a loop over features took longer than the trees of a single row.
        lengths = np.diff(offsets).reshape(len(sparse.keys), len(dense))
        ids = np.append(values, 0)[offsets[:-1]].reshape(lengths.shape) + 1
        is_list = np.array([[is_list] for _, is_list in self.features], dtype=bool).reshape(-1, 1)
        places = [sparse.keys.index(name) for name, _ in self.features]
        codes = np.where(is_list | (lengths[places] == 0), lengths[places], ids[places])
        rates = np.take_along_axis(self.rates.cpu().numpy(), np.where(codes < RATED, codes, 0), axis=1)
        numbers = (codes.T, dense.cpu().numpy(), np.where(is_list, codes, rates).T)
        return np.concatenate([column.astype(np.float32) for column in numbers], axis=1)

    def forward(self, dense: Tensor, sparse: KeyedJagged) -> Tensor:
        """Return the logits of members, ``[B, M]``, on the CPU."""
        rows, version = self.columns(dense, sparse), self.nodes._version
        if self._packed is None or self._packed[0] is not self.nodes or self._packed[1] != version:
            packed = pack_trees(self.nodes.cpu().numpy(), rows.shape[1])
            if packed is None:
                raise TrainingError(
                    "the trees of the ensemble are damaged: a node does not exist; use another checkpoint"
                )
            self._packed = self.nodes, version, packed
        return torch.from_numpy(sum_trees(rows, self._packed[2], self.leaves.cpu().numpy()))
