"""Test rectangles that are copied between flat arrays."""

from __future__ import annotations

import numpy as np
import torch

from stratarec.kernels import rectangles


def test_copies_match_the_reference_in_both_directions() -> None:
    source = torch.randn(20, 30)
    actual = rectangles.parts_of(
        [(5, 7, 31, 30, 3, 9), (0, 4, 0, 30, 0, 4), (2, 30, 90, 30, 200, 30), (1, 1, 599, 1, 399, 1)]
    )
    mine, expected = torch.zeros(400), torch.zeros(400)
    rectangles.copy_parts(source, mine, actual)
    rectangles.reference_copy_parts(source, expected, actual)
    assert torch.equal(mine, expected)
    assert mine.count_nonzero() == 5 * 7 + 60 + 1
    back, expected_back = torch.zeros(20, 30), torch.zeros(20, 30)
    rectangles.copy_parts(mine, back, rectangles.swapped(actual))
    rectangles.reference_copy_parts(expected, expected_back, rectangles.swapped(actual))
    assert torch.equal(back, expected_back)
    assert torch.equal(back.view(-1)[599], source.view(-1)[599])


def test_no_rectangles_copy_nothing() -> None:
    target = torch.ones(3)
    rectangles.copy_parts(torch.zeros(3), target, rectangles.parts_of([]))
    assert torch.equal(target, torch.ones(3))
    assert rectangles.parts_of([]).shape == (0, 6)
    assert rectangles.parts_of([]).dtype == np.int64
