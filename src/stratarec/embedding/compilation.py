"""Compile kernels of rows in a second process, while this process compiles other kernels and reads
data.

Numba compiles on one thread, and these kernels take a third of the time for which the kernels of a
first run compile. A forked child uses one row, which compiles the kernels and stores them in
Numba's cache on disk. This process loads them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Collection

import numpy as np
import torch

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig
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

# Time after which a child ends that cannot compile, for example if another thread had a lock at the
# fork.
_MOST_SECONDS = 60


def compile_kernels(widths: Collection[int], optimizer: RowOptimizerConfig) -> Callable[[], None]:
    """Compile the kernels that update rows in DRAM by a child process, if Numba's cache lacks them.

    Returns a function that waits until the child process has ended.

    Parameters
    ----------
    widths : collection of int
        Widths of the tables.
    optimizer : RowOptimizerConfig
        Row optimizer whose kernels are compiled.
    """
    if not hasattr(os, "fork") or cores() < 2 or all(map(is_compiled, widths)):
        return lambda: None
    # The lock is free in the child, because the thread that forks has it.
    with global_compiler_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if the process has threads
        child = os.fork()
    if child:
        running = [child]
        return lambda: _wait(running)
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS)
        for width in widths:
            use_one_row(width, optimizer)
    finally:
        os._exit(0)  # also after an error, which is not reported: the parent then compiles


def _wait(running: list[int]) -> None:
    while running:  # called before each update of rows
        # The user's code may have waited for all child processes.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(running.pop(), 0)


def use_one_row(width: int, optimizer: RowOptimizerConfig) -> None:
    """Update a row of `width` floats, look it up again, and read such a row from a checkpoint."""
    clock = StepClock(optimizer)
    table = EmbeddingBagConfig(name="t", num_embeddings=1, embedding_dim=width, feature_names=("f",))
    one = np.zeros(1, dtype=np.int64)
    bags = BagBatch(values=one.astype(np.int32), offsets=None, weights=None, batch=1, key=one)
    staged = StagedBags(group_layout([table], {"f": 0}, [0], [1]), bags)
    slots = CpuSlots(Level0(), 1, width, optimizer)
    slots.update(staged, Gradients(torch.zeros(1, width), []), clock.rule, clock.missed)
    clock.step = 1
    if clock.missed is not None:
        slots.apply_missed_steps(staged, clock.missed)
    rows = slots.read(one)
    full_state, row_state = len(optimizer.full_state), bool(optimizer.row_state)
    codec = RecordCodec(
        CodecConfig(), width=width, row_state=row_state, full_state=full_state, clock=optimizer.clocked
    )
    codec.decode(np.zeros((1, codec.record_bytes), dtype=np.uint8), one, rows, one)
