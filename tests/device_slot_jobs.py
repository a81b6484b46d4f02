"""Jobs of `tests/embedding/test_device_slots.py`, each in a process where Triton interprets its
kernels.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import slot_memories
import torch
import triton_interpreter
from slot_memories import DEVICE_WORK, OPTIMIZERS, device

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection, slots
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.cpu import CpuSlots
from stratarec.embedding.tables.base import group_layout
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.bags import BagBatch
from stratarec.kernels.optimizers import ROW_OPTIMIZERS, RowOptimizer
from stratarec.kernels.update import Gradients
from stratarec.testing.codecs import difficult_rows, level_of

# NumPy warns of operations that processors allow: infinity times 0, numbers outside an integer
# type.
warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")


def compare(numbers: tuple[int, ...]) -> None:
    """Print, as JSON, which results of workloads differ from those of slots in DRAM, and how many
    there are.
    """
    actual = []
    for number in numbers:
        expected, results = (
            list(slot_memories.results(kind, **DEVICE_WORK[number])) for kind in ("plain", "device")
        )
        differing = [
            place for place, pair in enumerate(zip(expected, results, strict=True)) if pair[0] != pair[1]
        ]
        actual.append((differing, len(results)))
    print(json.dumps(actual))


def _memories(optimizer: RowOptimizerConfig, rows: int, width: int, seed: int = 0) -> tuple[CpuSlots, Any]:
    """Return slots of both kinds with the same weights."""
    pair = CpuSlots(Level0(), rows, width, optimizer), device(Level0(), rows, width, optimizer)
    weights = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32))
    for memory in pair:
        memory.views(0, rows)["weight"].copy_(weights)
    return pair


def _group(widths: int, rows: tuple[int, ...], pooling: str) -> Any:
    tables: list[Any] = [
        EmbeddingBagConfig(
            name=f"t{place}",
            num_embeddings=count,
            embedding_dim=widths,
            feature_names=(f"f{place}",),
            pooling=pooling,  # type: ignore[arg-type]
        )
        for place, count in enumerate(rows)
    ]
    columns = {f"f{place}": place * widths for place in range(len(rows))}
    return group_layout(tables, columns, np.cumsum([0, *rows[:-1]]).tolist(), rows)


def kernels() -> None:
    """Print, as JSON, the largest relative difference of single steps from the CPU's, by case, at
    odd sizes.
    """
    results = {}
    # Rules that add up a row's numbers at both widths, both kinds of bags at each width. Numba
    # takes five seconds to compile a rule for a width.
    cases = (
        ("sgd", 5, True), ("rowwise_adagrad", 5, False), ("rowwise_adagrad", 48, True), ("adagrad", 48, False),
        ("rowwise_adam", 5, True), ("rowwise_adam", 48, False), ("adam", 5, False),
    )  # fmt: skip
    for kind, width, singles in cases:
        results[f"{kind}, {width}, {singles}"] = _step(OPTIMIZERS[kind], width, singles=singles, samples=7)
    # Tables of a few rows, with more lookups of one row than a program sums sequentially.
    results["long runs"] = _step(OPTIMIZERS["sgd"], 5, singles=True, samples=400)
    results["long runs of bags"] = _step(OPTIMIZERS["adam"], 5, singles=False, samples=300)
    results["nothing"] = _step(OPTIMIZERS["sgd"], 5, singles=False, samples=0)
    print(json.dumps(results))


def _step(optimizer: RowOptimizerConfig, width: int, *, singles: bool, samples: int) -> float:
    rows, draws = (3, 40), np.random.default_rng(width)
    layout = _group(width, rows, "sum" if singles else "mean")
    lengths = np.ones(2 * samples, np.int64) if singles else draws.integers(0, 4, 2 * samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    limit = np.where(np.arange(offsets[-1]) < offsets[samples], *rows)
    bags = BagBatch(
        values=(draws.random(len(limit)) * limit).astype(np.int64),
        offsets=None if singles else offsets,
        weights=None,
        batch=samples,
        key=np.arange(2),
    )
    gradients = Gradients(
        torch.from_numpy(draws.standard_normal((samples, 2 * width), dtype=np.float32)), ()
    )
    results = []
    for memory in _memories(optimizer, sum(rows), width):
        pooled = torch.full((samples, 2 * width), torch.nan)
        (staged,) = memory.pack((memory.stage(layout, bags),)).staged
        memory.pool(staged, pooled)
        norms = memory.square_norms(staged, gradients)
        memory.update(staged, gradients, optimizer.rule(3), None)
        parts = memory.read(np.arange(sum(rows))).parts
        results.append([pooled.numpy().reshape(-1), norms, *parts])
    assert not any(np.isnan(part).any() for result in results for part in result)
    return max(
        float(np.abs(a - b).max(initial=0) / max(np.abs(a).max(initial=0), 1))
        for a, b in zip(*results, strict=True)
    )


def codecs() -> None:
    """Print, as JSON, how many codecs were compared by bytes, verdicts and decoded numbers, and
    which differ.
    """
    wrong, count = [], 0
    for place, (kind, rounding, parameters) in enumerate(
        product(("fp32", "fp16", "bf16", "int8", "int4"), ("nearest", "stochastic"), ("fp16", "fp32"))
    ):
        width = (1, 5, 10, 33)[place % 4]
        for name, state in (("rowwise_adagrad", "fp32"), ("rowwise_adam", "bf16"), ("adam", "bf16")):
            optimizer = RowOptimizerConfig(kind=name, rows="batch" if name == "rowwise_adagrad" else "all")
            config: Any = CodecConfig(kind=kind, rounding=rounding, parameters=parameters, state=state)  # type: ignore[arg-type]
            count += 1
            if not _same_records(RecordCodec.of(config, width, optimizer), optimizer, place):
                wrong.append(str((config, width, name)))
    print(json.dumps([wrong, count]))


def _same_records(codec: RecordCodec, optimizer: RowOptimizerConfig, seed: int) -> bool:
    rows = difficult_rows(codec.width, seed)
    if seed % 3 == 2:  # add a number that no codec can store to the last column
        rows[7, -1] = (np.nan, np.inf, -np.inf, 7e4)[seed % 4]
    level = level_of(codec, rows)
    count, draws = len(rows), np.random.default_rng(seed)
    places = draws.permutation(count + 3)[:count]
    keys = draws.integers(0, 1 << 63, count, dtype=np.uint64) * 2
    results = []
    for memory in _memories(optimizer, count, codec.width):
        memory.write(np.arange(count), level, np.arange(count))
        records = np.full((count + 3, codec.record_bytes), 0xA5, dtype=np.uint8)
        bad = memory.encode(codec, np.arange(count), records, places, keys, 5)
        memory.clear_state()
        if bad < 0:
            memory.decode(codec, records, places, np.arange(count)[::-1].copy())
        decoded = memory.read(np.arange(count))
        # The CPU's kernels stop at a record that does not fit.
        results.append(
            (bad, records.tobytes() if bad < 0 else b"", *(part.tobytes() for part in decoded.parts))
        )
    return bool(results[0] == results[1])


def watched() -> None:
    """Print, as JSON, the faults of the accesses of small workloads."""
    with triton_interpreter.watched() as faults:
        for number in (0, 2):
            list(slot_memories.results("device", **{**DEVICE_WORK[number], "steps": 2}))
        _step(OPTIMIZERS["sgd"], 5, singles=True, samples=400)
    print(json.dumps(sorted(set(faults))))


_ROWS = "    u = tl.program_id(0) * {0} + tl.arange(0, K)\n    count, go = tl.load(segments), tl.load(ok)\n"
_ROWS += "    valid = (u < count) & (go != 0)\n    if (tl.program_id(0) * {0} < count)"
_SUM = "more = i + v < {0}\n                gradient = gradient + gradient_at"
_START = "gradient = tl.where(mask, gradient, {0})\n        if squares"
_COLUMN = "(key.to(tl.uint32) + {0}.to(tl.uint32) * STEP)"
FAULTS: dict[str, tuple[str, str, str]] = {
    "programs overlap": ("update.gpu", _ROWS.format("K"), _ROWS.format("(K - 1)")),
    "sums do not start from 0": ("update.gpu", _START.format("0.0"), _START.format("0.0) + (1e-6")),
    "a segment ends early": ("update.gpu", _SUM.format("length"), _SUM.format("length - 1")),
    "the last bag is left out": ("pooling.gpu", "valid = bag < bags", "valid = bag < bags - 1"),
    "another order of additions": ("simd.gpu", "return halve(lanes, K, LANES)", "return tl.sum(x, 1)"),
    "noise of another column": ("codec.gpu", _COLUMN.format("column"), _COLUMN.format("(column + 1)")),
    "codes are clamped early": (
        "codec.gpu",
        "tl.minimum(floor + up, LEVELS)",
        "tl.minimum(floor + up, LEVELS - 1)",
    ),
    "state stays": ("random.gpu", "if ROW_STATE:", "if ROW_STATE and K < 0:"),
    "clocks stand still": ("update.gpu", "valid, 0) + 1, valid)", "valid, 0), valid)"),
}
"""Fault -> module of kernels, its source, and the faulty source."""


def find(name: str) -> None:
    """Print, as JSON, how a fault in a kernel is detected: by bits, by accesses or by an error."""
    module, old, new = FAULTS[name]
    triton_interpreter.plant(f"stratarec.kernels.{module}", old, new)
    try:
        with triton_interpreter.watched() as faults:
            differs = any(_differs(number) for number in (3, 0, 2))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}"))
        return
    print(json.dumps("; ".join(sorted(set(faults))) or ("bits" if differs else "")))


def _differs(number: int) -> bool:
    workload = {**DEVICE_WORK[number], "steps": 3}
    # Run one after the other, because new tables use slots of one kind while results are computed.
    one, other = (list(slot_memories.results(kind, **workload)) for kind in ("plain", "device"))
    return one != other


def refused() -> None:
    """Print, as JSON, the errors of slots that a GPU cannot have: too many, of an optimizer of
    another package, and in the memory of another kind of device.
    """
    sgd, errors = RowOptimizerConfig(kind="sgd"), []
    added = mock.patch.dict(ROW_OPTIMIZERS, {"sgd": RowOptimizer(update=lambda *given: None)})
    for build in (
        lambda: device(Level0(), 1 << 31, 4, sgd),
        lambda: device(Level0(), 9, 4, sgd),
        lambda: Level0(torch.device("meta")),
    ):
        with added:
            try:
                build()
            except ConfigError as error:
                errors.append(str(error))
    print(json.dumps(errors))


def homes(numbers: tuple[int, ...]) -> None:
    """Print, as JSON, which results of workloads with int8 and int4 homes in GPU memory differ from
    homes in DRAM.
    """
    actual = []
    for number in numbers:
        results = []
        for kind, home in (("plain", "dram"), ("device", "hbm")):
            for name, tier in slot_memories.TABLES.items():
                if tier is not None and name in ("int8", "int4", "hot"):
                    slot_memories.TABLES[name] = replace(tier, home=home)  # type: ignore[arg-type]
            results.append(list(slot_memories.results(kind, **DEVICE_WORK[number])))
        differing = [place for place, pair in enumerate(zip(*results, strict=True)) if pair[0] != pair[1]]
        actual.append((differing, len(results[0])))
    print(json.dumps(actual))


Form = tuple[str, str, int, str]
"""Kind of slots, home of the cached table, number of its slots, and codec of its records."""
CROSSINGS: tuple[tuple[Form, Form], ...] = (
    (("device", "hbm", 32, "int8"), ("plain", "dram", 32, "int8")),
    (("plain", "log", 64, "fp32"), ("device", "hbm", 32, "fp32")),
    (("plain", "dram", 32, "int8"), ("device", "hbm", 32, "int8")),
    (("device", "hbm", 32, "fp32"), ("plain", "dram", 64, "fp32")),
    (("device", "dram", 32, "int8"), ("plain", "dram", 32, "int8")),
    (("plain", "dram", 32, "int8"), ("device", "dram", 32, "int8")),
)
"""Forms in which tables are saved and loaded. Slots of two forms differ only if records are
exact.
"""


def crossing(numbers: tuple[int, ...]) -> None:
    """Print, as JSON, what is said when tables are loaded in another form, and whether they train
    as on the CPU; then the error for a checkpoint of another layout.
    """
    results = []
    for number in numbers:
        saved, loaded = CROSSINGS[number]
        on_cpu = "plain", "dram", *saved[2:]
        (said, *tables), (_, *expected) = _continued(saved, loaded), _continued(on_cpu, on_cpu)
        results.append([said.decode(), tables == expected])
    try:
        list(_continued(("plain", "dram", 32, "int8"), ("device", "hbm", 32, "int8"), layout="pages"))
    except CheckpointError as error:
        results.append([str(error), False])
    print(json.dumps(results))


def _continued(saved: Form, loaded: Form, layout: str = "") -> Iterator[bytes]:
    """Yield what loading says, and the bytes of tables that were trained and saved in one form, and
    trained further in another. With a `layout`, the checkpoint claims that its records have it.
    """
    optimizer = RowOptimizerConfig(kind="adam", rows="all", learning_rate=0.01)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=120, embedding_dim=5, feature_names=(name,))
        for name in ("whole", "cached")
    ]
    with tempfile.TemporaryDirectory() as folder:
        manifest: dict[str, Any] = {}
        for (kind, home, cache_rows, codec), first_step in ((saved, 0), (loaded, 3)):
            slots.MEMORIES["cpu"] = slot_memories.KINDS[kind]
            tier = TableTier(home=home, codec=CodecConfig(kind=codec), cache_rows=cache_rows)
            tiers = TierConfig(tables={"cached": tier}, ways=8, log_path=Path(folder, f"log-{first_step}"))
            module = TieredEmbeddingBagCollection(tables, optimizer=optimizer, seed=3, tiers=tiers)
            if first_step:
                yield module.load(Path(folder), manifest).encode()
            for step in range(first_step, first_step + 3):
                ids = torch.from_numpy(np.random.default_rng(step).integers(0, 120, 24))
                features = KeyedJagged(keys=("whole", "cached"), values=ids, offsets=None, batch_size=12)
                module(features).pooled.square().sum().backward()
            if not first_step:
                manifest = module.save(Path(folder))
                manifest["groups"][1]["home"]["layout"] = layout or manifest["groups"][1]["home"]["layout"]
        for table in tables:
            yield b"".join(
                part.contiguous().numpy().tobytes() for part in module.table(table.name).values()
            )
        module.close()
