"""Slots that check the interface of level 0: the same workload must give the same bits on slots of
several kinds.

- *Guarded*: pages of slots are inaccessible except while a method of `SlotMemory` runs, so any
  other access ends the process with its stack. `views` leaves them open for good, because it
  returns the pages.
- *Late*: a step runs as late as a stream allows, when a method that waits for it is called.
- *Apart*: records of a home cannot be addressed, as from another device.
- *Device*: slots of a GPU, on tensors of the CPU, with kernels in Triton's interpreter.

Guarded slots detect nothing while another thread is in a method, so one workload has no lookahead.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    Prefetcher,
    RowOptimizerConfig,
    TieredEmbeddingBagCollection,
    slots,
)
from stratarec.embedding.collection import LookedUp
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.slots.cpu import CpuSlots
from stratarec.embedding.slots.memory import SlotMemory
from stratarec.embedding.tiers import TableTier, TierConfig

METHODS = tuple(
    name for name, each in vars(CpuSlots).items() if callable(each) and not name.startswith("_")
)
WITHOUT_SLOTS = ("like", "stage", "pack", "empty", "square_norms")
"""Methods that neither read nor write slots."""
IN_ORDER = ("pool", "gather", "apply_missed_steps", "weight_gradient")
"""Methods that a stream runs after earlier steps, without waiting."""
WAITING = ("encode", "swap", "copy_from", "trained", "apply_missed_steps_to_range", "views")
"""Methods that must wait for the queued steps; if one of them does not, some workload shows it.

The other methods need not wait: rows can be fetched into a slot that was encoded or empty while
steps are queued.
"""

_LIBC = ctypes.CDLL(None, use_errno=True)


def _protect(array: np.ndarray[Any, Any], access: int) -> None:
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if size and _LIBC.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size), access):
        raise OSError(ctypes.get_errno(), "mprotect")


class Guarded(CpuSlots):
    """Slots on inaccessible pages. Slots have their own pages
    (`kernels.runtime.memory.allocate`).
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lock = threading.Lock()
        self.users = 0
        self.guard(0)

    def guard(self, access: int) -> None:
        for part in self._rows.parts:
            assert part.ctypes.data % mmap.PAGESIZE == 0 or not part.nbytes
            _protect(part, access)

    @contextmanager
    def opened(self, *, for_good: bool = False) -> Iterator[None]:
        with self.lock:
            if not self.users:
                self.guard(mmap.PROT_READ | mmap.PROT_WRITE)
            self.users += 1
        yield
        with self.lock:
            self.users -= not for_good
            if not self.users:
                self.guard(0)


def _opening(name: str) -> Callable[..., Any]:
    method = getattr(CpuSlots, name)

    @wraps(method)
    def call(self: Guarded, *given: Any) -> Any:
        with self.opened(for_good=name == "views"):
            if name != "copy_from":
                return method(self, *given)
            with given[1].opened():
                return method(self, *given)

    return call


for _name in set(METHODS) - set(WITHOUT_SLOTS):
    setattr(Guarded, _name, _opening(_name))


class Late(CpuSlots):
    """Slots with late steps. All slots of a process share a queue, because slots of a `Level0`
    share work buffers.
    """

    queue: ClassVar[list[Callable[[], None]]] = []
    lock = threading.RLock()
    careless = ""
    """Name of a method that does not wait."""

    def update(self, *given: Any) -> None:
        with self.lock:
            self.queue.append(lambda: super(Late, self).update(*given))

    @classmethod
    def wait(cls) -> None:
        with cls.lock:
            while cls.queue:
                cls.queue.pop(0)()


def _waiting(name: str) -> Callable[..., Any]:
    method = getattr(CpuSlots, name)

    @wraps(method)
    def call(self: Late, *given: Any) -> Any:
        if name != self.careless:
            self.wait()
        return method(self, *given)

    return call


for _name in (*IN_ORDER, *WAITING):
    setattr(Late, _name, _waiting(_name))


class Apart(CpuSlots):
    """Slots that cannot address records of a home."""

    addresses_host = False


def device(*given: Any) -> SlotMemory:
    """Return slots of a GPU, whose kernels run in Triton's interpreter."""
    import triton_interpreter  # noqa: F401  # Triton is imported by the next line

    from stratarec.embedding.slots.device import DeviceSlots

    return DeviceSlots(*given)


KINDS: dict[str, Any] = {
    "plain": CpuSlots,
    "guarded": Guarded,
    "late": Late,
    "apart": Apart,
    "device": device,
}
"""Name -> class of slots, or a function that returns slots."""
TABLES = {
    "whole": None,
    "int8": TableTier(home="dram", codec=CodecConfig(kind="int8"), cache_rows=128),
    "mapped": TableTier(home="mapped", cache_rows=128),
    "int4": TableTier(home="log", codec=CodecConfig(kind="int4"), cache_rows=128),
    "hot": TableTier(home="dram", cache_rows=128, hot_rows=20),
}
KEYS = (*TABLES, "history")
ROWS, SAMPLES, STEPS = 400, 24, 12


def batch(seed: int, *, weighted: bool) -> KeyedJagged:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(0, 4, len(KEYS) * SAMPLES)
    ids = (ROWS * draws.random(int(lengths.sum())) ** (1 + seed % 3)).astype(np.int64)
    weights = (
        torch.from_numpy(draws.random(len(ids), dtype=np.float32)).requires_grad_() if weighted else None
    )
    return KeyedJagged(
        keys=KEYS,
        values=torch.from_numpy(ids),
        offsets=torch.from_numpy(np.cumsum([0, *lengths])),
        batch_size=SAMPLES,
        weights=weights,
    )


def work(kind: str, **workload: Any) -> str:
    """Train and return a hash of all results."""
    digest = hashlib.sha256()
    for part in results(kind, **workload):
        digest.update(part)
    return digest.hexdigest()


def results(
    kind: str,
    optimizer: RowOptimizerConfig,
    depth: int,
    *,
    weighted: bool = False,
    clipped: bool = False,
    width: int = 8,
    steps: int = STEPS,
    ahead: bool = False,
    place: str = "cpu",
) -> Iterator[bytes]:
    """Train, and yield the bytes of each result.

    If the host runs `ahead`, it never waits for a step before the end: caches have room for more
    batches, and there is no evaluation and no checkpoint during training.

    Results are outputs, gradients of per-sample weights, an evaluation and a checkpoint during
    training, and the final tables.
    """
    slots.MEMORIES["cpu"] = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        tiers = TierConfig(
            tables={
                name: replace(tier, cache_rows=224 if ahead else 128)
                for name, tier in TABLES.items()
                if tier
            },
            ways=8,
            mapped_path=Path(folder, "mapped"),
            log_path=Path(folder, "log"),
            lookahead=depth,
            device=place,
        )
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=ROWS,
                embedding_dim=width,
                feature_names=(name,),
                sequence_features=("history",) if name == "int8" else (),
                pooling="mean" if name == "whole" else "sum",
            )
            for name in TABLES
        ]
        module = TieredEmbeddingBagCollection(tables, optimizer=optimizer, seed=3, tiers=tiers)
        source = ((step, batch(step, weighted=weighted)) for step in range(steps))
        pauses = (-1, steps - 1) if ahead else (steps // 3, 2 * steps // 3)
        previous: Path | None = None
        # A device is not waited for before the end, so that it may be behind by several steps.
        kept: list[torch.Tensor] = []
        with Prefetcher(
            module.engine,
            source,
            lambda item, stop: item[1],
            depth=depth,
            pause_after=lambda place: place in pauses,
        ) as batches:
            for (step, features), handle in batches:
                rows = LookedUp(module.engine, handle) if clipped else handle
                result = module(rows)
                parts = (result.pooled, result.sequences["history"].values)
                (sum(part.square().sum() for part in parts)).backward()
                if isinstance(rows, LookedUp):
                    gradients, weights = rows.gradients, features.weights
                    yield str(module.engine.gradient_norm(handle, gradients)).encode()
                    if weights is not None:
                        weights.grad = torch.zeros_like(weights)
                    module.engine.update_rows(
                        handle, gradients, 0.5, None if weights is None else weights.grad
                    )
                kept += [part.detach().clone() for part in parts]
                if features.weights is not None:
                    kept.append(features.weights.grad)
                if step == pauses[1]:
                    yield module.rows("hot", 0, 50)["weight"].cpu().numpy().tobytes()
                    with torch.no_grad():
                        yield module(batch(99, weighted=False)).pooled.cpu().numpy().tobytes()
                if step in pauses:
                    here = Path(folder, f"saved-{step}")
                    here.mkdir()
                    manifest = module.save(here, previous)
                    previous = here
        for tensor in kept:
            yield tensor.cpu().numpy().tobytes()
        yield from _tables(module)
        module.close()
        assert previous is not None
        other = TieredEmbeddingBagCollection(tables, optimizer=optimizer, seed=3, device=place)
        other.load(previous, manifest)
        yield from _tables(other)


def _tables(module: TieredEmbeddingBagCollection) -> Iterator[bytes]:
    for name in TABLES:
        for part in module.table(name).values():
            yield part.contiguous().cpu().numpy().tobytes()


WORK: tuple[dict[str, Any], ...] = (
    {
        "optimizer": RowOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
        "depth": 0,
        "weighted": True,
    },
    {
        "optimizer": RowOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
        "depth": 2,
        "clipped": True,
    },
    {"optimizer": RowOptimizerConfig(kind="adam", rows="all", learning_rate=0.01), "depth": 0},
)


OPTIMIZERS = {
    "sgd": RowOptimizerConfig(kind="sgd", learning_rate=0.1, weight_decay=0.01, decay="decoupled"),
    "rowwise_adagrad": RowOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, weight_decay=0.01),
    "adagrad": RowOptimizerConfig(kind="adagrad", learning_rate=0.05),
    "rowwise_adam": RowOptimizerConfig(
        kind="rowwise_adam", learning_rate=0.01, weight_decay=0.1, decay="decoupled"
    ),
    "adam": RowOptimizerConfig(kind="adam", learning_rate=0.01),
}
DEVICE_WORK: tuple[dict[str, Any], ...] = (
    *({**workload, "steps": 4} for workload in WORK),
    {"optimizer": OPTIMIZERS["adagrad"], "depth": 2, "width": 5, "steps": 3, "weighted": True},
    {"optimizer": OPTIMIZERS["rowwise_adam"], "depth": 0, "width": 16, "steps": 3},
    {"optimizer": OPTIMIZERS["rowwise_adagrad"], "depth": 2, "width": 48, "steps": 3, "clipped": True},
    {"optimizer": OPTIMIZERS["sgd"], "depth": 0, "width": 128, "steps": 3},
    {"optimizer": OPTIMIZERS["rowwise_adagrad"], "depth": 2, "steps": 9, "ahead": True},
)
"""Shorter workloads for slots of a GPU, because interpreted kernels are slow: all optimizers, more
widths.
"""


def difference(one: bytes, other: bytes) -> float:
    """Return the largest absolute difference of two results, which are float32 numbers or the text
    of a norm.
    """
    if one == other:
        return 0.0
    if max(len(one), len(other)) < 32:
        return abs(float(one) - float(other)) / float(one)
    left, right = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    return float(np.nanmax(np.abs(left - right)))


def compare(workloads: int) -> None:
    """Print, as JSON, the hashes of the first workloads by kind of slots; slots of a GPU have other
    tests.
    """
    kinds = [kind for kind in KINDS if kind != "device"]
    print(json.dumps({kind: [work(kind, **each) for each in WORK[:workloads]] for kind in kinds}))


def find(names: tuple[str, ...]) -> None:
    """Print, as JSON, the methods whose missing wait changes the bits of some workload."""
    expected, actual = cache(lambda number: work("plain", **WORK[number])), []
    for name in names:
        Late.careless = name
        if any(work("late", **each) != expected(number) for number, each in enumerate(WORK)):
            actual.append(name)
        Late.queue.clear()
    print(json.dumps(actual))
