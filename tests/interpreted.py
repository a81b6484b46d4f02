"""Kernels without Numba's compiler (NUMBA_DISABLE_JIT=1): the interpreter runs the same function
bodies.

Compiled code does not check indices; the interpreter raises `IndexError`. LLVM intrinsics have no
body to interpret, so each of them has a twin here in NumPy, with its documented result and with
checked indices. `install` must run before the first kernel is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba.core.extending import _Intrinsic

WANTED = os.environ.get("NUMBA_DISABLE_JIT") == "1"
LANES = 32

_TWINS: dict[str, Callable[..., Any]] = {}
Size = TypeVar("Size")


def sized(compiled: Size, tiny: Size) -> Size:
    """Return `tiny` if the interpreter runs kernels, which takes a thousand times as long, and
    `compiled` otherwise.
    """
    return tiny if WANTED else compiled


def install() -> None:
    """Make every intrinsic callable from Python."""

    def call(intrinsic: Any, *args: Any) -> Any:
        made = intrinsic._defn
        name = f"{made.__module__.rpartition('.')[2]}.{intrinsic._name}"
        if name not in _TWINS:
            raise NotImplementedError(f"{name} has no twin in {__file__}; add one")
        return _TWINS[name](*args)

    _Intrinsic.__call__ = call


def twin(module: str, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        _TWINS[f"{module}.{name or function.__name__}"] = function
        return function

    return note


def span(array: Any, first: int, count: int) -> Any:
    """Return ``array[first:first + count]``; raise an error if an element is missing or its address
    is not aligned.
    """
    first = int(first)
    if not 0 <= first <= first + count <= len(array):
        raise IndexError(f"elements {first} to {first + count} of {len(array)}")
    assert array.flags.aligned, "compiled kernels read and write whole elements at multiples of their size"
    return array[first : first + count]


# Teams consist of the calling thread


@twin("outline")
def run_team(team: Any, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    body(0, *arguments)


@twin("outline")
def take(counter: Any) -> int:
    value = int(counter[0])
    counter[0] = value + 1
    return value


twin("python_lock", "release_lock")(lambda: 0)
twin("python_lock", "take_lock")(lambda state: None)


# Memory


def _changing(change: Callable[[int, int], int]) -> Callable[..., int]:
    def changed(words: Any, place: int, value: int) -> int:
        word = span(words, place, 1)
        before = int(word[0])
        word[0] = change(before, int(value))
        return before

    return changed


twin("atomics", "add")(_changing(lambda before, value: before + value))
twin("atomics", "keep")(_changing(lambda before, value: before & value))
twin("atomics", "mark")(_changing(lambda before, value: before | value))
twin("atomics", "raise_to")(_changing(max))
twin("atomics", "write")(_changing(lambda before, value: value))
twin("atomics", "read")(lambda words, place: int(span(words, place, 1)[0]))


twin("stack", "stack_array")(np.zeros)


@twin("prefetch")
def prefetch(array: Any, element: int) -> None:
    """Do nothing, because prefetching never faults."""


def _loaded(array: Any, byte: int, kind: Any) -> Any:
    return span(array, byte, np.dtype(kind).itemsize).view(kind)[0]


def _stored(array: Any, byte: int, value: Any, kind: Any) -> None:
    span(array, byte, np.dtype(kind).itemsize)[:] = np.array([value], dtype=kind).view(np.uint8)


twin("bits", "load_u16")(lambda array, byte: _loaded(array, byte, np.uint16))
twin("bits", "load_u32")(lambda array, byte: _loaded(array, byte, np.uint32))
twin("bits", "load_u64")(lambda array, byte: _loaded(array, byte, np.uint64))
twin("bits", "load_f32")(lambda array, byte: _loaded(array, byte, np.float32))
twin("bits", "store_u16")(lambda array, byte, value: _stored(array, byte, value, np.uint16))
twin("bits", "store_f32")(lambda array, byte, value: _stored(array, byte, value, np.float32))
twin("bits", "float_bits")(lambda value: np.float32(value).view(np.uint32))
twin("bits", "bits_float")(lambda bits: np.uint32(bits).view(np.float32))
twin("bits", "multiply32")(lambda one, other: np.uint32(int(one) * int(other) & 0xFFFFFFFF))
twin("bits", "add32")(lambda one, other: np.uint32(int(one) + int(other) & 0xFFFFFFFF))
twin("bits", "select32")(lambda condition, one, other: np.uint32(one if condition else other))
twin("bits", "fold32")(lambda word, shift: np.uint32(int(word) ^ (int(word) >> int(shift))))
twin("bits", "reverse_bytes")(lambda word: np.uint64(word).byteswap())


@twin("bits")
def fold_product(first: Any, second: Any) -> Any:
    product = int(first) * int(second)
    return np.uint64((product ^ product >> 64) & (1 << 64) - 1)


twin("bits", "to_half")(lambda value: np.float16(value).view(np.uint16))
twin("bits", "from_half")(lambda bits: np.float32(np.uint16(bits).view(np.float16)))


@twin("bits")
def test_bit(bits: Any, row: int) -> bool:
    return bool(span(bits, int(row) >> 3, 1)[0] >> (int(row) & 7) & 1)


@twin("bits")
def set_bit(bits: Any, row: int) -> None:
    span(bits, int(row) >> 3, 1)[0] |= np.uint8(1 << (int(row) & 7))


# Searches of 32 at once


@twin("lanes")
def find_equal(array: Any, first: int, value: int) -> int:
    actual = np.flatnonzero(span(array, first, LANES) == value)
    return int(actual[0]) if len(actual) else LANES


@twin("lanes")
def least(array: Any, first: int, count: int) -> Any:
    within = span(array, first, LANES)[: min(int(count), LANES)]
    return within.min() if len(within) else np.int32(0x7FFFFFFF)


@twin("lanes")
def largest_below(array: Any, keys: Any, first: int, count: int, limit: int) -> Any:
    within = slice(0, min(int(count), LANES))
    values, below = span(array, first, LANES)[within], span(keys, first, LANES)[within] < limit
    return values[below].max(initial=0)


# Rows in registers


def _narrow(row: Any) -> Any:
    words = row.view(np.uint32)
    rounded = words + ((words >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return (np.where(np.isnan(row), np.uint32(0x7FC00000), rounded) >> np.uint32(16)).astype(np.uint16)


@twin("vector")
def load(array: Any, element: int, width: int) -> Any:
    result = span(array, element, width)
    if result.dtype == np.uint16:
        return (result.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return result.copy()


@twin("vector")
def store(array: Any, element: int, row: Any) -> None:
    span(array, element, len(row))[:] = _narrow(row) if array.dtype == np.uint16 else row


@twin("vector")
def stream(array: Any, element: int, row: Any) -> None:
    place = span(array, element, len(row))
    assert place.ctypes.data % 64 == 0, "a streaming store needs an address that is a multiple of 64"
    place[:] = row


twin("vector", "add")(lambda one, other: one + other)
twin("vector", "subtract")(lambda one, other: one - other)
twin("vector", "multiply")(lambda one, other: one * other)
twin("vector", "divide")(lambda one, other: one / other)
twin("vector", "square_root")(np.sqrt)
twin("vector", "passed")(lambda row, by: np.where(by <= 0, np.float32(0), row))
twin("vector", "broadcast")(lambda number, width: np.full(width, number, dtype=np.float32))


@twin("vector")
def multiply_add(one: Any, other: Any, sum: Any) -> Any:
    """Multiply and add with one rounding, as current processors do (except for sums on a tie of
    float64).
    """
    return (one.astype(np.float64) * other + sum).astype(np.float32)


@twin("vector")
def total(row: Any) -> Any:
    lanes = 16 if len(row) >= 16 else math.gcd(len(row), 16)
    result = row[:lanes].copy()
    for first in range(lanes, len(row), lanes):
        part = row[first : first + lanes]
        result[: len(part)] += part
    while len(result) > 1:
        result = result[: len(result) // 2] + result[len(result) // 2 :]
    return result[0]


@twin("vector")
def store_totals(array: Any, element: int, *rows: Any) -> None:
    span(array, element, 4)[:] = [total(row) for row in rows]
