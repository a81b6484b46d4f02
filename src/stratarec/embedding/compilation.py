"""Compile the row update in a second process, while this process compiles other kernels and reads data.

Numba compiles on one thread, and the update takes half of the 13 s for which the kernels of a first run compile. A
forked child updates one row, which compiles the update and stores it in Numba's cache on disk. The first step loads it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Collection

import numpy as np
import torch

from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig, StepClock
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.cpu import CpuSlots
from stratarec.embedding.slots.memory import StagedBags
from stratarec.embedding.tables.base import group_layout
from stratarec.kernels.bags import BagBatch
from stratarec.kernels.runtime.cores import cores
from stratarec.kernels.runtime.numba_private import global_compiler_lock
from stratarec.kernels.update import Gradients
from stratarec.kernels.update.cpu import is_compiled

# Time after which a child ends that cannot compile, for example if another thread had a lock at the fork.
_MOST_SECONDS = 60


def compile_update(widths: Collection[int], optimizer: RowOptimizerConfig) -> Callable[[], None]:
    """Start to compile the update of rows in DRAM, unless Numba's cache has one; return a function that waits for it.

    Parameters
    ----------
    widths : collection of int
        Widths of the tables.
    optimizer : RowOptimizerConfig
    """
    if not hasattr(os, "fork") or cores() < 2 or all(map(is_compiled, widths)):
        return lambda: None
    # The lock is free in the child, because the thread that forks has it.
    with global_compiler_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if the process has threads
        child = os.fork()
    if child:
        return lambda: _wait(child)
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS)
        for width in widths:
            update_one_row(width, optimizer)
    finally:
        os._exit(0)  # also after an error, which is not reported: the parent then compiles


def _wait(child: int) -> None:
    with contextlib.suppress(ChildProcessError):  # the function may be called again
        os.waitpid(child, 0)


def update_one_row(width: int, optimizer: RowOptimizerConfig) -> None:
    """Update one row of `width` floats."""
    clock = StepClock(optimizer)
    table = EmbeddingBagConfig(name="t", num_embeddings=1, embedding_dim=width, feature_names=("f",))
    one = np.zeros(1, dtype=np.int64)
    bags = BagBatch(values=one.astype(np.int32), offsets=None, weights=None, batch=1, key=one)
    staged = StagedBags(group_layout([table], {"f": 0}, [0], [1]), bags)
    slots = CpuSlots(Level0(), 1, width, optimizer)
    slots.update(staged, Gradients(torch.zeros(1, width), []), clock.rule, clock.missed)
