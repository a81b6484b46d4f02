"""Rows on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from errors import refuses
from stratarec.distributed.wire import Wire
from stratarec.errors import TrainingError

SPANS = [(5, 8), (3, 8), (0, 4), (7, 3)]
FLOATS = sum(rows * width for rows, width in SPANS)


@pytest.mark.parametrize(("kind", "bits", "size", "scale"), [("fp32", 24, 4, 0), ("fp16", 11, 2, 2), ("bf16", 8, 2, 0)])
def test_float_wires_round_to_nearest_whatever_the_size_of_a_row(kind: Any, bits: int, size: int, scale: int) -> None:
    """Rows of 1e-30 to 1e30; within a row numbers as small as a thousandth of the largest."""
    draws, wire = torch.Generator().manual_seed(1), Wire(kind, 1, 0)
    signs = torch.randint(0, 2, (60, 8), generator=draws) * 2 - 1
    rows = signs * 10 ** (torch.arange(-30.0, 30)[:, None] - 3 * torch.rand(60, 8, generator=draws))
    rows[7] = 0
    sent = wire.encode(rows.view(-1), [(60, 8)], "rows", 3)
    assert sent.dtype == torch.uint8
    assert sent.numel() == wire.bytes_of([(60, 8)]) == 60 * (8 * size + scale)
    assert wire.bytes_of(SPANS) == sum(count * (width * size + scale) for count, width in SPANS)
    found = wire.decode(sent, [(60, 8)]).view(60, 8)
    assert bool(((found - rows).abs() <= rows.abs() * 2.0**-bits).all())


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
def test_int8_is_within_a_step_of_its_row_and_has_no_bias(size: float) -> None:
    wire, rows = Wire("int8", 1, 0), torch.randn(64, 16) * size
    found = torch.stack(
        [wire.decode(wire.encode(rows.view(-1), [(64, 16)], "rows", step), [(64, 16)]) for step in range(400)]
    )
    step = (rows.max(1).values - rows.min(1).values) / 255
    errors = found.view(400, 64, 16) - rows
    assert bool((errors.abs() <= step.view(1, 64, 1) * 1.01 + 1e-3 * size).all())
    # The mean of 400 draws within five of its own deviations, which are at most half a step each.
    assert bool((errors.mean(0).abs() <= step.view(64, 1) * 0.5 * 5 / 20 + 1e-3 * size).all())


def test_noise_is_of_seed_rank_direction_step_and_place_alone() -> None:
    rows, spans = torch.linspace(0, 1, 16).repeat(4), [(4, 16)]

    def sent(seed: int = 1, rank: int = 0, direction: str = "rows", step: int = 5) -> torch.Tensor:
        return Wire("int8", seed, rank).encode(rows, spans, direction, step)

    assert torch.equal(sent(), sent())
    records = sent().view(4, -1)
    assert len({record.numpy().tobytes() for record in records}) == 4
    for other in ({"seed": 2}, {"rank": 1}, {"direction": "gradients"}, {"step": 6}):
        assert not torch.equal(sent(), sent(**other))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_does_not_fit_is_refused(kind: Any, bad: float) -> None:
    rows = torch.zeros(FLOATS)
    rows[11] = bad
    with refuses(TrainingError, f"step 9 {kind}"):
        Wire(kind, 1, 0).encode(rows, SPANS, "gradients", 9)
