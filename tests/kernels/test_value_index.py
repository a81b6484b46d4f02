"""Compare the ids of the index with those of a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.kernels.raw_values.value_index import TextValues, ValueIndex, VocabularyKeys, reference_find


def texts(values: list[bytes]) -> TextValues:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return TextValues(np.frombuffer(b"".join(values) + b"\0", dtype=np.uint8), offsets)


def numbers(hashes: list[int], buckets: int, spread: int = 1) -> VocabularyKeys:
    """Return a vocabulary of integers that are `spread` positions apart."""
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    places = np.array(order, dtype=np.int32) * spread
    return VocabularyKeys(
        np.array([hashes[place] for place in order], dtype=np.uint64), places, buckets, None
    )


def words(values: list[bytes], hashes: list[int], buckets: int) -> VocabularyKeys:
    hashed = numbers(hashes, buckets)
    return hashed._replace(texts=texts([values[place] for place in hashed.places]))


def check(
    vocabularies: list[VocabularyKeys], number: int, keys: list[int], asked: list[bytes] | None
) -> list[int]:
    """Look up hashes in a vocabulary, and the texts that have them."""
    hashes, given = np.array(keys, dtype=np.uint64), None if asked is None else texts(asked)
    result = ValueIndex(vocabularies).find(number, hashes, given)
    np.testing.assert_array_equal(result, reference_find(vocabularies[number], hashes, given))
    return result.tolist()


@pytest.mark.parametrize("size", [0, 1, 2, 9, 1000])
@pytest.mark.parametrize("most", [2**64, 2**20, 64])
def test_ids_match_a_dictionary(size: int, most: int) -> None:
    """Keys are random, or have equal highest bits."""
    draws = np.random.default_rng(size)

    def keys(count: int) -> list[int]:
        return [int(key) for key in draws.integers(0, most, count, dtype=np.uint64, endpoint=most < 2**64)]

    one, other = (list(dict.fromkeys(keys(size))) for _ in range(2))
    vocabularies = [numbers(one, 3), numbers(other, 1, spread=2)]
    ids = check(vocabularies, 1, other[::-1] + keys(20), None)
    assert ids[: len(other)] == [1 + 2 * place for place in range(len(other))][::-1]
    check(vocabularies, 0, one + keys(20), None)
    assert check(vocabularies, 1, [], None) == []


def test_texts_with_equal_hashes_are_compared() -> None:
    values = [b"a", b"", b"bc", b"bd", "é".encode(), *(b"x%d" % place for place in range(20))]
    hashes = [7, 7, 7, 5, 2**64 - 1, *[9] * 20]
    asked = [b"bd", b"bc", b"b", b"", b"a", "é".encode(), b"x19", b"x0", b"x"]
    keys = [5, 7, 7, 7, 7, 2**64 - 1, 9, 9, 9]
    vocabularies = [words(values, hashes, 4), numbers([7, 8], 2), words([b"bc"], [7], 5)]
    expected = [4 + 3, 4 + 2, 7 % 4, 4 + 1, 4, 4 + 4, 4 + 24, 4 + 5, 9 % 4]
    assert check(vocabularies, 0, keys, asked) == expected
    assert check(vocabularies, 1, [8, 3], None) == [2 + 1, 3 % 2]
    assert check(vocabularies, 2, [7, 7], [b"bc", b"bd"]) == [5, 7 % 5]
    assert check(vocabularies, 0, [], []) == []
