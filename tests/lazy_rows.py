"""Rows in the memory of the lazy device: kernels in Triton's interpreter, which run when their
stream arrives at them.

Import this module before Triton and before the first gradient is computed.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import lazy_device
import triton_interpreter  # noqa: F401  # before Triton

lazy_device.install()

import graph_jobs  # noqa: E402
import slot_memories  # noqa: E402
import torch  # noqa: E402
from slot_memories import DEVICE_WORK  # noqa: E402

from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection, packed_batch, rings, slots  # noqa: E402
from stratarec.embedding.slots import device  # noqa: E402
from stratarec.embedding.tiers import TableTier, TierConfig  # noqa: E402
from stratarec.errors import StrataError  # noqa: E402
from stratarec.kernels.runtime.accelerator import DeviceTransfers  # noqa: E402
from stratarec.training.torch_setup import torch_settings  # noqa: E402


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on the current stream."""
    given = lazy_device.inner(arguments)
    lazy_device.current().put(lambda: kernel[(programs,)](*given, **constants))


for _module in (packed_batch, device):
    _module.launch = launch  # type: ignore[assignment]
slots.MEMORIES["lazy"] = device.DeviceSlots


def _nothing(*given: Any) -> None:
    pass


FAULTS: dict[str, Callable[[], None]] = {
    "moves do not wait for steps": lambda: setattr(rings.DeviceOrder, "after", _nothing),
    "steps do not wait for moves": lambda: setattr(rings.DeviceOrder, "start", _nothing),
    "places are reused too early": lambda: setattr(rings.Place, "release", _nothing),
    "pinned buffers are written too early": lambda: setattr(rings.Place, "is_sent", True),
    "lists do not wait for the copy": lambda: setattr(rings.Place, "wait", _nothing),
}
"""Name -> function that removes a wait."""


def compare(number: int, schedules: tuple[str, ...], fault: str = "", **more: Any) -> None:
    """Print, as JSON, under which schedules a workload has other results than with plain slots.

    With a fault, only the first of these schedules is printed.
    """
    workload = {**DEVICE_WORK[number], **more}
    expected = list(slot_memories.results("plain", **workload))
    if fault:
        FAULTS[fault]()
    differing = []
    for schedule in schedules:
        lazy_device.follow(schedule)
        try:
            same = list(slot_memories.results("plain", **workload, place="lazy")) == expected
        except Exception:
            if not fault:
                raise
            same = False
        differing += [] if same else [schedule]
        if fault and differing:
            break
        for stream in lazy_device._STREAMS:
            stream.drain()
    print(json.dumps(differing))


CHANGED_AT, STEPS = 2, 6


def trained(case: dict[str, Any], place: str) -> tuple[list[bytes], list[Any]]:
    """Train batches that are staged ahead. Return all results; and the number of copies of batches,
    the number of other copies to the device before and after the factor on the learning rate
    changes, and waits of the host.

    The factor changes while batches with the earlier one are staged.
    """
    pipeline, copies, others, results = graph_jobs.pipeline_of(case, "plain", place), Counter[str](), 0, []

    def counted(name: str, method: Any) -> Any:
        def call(*given: Any) -> Any:
            copies[name] += 1
            return method(*given)

        return call

    items = (
        (batch, pipeline.request(batch))
        for batch in (graph_jobs.batch_of(case, step) for step in range(STEPS))
    )
    with (
        mock.patch.object(rings.Place, "send", counted("batches", rings.Place.send)),
        mock.patch.object(DeviceTransfers, "up", counted("others", DeviceTransfers.up)),
        pipeline.stage_ahead(items, depth=2) as ahead,
    ):
        lazy_device.WAITS.clear()
        for step, (item, handle) in enumerate(ahead):
            if step == CHANGED_AT:
                pipeline.rate_factor, others = 0.5, copies["others"]
            results.append(pipeline.train(step, *item, handle))
            if step == CHANGED_AT:
                waits = list(lazy_device.WAITS)
    losses = torch.tensor([result.loss for result in results])
    states = [losses, *graph_jobs.state_of(pipeline, "plain")]
    pipeline.model.embeddings.close()
    return [part.numpy().tobytes() for part in states], [
        copies["batches"],
        others,
        copies["others"] - others,
        waits,
    ]


def step(names: tuple[str, ...], schedules: tuple[str, ...], fault: str = "") -> None:
    """Print, as JSON, whether steps of these cases with rows on the device have the results of the
    CPU under each schedule, and the counts of `trained`.

    With a fault, print the case and the schedule that show it first.
    """
    results: list[Any] = []
    with torch_settings(seed=1, threads=1):
        # Products of pairs add up in another order on a device.
        cases = {name: {**graph_jobs.CASES[name], "interaction": "cat"} for name in names}
        expected = {name: trained(case, "cpu")[0] for name, case in cases.items()}
        if fault:
            FAULTS[fault]()
        for schedule, (name, case) in product(schedules, cases.items()):
            lazy_device.follow(schedule)
            try:
                actual, counts = trained(case, "lazy")
            except Exception:
                if not fault:
                    raise
                actual, counts = [], []
            for stream in lazy_device._STREAMS:
                stream.drain()
            if not fault:
                results.append([actual == expected[name], *counts])
            elif actual != expected[name]:
                results = [name, schedule]
                break
    print(json.dumps(results))


def crowded() -> None:
    """Print, as JSON, errors of tables for which other tables on the device leave too little
    memory: rows in slots, and records in GPU memory under a cache; and whether there is room after
    the others are closed.
    """
    errors: list[str] = []

    def built(**tiers: Any) -> TieredEmbeddingBagCollection | None:
        table = EmbeddingBagConfig(name="t", num_embeddings=4000, embedding_dim=8, feature_names=("x",))
        try:
            return TieredEmbeddingBagCollection(
                [table], tiers=TierConfig(device="lazy", ways=8, tables=tiers)
            )
        except StrataError as error:
            errors.append(f"{type(error).__name__}: {error}")
            return None

    other = built()
    assert other is not None
    held = lazy_device.Chip.held
    lazy_device.Chip.limit = held + (130 << 10)
    assert built() is None
    assert built(t=TableTier(home="hbm", cache_rows=64)) is None
    # Room for the rows, but not for the lists by which they get their initial values.
    lazy_device.Chip.limit = held + (190 << 10)
    assert built() is None
    lazy_device.Chip.limit = held + (130 << 10)
    other.close()
    del other
    gc.collect()
    for stream in lazy_device._STREAMS:
        stream.drain()
    print(json.dumps([errors, built() is not None]))


torch.set_num_threads(1)
