"""Guard pages: a kernel gets copies of its arrays that end at a page without access rights.

An access one element before or behind an array then ends the process; in ordinary memory it would
read or write other data by chance. Calls are intercepted where Python calls compiled code, so the
library does not depend on this module. Bytes that a kernel changed are copied back.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba.core.registry import CPUDispatcher
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import Team

_KERNELS, _ELSEWHERE = "stratarec.kernels.", "stratarec.kernels.runtime."
"""Modules whose arrays are not copied, because runtime threads keep them."""
_MOST_BYTES = 64 << 20
_PAGE = mmap.PAGESIZE
# Bytes next to an array that a page boundary leaves free. A kernel must not change them.
_BESIDE, _MARK = 64, 0xA5


class _Span(NamedTuple):
    """Memory that arrays of one call share."""

    first: int
    last: int
    kept: bool
    """Whether to copy changes back to the caller's array."""


class _Copy(NamedTuple):
    span: _Span
    region: NDArray[np.uint8]
    begin: int
    before: NDArray[np.uint8]

    @property
    def mine(self) -> NDArray[np.uint8]:
        return self.region[self.begin : self.begin + len(self.before)]


class Guards:
    """Intercept every call of a kernel from Python after `install` was called."""

    def __init__(self) -> None:
        self.at_end = True
        """Whether arrays end (or else begin) at a guard page."""
        self.calls = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._call = CPUDispatcher.__call__
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def install(self) -> None:
        """Intercept calls in this process from now on."""
        # The C type's call is looked up on its Python subclass.
        CPUDispatcher.__call__ = lambda kernel, *arguments: self._caught(kernel, arguments)

    def _caught(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        module = kernel.py_func.__module__
        arrays = list(_arrays(arguments))
        if not module.startswith(_KERNELS) or module.startswith(_ELSEWHERE) or not arrays:
            return self._call(kernel, *arguments)
        self.calls += 1
        copies = [self._copy(span, arrays) for span in _spans(arrays)]
        copied_arrays = {id(array): _moved(array, copies) for array in arrays}
        try:
            result = self._call(kernel, *_replaced(arguments, copied_arrays))
        finally:
            for copy in copies:
                self._copy_back(copy)
        self._check(kernel, copies)
        assert not any(_inside(array, copies) for array in _arrays((result,))), (
            f"{kernel} returned what it was given"
        )
        return result

    def _copy(self, span: _Span, arrays: list[NDArray[Any]]) -> _Copy:
        size = span.last - span.first
        if size > _MOST_BYTES:
            return _Copy(span, np.empty(0, np.uint8), 0, np.empty(0, np.uint8))
        region = self._region(size)
        begin = _PAGE
        if self.at_end:
            begin = len(region) - _PAGE - size
            # Kernels are compiled for arrays with aligned elements.
            sizes = [array.itemsize for array in arrays if _within(array, span) and array.flags.aligned]
            begin -= begin % max(sizes, default=1)
        before = _memory(span).copy() if size else region[:0]
        copy = _Copy(span, region, begin, before)
        copy.mine[:] = before
        for margin in _margins(copy):
            margin[:] = _MARK
        return copy

    def _region(self, size: int) -> NDArray[np.uint8]:
        """Return memory for this many bytes between two guard pages."""
        pages = 1 << max(-(-size // _PAGE) - 1, 0).bit_length()
        with self._lock:
            if self._free[pages]:
                return self._free[pages].pop()
        memory = mmap.mmap(-1, (pages + 2) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region = np.frombuffer(memory, np.uint8)
        for guard in (0, (pages + 1) * _PAGE):
            if self._protect(region.ctypes.data + guard, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "no guard page")
        return region

    def _copy_back(self, copy: _Copy) -> None:
        if copy.span.kept and len(copy.before):
            changed = np.flatnonzero(copy.mine != copy.before)
            if len(changed):
                target = _memory(copy.span)
                # Copy only what the kernel wrote, because another thread may have written next to
                # it.
                target[changed] = copy.mine[changed]

    def _check(self, kernel: Any, copies: list[_Copy]) -> None:
        for copy in copies:
            if len(copy.region):
                wrong = any((margin != _MARK).any() for margin in _margins(copy))
                assert not wrong, f"{kernel.py_func.__module__}.{kernel.__name__} wrote next to an array"
                with self._lock:
                    self._free[len(copy.region) // _PAGE - 2].append(copy.region)


def _memory(span: _Span) -> NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_uint8 * (span.last - span.first)).from_address(span.first), np.uint8)


def _margins(copy: _Copy) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the bytes before and behind an array, up to the guards."""
    end, last = copy.begin + len(copy.before), len(copy.region) - _PAGE
    front = copy.region[max(copy.begin - _BESIDE, _PAGE) : copy.begin] if len(copy.region) else copy.region
    return front, copy.region[end : min(end + _BESIDE, last)] if len(copy.region) else copy.region


def _arrays(value: Any) -> Iterator[NDArray[Any]]:
    """Return all arrays of a call, except the words that other threads of a team wait at."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple) and not isinstance(value, Team):
        for part in value:
            yield from _arrays(part)


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    if not array.size:
        return array.ctypes.data, array.ctypes.data
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(min(each, 0) for each in reach)
    return first, array.ctypes.data + sum(max(each, 0) for each in reach) + array.itemsize


def _spans(arrays: list[NDArray[Any]]) -> list[_Span]:
    """Return the memory of all arrays. Arrays that overlap share one span."""
    results: list[_Span] = []
    for (first, last), kept in sorted((_bounds(array), array.flags.writeable) for array in arrays):
        if results and (first < results[-1].last or (first, last) == results[-1][:2]):
            results[-1] = _Span(results[-1].first, max(last, results[-1].last), results[-1].kept or kept)
        else:
            results.append(_Span(first, last, kept))
    return results


def _within(array: NDArray[Any], span: _Span) -> bool:
    first, last = _bounds(array)
    return span.first <= first and last <= span.last and (first < span.last or span.first == span.last)


def _moved(array: NDArray[Any], copies: list[_Copy]) -> NDArray[Any]:
    """Return the array in the copy of its memory."""
    copy = next(copy for copy in copies if _within(array, copy.span))
    if not len(copy.region):
        return array
    offset = copy.begin + array.ctypes.data - copy.span.first
    # Use its own offset, because NumPy would reject an empty array at a guard.
    actual = np.ndarray(array.shape, array.dtype, copy.region, offset, array.strides)
    actual.flags.writeable = array.flags.writeable
    return actual


def _replaced(value: Any, copied_arrays: dict[int, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        return copied_arrays[id(value)]
    if isinstance(value, tuple) and not isinstance(value, Team):
        parts = [_replaced(part, copied_arrays) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _inside(array: NDArray[Any], copies: list[_Copy]) -> bool:
    return any(len(copy.region) and np.may_share_memory(array, copy.region) for copy in copies)
