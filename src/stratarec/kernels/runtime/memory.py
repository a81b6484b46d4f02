"""Large arrays on huge pages, and buffers that are reused instead of being mapped at every step.

A new output of 100 MB costs more in page faults than the pooling that fills it, because the system
zeroes every page.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Smaller tensors come from malloc, which keeps free memory of such sizes and needs no system call.
_SMALL_BYTES = 1 << 20
_FREE_PER_SIZE = 2
# Options of glibc's `mallopt`, and the size up to which it keeps free memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 1 << 28


def keep_free_memory() -> None:
    """Make malloc keep free memory for the next allocation, if it is glibc's. There is no way to
    undo this.

    glibc returns freed blocks of 128 KiB and more to the system, unless larger ones were freed
    before. The activations of small batches are of this size: a step of 256 samples of an ensemble
    had up to 300 page faults, which took 0.4 to 0.8 of 11 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def allocate(elements: int) -> NDArray[np.float32]:
    """Allocate zeroed, page-aligned memory of `elements` float32 values, on huge pages where the
    system has them.

    With 4 KiB pages, nearly every access to a random row of a large table misses the TLB.
    """
    return np.frombuffer(_map(elements * 4), dtype=np.float32)[:elements]


# Private, because shared anonymous memory (the default of `mmap`) is a file of the kernel's tmpfs.
# There, huge pages exist only if an administrator enabled them, and reading a page that was never
# written allocates it.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), **_PRIVATE)
    # A 1.39 GB table, D = 64, batch 16,384, one thread: on huge pages forward took 6.2 ms instead
    # of 8.3, backward 14.8 instead of 22.9.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def flat(tensor: Tensor) -> NDArray[Any]:
    """Return the elements of a tensor as a flat array, copied only if not contiguous."""
    array: NDArray[Any] = tensor.detach().contiguous().view(-1).numpy()
    return array


def buffer_bytes(elements: int) -> int:
    """Return the number of bytes that `RECYCLER` uses for `elements` float32 values.

    Sizes are 2^n and 1.5 * 2^n bytes, so batches of slightly different sizes share buffers.
    """
    needed = elements * 4
    if needed < _SMALL_BYTES:
        return needed
    size = 1 << (needed - 1).bit_length()
    return size * 3 // 4 if needed <= size * 3 // 4 else size


# A new output of 109 MB cost 57 ms of page faults, more than the 34 ms of the forward pass.
class Recycler:
    """Allocator of uninitialized float32 tensors; it reuses a tensor's memory after the last view
    of it is deleted.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        # Finalizers only append to this queue, because the garbage collector may run them in a
        # thread that has the lock.
        self._returned: deque[tuple[int, mmap.mmap]] = deque()
        self._lock = threading.Lock()

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor as from `torch.empty`; if it is large, in recycled memory."""
        elements = math.prod(shape)
        if elements * 4 < _SMALL_BYTES:
            return torch.empty(shape)
        size = buffer_bytes(elements)
        with self._lock:
            self._recycle()
            free = self._free.get(size)
            memory = free.pop() if free else None
        if memory is None:
            memory = _map(size)
        array = np.frombuffer(memory, dtype=np.float32)
        # `atexit` is off, because at the end of the process no memory needs to be returned.
        weakref.finalize(array, self._returned.append, (size, memory)).atexit = False
        return torch.from_numpy(array)[:elements].view(shape)

    def _recycle(self) -> None:
        """Make returned memory available, or release it if enough is free. Needs the lock."""
        while self._returned:
            size, memory = self._returned.popleft()
            free = self._free.setdefault(size, [])
            if len(free) < _FREE_PER_SIZE:
                free.append(memory)


RECYCLER = Recycler()
