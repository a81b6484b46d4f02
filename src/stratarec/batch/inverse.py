"""Deduplicated features (RecD): distinct values, and which of them each sample has.

Shapes: F features (keys), B samples in a batch, U distinct values among them, N ids in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged, as_int64, offsets_of, slice_places
from stratarec.errors import ConfigError
from stratarec.kernels.collate import outside, outside_windows

# Samples that a run must have on average to be worth it. A run is neighbouring samples of the same values in all groups
# that leave runs this long; the others are shuffled and looked up sample by sample.
LEAST_RUN = 2


@dataclass(frozen=True, kw_only=True)
class JaggedWindows:
    """U bags of one feature that may overlap: bag u is ``values[start[u]:start[u] + length[u]]``.

    Histories of one user are windows into the user's events: they share values instead of repeating them.

    Parameters
    ----------
    key : str
        Feature name.
    values : Tensor
        ``[E]`` int32 or int64 ids.
    start, length : Tensor
        ``[U]`` int64, or int32 that becomes it; every window lies inside `values`.
    """

    key: str
    values: Tensor
    start: Tensor
    length: Tensor

    def __post_init__(self) -> None:
        if self.start.shape != self.length.shape:
            raise ConfigError(f"{self.start.numel()} starts and {self.length.numel()} lengths, expected as many")
        for name in ("start", "length"):
            object.__setattr__(self, name, as_int64(getattr(self, name)))
        wrong = outside_windows(self.start, self.length, self.values.numel())
        if wrong >= 0:
            raise ConfigError(
                f"feature {self.key!r}: window {wrong} has {int(self.length[wrong])} values from "
                f"{int(self.start[wrong])}, expected places from 0 to {self.values.numel()}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    def to(self, device: torch.device | str) -> JaggedWindows:
        """The same windows on `device`."""
        return replace(self, values=self.values.to(device), start=self.start.to(device), length=self.length.to(device))

    def take(self, rows: Tensor) -> JaggedWindows:
        """The windows `rows`; the values are shared."""
        return replace(self, start=self.start[rows.long()], length=self.length[rows.long()])

    def to_keyed(self) -> KeyedJagged:
        """The same bags with copies of their values."""
        places, offsets = slice_places(self.start, self.length)
        return KeyedJagged(
            keys=self.keys, values=self.values[places], offsets=offsets, batch_size=self.batch_size
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[JaggedWindows]) -> JaggedWindows:
        """The windows of all parts, part after part."""
        if not parts or any(part.key != parts[0].key for part in parts):
            raise ConfigError(f"concatenate needs parts of one feature, got {[part.key for part in parts]}")
        shift = offsets_of(torch.tensor([part.values.numel() for part in parts])).tolist()
        return cls(
            key=parts[0].key,
            values=torch.cat([part.values for part in parts]),
            start=torch.cat([part.start + first for part, first in zip(parts, shift, strict=False)]),
            length=torch.cat([part.length for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class InverseJagged:
    """A group of features over B samples that share U distinct values (RecD's inverse jagged tensor).

    Sample b has the bags ``inverse[b]`` of `unique`, for every feature of the group at once::

        unique     "os"  [3]  [7]  [3]      "country"  [1]  [1]  [4]       U = 3
        inverse    0  0  0  2  2  1                                        B = 6
        expanded   "os"  [3]  [3]  [3]  [3]  [3]  [7]   "country"  [1]  [1]  [1]  [4]  [4]  [1]

    Parameters
    ----------
    unique : KeyedJagged or JaggedWindows
        The distinct values; ``batch_size`` is U. Windows make this a *partial* inverse: (start, length) into values
        that windows share.
    inverse : Tensor
        ``[B]`` int32 or int64 in [0, U).
    """

    unique: KeyedJagged | JaggedWindows
    inverse: Tensor

    def __post_init__(self) -> None:
        if self.inverse.dim() != 1 or self.inverse.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"inverse is {self.inverse.dtype} of shape {tuple(self.inverse.shape)}, expected [B] int32 or int64"
            )
        wrong = outside(self.inverse, self.unique.batch_size)
        if wrong >= 0:
            raise ConfigError(
                f"inverse of {', '.join(self.keys)} points sample {wrong} at {int(self.inverse[wrong])}, "
                f"expected 0 to {self.unique.batch_size - 1}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return self.unique.keys

    @property
    def batch_size(self) -> int:
        return self.inverse.numel()

    def to(self, device: torch.device | str) -> InverseJagged:
        """The same group on `device`."""
        return InverseJagged(unique=self.unique.to(device), inverse=self.inverse.to(device))

    @property
    def factor(self) -> float:
        """Samples for each distinct value, B / U."""
        return self.batch_size / max(self.unique.batch_size, 1)

    @classmethod
    def from_keyed(cls, features: KeyedJagged) -> InverseJagged:
        """Find the distinct samples of a group by comparing their ids; numbered in order of first appearance.

        For data that was not prepared with groups: the loader never needs it. Weights are not supported.
        """
        if features.weights is not None:
            raise ConfigError("a group of features with per-sample weights cannot be deduplicated; leave it expanded")
        offsets, size = features.bag_offsets().tolist(), features.batch_size
        ids = features.values.tolist()
        seen: dict[tuple[tuple[int, ...], ...], int] = {}
        inverse = [
            seen.setdefault(
                tuple(tuple(ids[offsets[f * size + b] : offsets[f * size + b + 1]]) for f in range(len(features.keys))),
                len(seen),
            )
            for b in range(size)
        ]
        places, first = _by_first_appearance(torch.tensor(inverse, dtype=torch.int64))
        return cls(unique=features.take(first), inverse=places.to(torch.int32))

    def expand(self) -> KeyedJagged:
        """The group without deduplication, a bag for each of the B samples."""
        taken = self.unique.take(self.inverse)
        return taken.to_keyed() if isinstance(taken, JaggedWindows) else taken

    def materialize(self) -> InverseJagged:
        """The same group with windows turned into bags of their own."""
        return InverseJagged(unique=self.bags(), inverse=self.inverse)

    def bags(self) -> KeyedJagged:
        """The distinct values as bags, windows copied."""
        return self.unique.to_keyed() if isinstance(self.unique, JaggedWindows) else self.unique

    def compact(self) -> InverseJagged:
        """The same samples without distinct values that no sample points at, numbered by first appearance."""
        inverse, first = _by_first_appearance(self.inverse.long())
        return InverseJagged(unique=self.unique.take(self.inverse[first]), inverse=inverse.to(self.inverse.dtype))

    def slice(self, first: int, last: int) -> InverseJagged:
        """Samples ``first`` to ``last`` (not included) and the distinct values they need."""
        return InverseJagged(unique=self.unique, inverse=self.inverse[first:last]).compact()

    @classmethod
    def concatenate(cls, parts: Sequence[InverseJagged]) -> InverseJagged:
        """The samples of all parts; distinct values of different parts stay apart even where they are equal."""
        windows = [part.unique for part in parts if isinstance(part.unique, JaggedWindows)]
        keyed = [part.unique for part in parts if isinstance(part.unique, KeyedJagged)]
        if windows and keyed:
            raise ConfigError("concatenate needs parts of one kind, got windows and bags; call materialize() first")
        sizes = [part.unique.batch_size for part in parts]
        shift = offsets_of(torch.tensor(sizes, dtype=torch.int64)).tolist()
        return cls(
            unique=JaggedWindows.concatenate(windows) if windows else KeyedJagged.concatenate(keyed),
            inverse=torch.cat([part.inverse + first for part, first in zip(parts, shift, strict=False)]),
        )

    @classmethod
    def merge(cls, groups: Sequence[InverseJagged]) -> InverseJagged:
        """One group with the features of all `groups`, over the distinct combinations that occur."""
        if not groups or len({group.batch_size for group in groups}) != 1:
            raise ConfigError(f"merge needs groups over the same samples, got {[group.batch_size for group in groups]}")
        codes = torch.zeros_like(groups[0].inverse, dtype=torch.int64)
        for group in groups:
            codes = torch.unique(codes * max(group.unique.batch_size, 1) + group.inverse, return_inverse=True)[1]
        inverse, first = _by_first_appearance(codes)
        bags = {}
        for group in groups:
            found = InverseJagged(unique=group.unique, inverse=group.inverse[first]).expand()
            bags.update({key: found[key] for key in found.keys})
        return cls(unique=KeyedJagged.from_features(bags), inverse=inverse.to(torch.int32))


def _by_first_appearance(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes renumbered in order of first appearance, and the place where each number appears first."""
    _, ranks = torch.unique(codes, return_inverse=True)
    count = int(ranks.max()) + 1 if ranks.numel() else 0
    first = torch.full((count,), codes.numel(), dtype=torch.int64, device=codes.device)
    first.scatter_reduce_(0, ranks, torch.arange(codes.numel(), device=codes.device), "amin")
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(count, device=codes.device)
    return place[ranks], first[order]
