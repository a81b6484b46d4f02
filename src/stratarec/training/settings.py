"""What training needs of torch as a whole, for as long as it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def torch_settings(*, threads: int = 0, seed: int = 0) -> Iterator[None]:
    """Deterministic algorithms, `threads` (0 leaves them) and a random state of `seed`; everything is given back after.

    Notes
    -----
    These are settings of the process: two trainings at a time, on threads of one process, need the same ones.
    """
    options: Any = torch.utils.deterministic
    before, fills = torch.get_num_threads(), options.fill_uninitialized_memory
    # Not `torch.use_deterministic_algorithms`, which also tells torch's compiler and imports it for that.
    strictness = torch.get_deterministic_debug_mode()
    try:
        if threads:
            torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("error")
        # Else every new tensor is filled first; nothing here reads memory that it has not written.
        options.fill_uninitialized_memory = False
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_deterministic_debug_mode(strictness)
        options.fill_uninitialized_memory = fills
        if threads:
            torch.set_num_threads(before)
