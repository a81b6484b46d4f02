"""What of a batch's rows travels early, and what after the batch before it is trained.

A row is *final* where the batch before does not look it up: nothing changes it any more once the batches before that
one are done. A bag is final where all its rows are. Owners know this when they have prepared the batch. They tell
whoever asked by one bit a row of the answer, in the message that says whether they could prepare it.

Shapes: N ids, S streams of an owner (`Sharding.streams`). Rows of a stream are its bags where it is pooled, else its
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.distributed.legs import Leg
from stratarec.embedding.prepared import Part, Prepared
from stratarec.jagged import KeyedJagged, offsets_of

Flags = NDArray[np.bool_]


class Half(NamedTuple):
    """One of two messages with the rows of a batch.

    Parameters
    ----------
    part : Part or None
        What this rank's own tables are asked for; None where it has none.
    answering, asking : Leg
        As those of `Routed`, with the arrays of the part, and some rows of the same arrays.
    numbers : ndarray
        Which rows of the whole answer these are.
    idle : bool
        As that of `Routed`.
    """

    part: Part | None
    answering: Leg
    asking: Leg
    numbers: NDArray[np.int64]
    idle: bool


@dataclass(frozen=True)
class Streams:
    """The ids that an owner is asked for, stream by stream."""

    own: KeyedJagged
    pooled: Sequence[bool]
    """Whether each stream is."""

    def bags(self, stream: int) -> int:
        """Bags that a pooled stream fills."""
        return self.own.batch_size if self.own.filled is None else self.own.filled[stream]

    def final(self, touched: Flags) -> list[Flags]:
        """For each stream which of its rows are final, given whether the batch before looks up that of each id."""
        own, size = self.own, self.own.batch_size
        if own.offsets is None:
            return [~touched[place * size : (place + 1) * size] for place in range(len(self.pooled))]
        offsets, seen = own.offsets.numpy(), np.concatenate(([0], np.cumsum(touched)))
        found = []
        for place, pooled in enumerate(self.pooled):
            first = place * size
            if pooled:
                found.append(np.diff(seen[offsets[first : first + self.bags(place) + 1]]) == 0)
            else:
                found.append(~touched[offsets[first] : offsets[first + size]])
        return found

    def part(self, prepared: Prepared, wanted: Sequence[Flags]) -> Part:
        """The wanted rows of each stream, in their order, as a batch of their own."""
        features, places = self._singles(wanted) if self.own.offsets is None else self._jagged(wanted)
        # Groups under caches share an array.
        arrays = {id(ids): ids[places] for ids in {id(bags.values): bags.values for bags in prepared.bags}.values()}
        offsets = None if features.offsets is None else features.offsets.numpy()
        filled = None if features.filled is None else np.array(features.filled, dtype=np.int64)
        return Part(features, tuple(
            replace(
                bags, values=arrays[id(bags.values)], offsets=offsets, batch=features.batch_size,
                weights=None if features.weights is None else features.weights.detach().numpy(),
                filled=None if filled is None else filled[bags.key],
            )
            for bags in prepared.bags
        ))  # fmt: skip

    def _singles(self, wanted: Sequence[Flags]) -> tuple[KeyedJagged, NDArray[np.int64]]:
        own, counts = self.own, [int(np.count_nonzero(flags)) for flags in wanted]
        size = max(counts, default=0)
        # What fills a stream up to the size of the longest is never looked at.
        places = np.zeros((len(counts), size), dtype=np.int64)
        for place, (flags, count) in enumerate(zip(wanted, counts, strict=True)):
            places[place, :count] = np.flatnonzero(flags) + place * own.batch_size
        flat = places.reshape(-1)
        features = KeyedJagged(
            keys=own.keys, values=own.values[torch.from_numpy(flat)], offsets=None, batch_size=size,
            filled=tuple(counts),
        )  # fmt: skip
        return features, flat

    def _jagged(self, wanted: Sequence[Flags]) -> tuple[KeyedJagged, NDArray[np.int64]]:
        own, size = self.own, self.own.batch_size
        assert own.offsets is not None
        offsets, kept, lengths = own.offsets.numpy(), [], []
        for place, (pooled, flags) in enumerate(zip(self.pooled, wanted, strict=True)):
            if pooled:
                first = place * size
                bags = np.diff(offsets[first : first + len(flags) + 1])
                kept.append(np.repeat(flags, bags))
                lengths.append(bags[flags])
            else:
                kept.append(flags)
                lengths.append(np.array([np.count_nonzero(flags)], dtype=np.int64))
        most = max((len(bags) for bags in lengths), default=0)
        padded = np.zeros((len(lengths), most), dtype=np.int64)
        for place, bags in enumerate(lengths):
            padded[place, : len(bags)] = bags
        places = np.flatnonzero(np.concatenate(kept))
        features = KeyedJagged(
            keys=own.keys, values=own.values[torch.from_numpy(places)],
            offsets=offsets_of(torch.from_numpy(padded.reshape(-1))), batch_size=most,
            filled=tuple(len(bags) for bags in lengths),
        )  # fmt: skip
        return features, places


def by_rank(streams: Sequence[Flags], rows: Sequence[Sequence[int]]) -> list[Flags]:
    """For each rank the flags of what it asked for, stream after stream, from those of each stream, rank after rank.

    Parameters
    ----------
    rows : sequence of sequence of int
        Of each rank in each stream.
    """
    ends = np.cumsum([[0] * len(streams), *rows], axis=0).tolist()
    return [
        np.concatenate([np.zeros(0, dtype=np.bool_), *(flags[i:j] for flags, i, j in zip(streams, *span, strict=True))])
        for span in pairwise(ends)
    ]


def packed(failed: bool, flags: Flags) -> NDArray[np.uint8]:
    """What an owner tells a rank of a batch: whether it failed, and one bit a row."""
    return np.concatenate((np.array([failed], dtype=np.uint8), np.packbits(flags)))


def packed_bytes(rows: int) -> int:
    """Bytes of `packed`."""
    return 1 + -(-rows // 8)


def unpacked(content: NDArray[np.uint8], rows: int) -> Flags:
    """The flags of `packed`."""
    return np.unpackbits(content[1:], count=rows).astype(np.bool_)
