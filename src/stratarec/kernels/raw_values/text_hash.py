"""Hash texts in compiled code: XXH3 of 64 bits without a seed, as `xxhash.xxh3_64_intdigest`
computes it.

The algorithm and its constants: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import fold_product, load_u32, load_u64, reverse_bytes

U = np.uint64
_PRIMES_32 = U(0x9E3779B1), U(0x85EBCA77), U(0xC2B2AE3D)
_PRIMES = (
    U(0x9E3779B185EBCA87),
    U(0xC2B2AE3D27D4EB4F),
    U(0x165667B19E3779F9),
    U(0x85EBCA77C2B2AE63),
    U(0x27D4EB2F165667C5),
)
_MIXER, _FACTOR = U(0x165667919E3779F9), U(0x9FB21C651E98DF25)
_LOW = U(0xFFFFFFFF)
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)
# Two words of the secret, combined, for short texts: from byte 8, 24, 40 and 56 on.
_PAIRS = tuple(np.bitwise_xor(*_SECRET[at : at + 16].view(np.uint64)) for at in (8, 24, 40, 56))
_SHORTEST = U(np.bitwise_xor(*_SECRET[:8].view(np.uint32)))


def hash_texts(content: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hash of each text ``content[offsets[t]:offsets[t + 1]]``, ``[T]``."""
    hashes = np.empty(len(offsets) - 1, dtype=np.uint64)
    _hash_texts(content, offsets, hashes)
    return hashes


@njit(nogil=True, cache=True)
def _hash_texts(content, offsets, hashes):
    for t in range(len(hashes)):
        hashes[t] = hash_text(content, offsets[t], offsets[t + 1])


@njit(**BODY)
def _avalanche(word):
    word = (word ^ (word >> U(37))) * _MIXER
    return word ^ (word >> U(32))


@njit(**BODY)
def _avalanche_64(word):
    """Return the final mix of XXH64, which the shortest texts use."""
    word = (word ^ (word >> U(33))) * _PRIMES[1]
    word = (word ^ (word >> U(29))) * _PRIMES[2]
    return word ^ (word >> U(32))


@njit(**BODY)
def _mix(content, at, secret):
    return fold_product(
        load_u64(content, at) ^ load_u64(_SECRET, secret),
        load_u64(content, at + 8) ^ load_u64(_SECRET, secret + 8),
    )


@njit(**BODY)
def hash_text(content, first, end):
    """Return the hash of ``content[first:end]``."""
    size = end - first
    length = U(size)
    if size > 240:
        return _hash_long(content, first, end)
    if size > 16:
        total = length * _PRIMES[0]
        if size > 128:
            for part in range(size // 16):
                total += _mix(content, first + 16 * part, 16 * part if part < 8 else 16 * part - 125)
                if part == 7:
                    total = _avalanche(total)
            return _avalanche(total + _mix(content, end - 16, np.int64(119)))
        # From both ends to the middle.
        for part in range((size - 1) // 32 + 1):
            total += _mix(content, first + 16 * part, 32 * part)
            total += _mix(content, end - 16 * part - 16, 32 * part + 16)
        return _avalanche(total)
    if size > 8:
        low, high = load_u64(content, first) ^ _PAIRS[1], load_u64(content, end - 8) ^ _PAIRS[2]
        return _avalanche(length + reverse_bytes(low) + high + fold_product(low, high))
    if size > 3:
        word = (U(load_u32(content, end - 4)) + (U(load_u32(content, first)) << U(32))) ^ _PAIRS[0]
        rotated = ((word << U(49)) | (word >> U(15))) ^ ((word << U(24)) | (word >> U(40)))
        word = (word ^ rotated) * _FACTOR
        word = (word ^ ((word >> U(35)) + length)) * _FACTOR
        return word ^ (word >> U(28))
    if size > 0:
        begin, middle, last = U(content[first]), U(content[first + (size >> 1)]), U(content[end - 1])
        word = (begin << U(16)) | (middle << U(24)) | last | (length << U(8))
        return _avalanche_64(word ^ _SHORTEST)
    return _avalanche_64(_PAIRS[3])


@njit(**BODY)
def _hash_long(content, first, end):
    sums = stack_array(8, np.uint64)
    sums[0] = _PRIMES_32[2]
    sums[5] = _PRIMES_32[1]
    sums[6] = _PRIMES[4]
    sums[7] = _PRIMES_32[0]
    for place in range(4):
        sums[1 + place] = _PRIMES[place]
    stripes = (end - first - 1) // 64
    for stripe in range(stripes + 1):
        # The last stripe ends with the text.
        is_last = stripe == stripes
        _add_stripe(
            sums,
            content,
            end - 64 if is_last else first + 64 * stripe,
            121 if is_last else 8 * (stripe % 16),
        )
        if stripe % 16 == 15 and not is_last:
            for place in range(8):
                word = sums[place] ^ (sums[place] >> U(47)) ^ load_u64(_SECRET, 128 + 8 * place)
                sums[place] = word * _PRIMES_32[0]
    total = U(end - first) * _PRIMES[0]
    for pair in range(4):
        left, right = load_u64(_SECRET, 11 + 16 * pair), load_u64(_SECRET, 19 + 16 * pair)
        total += fold_product(sums[2 * pair] ^ left, sums[2 * pair + 1] ^ right)
    return _avalanche(total)


@njit(**BODY)
def _add_stripe(sums, content, at, secret):
    for place in range(8):
        word = load_u64(content, at + 8 * place)
        key = word ^ load_u64(_SECRET, secret + 8 * place)
        sums[place ^ 1] += word
        sums[place] += (key & _LOW) * (key >> U(32))
