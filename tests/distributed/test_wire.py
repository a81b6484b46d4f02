"""Rows on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stratarec.distributed.wire import Wire, merged
from stratarec.errors import ConfigError, TrainingError

SPANS = [(5, 8), (3, 8), (0, 4), (7, 3)]
FLOATS = sum(rows * width for rows, width in SPANS)


@pytest.mark.parametrize(("kind", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_float_wires_round_to_nearest(kind: Any, size: int) -> None:
    rows, wire = torch.randn(FLOATS), Wire(kind, 1, 0)
    sent = wire.encode(rows, SPANS, "rows", 3)
    assert sent.dtype == torch.uint8
    assert sent.numel() == wire.bytes_of(SPANS) == FLOATS * size
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    assert torch.equal(wire.decode(sent, SPANS), rows.to(dtype).float())


def test_int8_is_within_a_step_of_its_row_and_has_no_bias() -> None:
    wire, rows = Wire("int8", 1, 0), torch.randn(64, 16)
    found = torch.stack(
        [wire.decode(wire.encode(rows.view(-1), [(64, 16)], "rows", step), [(64, 16)]) for step in range(400)]
    )
    step = (rows.max(1).values - rows.min(1).values) / 255
    errors = found.view(400, 64, 16) - rows
    assert bool((errors.abs() <= step.view(1, 64, 1) * 1.01 + 1e-3).all())
    # The mean of 400 draws within five of its own deviations, which are at most half a step each.
    assert bool((errors.mean(0).abs() <= step.view(64, 1) * 0.5 * 5 / 20 + 1e-3).all())


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
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_what_does_not_fit_is_refused(kind: Any, bad: float) -> None:
    rows = torch.zeros(FLOATS)
    rows[11] = bad
    with pytest.raises(TrainingError, match=f"gradients exchange of step 9 does not fit {kind}"):
        Wire(kind, 1, 0).encode(rows, SPANS, "gradients", 9)


def test_other_wires_are_refused() -> None:
    with pytest.raises(ConfigError, match="wire is 'telegraph', expected one of fp32, fp16, bf16, int8"):
        Wire("telegraph", 0, 0)  # type: ignore[arg-type]


def test_neighbouring_spans_are_one() -> None:
    assert merged(SPANS) == [(8, 8), (7, 3)]
    assert merged([]) == []
