"""Test kernels that keep rows in vector registers, for every width and instruction set.

The interpreter checks every index and address at every width. Compiled kernels run at one width,
once for each instruction set of this processor. The set determines which stores need aligned
addresses and which conversions call a library; the process crashes if an address is not aligned or
the library is missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import WANTED, sized
from llvmlite.binding import get_host_cpu_features

from stratarec.kernels.attention import Pairs, pair_pool, pair_products, pair_sums
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.codec import records as codec
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.interaction import dot_interaction
from stratarec.kernels.interaction.reference import dot_interaction as plain_interaction
from stratarec.kernels.pooling import gather, pool, weight_gradient
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.simd.vector import LANES, blocks
from stratarec.kernels.update import Gradients, RowUpdate, Slots, UpdateWorkspace, reference, update

TESTS = Path(__file__).parents[1]
# 272 is 4 blocks of 68 floats, the second of which starts in the middle of a cache line, or 17
# blocks of 16.
EVERY = sized([272], [*range(1, 34), *range(34, 601, 27), 272, 274, 599])
# Rows of more than 32 short blocks take the interpreter 20 times as long as all others, so only two
# of them run.
WIDTHS = [width for width in EVERY if width // blocks(width)[0] <= 32 or width in (274, 599)]
ROWS, SAMPLES = 3, 2
UPDATES = ("sgd", "rowwise_adagrad", "adagrad", "rowwise_adam", "adam")


def group_of(width: int, second: int) -> GroupLayout:
    """Return a layout of two features of one table.

    The second feature's column is directly behind the first one's row, or later.
    """
    zeros = np.zeros(2, dtype=np.int64)
    return GroupLayout(
        width=width,
        base=zeros,
        rows=np.full(2, ROWS),
        column=np.array([0, second]),
        mean=zeros,
        sequence=zeros,
        table_start=np.array([0, 2]),
        table_features=np.arange(2),
    )


def lookups_of(width: int) -> BagBatch:
    """Return a batch with one id per bag."""
    values = np.random.default_rng(width).integers(0, ROWS, 2 * SAMPLES)
    return BagBatch(values=values, offsets=None, weights=None, batch=SAMPLES, key=np.arange(2))


def weights_of(width: int) -> np.ndarray:
    weights = allocate(ROWS * width)
    weights[:] = np.random.default_rng(width).standard_normal(ROWS * width)
    return weights


@pytest.mark.slow
@pytest.mark.interpreted
def test_rows_of_every_width_are_pooled_into_large_outputs() -> None:
    # Outputs from 4 MiB are streamed. Here a few samples have many columns. With one more column
    # per sample, or an output that starts one float later, addresses are no longer multiples of 64
    # bytes.
    columns = (1 << 20) // SAMPLES
    memory = allocate(SAMPLES * (columns + LANES) + LANES)
    outs = [
        memory[first:][: SAMPLES * size].reshape(SAMPLES, size)
        for first, size in ((0, columns), (LANES, columns + LANES), (0, columns + 1), (1, columns))
    ]
    for width in EVERY:
        weights, bags = weights_of(width), lookups_of(width)
        rows = weights.reshape(ROWS, width)[bags.values].reshape(2, SAMPLES, width)
        for out, second in (
            product(outs, (width, width + 1)) if WANTED and width % 8 == 0 else ((outs[0], width),)
        ):
            used = out[:, : second + width + 1]
            used[:] = -1
            assert pool(weights, group_of(width, second), bags, torch.from_numpy(out)) == -1
            for first, expected in ((0, rows[0]), (second, rows[1])):
                np.testing.assert_array_equal(
                    used[:, first : first + width], expected, err_msg=f"width {width}"
                )
            assert (used[:, second + width] == -1).all()
    for width in WIDTHS:
        weights, bags = weights_of(width), lookups_of(width)
        rows = weights.reshape(ROWS, width)[bags.values].reshape(2, SAMPLES, width)
        gathered = torch.full((SAMPLES, width), -1.0)
        assert gather(weights, group_of(width, width), bags, 1, gathered) == -1
        np.testing.assert_array_equal(gathered.numpy(), rows[1], err_msg=f"width {width}")
        gradient, actual = np.ones((SAMPLES, 2 * width), np.float32), torch.zeros(2 * SAMPLES)
        weight_gradient(weights, group_of(width, width), bags, torch.from_numpy(gradient), actual)
        np.testing.assert_allclose(
            actual, rows.sum(-1).reshape(-1), rtol=1e-4, atol=1e-4, err_msg=f"width {width}"
        )


def rule_of(kind: str) -> RowUpdate:
    return RowUpdate(
        kind=kind, rate=0.1, eps=1e-6, decay=0.01, decoupled=kind == "adam", beta1=0.9, beta2=0.99, step=1
    )


def state_of(rule: RowUpdate, slots: Slots, row: int, width: int) -> dict[str, torch.Tensor]:
    """Return a row's state under the names of the reference."""
    one, full = slots.row_state[row : row + 1], slots.full_state.reshape(ROWS, -1)[row]
    names: dict[str, tuple[tuple[str, np.ndarray], ...]] = {
        "sgd": (), "rowwise_adagrad": (("sum", one),), "adagrad": (("sum", full[:width]),),
        "rowwise_adam": (("exp_avg", full[:width]), ("exp_avg_sq", one)),
        "adam": (("exp_avg", full[:width]), ("exp_avg_sq", full[width:])),
    }  # fmt: skip
    return {name: torch.from_numpy(part.copy()) for name, part in names[rule.kind]}


@pytest.mark.slow
@pytest.mark.interpreted
def test_rows_of_every_width_are_updated() -> None:
    for number, width in enumerate(WIDTHS):
        bags, rule = lookups_of(width), rule_of(UPDATES[number % len(UPDATES)])
        weights = weights_of(width)
        gradient = torch.randn(SAMPLES, 2 * width, generator=torch.Generator().manual_seed(width))
        full = allocate(ROWS * width * (2 if rule.kind == "adam" else 1))
        slots = Slots(weights, allocate(ROWS), full, np.zeros(0, np.int32))
        lookups = [
            (int(row), gradient[i % SAMPLES, i // SAMPLES * width :][:width], 1.0)
            for i, row in enumerate(bags.values)
        ]
        expected = torch.from_numpy(weights.reshape(ROWS, width).copy())
        for row, total in reference.row_gradients(lookups).items():
            reference.update_row(rule, expected[row], total, state_of(rule, slots, row, width))
        update(slots, group_of(width, width), bags, Gradients(gradient, []), rule, UpdateWorkspace())
        actual = torch.from_numpy(weights).view(ROWS, width)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4, msg=f"width {width}, {rule.kind}"
        )


@pytest.mark.slow
@pytest.mark.interpreted
def test_products_of_rows_of_every_width() -> None:
    pairs = Pairs(first=torch.tensor([1]), offsets=torch.tensor([0, 2]))
    for width in WIDTHS:
        draws = torch.Generator().manual_seed(width)
        dense, pooled = torch.randn(1, width, generator=draws), torch.randn(1, 3, width, generator=draws)
        inputs = [dense.requires_grad_(), pooled.requires_grad_()]
        expected = plain_interaction(dense, pooled)
        actual = dot_interaction(dense, pooled)[:, : expected.shape[1]]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=f"width {width}")
        for mine, plain in zip(
            torch.autograd.grad(actual.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4, msg=f"width {width}")
        sample, events = dense.detach(), pooled.detach()[0]
        torch.testing.assert_close(pair_sums(sample, events, pairs), sample + events[1:])
        torch.testing.assert_close(pair_products(sample, events, pairs), sample * events[1:])
        pooled_pairs = pair_pool(torch.ones(2), events, pairs)
        torch.testing.assert_close(pooled_pairs, events[1:].sum(0, keepdim=True), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_records_of_every_width_keep_their_rows(kind: str) -> None:
    for width in sized(range(1, 601, 31), range(1, 601, 53)):
        form = RecordLayout(
            kind=KINDS[kind],
            stochastic=True,
            wide_parameters=False,
            wide_state=False,
            width=width,
            row_state=True,
            full_state=0,
            clock=False,
        )
        places, keys = np.arange(ROWS), np.arange(ROWS, dtype=np.uint64)
        slots = (
            weights_of(width),
            np.ones(ROWS, np.float32),
            np.zeros(1, np.float32),
            np.zeros(0, np.int32),
        )
        records = np.zeros((ROWS, form.record_bytes), np.uint8)
        again = tuple(np.zeros_like(part) for part in slots)
        assert codec.encode(form, slots, places, records, places, keys, 1) < 0
        codec.decode(form, records, places, again, places)
        step = 1.0 if kind == "int4" else 0.05
        np.testing.assert_allclose(again[0], slots[0], atol=step, rtol=0.01, err_msg=f"width {width}")


# Names of the instruction sets, and LLVM's names of the features that each adds to the previous
# ones.
SETS = {
    "x86-64-v2": (),
    "x86-64-v3": ("avx2", "fma", "f16c", "bmi2"),
    "x86-64-v4": ("avx512bw", "avx512vl", "avx512dq"),
}


@pytest.mark.slow
@pytest.mark.skipif(WANTED, reason="compiles")
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86 processors"
)
@pytest.mark.parametrize("name", SETS)
def test_kernels_run_compiled_for_every_instruction_set(name: str, tmp_path: Path) -> None:
    present = get_host_cpu_features()
    if missing := [feature for feature in SETS[name] if not present.get(feature)]:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    # LLVM prefers vectors of half the size on some, but not all, processors with AVX-512.
    features = "-prefer-256-bit" if name == "x86-64-v4" else ""
    environment: dict[str, Any] = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    chosen = ("-k", "pooled or products or half", __file__, str(TESTS / "kernels" / "test_codec.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
