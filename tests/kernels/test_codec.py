"""Test half floats, unaligned memory and noise of the codec kernels."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from stratarec.kernels.codec.kinds.base import noise, plain_unit, words
from stratarec.kernels.codec.kinds.integers import parameters, store_parameters
from stratarec.kernels.random.reference import mix
from stratarec.kernels.simd import bits

pytestmark = pytest.mark.interpreted


@njit
def halves_of(values, out):
    for i in range(len(values)):
        out[i] = bits.to_half(values[i])


@njit
def floats_of(halves, out):
    for i in range(len(halves)):
        out[i] = bits.from_half(halves[i])


@njit
def move(source, target, first):
    """Copy a float32 and a uint16 between any byte positions."""
    bits.store_f32(target, np.uint64(first + 1), bits.load_f32(source, np.uint64(first)))
    bits.store_u16(target, np.uint64(first + 5), bits.load_u16(source, np.uint64(first + 4)))


@njit
def parameters_of(low, high, levels, records):
    scale, offset, is_finite = parameters(low, high, levels, False)
    store_parameters(records, np.uint64(0), scale, offset, False)
    return scale, offset, is_finite


@njit
def words_of(base, out):
    for d in range(len(out)):
        out[d] = words(base, np.uint64(d))


def test_every_half_float_converts_to_its_float() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    actual = np.empty(1 << 16, dtype=np.float32)
    floats_of(halves, actual)
    np.testing.assert_array_equal(actual, halves.view(np.float16).astype(np.float32))


def test_floats_convert_to_the_nearest_half_with_ties_to_even() -> None:
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (finite[:-1] + finite[1:]) / 2
    values = np.concatenate(
        [finite, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e6))]
    )
    values = np.concatenate([values, -values])
    actual = np.empty(len(values), dtype=np.uint16)
    halves_of(values, actual)
    np.testing.assert_array_equal(actual, values.astype(np.float16).view(np.uint16))
    assert (actual[len(finite) : len(finite) + len(ties)] % 2 == 0).all()


@pytest.mark.parametrize("first", range(8))
def test_memory_is_read_and_written_at_any_byte(first: int) -> None:
    source = np.random.default_rng(0).integers(0, 120, 24, dtype=np.uint8)
    target = np.full(24, 0xA5, dtype=np.uint8)
    move(source, target, first)
    np.testing.assert_array_equal(target[first + 1 : first + 7], source[first : first + 6])
    assert (np.delete(target, np.arange(first + 1, first + 7)) == 0xA5).all()


def test_offsets_are_rounded_down_and_scales_up() -> None:
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    exact = np.concatenate([-finite[::-1], finite[1:]]).astype(np.float32)
    between = exact[:-1] + (exact[1:] - exact[:-1]) * np.float32(0.3)
    records = np.zeros(4, dtype=np.uint8)
    for i in range(0, len(between), 7):
        _, offset, is_finite = parameters_of(between[i], between[i], np.float32(255), records)
        assert is_finite
        assert offset == exact[i]
        _, offset, _ = parameters_of(exact[i], exact[i], np.float32(255), records)
        assert offset == exact[i]
        step = abs(between[i])
        scale, _, _ = parameters_of(np.float32(0), step, np.float32(1), records)
        expected = np.float16(step)
        assert scale == (expected if expected >= step else np.nextafter(expected, np.float16(np.inf)))
        assert np.frombuffer(records, np.float16)[0] == scale


def test_a_scale_beyond_half_floats_is_refused() -> None:
    records = np.zeros(4, dtype=np.uint8)
    assert parameters_of(np.float32(0), np.float32(65504 * 15), np.float32(15), records)[2]
    assert not parameters_of(np.float32(0), np.float32(65505 * 15), np.float32(15), records)[2]


def test_noise_matches_the_reference() -> None:
    key, batch_number = 0xFEDCBA9876543210, 77
    base = mix(key ^ mix((batch_number * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1)))
    actual = np.empty(1000, dtype=np.uint32)
    words_of(np.uint64(base), actual)
    np.testing.assert_array_equal(actual, noise(key, batch_number, range(1000)))


def test_noise_is_uniform_and_uncorrelated_between_keys_writes_and_columns() -> None:
    rows, columns = 512, 64
    grid = np.stack([plain_unit(noise(key, 1, range(columns))) for key in range(rows)]).astype(np.float64)
    counts, _ = np.histogram(grid, bins=20, range=(0, 1))
    expected = grid.size / 20
    # chi-squared with 19 degrees of freedom, p below 0.001
    assert ((counts - expected) ** 2 / expected).sum() < 45
    later = np.stack([plain_unit(noise(key, 2, range(columns))) for key in range(rows)])
    for other in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1), later):
        # The correlation of independent numbers has a standard deviation of 1 / sqrt(their number).
        assert abs(np.corrcoef(grid.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(grid.size)
    # Adjacent columns differ by a constant before mixing. Their sums must still look like sums of
    # two uniform numbers.
    pairs, _, _ = np.histogram2d(grid[:, :-1].ravel(), grid[:, 1:].ravel(), bins=8, range=((0, 1), (0, 1)))
    expected = pairs.sum() / 64
    assert ((pairs - expected) ** 2 / expected).sum() < 107  # 63 degrees of freedom, p below 0.001
