"""Requests for the rows of a batch's ids, and the batch that an owner joins from the requests of
all ranks.

In the joined batch, the bags of each feature are in the order of ranks. So a complete table on one
rank gets the same batch as in one process, and computes the same bits.

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
from stratarec.distributed.sharding import IdStream, Sharding
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.errors import ConfigError
from stratarec.kernels.collate import outside
from stratarec.kernels.unique import number_distinct

WORDS = 3
"""Number of counts of a request (`RowRequest.counts`), which a rank sends before the request."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """Request of one rank to one owner, for one stream of ids.

    Parameters
    ----------
    bags : int
        Number of bags of a pooled feature; 1 otherwise.
    ids : Tensor
        ``[N]`` int32 or int64 requested rows, numbered as the owner numbers them.
    lengths : Tensor or None
        ``[bags]`` number of ids of each bag; None if every bag has one id, and for streams without
        pooling.
    """

    bags: int
    ids: Tensor
    lengths: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows in the answer: one per bag, or one per id without pooling."""
        return self.ids.numel() if self.lengths is None else self.bags

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of bags, number of ids, and 1 if every bag has one id, without lengths."""
        return self.bags, self.ids.numel(), int(self.lengths is None)


@dataclass(frozen=True, kw_only=True)
class DistinctRows:
    """Distinct rows of one table that a batch needs, ordered by owner.

    Parameters
    ----------
    owned : tuple of Tensor
        One tensor per owner of the table: the rows requested from it, numbered as the owner numbers
        them, in the order of their first lookups.
    places : Tensor
        ``[lookups]`` int64 position of each lookup's row among all distinct rows; features are in
        the table's order.
    """

    owned: tuple[Tensor, ...]
    places: Tensor

    @property
    def rows(self) -> int:
        """Number of distinct rows."""
        return sum(part.numel() for part in self.owned)


class Requests:
    """Builds the requests of one rank: it divides the ids of a batch by the owners of their rows.

    Parameters
    ----------
    sharding : Sharding
        Owners of all rows.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.streams = [sharding.streams(rank) for rank in range(sharding.ranks)]
        # Type of ids on the wire: int32 halves their bytes, unless a table is huge.
        large = any(table.num_embeddings > 2**31 for table in sharding.tables)
        self.ids = torch.int64 if large else torch.int32

    def split(self, features: KeyedJagged) -> tuple[list[list[RowRequest]], dict[str, DistinctRows]]:
        """Divide the ids of a batch by the owners of their rows.

        Parameters
        ----------
        features : KeyedJagged
            Ids of this rank's batch.

        Returns
        -------
        requests : list of list of RowRequest
            Requests to each rank, one per stream of this rank's ids.
        distinct : dict of str to DistinctRows
            Distinct rows of each table whose rows are exchanged (``travel`` is ``rows``).

        Raises
        ------
        ConfigError
            If a feature is missing or an id is outside its table.
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
    ) -> RowRequest:
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
        # In the order of first lookups. Sorting rows took a fifth of the computing time of a rank's
        # step.
        unique, places = number_distinct(torch.cat(parts) if len(parts) > 1 else parts[0])
        place = self._sharding.places[table.name]
        owners, rows = self._sharding.owner(table.name, unique)
        if place.ranks == 1:
            owned = (torch.from_numpy(rows).to(self.ids),)
            return DistinctRows(owned=owned, places=torch.from_numpy(places))
        # 16 bits, which NumPy sorts by radix.
        part = (owners - place.first).astype(np.uint16)
        order = np.argsort(part, kind="stable")
        ends = np.bincount(part, minlength=place.ranks).tolist()
        place_of = np.empty_like(order)
        place_of[order] = np.arange(len(order))
        # Converted once for all owners.
        owned = torch.from_numpy(rows[order]).to(self.ids).split(ends)  # type: ignore[no-untyped-call]
        return DistinctRows(owned=owned, places=torch.from_numpy(place_of[places]))

    def message(self, asked: Sequence[RowRequest]) -> Tensor:
        """Return the message to one owner, ``[n]``: lengths and ids of its requests `asked`."""
        parts = [part for request in asked for part in (request.lengths, request.ids) if part is not None]
        return torch.cat([part.to(self.ids) for part in parts]) if parts else torch.empty(0, dtype=self.ids)


def join_requests(
    streams: Sequence[IdStream], asked: Sequence[Sequence[RowRequest]], least: int = 0
) -> KeyedJagged:
    """Join the requests of all ranks into the batch that an owner looks up; bags are in the order
    of ranks.

    Parameters
    ----------
    streams : sequence of IdStream
        Streams of ids to this owner.
    asked : sequence of sequence of RowRequest
        Requests of each rank, one per stream.
    least : int
        Minimum number of bags per feature.
    """
    keys = tuple(stream.key for stream in streams)
    by_stream = [[rank[place] for rank in asked] for place in range(len(streams))]
    values = [request.ids for requests in by_stream for request in requests]
    bags = [_bags(stream, requests) for stream, requests in zip(streams, by_stream, strict=True)]
    size = max(least, *(len(lengths) for lengths in bags)) if bags else least
    # Batches of single ids have separate kernels without offsets.
    single = all(stream.kind == "pooled" for stream in streams) and all(
        request.lengths is None for requests in by_stream for request in requests
    )
    joined_values = torch.cat(values) if values else torch.empty(0, dtype=torch.int32)
    if single and all(len(lengths) == size for lengths in bags):
        return KeyedJagged(keys=keys, values=joined_values, offsets=None, batch_size=size)
    # A jagged batch has equally many bags for each feature, so features are padded with empty bags
    # at the end.
    padded = torch.zeros(len(streams), size, dtype=torch.int64)
    for place, lengths in enumerate(bags):
        padded[place, : len(lengths)] = lengths
    filled = tuple(len(lengths) for lengths in bags)
    return KeyedJagged(
        keys=keys, values=joined_values, offsets=offsets_of(padded.view(-1)), batch_size=size, filled=filled
    )


def _bags(stream: IdStream, asked: Sequence[RowRequest]) -> Tensor:
    """Return the bag lengths of a stream in the joined batch; without pooling it is one bag."""
    if stream.kind != "pooled":
        return torch.tensor([sum(request.ids.numel() for request in asked)])
    return torch.cat(
        [
            torch.ones(request.bags, dtype=torch.int64)
            if request.lengths is None
            else request.lengths.long()
            for request in asked
        ]
    )


def bags_of(features: KeyedJagged, key: str) -> tuple[Tensor, Tensor | None]:
    """Return the ids of a feature and the lengths of its bags, without the empty bags at the end.

    Parameters
    ----------
    features : KeyedJagged
        A batch.
    key : str
        Name of the feature.

    Returns
    -------
    ids : Tensor
        ``[N]`` ids, a view.
    lengths : Tensor or None
        ``[bags]`` int64 number of ids of each bag; None if each bag has one id.
    """
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


def parse_requests(message: Tensor, counts: Sequence[int]) -> list[RowRequest]:
    """Split the message of one rank into its requests.

    Parameters
    ----------
    message : Tensor
        ``[n]`` lengths and ids, as `Requests.message` returns them.
    counts : sequence of int
        ``[S * WORDS]``: `RowRequest.counts` of each stream, which the rank sent before the message.
    """
    requests, done = [], 0
    for bags, ids, single in np.array(counts, dtype=np.int64).reshape(-1, WORDS).tolist():
        lengths = None if single else message[done : done + bags]
        done += 0 if single else bags
        requests.append(RowRequest(bags=bags, ids=message[done : done + ids], lengths=lengths))
        done += ids
    return requests


def message_sizes(counts: NDArray[np.int64]) -> list[int]:
    """Return the number of elements of each rank's message.

    Parameters
    ----------
    counts : ndarray
        ``[ranks, S * WORDS]`` int64: `RowRequest.counts` of each rank and stream.
    """
    bags, ids, single = counts.reshape(len(counts), -1, WORDS).transpose(2, 0, 1)
    sizes: list[int] = (ids + bags * (1 - single)).sum(axis=1).tolist()
    return sizes
