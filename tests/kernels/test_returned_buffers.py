"""Test that a buffer may be returned at any time: a thread that has a pool's lock may run the
garbage collector.
"""

from __future__ import annotations

import platform
import resource
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stratarec.kernels.runtime.accelerator import _Pinned
from stratarec.kernels.runtime.memory import Recycler, keep_free_memory


class Driver:
    """A driver whose pinned memory is ordinary memory."""

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


def pinned() -> tuple[_Pinned, Callable[[], Tensor]]:
    pool = _Pinned(Driver())  # type: ignore[arg-type]
    return pool, lambda: pool.empty((1 << 20,), torch.float32)


def recycled() -> tuple[Recycler, Callable[[], Tensor]]:
    pool = Recycler()
    return pool, lambda: pool.empty(1 << 22)


@pytest.mark.parametrize("make", [pinned, recycled])
def test_a_buffer_that_is_returned_under_the_lock_is_reused(
    make: Callable[[], tuple[Recycler, Callable[[], Tensor]]],
) -> None:
    pool, empty = make()
    buffers = [empty()]
    address = buffers[0].data_ptr()

    def collect() -> None:
        with pool._lock:
            buffers.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert empty().data_ptr() == address


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators keep free memory by their own rules"
)
def test_free_memory_is_used_again_without_page_faults() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    keep_free_memory()
    for _ in range(8):  # a freed block may be a few bytes too short for the next tensor
        torch.ones(1 << 24)  # 64 MiB, which glibc returns to the system by default
    counts = []
    for _ in range(5):
        before = faults()
        torch.ones(1 << 24)
        counts.append(faults() - before)
    # Memory that was returned has a fault for each page or huge page, 32 at least. Other code may
    # take the free block.
    assert sorted(counts)[2] < 16
