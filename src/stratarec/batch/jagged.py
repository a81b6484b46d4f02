"""Jagged ids: bags of one feature, bags of several features of the same samples, and deduplicated
features (RecD).

Shapes: F features (keys), B samples in a batch, U distinct values among them, N ids in total, D
embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.kernels.collate import outside, outside_windows


@dataclass(frozen=True, kw_only=True)
class JaggedTensor:
    """B bags of values of one feature: bag b is ``values[offsets[b]:offsets[b + 1]]``.

    Parameters
    ----------
    values : Tensor
        ``[N]`` int32 or int64 ids, or ``[N, D]`` float rows.
    offsets : Tensor
        ``[B + 1]`` int64, ascending, from 0 to N; int32 is converted to int64.
    weights : Tensor or None
        ``[N]`` float32, one weight per value.

    Examples
    --------
    >>> import torch
    >>> from stratarec import JaggedTensor
    >>> bags = JaggedTensor(values=torch.tensor([4, 4, 1]), offsets=torch.tensor([0, 1, 1, 3]))
    >>> bags.batch_size
    3
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", as_int64(self.offsets))

    @property
    def batch_size(self) -> int:
        """Number of bags, B."""
        return self.offsets.numel() - 1

    def lengths(self) -> Tensor:
        """Return the number of values in each bag, ``[B]`` int64.

        Examples
        --------
        >>> bags.lengths()
        tensor([1, 0, 2])
        """
        return self.offsets.diff()

    def to_list(self) -> list[list[float | int]]:
        """Return the bags as Python lists, for tests and inspection.

        Examples
        --------
        >>> bags.to_list()
        [[4], [], [4, 1]]
        """
        return [bag.tolist() for bag in torch.split(self.values, self.lengths().tolist())]


@dataclass(frozen=True, kw_only=True)
class KeyedJagged:
    """F features over the same B samples, stored feature by feature.

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
        ``[F * B + 1]`` int64; int32 is converted to int64. None means that every bag contains
        exactly one id (N = F * B), so kernels skip the indirection; results are the same.
    batch_size : int
        B.
    weights : Tensor or None
        ``[N]`` float32 per-sample weights.
    filled : tuple of int or None
        Number of bags of each feature that may contain ids; later bags are empty, and their pooled
        rows are undefined instead of zeros. None for all bags.

    Examples
    --------
    >>> import torch
    >>> from stratarec import KeyedJagged
    >>> batch = KeyedJagged(
    ...     keys=("user", "item"),
    ...     values=torch.tensor([7, 3, 7, 1, 5, 2]),
    ...     offsets=torch.tensor([0, 1, 2, 3, 5, 5, 6]),
    ...     batch_size=3,
    ... )
    >>> batch["item"].to_list()
    [[1, 5], [], [2]]
    """

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor | None
    batch_size: int
    weights: Tensor | None = None
    filled: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        bags = len(self.keys) * self.batch_size
        if len(set(self.keys)) != len(self.keys):
            raise ConfigError(f"feature names must be distinct, got {self.keys}")
        if self.offsets is None:
            if self.values.numel() != bags:
                raise ConfigError(
                    f"{self.values.numel()} ids without offsets, expected one for each of {bags} bags"
                )
        elif self.offsets.numel() != bags + 1:
            raise ConfigError(
                f"offsets has {self.offsets.numel()} elements, expected F * B + 1 = {bags + 1}"
            )
        else:
            object.__setattr__(self, "offsets", as_int64(self.offsets))
        if self.filled is not None and len(self.filled) != len(self.keys):
            raise ConfigError(
                f"filled has {len(self.filled)} numbers, expected {len(self.keys)}, one per feature"
            )

    @classmethod
    def from_features(
        cls, features: Mapping[str, JaggedTensor], batch_size: int | None = None
    ) -> KeyedJagged:
        """Join features of the same samples.

        Parameters
        ----------
        features : mapping of str to JaggedTensor
            Bags of each feature; all or none have weights.
        batch_size : int, optional
            Number of samples, which is needed only if there are no features.

        Examples
        --------
        >>> from stratarec import JaggedTensor
        >>> item = JaggedTensor(values=torch.tensor([1, 5, 2]), offsets=torch.tensor([0, 2, 2, 3]))
        >>> tag = JaggedTensor(values=torch.tensor([8, 8]), offsets=torch.tensor([0, 0, 1, 2]))
        >>> KeyedJagged.from_features({"item": item, "tag": tag}).offsets
        tensor([0, 2, 2, 3, 3, 4, 5])
        """
        if not features:
            if batch_size is None:
                raise ConfigError("from_features needs at least one feature, or a batch_size")
            empty = torch.empty(0, dtype=torch.int64)
            return cls(keys=(), values=empty, offsets=offsets_of(empty), batch_size=batch_size)
        parts = list(features.values())
        sizes = {part.batch_size for part in parts}
        if len(sizes) != 1:
            raise ConfigError(f"features have different batch sizes: {sorted(sizes)}")
        if len({part.weights is None for part in parts}) != 1:
            raise ConfigError(
                "only some features have weights; give weights for every feature, or for none"
            )
        offsets = offsets_of(torch.cat([part.lengths() for part in parts]))
        weights = [
            part.weights[part.offsets[0] : part.offsets[-1]] for part in parts if part.weights is not None
        ]
        return cls(
            keys=tuple(features),
            # The values of a feature may be a view that extends beyond its bags.
            values=torch.cat([part.values[part.offsets[0] : part.offsets[-1]] for part in parts]),
            offsets=offsets,
            batch_size=sizes.pop(),
            weights=torch.cat(weights) if weights else None,
        )

    def to(self, device: torch.device | str) -> KeyedJagged:
        """Return the same features on `device`.

        Examples
        --------
        >>> batch.to("cpu").values.device
        device(type='cpu')
        """
        moved = {name: to_device(getattr(self, name), device) for name in ("values", "offsets", "weights")}
        return replace(self, **moved)  # type: ignore[arg-type]

    def bag_offsets(self) -> Tensor:
        """Return ``[F * B + 1]`` int64 offsets, which are computed if ``offsets`` is None.

        Examples
        --------
        >>> users = torch.tensor([7, 3])
        >>> KeyedJagged(keys=("user",), values=users, offsets=None, batch_size=2).bag_offsets()
        tensor([0, 1, 2])
        """
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.values.numel() + 1, dtype=torch.int64, device=self.values.device)

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the feature `key`; its values are a view."""
        f, size = self._place(key), self.batch_size
        if self.offsets is None:  # not by `bag_offsets`: to get every feature would take time in F squared
            first, last = f * size, (f + 1) * size
            offsets = torch.arange(first, last + 1, dtype=torch.int64, device=self.values.device)
        else:
            offsets = self.offsets[f * size : (f + 1) * size + 1]
            first, last = int(offsets[0]), int(offsets[-1])
        weights = None if self.weights is None else self.weights[first:last]
        return JaggedTensor(values=self.values[first:last], offsets=offsets - first, weights=weights)

    def select(self, keys: Sequence[str]) -> KeyedJagged:
        """Return the features `keys`, in the order of `keys`.

        Examples
        --------
        >>> batch.select(["item"]).values
        tensor([1, 5, 2])
        """
        if not keys:
            raise ConfigError("select needs at least one feature")
        size, offsets, spans = self.batch_size, self.bag_offsets(), list[tuple[int, int]]()
        for f in map(self._place, keys):
            # Adjacent features are copied together. Copying 29 features one by one took 2.5 ms.
            first = spans.pop()[0] if spans and spans[-1][1] == f else f
            spans.append((first, f + 1))
        ends = [(int(offsets[first * size]), int(offsets[last * size])) for first, last in spans]
        lengths = [offsets[first * size : last * size + 1].diff() for first, last in spans]
        return KeyedJagged(
            keys=tuple(keys),
            values=torch.cat([self.values[begin:end] for begin, end in ends]),
            offsets=offsets_of(torch.cat(lengths)),
            batch_size=size,
            weights=None
            if self.weights is None
            else torch.cat([self.weights[begin:end] for begin, end in ends]),
        )

    def _place(self, key: str) -> int:
        if key not in self.keys:
            raise ConfigError(f"no feature {key!r} in this batch; it has {', '.join(self.keys)}")
        return self.keys.index(key)

    def take(self, rows: Tensor) -> KeyedJagged:
        """Select samples by their indices `rows`: ``[M]`` integers in any order, which may repeat.

        Examples
        --------
        >>> batch.take(torch.tensor([2, 0, 0]))["item"].to_list()
        [[2], [1, 5], [1, 5]]
        """
        rows = rows.long()
        features, size = len(self.keys), rows.numel()
        if self.offsets is None and self.weights is None:
            picked = self.values.view(features, self.batch_size)[:, rows]
            return KeyedJagged(keys=self.keys, values=picked.reshape(-1), offsets=None, batch_size=size)
        bags = (torch.arange(features, device=rows.device).unsqueeze(1) * self.batch_size + rows).view(-1)
        offsets = self.bag_offsets()
        places, ends = slice_places(offsets[bags], offsets[bags + 1] - offsets[bags])
        weights = None if self.weights is None else self.weights[places]
        return KeyedJagged(
            keys=self.keys, values=self.values[places], offsets=ends, batch_size=size, weights=weights
        )

    @classmethod
    def concatenate(cls, parts: Sequence[KeyedJagged]) -> KeyedJagged:
        """Concatenate the samples of parts, which have the same features in the same order.

        Examples
        --------
        >>> KeyedJagged.concatenate([batch, batch])["item"].to_list()
        [[1, 5], [], [2], [1, 5], [], [2]]
        """
        if not parts or any(part.keys != parts[0].keys for part in parts):
            raise ConfigError(
                f"concatenate needs parts with the same features, got {[part.keys for part in parts]}"
            )
        if len({part.weights is None for part in parts}) != 1:
            raise ConfigError("only some parts have weights; give weights for every part, or for none")
        keys, size = parts[0].keys, sum(part.batch_size for part in parts)
        if not keys or all(part.offsets is None and part.weights is None for part in parts):
            # The batch size is passed explicitly, because it cannot be inferred without keys or
            # samples.
            values = torch.cat([part.values.view(len(keys), part.batch_size) for part in parts], 1).reshape(
                -1
            )
            return cls(keys=keys, values=values, offsets=None, batch_size=size)
        bags = [[part[key] for part in parts] for key in keys]
        joined = {
            key: JaggedTensor(
                values=torch.cat([bag.values for bag in features]),
                offsets=offsets_of(torch.cat([bag.lengths() for bag in features])),
                weights=None
                if parts[0].weights is None
                else torch.cat([_weights(bag) for bag in features]),
            )
            for key, features in zip(keys, bags, strict=True)
        }
        return cls.from_features(joined)


def with_weights(
    features: Mapping[str, JaggedTensor], weights: Mapping[str, Tensor]
) -> dict[str, JaggedTensor]:
    """Return features with their `weights`, ``[N]`` float32. If there are any, other features get
    weights of 1.
    """
    if not weights:
        return dict(features)
    return {
        key: replace(bags, weights=weights.get(key, torch.ones_like(bags.values, dtype=torch.float32)))
        for key, bags in features.items()
    }


def to_device(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    """Return `tensor` on `device`, or None if it is None."""
    return None if tensor is None else tensor.to(device)


def as_int64(places: Tensor) -> Tensor:
    """Convert int32 offsets or starts `places` to int64, as kernels require; other types are
    returned unchanged.
    """
    return places.long() if places.dtype == torch.int32 else places


def slice_places(start: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices in all slices ``start[i]:start[i] + lengths[i]``, and the offsets of the
    slices.

    Parameters
    ----------
    start, lengths : Tensor
        ``[M]`` int64.

    Returns
    -------
    tuple of Tensor
        ``[N]`` indices, slice after slice, and ``[M + 1]`` offsets, both int64.
    """
    offsets = offsets_of(lengths)
    shift = torch.repeat_interleave(start - offsets[:-1], lengths)
    return torch.arange(shift.numel(), dtype=torch.int64, device=shift.device) + shift, offsets


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the ``[B + 1]`` int64 offsets of B bags with these lengths."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _weights(bag: JaggedTensor) -> Tensor:
    assert bag.weights is not None
    return bag.weights


# Minimum average length of segments. A segment is adjacent samples with the same values in each
# group. Groups whose values change so often that segments would be shorter are not considered;
# their values are looked up sample by sample.
LEAST_SEGMENT = 2


@dataclass(frozen=True, kw_only=True)
class JaggedWindows:
    """U bags of one feature that may overlap: bag u is ``values[start[u]:start[u] + length[u]]``.

    Histories of one user are windows into the user's events, so they share values instead of
    repeating them.

    Parameters
    ----------
    key : str
        Feature name.
    values : Tensor
        ``[E]`` int32 or int64 ids.
    start, length : Tensor
        ``[U]`` int64 (int32 is converted); every window is inside `values`.
    """

    key: str
    values: Tensor
    start: Tensor
    length: Tensor

    def __post_init__(self) -> None:
        if self.start.shape != self.length.shape:
            raise ConfigError(
                f"windows have {self.start.numel()} starts and {self.length.numel()} "
                "lengths, expected equal numbers"
            )
        for name in ("start", "length"):
            object.__setattr__(self, name, as_int64(getattr(self, name)))
        invalid = outside_windows(self.start, self.length, self.values.numel())
        if invalid >= 0:
            raise ConfigError(
                f"feature {self.key!r}: window {invalid} has {int(self.length[invalid])} values from "
                f"{int(self.start[invalid])}, expected positions from 0 to {self.values.numel()}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    def to(self, device: torch.device | str) -> JaggedWindows:
        """Return the same windows on `device`."""
        return replace(
            self, values=self.values.to(device), start=self.start.to(device), length=self.length.to(device)
        )

    def take(self, rows: Tensor) -> JaggedWindows:
        """Return the windows `rows`; they share the values of this object."""
        return replace(self, start=self.start[rows.long()], length=self.length[rows.long()])

    def to_keyed(self) -> KeyedJagged:
        """Return the same bags; the values of windows are copied."""
        places, offsets = slice_places(self.start, self.length)
        return KeyedJagged(
            keys=self.keys, values=self.values[places], offsets=offsets, batch_size=self.batch_size
        )

    @classmethod
    def concatenate(cls, parts: Sequence[JaggedWindows]) -> JaggedWindows:
        """Concatenate the windows of all parts."""
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
    """A group of features of B samples, which have U distinct values (RecD's inverse jagged
    tensor).

    Sample b has the bags ``inverse[b]`` of `unique`, for every feature of the group at once::

        unique     "os"  [3]  [7]  [3]      "country"  [1]  [1]  [4]       U = 3
        inverse    0  0  0  2  2  1                                        B = 6
        expanded   "os"  [3]  [3]  [3]  [3]  [3]  [7]   "country"  [1]  [1]  [1]  [4]  [4]  [1]

    Parameters
    ----------
    unique : KeyedJagged or JaggedWindows
        The distinct values; ``batch_size`` is U. With windows, this is RecD's *partial* inverse:
        each distinct value is a (start, length) in shared values.
    inverse : Tensor
        ``[B]`` int32 or int64 in [0, U).

    Examples
    --------
    >>> import torch
    >>> from stratarec import InverseJagged, KeyedJagged
    >>> unique = KeyedJagged(keys=("os",), values=torch.tensor([3, 7]), offsets=None, batch_size=2)
    >>> group = InverseJagged(unique=unique, inverse=torch.tensor([0, 0, 1]))
    >>> group.keys, group.batch_size, group.factor
    (('os',), 3, 1.5)
    """

    unique: KeyedJagged | JaggedWindows
    inverse: Tensor

    def __post_init__(self) -> None:
        if self.inverse.dim() != 1 or self.inverse.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"inverse is {self.inverse.dtype} of shape {tuple(self.inverse.shape)}, "
                "expected [B] int32 or int64"
            )
        invalid = outside(self.inverse, self.unique.batch_size)
        if invalid >= 0:
            raise ConfigError(
                f"inverse of {', '.join(self.keys)} points sample {invalid} at "
                f"{int(self.inverse[invalid])}, expected 0 to {self.unique.batch_size - 1}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Feature names of the group."""
        return self.unique.keys

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return self.inverse.numel()

    def to(self, device: torch.device | str) -> InverseJagged:
        """Return the same group on `device`.

        Examples
        --------
        >>> group.to("cpu").inverse.device
        device(type='cpu')
        """
        return InverseJagged(unique=self.unique.to(device), inverse=self.inverse.to(device))

    @property
    def factor(self) -> float:
        """Average number of samples per distinct value, B / U."""
        return self.batch_size / max(self.unique.batch_size, 1)

    def expand(self) -> KeyedJagged:
        """Return the group without deduplication: one bag for each of the B samples.

        Examples
        --------
        >>> group.expand()["os"].to_list()
        [[3], [3], [7]]
        """
        bags = self.unique.take(self.inverse)
        return bags.to_keyed() if isinstance(bags, JaggedWindows) else bags

    def bags(self) -> KeyedJagged:
        """Return the distinct values as bags; values of windows are copied.

        Examples
        --------
        >>> group.bags()["os"].to_list()
        [[3], [7]]
        """
        return self.unique.to_keyed() if isinstance(self.unique, JaggedWindows) else self.unique

    def compact(self) -> InverseJagged:
        """Remove distinct values that no sample uses, and number the others in the order of first
        appearance.

        Examples
        --------
        >>> compact = InverseJagged(unique=unique, inverse=torch.tensor([1, 1])).compact()
        >>> compact.bags()["os"].to_list()
        [[7]]
        """
        inverse, first = _by_first_appearance(self.inverse.long())
        return InverseJagged(
            unique=self.unique.take(self.inverse[first]), inverse=inverse.to(self.inverse.dtype)
        )

    def slice(self, first: int, last: int) -> InverseJagged:
        """Return samples ``first:last`` and the distinct values that they use.

        Examples
        --------
        >>> group.slice(1, 3).inverse
        tensor([0, 1])
        """
        return InverseJagged(unique=self.unique, inverse=self.inverse[first:last]).compact()

    @classmethod
    def concatenate(cls, parts: Sequence[InverseJagged]) -> InverseJagged:
        """Concatenate the samples of all parts; equal values of different parts are not merged.

        Examples
        --------
        >>> InverseJagged.concatenate([group, group]).inverse
        tensor([0, 0, 1, 2, 2, 3])
        """
        windows = [part.unique for part in parts if isinstance(part.unique, JaggedWindows)]
        keyed = [part.unique for part in parts if isinstance(part.unique, KeyedJagged)]
        if windows and keyed:
            raise ConfigError(
                "concatenate needs parts of one kind, got windows and bags; convert windows with bags()"
            )
        sizes = [part.unique.batch_size for part in parts]
        shift = offsets_of(torch.tensor(sizes, dtype=torch.int64)).tolist()
        return cls(
            unique=JaggedWindows.concatenate(windows) if windows else KeyedJagged.concatenate(keyed),
            inverse=torch.cat([part.inverse + first for part, first in zip(parts, shift, strict=False)]),
        )


def _by_first_appearance(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber codes in the order of first appearance; also return the first position of each new
    number.
    """
    _, ranks = torch.unique(codes, return_inverse=True)
    count = int(ranks.max()) + 1 if ranks.numel() else 0
    first = torch.full((count,), codes.numel(), dtype=torch.int64, device=codes.device)
    first.scatter_reduce_(0, ranks, torch.arange(codes.numel(), device=codes.device), "amin")
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(count, device=codes.device)
    return place[ranks], first[order]
