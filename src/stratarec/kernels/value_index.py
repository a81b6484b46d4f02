"""Find the ids of values by their hashes, in the vocabularies of several features at once.

The keys of a vocabulary are sorted, and the highest bits of a key select the few keys among which it is searched.
Values of text with equal hashes are compared byte by byte.

Shapes: V vocabularies, K values of all vocabularies, F features, N values to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY

# Keys are searched one by one if there are no more than this; if hashes are random, there is about one.
_FEW = 8
# Bits of a key that select a span of keys, at least and at most.
_BITS = (1, 28)

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]


class TextValues(NamedTuple):
    """Texts in UTF-8: text t is ``content[offsets[t]:offsets[t + 1]]``."""

    content: Bytes
    offsets: Int64s


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


class Query(NamedTuple):
    """Values to find: feature f looks up ``counts[f]`` values from number ``sources[f]`` on in its vocabulary.

    Parameters
    ----------
    hashes : ndarray
        ``[N]`` uint64.
    sources, counts, vocabularies : ndarray
        ``[F]`` int64.
    texts : TextValues
        The last values are text: these are their texts.
    """

    hashes: NDArray[np.uint64]
    sources: Int64s
    counts: Int64s
    vocabularies: Int64s
    texts: TextValues


class ValueIndex:
    """Index of the values of several vocabularies. It takes about 20 bytes per value, and the bytes of texts.

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
        contents = [np.zeros(0, np.uint8) if part.texts is None else part.texts.content for part in vocabularies]
        offsets = [np.zeros(1, np.int64) if part.texts is None else part.texts.offsets for part in vocabularies]
        self._arrays = (
            _joined(keys, np.uint64), _joined([part.places for part in vocabularies], np.int32), _starts(keys),
            _joined(starts, np.int32), _starts(starts), shifts,
            np.array([part.buckets for part in vocabularies], dtype=np.uint64),
            _joined(contents, np.uint8), _starts(contents), _joined(offsets, np.int64),
            np.where([part.texts is None for part in vocabularies], -1, _starts(offsets)),
        )  # fmt: skip

    def find(self, query: Query) -> NDArray[np.int32]:
        """Return the ids of all values of `query`, feature after feature, ``[N]`` int32."""
        ids = np.empty(int(query.counts.sum()), dtype=np.int32)
        _find(tuple(query[:4]), tuple(query.texts), self._arrays, ids)
        return ids


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype=dtype)


def _starts(parts: Sequence[NDArray[np.generic]]) -> Int64s:
    return np.cumsum([0, *map(len, parts)])[:-1].astype(np.int64)


def reference_find(vocabularies: Sequence[VocabularyKeys], query: Query) -> NDArray[np.int32]:
    """Return the same as `ValueIndex.find`, by a dictionary for each vocabulary."""
    ids = []
    first_text = len(query.hashes) - len(query.texts.offsets) + 1
    for source, count, number in zip(query.sources, query.counts, query.vocabularies, strict=True):
        hashes, places, buckets, texts = vocabularies[number]
        codes = {
            (key, b"" if texts is None else _text(texts, number)): buckets + place
            for number, (key, place) in enumerate(zip(hashes.tolist(), places.tolist(), strict=True))
        }
        for place in range(source, source + count):
            key = int(query.hashes[place])
            text = b"" if texts is None else _text(query.texts, place - first_text)
            ids.append(codes.get((key, text), key % buckets))
    return np.array(ids, dtype=np.int32)


def _text(texts: TextValues, place: int) -> bytes:
    return texts.content[texts.offsets[place] : texts.offsets[place + 1]].tobytes()


@njit(**BODY)
def _equal(left, first, last, right, start, stop):
    if last - first != stop - start:
        return False
    for byte in range(last - first):
        if left[first + byte] != right[start + byte]:
            return False
    return True


@njit(nogil=True, cache=True)
def _find(query, texts, index, ids):
    hashes, sources, counts, vocabularies = query
    content, offsets = texts
    keys, places, first_key, starts, first_start, shifts, buckets, contents, first_byte, text_offsets, first_text = (
        index
    )
    texts_from = len(hashes) - len(offsets) + 1
    done = 0
    for f in range(len(sources)):
        v, source = vocabularies[f], sources[f]
        base, start, shift, bucket_count = first_key[v], first_start[v], shifts[v], buckets[v]
        # A loop without branches, so that reads of different values from memory overlap.
        for j in range(counts[f]):
            ids[done + j] = starts[start + np.int64(hashes[source + j] >> shift)]
        for j in range(counts[f]):
            key = hashes[source + j]
            low, high = base + ids[done + j], base + starts[start + np.int64(key >> shift) + 1]
            end = high
            while high - low > _FEW:
                middle = (low + high) // 2
                if keys[middle] < key:
                    low = middle + 1
                else:
                    high = middle
            while low < end and keys[low] < key:
                low += 1
            if first_text[v] >= 0:
                at, text = first_text[v] - base, source + j - texts_from
                while low < end and keys[low] == key and not _equal(
                    contents, first_byte[v] + text_offsets[at + low], first_byte[v] + text_offsets[at + low + 1],
                    content, offsets[text], offsets[text + 1],
                ):  # fmt: skip
                    low += 1
            if low < end and keys[low] == key:
                ids[done + j] = np.int32(np.int64(bucket_count) + places[low])
            else:
                ids[done + j] = np.int32(key % bucket_count)
        done += counts[f]
