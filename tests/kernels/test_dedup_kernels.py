"""Compare the kernels of deduplicated batches with the plain reference, with one thread and with
two; results must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.kernels import segments as dedup

pytestmark = pytest.mark.interpreted

fast = settings(deadline=None, max_examples=40)


@fast
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_segments_end_where_some_inverse_changes(samples: list[tuple[int, int]]) -> None:
    one, other = (np.array(part, dtype=np.int32) for part in zip(*samples, strict=True))
    first = dedup.find_segments(one, np.array([0, len(samples)]))
    assert first.tolist() == changes([[value] for value, _ in samples])
    assert dedup.find_segments(other, first).tolist() == changes(samples)


def changes(samples: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions where adjacent samples differ, from 0 to the number of samples."""
    return [b for b in range(len(samples)) if not b or samples[b] != samples[b - 1]] + [len(samples)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("width", "spans"),
    [(7, [(2, 3)]), (40, [(0, 17), (17, 3), (30, 10)]), (33, [(0, 33)]), (64, [(48, 16)])],
)
@pytest.mark.parametrize("starts", [[0, 50], list(range(51)), [0, 1, 9, 20, 21, 49, 50]])
def test_expand_and_fold_match_the_reference_bitwise(
    threads: int, width: int, spans: list[tuple[int, int]], starts: list[int]
) -> None:
    draws = torch.Generator().manual_seed(width)
    pooled, gradient = torch.randn(50, width, generator=draws), torch.randn(50, width, generator=draws)
    columns = [column for first, count in spans for column in range(first, first + count)]
    segment_columns, segments = dedup.SegmentColumns(width, spans, torch.tensor(starts)), len(starts) - 1
    torch.set_num_threads(threads)
    segment = torch.repeat_interleave(torch.arange(segments), torch.tensor(starts).diff())
    expected = dedup.reference_expand(pooled.clone(), spans, segment)
    assert torch.equal(segment_columns.expand(pooled), expected)
    folded = segment_columns.fold(gradient)
    expected = dedup.reference_fold(gradient, spans, segment, segments)
    folded[segments:, columns] = 0  # not written
    assert torch.equal(folded, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [16, 37])
def test_sums_of_rows_match_the_reference_bitwise(threads: int, width: int) -> None:
    draws = torch.Generator().manual_seed(width)
    gradient = torch.randn(60, width, generator=draws)
    inverse = torch.randint(0, 9, (60,), generator=draws).int()
    torch.set_num_threads(threads)
    expected = dedup.reference_sum_rows(gradient, inverse, 11)
    assert torch.equal(dedup.sum_rows(gradient, inverse, 11), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [16, 19])
def test_windows_gather_and_scatter_like_the_reference_bitwise(threads: int, width: int) -> None:
    draws = torch.Generator().manual_seed(width)
    values, longest = 23, 6
    length = torch.randint(0, longest + 1, (40,), generator=draws)
    start = (torch.rand(40, generator=draws) * (values - length + 1)).long()
    rows = torch.randn(values, width, generator=draws)
    gradient = torch.randn(40, longest, width, generator=draws)
    torch.set_num_threads(threads)
    places = dedup.reference_window_places(start, length, longest, values)
    gathered = dedup.gather_windows(rows, start, length, longest)
    assert torch.equal(gathered, dedup.reference_gather_windows(rows, places))
    scattered = dedup.scatter_windows(gradient, start, length, values)
    assert torch.equal(scattered, dedup.reference_scatter_windows(gradient, places, values))
