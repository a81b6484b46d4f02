"""Verify that a GPU computes the same as the CPU, and measure its speed.

Single operations, trainings, rows in GPU memory, and transfers during computation are compared.
Shapes: B samples, D width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.cli.checks.machine import Finding
from stratarec.config.units import format_bytes
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.slots import MEMORIES
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.kernels.attention import DevicePairs, Pairs, pair_pool, pair_products, pair_sums
from stratarec.kernels.interaction import dot_interaction
from stratarec.kernels.row_index import RowIndex
from stratarec.kernels.runtime.accelerator import CPU, device_memory, transfers_of
from stratarec.models import DLRMConfig, HistoryConfig, build_model
from stratarec.models.history import History, HistoryWindows
from stratarec.models.zoo.config import DCNv2Config
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.graph_step import build_pipeline
from stratarec.training.torch_setup import build_optimizer, torch_settings

_EXACT, _ROUNDED = 1e-5, 3e-3
"""Maximum difference from the CPU in float32, and in bf16: absolute for losses, relative for single
operations.
"""
_DRIFT = 1e-3
"""Maximum mean difference between the float32 losses of a complete training on the CPU and on the
GPU.

A GPU adds in another order than the CPU, and training amplifies the difference: with Adam on all
rows, the losses of correct devices differed by 3e-4 after 200 steps. Single steps from equal
weights (`_EXACT`) are the stricter test.
"""
_ROW_STEPS = 20
_ROWS = {"item": 500, "place": 20}
Operation: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]


class Sizes(NamedTuple):
    """Amount of work."""

    steps: int = 200
    batch: int = 512
    transfer_bytes: int = 1 << 30
    """Bytes of each transfer, more than the last-level cache of a GPU (50 MB on an H100): memory is
    measured.
    """
    matrix_edge: int = 8192
    """Rows of the matrices. At this size, a product takes much longer than synchronizing with the
    GPU.
    """
    models: int = 8
    """Number of models, with different seeds, whose single steps are compared."""


FULL = Sizes()


def verify(device: torch.device, sizes: Sizes = FULL) -> Iterator[tuple[Finding, dict[str, float]]]:
    """Verify a device. Yield each finding with the measurements to record; a finding with a
    `change` is a failure.
    """
    yield _operations(device), {}
    for config in _models():
        for precision in ("float32", "bf16"):
            yield _trainings(config, precision, device, sizes), {}
    if device.type in MEMORIES:
        yield _rows_in_memory(device, sizes), {}
    yield _transfers(device)
    yield _speeds(device, sizes)


def _operations(device: torch.device) -> Finding:
    worst, name = max(
        (_difference(operate, inputs, device), name) for name, (operate, inputs) in _cases().items()
    )
    state = f"{len(_cases())} operations and their gradients, largest difference from the CPU {worst:.1e} ({name})"
    return Finding(
        "operations", state, "" if worst <= _EXACT else f"{name} differs by more than {_EXACT:g}: {_REPORT}"
    )


_REPORT = "use train.device=cpu, and report this with the output of `stratarec doctor --gpu`"


def _cases() -> Mapping[str, tuple[Operation, Sequence[Tensor]]]:
    draws = torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws)

    length, inverse = torch.randint(0, 7, (40,), generator=draws), torch.arange(40).flip(0)
    windows = HistoryWindows(start=(torch.arange(40) % 20), length=length, inverse=inverse)
    count = int(length.sum())
    pairs = Pairs(
        first=windows.start, offsets=torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    )
    # Index lists as steps on a device build them: a sequence feature has one more row of zeros.
    listed = RowIndex.of_windows(windows.start, length, rows=31, room=count)
    of_pairs = DevicePairs(RowIndex.of_lengths(length, rows=40, room=count), listed)
    places = RowIndex.of_windows(
        windows.start, length, rows=31, stride=windows.longest, room=40 * windows.longest
    )
    samples = RowIndex.of_windows(inverse, torch.ones_like(inverse), rows=40, stride=1, room=40)

    def history(rows: Tensor) -> History:
        if rows.device.type == "cpu":
            return History(rows=rows, windows=windows)
        return History.on_device(rows, windows, (places, samples))

    def on_pairs(operate: Callable[..., Tensor], first: Tensor, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu":
            return operate(first, rows, pairs)
        rows = functional.pad(rows, (0, 0, 0, 1))
        return operate(first, rows, DevicePairs(*(part.on_device(rows) for part in of_pairs)))

    return {
        "interaction": (dot_interaction, [some(40, 8), some(40, 4, 8)]),
        "windows": (lambda rows: history(rows).padded()[0], [some(30, 8)]),
        "samples of windows": (lambda rows: history(rows).expand(rows), [some(40, 8)]),
        "sums of pairs": (partial(on_pairs, pair_sums), [some(40, 8), some(30, 8)]),
        "products of pairs": (partial(on_pairs, pair_products), [some(40, 8), some(30, 8)]),
        "pooled pairs": (partial(on_pairs, pair_pool), [some(count), some(30, 8)]),
    }


def _difference(operate: Operation, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Return the largest difference between CPU and device in an output or gradient, relative to
    its largest number.
    """
    results = []
    for where in (CPU, device):
        leaves = [tensor.to(where).requires_grad_() for tensor in inputs]
        out = operate(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((tensor * tensor.detach().sin()).sum() for tensor in outs)
        assert isinstance(total, Tensor)
        gradients = torch.autograd.grad(total, leaves)
        results.append([tensor.detach().cpu() for tensor in (*outs, *gradients)])
    pairs = [
        (one[:, : other.shape[1]] if one.dim() == 2 else one, other)
        for one, other in zip(*results, strict=True)
    ]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1)) for one, other in pairs)


def _models() -> list[Any]:
    attention, transformer = HistoryConfig(pooling="target_attention"), HistoryConfig(pooling="transformer")
    return [
        DLRMConfig(embedding_dim=16, bottom_mlp=(32,), top_mlp=(64,), history=attention),
        DCNv2Config(embedding_dim=16, deep_mlp=(64,), dropout=0.1, batch_norm=True, history=transformer),
    ]


def _trainings(config: Any, precision: Any, device: torch.device, sizes: Sizes) -> Finding:
    """Compare losses with losses on the CPU: first of single steps from equal weights, then of
    complete trainings.
    """
    train = TrainConfig(precision=precision, clip_norm=10.0)
    limit, drift_limit = (_EXACT, _DRIFT) if precision == "float32" else (_ROUNDED, _ROUNDED)
    # Two steps are run, because only the loss of the second step depends on the first update.
    single = max(
        abs(first - right)
        for seed in range(sizes.models)
        for first, right in zip(
            *(_losses(config, train, where, sizes, 2, seed) for where in (CPU, device)), strict=True
        )
    )
    expected, one, other = (
        _losses(config, train, where, sizes, sizes.steps) for where in (CPU, device, device)
    )
    drift = sum(abs(first - right) for first, right in zip(expected, one, strict=True)) / len(one)
    description = (
        f"difference from the CPU at most {single:.1e} in single steps, {drift:.1e} on average over "
        f"{sizes.steps} steps; a second run is {'identical' if one == other else 'different'}"
    )
    change = ""
    if one != other:
        change = f"two runs give different losses: {_REPORT}"
    elif not single <= limit:
        change = f"losses of single steps differ by more than {limit:g}: {_REPORT}"
    elif not drift <= drift_limit:
        change = f"losses differ by more than {drift_limit:g} on average: {_REPORT}"
    return Finding(f"{config.kind}, {precision}", description, change)


def _losses(
    config: Any, train: TrainConfig, device: torch.device, sizes: Sizes, steps: int, seed: int = 1
) -> list[float]:
    """Build a model, train it, and return the loss of each step."""
    schema = Schema(
        dense=tuple(DenseFeature(name=f"n{place}") for place in range(4)),
        sparse=(
            SparseFeature(name="item"),
            SparseFeature(name="place"),
            SparseFeature(name="history", kind="history", of="item", max_length=20),
        ),
        user="user",
        time="time",
    )
    model = build_model(config, schema, _ROWS, seed=seed, click_rates=[0.5])
    model.place(device)
    model.train()
    loader: Any = None  # the batches are generated here
    pipeline = build_pipeline(model, build_optimizer(train.dense, model.network), train, loader)
    with torch_settings(seed=1):
        try:
            return [pipeline.train(step, _batch(sizes.batch, step)).loss for step in range(steps)]
        finally:
            model.embeddings.close()


def _batch(size: int, step: int) -> Batch:
    draws = torch.Generator().manual_seed(step)

    def bags(rows: int, lengths: Tensor) -> JaggedTensor:
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=draws)
        return JaggedTensor(
            values=values, offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        )

    one = torch.ones(size, dtype=torch.int64)
    sparse = KeyedJagged.from_features(
        {
            "item": bags(_ROWS["item"], one),
            "place": bags(_ROWS["place"], one),
            "history": bags(_ROWS["item"], torch.randint(0, 21, (size,), generator=draws)),
        }
    )
    dense = torch.randn(size, 4, generator=draws)
    label = (dense.sum(1) + sparse["item"].values.remainder(5) > 2).float()
    return Batch(label=label, dense=dense, sparse=sparse)


def _rows_in_memory(device: torch.device, sizes: Sizes) -> Finding:
    """Compare rows that are trained in GPU memory with the same rows trained in DRAM."""
    subject = "rows in GPU memory"
    try:
        pairs = [
            (expected, rows)
            for kind in ("rowwise_adagrad", "adam")
            for expected, rows in zip(
                *(_trained_rows(kind, where, sizes) for where in (CPU, device)), strict=True
            )
        ]
    except ConfigError as error:  # such as without Triton
        return Finding(subject, "not available", str(error), must=False)
    worst = max(float((expected - rows).abs().max()) for expected, rows in pairs)
    state = f"lookups, updates and moves of int8 rows, largest difference from the CPU {worst:.1e}"
    change = (
        ""
        if worst <= _EXACT
        else f"rows differ by more than {_EXACT:g}: set memory.hbm to 0, and report this"
    )
    return Finding(subject, state, change)


def _trained_rows(kind: Any, device: torch.device, sizes: Sizes) -> Iterator[Tensor]:
    """Train a table in level 0 and a cached table. Yield the looked-up rows of each step, and at
    the end all rows.
    """
    tables = [
        EmbeddingBagConfig(name="whole", num_embeddings=300, embedding_dim=16, feature_names=("whole",)),
        EmbeddingBagConfig(
            name="cached", num_embeddings=16 * sizes.batch, embedding_dim=64, feature_names=("cached",)
        ),
    ]
    cached = TableTier(codec=CodecConfig(kind="int8"), cache_rows=4 * sizes.batch)
    tiers = TierConfig(device=str(device), tables={"cached": cached})
    module = TieredEmbeddingBagCollection(
        tables, optimizer=RowOptimizerConfig(kind=kind), seed=1, tiers=tiers
    )
    draws = torch.Generator().manual_seed(2)
    try:
        for _ in range(_ROW_STEPS):
            values = [
                torch.randint(0, table.num_embeddings, (sizes.batch,), generator=draws) for table in tables
            ]
            features = KeyedJagged(
                keys=("whole", "cached"), values=torch.cat(values), offsets=None, batch_size=sizes.batch
            )
            pooled = module(features).pooled
            (pooled * pooled).sum().backward()
            yield pooled.detach().cpu()
        for table in tables:
            yield module.rows(table.name, 0, table.num_embeddings)["weight"].clone()
    finally:
        module.close()


def _transfers(device: torch.device, rounds: int = 64) -> tuple[Finding, dict[str, float]]:
    """Verify transfers to and from the device while it computes."""
    transfers, wrong = transfers_of(device), 0
    busy = torch.randn(256, 256).to(device)
    for number in range(rounds):
        host = transfers.empty(1 << 16)
        host.copy_(torch.arange(1 << 16) + number)
        expected, copy = host.clone(), transfers.up(host)
        del host
        busy = (busy @ busy).tanh()
        back = transfers.down(copy * 2)
        if number % 4 == 3:
            transfers.wait()
            wrong += not torch.equal(back, expected * 2)
    change = f"{wrong} of {rounds // 4} checked transfers were wrong: {_REPORT}" if wrong else ""
    return Finding("transfers", f"{rounds} in each direction during computation", change), {}


def _speeds(device: torch.device, sizes: Sizes) -> tuple[Finding, dict[str, float]]:
    """Measure `DeviceFigures`: transfers of pinned memory, gathers of random rows, products of
    square matrices.
    """
    transfers, memory = transfers_of(device), device_memory(device)[1]
    # Transfer buffers and gathered rows together take three times `size` bytes of GPU memory.
    size = min(sizes.transfer_bytes, memory // 8 // 256 * 256) if memory else sizes.transfer_bytes
    edge = min(sizes.matrix_edge, math.isqrt(size // 8))
    host = transfers.empty(size // 4).fill_(1.0)
    copy, square = transfers.up(host), transfers.up(torch.full((edge, edge), 1 / edge))
    rows = copy[: size // 256 * 64].view(-1, 64)
    places = transfers.up(torch.randperm(len(rows)))

    def rate(work: float, move: Callable[[], object]) -> float:
        shortest = float("inf")
        for _ in range(4):
            transfers.down(copy[:1])
            transfers.wait()
            start = time.perf_counter()
            move()
            transfers.wait()
            shortest = min(shortest, time.perf_counter() - start)
        return work / shortest

    def multiply(matrix: Tensor) -> Tensor:
        return transfers.down((matrix @ matrix)[:1, :1])

    narrow, products = square.bfloat16(), 2.0 * edge**3
    measured = {
        "float32_flops": rate(products, lambda: multiply(square)),
        "bf16_flops": rate(products, lambda: multiply(narrow)),
        "up_bytes": rate(size, lambda: transfers.down(transfers.up(host)[:1])),
        "down_bytes": rate(size, lambda: transfers.down(copy)),
        "row_bytes": rate(size, lambda: transfers.down(rows.index_select(0, places)[:1])),
        "memory_bytes": float(memory),
    }
    up, down = (format_bytes(round(measured[name])) for name in ("up_bytes", "down_bytes"))
    state = (
        f"{up}/s to the device, {down}/s back, from pinned memory; {measured['float32_flops'] / 1e12:.3g} "
        f"TFLOP/s float32, {measured['bf16_flops'] / 1e12:.3g} bf16"
    )
    return Finding("speed", state), measured
