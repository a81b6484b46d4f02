"""Members of an ensemble that are boosted trees.

Trees select sharp effects of numbers, and interactions, that networks learn slowly (Grinsztajn et
al. 2022, arXiv 2207.08815). They are fitted once, while networks train (`training/steps/trees.py`),
and are not trained further. Their logits are columns behind the numbers of a network's dense input,
so everything that computes the network can add them.

A tree compares numbers: dense features, and for each sparse feature either its code, the id plus 1
(0 if there is none; ids are ordered by frequency), or the click rate of the code. For a list, both
are its length. For some pairs of columns it also compares the click rate of a pair of codes
(`kernels/trees/pair_rates.py`).

Shapes: B samples, F numbers, S sparse features, M members, T trees, N nodes of all trees, R codes
with a click rate, P pairs of columns, E pairs of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stratarec.batch.jagged import KeyedJagged
from stratarec.kernels.trees.columns import FittedTrees, Samples, compute_trees
from stratarec.kernels.trees.pair_lookup import PackedPairs, pack_pairs
from stratarec.kernels.trees.pair_rates import EDGE_FIELDS, PAIR_FIELDS, RATE_FIELDS, PairRates
from stratarec.kernels.trees.sums import NODE_FIELDS, TREE_FIELDS, PackedTrees, TreeArrays, pack_trees

MEMBERS = 6
"""M, number of members that are trees (`training/steps/trees.py` says how they differ)."""
RATED = 8192
"""Maximum number of codes of a feature that have a click rate; all larger codes have the rate of
code 0. Only features with fewer values are compared with sets; the codes of others are compared by
their order."""
LEAVES = 31
"""Maximum number of leaves of a tree."""
PAIR_ARRAYS = ("pairs", "pair_rates", "edges")
"""Names of the arrays of `PairRates` among the tensors of `TreeMembers`."""

Length = Annotated[int, pydantic.Field(ge=0, lt=1 << 40)]


@dataclass(frozen=True, kw_only=True)
class TreeSizes:
    """Lengths of the tensors of `TreeMembers`."""

    trees: Length = 0
    """T."""
    nodes: Length = 0
    """N."""
    sets: Length = 0
    """K, number of codes in the sets that nodes compare with."""
    rated: Annotated[Length, pydantic.Field(ge=1)] = 1
    """R, number of codes that have a click rate."""
    pairs: Length = 0
    """P."""
    pair_rates: Length = 0
    """E, number of pairs of codes that have a click rate."""
    edges: Length = 0
    """Number of edges of dense features that are part of a pair."""

    @pydantic.model_serializer(mode="wrap")
    def _write(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, int]:
        """Leave out pairs where there are none, because hashes of manifests without them must stay
        the same.
        """
        lengths: dict[str, int] = handler(self)
        return {name: length for name, length in lengths.items() if length or name not in PAIR_ARRAYS}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TreeSizes:
        """Return the lengths of tensors, by name; 0 or 1 for tensors that are missing or have
        another dimension.
        """
        shapes = {
            name: tensors[name].shape
            if name in tensors and tensors[name].dim() == len(shape)
            else (0,) * len(shape)
            for name, shape in cls().shapes(0).items()
        }
        lengths = {name: shapes[name][0] for name in ("trees", "nodes", "sets", *PAIR_ARRAYS)}
        return cls(**lengths, rated=max(shapes["rates"][1], 1))

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor for a number of sparse features."""
        return {
            "trees": (self.trees, TREE_FIELDS),
            "nodes": (self.nodes, NODE_FIELDS),
            "sets": (self.sets,),
            "leaves": (self.nodes + self.trees,),
            "rates": (features, self.rated),
            "pairs": (self.pairs, PAIR_FIELDS),
            "pair_rates": (self.pair_rates, RATE_FIELDS),
            "edges": (self.edges, EDGE_FIELDS),
        }


class TreeMembers(nn.Module):
    """Boosted trees, stored as tensors without padding (`kernels/trees/sums.py`). There are none
    until they are fitted.

    Parameters
    ----------
    most : int
        Most trees of a member.
    """

    trees: Tensor
    nodes: Tensor
    sets: Tensor
    leaves: Tensor
    rates: Tensor
    pairs: Tensor
    pair_rates: Tensor
    edges: Tensor

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.features: tuple[tuple[str, bool], ...] = ()
        self.dense = 0
        self._packed: tuple[Tensor, int, PackedTrees] | None = None
        self._pairs: tuple[Tensor, int, PackedPairs] | None = None
        for name, shape in TreeSizes().shapes(0).items():
            self.register_buffer(name, torch.zeros(shape))

    def set_features(self, features: tuple[tuple[str, bool], ...], dense: int = 0) -> None:
        """Set the names of sparse features in order and whether each is a list, and the number of
        dense features.
        """
        self.features = features
        self.dense = dense
        self.resize(self.sizes)

    @property
    def sizes(self) -> TreeSizes:
        """Lengths of the tensors."""
        return TreeSizes.of(dict(self.named_buffers()))

    def resize(self, sizes: TreeSizes) -> None:
        """Replace the tensors by zeros of other lengths."""
        for name, shape in sizes.shapes(len(self.features)).items():
            setattr(self, name, getattr(self, name).new_zeros(shape))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of trees of each member, ``[M]``."""
        members = self.trees[:, 0].cpu().numpy()
        return np.array([np.count_nonzero(members == member) for member in range(MEMBERS)])

    @property
    def width(self) -> int:
        """Number of values of a sample that trees compare: codes, dense features and click
        rates.
        """
        return 2 * len(self.features) + self.dense + len(self.pairs)

    def columns(self, dense: Tensor, sparse: KeyedJagged) -> NDArray[np.float32]:
        """Return the numbers that trees compare: codes, dense features, click rates of codes and
        click rates of pairs, ``[B, S + F + S + P]``.
        """
        return compute_trees(self._samples(dense, sparse), self.fitted())[0]

    def keys(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the place of each feature among `names`, and whether it is a list, ``[S, 2]``."""
        keys = [(names.index(name), is_list) for name, is_list in self.features]
        return np.array(keys, dtype=np.int64).reshape(-1, 2)

    def _samples(self, dense: Tensor, sparse: KeyedJagged) -> Samples:
        numbers, ids = np.ascontiguousarray(dense.cpu().numpy()), sparse.values.cpu().numpy()
        return Samples(numbers, ids, sparse.bag_offsets().cpu().numpy(), self.keys(sparse.keys))

    def of_pairs(self) -> PairRates:
        """Return the click rates of pairs; arrays share the memory of the tensors, if these are on
        the CPU.
        """
        return PairRates(*(getattr(self, name).cpu().numpy() for name in PAIR_ARRAYS))

    def remove_pairs(self, place: int, codes: NDArray[np.int64]) -> None:
        """Remove the click rates of pairs with one of `codes` of the sparse feature at `place`."""
        pair, *of_row = self.pair_rates[:, :3].cpu().numpy().astype(np.int64).T
        columns = self.pairs[:, :2].cpu().numpy()[pair]
        is_named = [(columns[:, side] == place) & np.isin(of_row[side], codes) for side in (0, 1)]
        self.pair_rates = self.pair_rates[torch.from_numpy(~(is_named[0] | is_named[1]))]

    def _packed_pairs(self) -> PackedPairs:
        rates, version = self.pair_rates, self.pair_rates._version
        if self._pairs is None or self._pairs[0] is not rates or self._pairs[1] != version:
            self._pairs = rates, version, pack_pairs(self.of_pairs(), len(self.features))
        return self._pairs[2]

    def forward(self, dense: Tensor, sparse: KeyedJagged) -> Tensor:
        """Return the logits of members, ``[B, M]``, on the CPU."""
        return torch.from_numpy(compute_trees(self._samples(dense, sparse), self.fitted())[1])

    def fitted(self) -> FittedTrees:
        """Return the trees as they are now."""
        packed, rates, leaves = self._pack(), self.rates.cpu().numpy(), self.leaves.cpu().numpy()
        assert packed is not None, "trees are checked when they are read"
        return FittedTrees(rates, self._packed_pairs(), packed, leaves, MEMBERS)

    def fault(self) -> str:
        """Check values, which may come from a file; return the fault, or an empty string."""
        if self._pack() is None:
            return "nodes that do not exist, have several parents or are not whole numbers"
        if not self.of_pairs().is_valid(len(self.features) + self.dense, len(self.features)):
            return (
                "click rates of pairs that are not sorted, not from 0 to 1 or of columns that do not exist"
            )
        return (
            ""
            if bool(((self.rates >= 0) & (self.rates <= 1)).all())
            else "click rates that are not from 0 to 1"
        )

    def _pack(self) -> PackedTrees | None:
        """Return the trees in the form of the kernel; None if they are invalid."""
        nodes, version = self.nodes, self.nodes._version
        if self._packed is None or self._packed[0] is not nodes or self._packed[1] != version:
            parts = (tensor.cpu().numpy() for tensor in (self.trees, nodes, self.sets, self.leaves))
            packed = pack_trees(TreeArrays(*parts), self.width, MEMBERS)
            if packed is None:
                return None
            self._packed = nodes, version, packed
        return self._packed[2]
