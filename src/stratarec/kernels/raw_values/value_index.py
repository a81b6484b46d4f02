"""Find the ids of values by their hashes in vocabularies.

The keys of a vocabulary are sorted, and the highest bits of a key select the few keys among which
it is searched. Values of text with equal hashes are compared byte by byte.

Shapes: V vocabularies, K values of all vocabularies, N values to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import prefetch

# Keys are searched one by one if there are no more than this; if hashes are random, there is about
# one.
_FEW = 8
# Bits of a key that select a span of keys, at least and at most.
_BITS = (1, 28)

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]


class TextValues(NamedTuple):
    """Texts in UTF-8: text t is ``content[offsets[t]:offsets[t + 1]]``."""

    content: Bytes
    offsets: Int64s


NO_TEXTS = TextValues(np.frombuffer(b"\0", dtype=np.uint8), np.zeros(1, dtype=np.int64))
"""Texts of values that are numbers."""


class VocabularyKeys(NamedTuple):
    """The values of one vocabulary, in ascending order of their hashes.

    Parameters
    ----------
    hashes : ndarray
        ``[K]`` uint64. Different numbers have different hashes.
    places : ndarray
        ``[K]`` int32, the position of each value in the vocabulary.
    buckets : int
        Number of ids of values that the vocabulary does not have; these are the first ids.
    texts : TextValues or None
        K texts; None for numbers.
    """

    hashes: NDArray[np.uint64]
    places: NDArray[np.int32]
    buckets: int
    texts: TextValues | None


class IndexArrays(NamedTuple):
    """Keys of all vocabularies, one after another, as kernels read them."""

    vocabularies: Int64s
    """``[V, 6]`` first key, first element of `starts`, number of the lowest bit that selects keys,
    number of buckets, first byte in `contents` and first element of `offsets` (-1 for numbers)."""
    keys: NDArray[np.uint64]
    """``[K]`` hashes."""
    places: NDArray[np.int32]
    """``[K]``."""
    starts: NDArray[np.int32]
    """First key with each value of the highest bits, and the end of the last one."""
    contents: Bytes
    """Bytes of all texts."""
    offsets: Int64s
    """First byte of each text within the bytes of its vocabulary, and the end of the last one."""


class ValueIndex:
    """Index of the values of several vocabularies. It takes about 20 bytes per value, and the bytes
    of texts.

    Parameters
    ----------
    vocabularies : sequence of VocabularyKeys
        Values of each vocabulary.
    """

    def __init__(self, vocabularies: Sequence[VocabularyKeys]) -> None:
        keys = [part.hashes for part in vocabularies]
        bits = [min(max(len(part).bit_length(), _BITS[0]), _BITS[1]) for part in keys]
        shifts = np.array([64 - count for count in bits], dtype=np.uint64)
        starts = [
            np.append(np.searchsorted(part, np.arange(1 << count, dtype=np.uint64) << shift), len(part))
            for part, count, shift in zip(keys, bits, shifts, strict=True)
        ]
        contents = [
            np.zeros(0, np.uint8) if part.texts is None else part.texts.content for part in vocabularies
        ]
        offsets = [
            np.zeros(1, np.int64) if part.texts is None else part.texts.offsets for part in vocabularies
        ]
        first_texts = np.where([part.texts is None for part in vocabularies], -1, _starts(offsets))
        buckets = [part.buckets for part in vocabularies]
        numbers = [
            _starts(keys),
            _starts(starts),
            shifts.astype(np.int64),
            buckets,
            _starts(contents),
            first_texts,
        ]
        self.arrays = IndexArrays(
            np.array(numbers, dtype=np.int64).T.copy(),
            _joined(keys, np.uint64),
            _joined([part.places for part in vocabularies], np.int32),
            _joined(starts, np.int32),
            _joined(contents, np.uint8),
            _joined(offsets, np.int64),
        )

    def find(
        self, vocabulary: int, hashes: NDArray[np.uint64], texts: TextValues | None = None
    ) -> NDArray[np.int32]:
        """Return the ids of values in one vocabulary, ``[N]``.

        Parameters
        ----------
        vocabulary : int
            Number of the vocabulary.
        hashes : ndarray
            ``[N]``.
        texts : TextValues or None
            The values, if they are text.
        """
        ids = np.empty(len(hashes), dtype=np.int32)
        _find(tuple(self.arrays), vocabulary, hashes, tuple(texts or NO_TEXTS), ids)
        return ids


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype=dtype)


def _starts(parts: Sequence[NDArray[Any]]) -> Int64s:
    return np.cumsum([0, *map(len, parts)])[:-1].astype(np.int64)


def reference_find(
    keys: VocabularyKeys, hashes: NDArray[np.uint64], texts: TextValues | None = None
) -> NDArray[np.int32]:
    """Return the same as `ValueIndex.find` for a vocabulary, by a dictionary."""
    codes = {
        (key, _text(keys.texts, number)): keys.buckets + place
        for number, (key, place) in enumerate(zip(keys.hashes.tolist(), keys.places.tolist(), strict=True))
    }
    ids = [codes.get((key, _text(texts, n)), key % keys.buckets) for n, key in enumerate(hashes.tolist())]
    return np.array(ids, dtype=np.int32)


def _text(texts: TextValues | None, place: int) -> bytes:
    return (
        b"" if texts is None else texts.content[texts.offsets[place] : texts.offsets[place + 1]].tobytes()
    )


@njit(**BODY)
def _equal(one, first, last, other, start, stop):
    if last - first != stop - start:
        return False
    for byte in range(last - first):
        if one[first + byte] != other[start + byte]:
            return False
    return True


@njit(nogil=True, cache=True)
def _find(index, vocabulary, hashes, texts, ids):
    find_ids(IndexArrays(*index), vocabulary, hashes, TextValues(*texts), 0, ids)


@njit(**BODY)
def prefetch_keys(index, vocabulary, hashes, step):
    """Prefetch what `find_ids` reads first (step 0), then the keys to which that leads (step 1)."""
    base, start, shift = index.vocabularies[vocabulary, :3]
    for j in range(len(hashes)):
        at = start + np.int64(hashes[j] >> np.uint64(shift))
        if step:
            prefetch(index.keys, base + index.starts[at])
            prefetch(index.places, base + index.starts[at])
        else:
            prefetch(index.starts, at)


@njit(**BODY)
def find_ids(index, vocabulary, hashes, texts, text, ids):
    """Set `ids` to those of values with `hashes`; if they are text, these are the texts from number
    `text` on.
    """
    base, start, shift, buckets, first_byte, first_text = index.vocabularies[vocabulary]
    keys, shift = index.keys, np.uint64(shift)
    # A loop without branches, so that reads of different values from memory overlap.
    for j in range(len(hashes)):
        ids[j] = index.starts[start + np.int64(hashes[j] >> shift)]
    for j in range(len(hashes)):
        key = hashes[j]
        low, high = base + ids[j], base + index.starts[start + np.int64(key >> shift) + 1]
        end = high
        while high - low > _FEW:
            middle = (low + high) // 2
            if keys[middle] < key:
                low = middle + 1
            else:
                high = middle
        while low < end and keys[low] < key:
            low += 1
        if first_text >= 0:
            at = first_text - base
            while (
                low < end
                and keys[low] == key
                and not _equal(
                    index.contents,
                    first_byte + index.offsets[at + low],
                    first_byte + index.offsets[at + low + 1],
                    texts.content,
                    texts.offsets[text + j],
                    texts.offsets[text + j + 1],
                )
            ):
                low += 1
        if low < end and keys[low] == key:
            ids[j] = np.int32(buckets + index.places[low])
        else:
            ids[j] = np.int32(key % np.uint64(buckets))
