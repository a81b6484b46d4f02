"""A batch's ids as their owners are asked for them, and what an owner is asked by all.

Bags of one rank follow those of the ranks before it, feature by feature: a table that is whole on its owner sees the
very batch that one process would see, so its arithmetic has the same bits.

Shapes: B samples of this rank, N ids, S streams of an owner (`Sharding.streams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged, offsets_of
from stratarec.distributed.hot_replicas import Replicas
from stratarec.distributed.sharding import IdStream, Rows, Sharding
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.errors import ConfigError
from stratarec.kernels.collate import outside
from stratarec.kernels.unique import number_distinct

_NONE: Rows = np.empty(0, dtype=np.int64)
WORDS = 3
"""Numbers that announce a stream: bags, ids, and whether every bag holds one id, so that lengths need not travel."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What one rank asks one owner for, of one stream.

    Parameters
    ----------
    bags : int
        Of a pooled feature; 1 otherwise.
    ids : Tensor
        Rows as the owner numbers them.
    lengths : Tensor or None
        ``[bags]``; None where every bag holds one id, and where nothing is pooled.
    """

    bags: int
    ids: Tensor
    lengths: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows that come back: pooled ones, or one an id."""
        return self.ids.numel() if self.lengths is None else self.bags

    @property
    def announced(self) -> tuple[int, int, int]:
        """`WORDS` numbers."""
        return self.bags, self.ids.numel(), int(self.lengths is None)


@dataclass(frozen=True, kw_only=True)
class DistinctRows:
    """The rows of one table that a batch needs, in the order of their owners.

    Parameters
    ----------
    owned : tuple of Tensor
        As they travel: for each rank that holds rows of the table those asked of it, by its own numbers, in the order
        of their first lookups.
    places : Tensor
        ``[lookups]`` int64: which of them each lookup is, features in the order of the table.
    hot : ndarray
        The numbers of those that every rank has; they come behind the others.
    """

    owned: tuple[Tensor, ...]
    places: Tensor
    hot: Rows

    @property
    def rows(self) -> int:
        return sum(part.numel() for part in self.owned) + len(self.hot)


class Requests:
    """Splits the batches of one rank by owner.

    Parameters
    ----------
    sharding : Sharding
    replicas : Replicas or None
        Hot rows, which nobody is asked for.
    """

    def __init__(self, sharding: Sharding, replicas: Replicas | None = None) -> None:
        self._sharding, self._replicas = sharding, replicas
        self.streams = [sharding.streams(rank) for rank in range(sharding.ranks)]
        # Half the bytes of the ids that travel, for all tables that are not huge.
        large = any(table.num_embeddings > 2**31 for table in sharding.tables)
        self.ids = torch.int64 if large else torch.int32
        """Type of ids on the wire."""

    def split(self, features: KeyedJagged) -> tuple[list[list[RowRequest]], dict[str, DistinctRows]]:
        """For each owner what it is asked for, stream by stream; and the distinct rows of the tables whose rows travel.

        Raises
        ------
        ConfigError
            For a missing feature or an id outside its table.
        """
        distinct = {
            table.name: self._distinct(features, table)
            for table in self._sharding.tables
            if self._sharding.places[table.name].travel == "rows"
        }
        asked = [
            [self._asked(features, stream, distinct, rank) for stream in streams]
            for rank, streams in enumerate(self.streams)
        ]
        return asked, distinct

    def _asked(
        self, features: KeyedJagged, stream: IdStream, distinct: dict[str, DistinctRows], rank: int
    ) -> RowRequest:  # fmt: skip
        if stream.kind == "rows":
            place = self._sharding.places[stream.table.name]
            return RowRequest(bags=1, ids=distinct[stream.table.name].owned[rank - place.first])
        ids, lengths = bags_of(features, stream.key)
        _check(ids, stream.key, stream.table)
        if stream.kind == "sequence":
            return RowRequest(bags=1, ids=ids)
        bags = ids.numel() if lengths is None else lengths.numel()
        return RowRequest(bags=bags, ids=ids, lengths=lengths)

    def _distinct(self, features: KeyedJagged, table: EmbeddingBagConfig) -> DistinctRows:
        keys = (*table.feature_names, *table.sequence_features)
        parts = [bags_of(features, key)[0] for key in keys]
        for key, ids in zip(keys, parts, strict=True):
            _check(ids, key, table)
        # By first lookup, not sorted: sorting took a fifth of what a rank computes in a step.
        found, places = number_distinct(torch.cat(parts) if len(parts) > 1 else parts[0])
        place = self._sharding.places[table.name]
        owners, rows = self._sharding.owner(table.name, found)
        numbers = np.full(len(found), -1) if self._replicas is None else self._replicas.numbers(table.name, found)
        if place.ranks == 1 and not (numbers >= 0).any():
            owned = (torch.from_numpy(rows).to(self.ids),)
            return DistinctRows(owned=owned, places=torch.from_numpy(places), hot=_NONE)
        # Of 16 bits, because those are sorted by radix. Hot rows are behind those of all owners.
        part = (owners - place.first).astype(np.uint16)
        part[numbers >= 0] = place.ranks
        order = np.argsort(part, kind="stable")
        *ends, _ = np.bincount(part, minlength=place.ranks + 1).tolist()
        place_of = np.empty_like(order)
        place_of[order] = np.arange(len(order))
        cold = sum(ends)
        # As they travel: one conversion, not one for every owner.
        owned = torch.from_numpy(rows[order[:cold]]).to(self.ids).split(ends)  # type: ignore[no-untyped-call]
        return DistinctRows(owned=owned, places=torch.from_numpy(place_of[places]), hot=numbers[order[cold:]])

    def message(self, asked: Sequence[RowRequest]) -> Tensor:
        """Lengths and ids as they travel."""
        parts = [part for each in asked for part in (each.lengths, each.ids) if part is not None]
        return torch.cat([part.to(self.ids) for part in parts]) if parts else torch.empty(0, dtype=self.ids)


def joined(streams: Sequence[IdStream], asked: Sequence[Sequence[RowRequest]], least: int = 0) -> KeyedJagged:
    """The batch that an owner looks up: for every stream the bags of all ranks, in their order.

    Parameters
    ----------
    asked : sequence of sequence of RowRequest
        For each rank, stream by stream.
    least : int
        Size that the batch has at least.
    """
    keys = tuple(stream.key for stream in streams)
    by_stream = [[rank[place] for rank in asked] for place in range(len(streams))]
    values = [each.ids for stream in by_stream for each in stream]
    bags = [_bags(stream, found) for stream, found in zip(streams, by_stream, strict=True)]
    size = max(least, *(len(lengths) for lengths in bags)) if bags else least
    # Batches of single ids have kernels of their own, which need no offsets.
    single = all(stream.kind == "pooled" for stream in streams) and all(
        each.lengths is None for found in by_stream for each in found
    )
    joined_values = torch.cat(values) if values else torch.empty(0, dtype=torch.int32)
    if single and all(len(lengths) == size for lengths in bags):
        return KeyedJagged(keys=keys, values=joined_values, offsets=None, batch_size=size)
    # A jagged batch has equally many bags of each feature: what is missing are empty ones, of which `filled` says.
    padded = torch.zeros(len(streams), size, dtype=torch.int64)
    for place, lengths in enumerate(bags):
        padded[place, : len(lengths)] = lengths
    filled = tuple(len(lengths) for lengths in bags)
    return KeyedJagged(
        keys=keys, values=joined_values, offsets=offsets_of(padded.view(-1)), batch_size=size, filled=filled
    )  # fmt: skip


def _bags(stream: IdStream, asked: Sequence[RowRequest]) -> Tensor:
    """Lengths of a stream's bags at its owner; what is not pooled is one bag."""
    if stream.kind != "pooled":
        return torch.tensor([sum(each.ids.numel() for each in asked)])
    return torch.cat([
        torch.ones(each.bags, dtype=torch.int64) if each.lengths is None else each.lengths.long() for each in asked
    ])  # fmt: skip


def bags_of(features: KeyedJagged, key: str) -> tuple[Tensor, Tensor | None]:
    """Ids of a feature, and the lengths of the bags that may hold some; None where each holds one."""
    if key not in features.keys:
        raise ConfigError(f"the batch lacks {key}; it has {', '.join(features.keys)}")
    place, size = features.keys.index(key), features.batch_size
    first = place * size
    if features.offsets is None:
        return features.values[first : first + size], None
    bags = size if features.filled is None else features.filled[place]
    offsets = features.offsets[first : first + bags + 1]
    ids = features.values[int(offsets[0]) : int(features.offsets[first + size])]
    lengths = offsets.diff()
    return ids, None if ids.numel() == bags and bool((lengths == 1).all()) else lengths


def _check(ids: Tensor, key: str, table: EmbeddingBagConfig) -> None:
    wrong = outside(ids, table.num_embeddings)
    if wrong >= 0:
        raise ConfigError(
            f"feature {key!r}: id {int(ids[wrong])} is outside table {table.name!r}, expected 0 to "
            f"{table.num_embeddings - 1}"
        )


def read(message: Tensor, announced: Sequence[int]) -> list[RowRequest]:
    """What a rank asks for, from what it announced and its message."""
    found, done = [], 0
    for bags, ids, single in np.array(announced, dtype=np.int64).reshape(-1, WORDS).tolist():
        lengths = None if single else message[done : done + bags]
        done += 0 if single else bags
        found.append(RowRequest(bags=bags, ids=message[done : done + ids], lengths=lengths))
        done += ids
    return found


def message_sizes(announced: NDArray[np.int64]) -> list[int]:
    """Elements of the message of each rank, from ``[ranks, S * WORDS]`` that they announced."""
    bags, ids, single = announced.reshape(len(announced), -1, WORDS).transpose(2, 0, 1)
    sizes: list[int] = (ids + bags * (1 - single)).sum(axis=1).tolist()
    return sizes
