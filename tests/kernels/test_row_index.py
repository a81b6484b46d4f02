"""Compare rows read by index, and their sums, with the reference, and with the kernels of the host
bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from errors import refuses
from stratarec.errors import ConfigError
from stratarec.kernels import segments
from stratarec.kernels.attention import DevicePairs, Pairs, pair_pool, pair_products, pair_sums
from stratarec.kernels.row_index import RowIndex, add_up, reference_add_up, reference_take, take

pytestmark = pytest.mark.interpreted
EVENTS, WIDTH = 30, 8


class Batch(NamedTuple):
    """Windows of 12 histories, some of them empty, which overlap."""

    start: Tensor
    length: Tensor
    rows: Tensor
    draws: torch.Generator

    def some(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draws).requires_grad_()


@pytest.fixture
def batch() -> Batch:
    draws = torch.Generator().manual_seed(3)
    length = torch.randint(0, 9, (12,), generator=draws)
    length[4] = 0
    rows = torch.randn(EVENTS, WIDTH, generator=draws).requires_grad_()
    return Batch(torch.randint(0, EVENTS - 9, (12,), generator=draws), length, rows, draws)


def with_room(rows: Tensor, room: int = 40) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, room - len(rows)))


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    draws = torch.Generator().manual_seed(1)
    return torch.autograd.grad(
        output, inputs, torch.randn(output.shape, generator=draws), retain_graph=True
    )


@pytest.mark.parametrize("stride", [0, 9])
def test_both_directions_match_the_reference(batch: Batch, stride: int) -> None:
    index = RowIndex.of_windows(batch.start, batch.length, rows=40, stride=stride, room=128)
    rows, values = with_room(batch.rows), batch.some(128, WIDTH)
    pairs = (
        (take(rows, index), reference_take(rows, index)),
        (add_up(values, index), reference_add_up(values, index)),
    )
    for (one, other), leaf in zip(pairs, (batch.rows, values), strict=True):
        assert torch.equal(one, other)
        if leaf is batch.rows:
            torch.testing.assert_close(gradients(one, leaf), gradients(other, leaf))
    # The gradient of a sum is read by the places; places without a row are not asked for theirs.
    listed = index.place[: int(index.offsets[-1])].long()  # type: ignore[index]
    (one,), (other,) = gradients(pairs[1][0], values), gradients(pairs[1][1], values)
    assert torch.equal(one[listed], other[listed])


def test_windows_have_the_bits_of_the_host(batch: Batch) -> None:
    start, length, longest = batch.start, batch.length, 11
    index = RowIndex.of_windows(start, length, rows=40, stride=longest, room=12 * longest, places=100)
    gathered = take(with_room(batch.rows), index).view(12, longest, WIDTH)
    assert torch.equal(gathered, segments.gather_windows(batch.rows.detach(), start, length, longest))
    assert torch.equal((index.row != 39).view(12, longest), torch.arange(longest) < length.unsqueeze(1))
    gradient = torch.randn(gathered.shape, generator=batch.draws)
    (mine,) = torch.autograd.grad(gathered, batch.rows, gradient)
    assert torch.equal(mine, segments.scatter_windows(gradient, start, length, EVENTS))


def test_vectors_of_histories_and_segments_have_the_bits_of_the_host(batch: Batch) -> None:
    inverse = torch.randint(0, 12, (50,), generator=batch.draws)
    vectors, lengths = batch.some(12, WIDTH), torch.tensor([3, 1, 7, 20, 19])
    index = RowIndex.of_windows(inverse, torch.ones_like(inverse), rows=20, stride=1, room=50)
    expanded, gradient = take(with_room(vectors, 20), index), torch.randn(50, WIDTH, generator=batch.draws)
    assert torch.equal(expanded, vectors[inverse])
    (mine,) = torch.autograd.grad(expanded, vectors, gradient)
    assert torch.equal(mine, segments.sum_rows(gradient, inverse, 12))
    of_segments = RowIndex.of_lengths(lengths, rows=50, room=50)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    columns, buffer = segments.SegmentColumns(WIDTH, [(0, WIDTH)], starts), batch.some(50, WIDTH)
    (mine,) = torch.autograd.grad(take(buffer, of_segments), buffer, gradient)
    assert torch.equal(take(buffer, of_segments), columns.expand(buffer.detach().clone()))
    assert torch.equal(mine[:5], columns.fold(gradient)[:5])
    assert not mine[5:].any()


def test_pairs_have_the_bits_of_the_host(batch: Batch) -> None:
    start, length, samples = batch.start, batch.length, batch.some(12, WIDTH)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    count, host = int(offsets[-1]), Pairs(first=start, offsets=offsets)
    events = RowIndex.of_windows(start, length, rows=40, room=96)
    device = DevicePairs(RowIndex.of_lengths(length, rows=12, room=96), events)
    weights = batch.some(count)
    results = [
        (
            pair_sums(samples, rows, pairs)[:count], pair_products(samples, rows, pairs)[:count],
            pair_pool(torch.nn.functional.pad(weights, (0, more)), rows, pairs),
        )
        for rows, pairs, more in ((batch.rows, host, 0), (with_room(batch.rows), device, 96 - count))
    ]  # fmt: skip
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for number, leaves in ((0, (samples, batch.rows)), (1, (samples, batch.rows)), (2, (batch.rows,))):
        expected, actual = (gradients(result[number], *leaves) for result in results)
        assert all(map(torch.equal, expected, actual))
    # Dot products add up in another order.
    torch.testing.assert_close(*(gradients(result[2], weights)[0] for result in results))


def test_no_windows_and_too_many_places() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    index = RowIndex.of_windows(nothing, nothing, rows=64, room=64)
    assert not take(torch.zeros(64, 2), index).any()
    assert not add_up(torch.ones(64, 2), index).any()
    assert not RowIndex.of_lengths(nothing, rows=3, room=8).offsets.any()
    with refuses(ConfigError, "histories"):
        RowIndex.of_windows(nothing, nothing, rows=64, room=1 << 31)
