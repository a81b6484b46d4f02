"""What flows through every room: jagged ids and the batch that carries them.

Shapes: F features (keys), B samples in a batch, N ids in all, D embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JaggedTensor:
    """B bags of values of one feature: bag b is ``values[offsets[b]:offsets[b + 1]]``.

    Parameters
    ----------
    values : Tensor
        ``[N]`` int32 or int64 ids, or ``[N, D]`` float rows.
    offsets : Tensor
        ``[B + 1]`` int64, rising, from 0 to N.
    weights : Tensor or None
        ``[N]`` float32, one weight a value.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.offsets.numel() - 1

    def lengths(self) -> Tensor:
        """``[B]`` int64 number of values in each bag."""
        return self.offsets.diff()

    def to_list(self) -> list[list[float | int]]:
        """The bags as Python lists; for tests and for looking."""
        return [bag.tolist() for bag in torch.split(self.values, self.lengths().tolist())]


@dataclass(frozen=True, kw_only=True)
class KeyedJagged:
    """F features over the same B samples, stored together, feature by feature.

    Bag ``(f, b)`` is ``values[offsets[f * B + b]:offsets[f * B + b + 1]]``::

        keys       "user"          "item"
        sample     0     1    2    0    1   2
        values   [ 7 |  3  | 7  |  1 5 |   | 2 ]
        offsets  0   1     2    3      5   5   6

    Parameters
    ----------
    keys : tuple of str
        Feature names, F of them, distinct.
    values : Tensor
        ``[N]`` int32 or int64 ids.
    offsets : Tensor or None
        ``[F * B + 1]`` int64. None says that every bag holds exactly one id (N = F * B), which lets kernels skip
        the indirection; it never changes a result.
    batch_size : int
        B.
    weights : Tensor or None
        ``[N]`` float32 per-sample weights.
    """

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor | None
    batch_size: int
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        bags = len(self.keys) * self.batch_size
        if len(set(self.keys)) != len(self.keys):
            raise ConfigError(f"feature names must be distinct, got {self.keys}")
        if self.offsets is None:
            if self.values.numel() != bags:
                raise ConfigError(f"{self.values.numel()} ids without offsets, expected one for each of {bags} bags")
        elif self.offsets.numel() != bags + 1:
            raise ConfigError(f"offsets has {self.offsets.numel()} elements, expected F * B + 1 = {bags + 1}")

    @classmethod
    def from_features(cls, features: Mapping[str, JaggedTensor]) -> KeyedJagged:
        """Join features over the same samples. All or none must have weights."""
        if not features:
            raise ConfigError("from_features needs at least one feature")
        parts = list(features.values())
        sizes = {part.batch_size for part in parts}
        if len(sizes) != 1:
            raise ConfigError(f"features have different batch sizes: {sorted(sizes)}")
        if len({part.weights is None for part in parts}) != 1:
            raise ConfigError("either every feature has weights or none has")
        lengths = torch.cat([part.lengths() for part in parts])
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        weights = [part.weights[part.offsets[0] : part.offsets[-1]] for part in parts if part.weights is not None]
        return cls(
            keys=tuple(features),
            values=torch.cat([part.values[part.offsets[0] : part.offsets[-1]] for part in parts]),
            offsets=offsets,
            batch_size=sizes.pop(),
            weights=torch.cat(weights) if weights else None,
        )

    def bag_offsets(self) -> Tensor:
        """``[F * B + 1]`` int64, made where ``offsets`` is None."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.values.numel() + 1, dtype=torch.int64, device=self.values.device)

    def __getitem__(self, key: str) -> JaggedTensor:
        """The feature `key`, its values a view."""
        if key not in self.keys:
            raise ConfigError(f"no feature {key!r} in this batch; it has {', '.join(self.keys)}")
        f, size = self.keys.index(key), self.batch_size
        offsets = self.bag_offsets()[f * size : (f + 1) * size + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        weights = None if self.weights is None else self.weights[first:last]
        return JaggedTensor(values=self.values[first:last], offsets=offsets - first, weights=weights)

    def select(self, keys: Sequence[str]) -> KeyedJagged:
        """The features `keys`, in that order."""
        return KeyedJagged.from_features({key: self[key] for key in keys})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B samples.

    Parameters
    ----------
    label : Tensor
        ``[B]`` float32 in {0, 1}.
    dense : Tensor
        ``[B, F_dense]`` float32, transformed; F_dense may be 0.
    sparse : KeyedJagged
        Every sparse feature of the schema, in schema order.
    group : Tensor or None
        ``[B]`` int64, the user (else the session) of each sample, for grouped AUC.
    """

    label: Tensor
    dense: Tensor
    sparse: KeyedJagged
    group: Tensor | None = None

    @property
    def size(self) -> int:
        return self.label.numel()

    def replace(self, **changes: object) -> Batch:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
