"""The samples of one step: labels, dense features, and sparse features with or without
deduplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratarec.batch.jagged import InverseJagged, KeyedJagged, to_device, with_weights


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B samples, with T labels.

    Parameters
    ----------
    label : Tensor
        ``[B]`` float32 in {0, 1}; ``[B, T]`` for several labels, where NaN marks an unknown label.
    dense : Tensor
        ``[B, F_dense]`` float32, after their transforms; F_dense may be 0.
    sparse : KeyedJagged
        The sparse features that are in no group, in the order of the schema. If any feature of the
        schema has weights, `sparse` has weights, which are 1 for values of other features.
    groups : tuple of InverseJagged
        The deduplicated features, one group each.
    user : Tensor or None
        ``[B]`` int64, a number for the user of each sample (or the session if there are no users),
        for grouped AUC.
    weight : Tensor or None
        ``[B]`` float32, the weight of each sample; None if all weights are equal.

    Examples
    --------
    >>> from stratarec import Batch, Dataset, Loader, LoaderConfig
    >>> loader = Loader(Dataset.open("data/clicks"), "train", LoaderConfig(batch_size=64))
    >>> batch = next(loader.batches(epoch=0))
    >>> batch.size, batch.label.shape
    (64, torch.Size([64]))
    """

    label: Tensor
    dense: Tensor
    sparse: KeyedJagged
    groups: tuple[InverseJagged, ...] = ()
    user: Tensor | None = None
    weight: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of samples, B."""
        return self.label.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """Return the same samples on `device`.

        Examples
        --------
        >>> batch.to("cpu").label.device
        device(type='cpu')
        """
        return Batch(
            label=self.label.to(device),
            dense=self.dense.to(device),
            sparse=self.sparse.to(device),
            groups=tuple(group.to(device) for group in self.groups),
            user=to_device(self.user, device),
            weight=to_device(self.weight, device),
        )

    def expanded(self, keys: Sequence[str] | None = None) -> Batch:
        """Return the same samples without deduplication. `keys` is the order of features; by
        default as stored.

        Examples
        --------
        >>> [group.keys for group in batch.groups]
        [('country', 'user'), ('device',)]
        >>> batch.expanded().sparse.keys
        ('item', 'country', 'user', 'device')
        """
        if not self.groups:
            return self
        parts = [group.expand() for group in self.groups]
        bags = {key: part[key] for part in (self.sparse, *parts) for key in part.keys}
        bags = with_weights(
            bags, {key: bag.weights for key, bag in bags.items() if bag.weights is not None}
        )
        return replace(
            self,
            sparse=KeyedJagged.from_features({key: bags[key] for key in keys or bags}, self.size),
            groups=(),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Batch]) -> Batch:
        """Concatenate batches with the same features and groups; equal values of different parts
        are not merged.

        Examples
        --------
        >>> Batch.concatenate([batch, batch]).size
        128
        """
        users = [part.user for part in parts if part.user is not None]
        weights = [part.weight for part in parts if part.weight is not None]
        groups = zip(*(part.groups for part in parts), strict=True)
        return cls(
            label=torch.cat([part.label for part in parts]),
            dense=torch.cat([part.dense for part in parts]),
            sparse=KeyedJagged.concatenate([part.sparse for part in parts]),
            groups=tuple(InverseJagged.concatenate(group) for group in groups),
            user=torch.cat(users) if users else None,
            weight=torch.cat(weights) if weights else None,
        )

    def replace(self, **changes: object) -> Batch:
        """Return a copy with some fields changed.

        Examples
        --------
        >>> batch.replace(weight=batch.label * 2 + 1).weight.unique()
        tensor([1., 3.])
        """
        return replace(self, **changes)  # type: ignore[arg-type]
