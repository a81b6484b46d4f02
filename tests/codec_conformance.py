"""Conformance tests of row codecs: subclass the suites that fit the codec, and define `config` and
`golden` bytes.

Shapes: n rows, D width. Every statistical test has fixed seeds and a bound of five standard
deviations.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stratarec.embedding.codecs import FloatRows, RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.kernels.codec import reference
from stratarec.testing import check_codec
from stratarec.testing.codecs import (
    Floats,
    Records,
    decoded,
    difficult_rows,
    encoded,
    every_shape,
    float_step,
    keys_of,
    level_of,
)

WIDTHS = [3, 33, 130]
LARGEST = {"fp32": 3.4028235e38, "fp16": 65504.0, "bf16": 3.3895314e38}
GOLDEN_ROW = [0.1, -0.25, 1.0, 3.14159, -2.5e-6, 0.0, -0.7]


def stored_parameters(codec: RecordCodec, records: Records) -> NDArray[np.float64]:
    """Return the stored scale and offset, ``[n, 2]``."""
    part = records[:, codec.layout.parameters_at : codec.layout.row_state_at].copy()
    return part.view(np.float32 if codec.layout.wide_parameters else np.float16).astype(np.float64)


def weight_step(codec: RecordCodec, rows: Floats, records: Records) -> NDArray[np.float64]:
    """Return the distance ``[n, D]`` of the two values between which a weight is rounded."""
    if not codec.layout.levels:
        return float_step(rows, codec.config.kind)
    return np.broadcast_to(stored_parameters(codec, records)[:, :1], rows.shape)


class CodecTests:
    """Conformance tests of one codec configuration."""

    config: ClassVar[CodecConfig]
    golden: ClassVar[str]
    """Hexadecimal record of `GOLDEN_ROW` with key 7, batch number 11, row state 0.3 and full state
    1/3, stored as bf16.
    """

    def codec(self, width: int) -> RecordCodec:
        """Return a codec without optimizer state."""
        return RecordCodec(self.config, width=width, row_state=False, full_state=0)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_weights_are_restored_within_the_bounds(self, width: int) -> None:
        codec, rows = self.codec(width), difficult_rows(width)
        records = encoded(codec, level_of(codec, rows), keys_of(len(rows)))
        result = decoded(codec, records).weights.reshape(rows.shape)
        if self.config.kind == "fp32":
            assert result.tobytes() == rows.tobytes()
            return
        share = 0.5 if self.config.rounding == "nearest" else 1.0
        slack = np.abs(rows).max(axis=1, keepdims=True) * 2.0**-20 if codec.layout.levels else 0.0
        error = np.abs(result.astype(np.float64) - rows)
        assert (error <= share * weight_step(codec, rows, records) + slack).all()

    @pytest.mark.parametrize("width", WIDTHS)
    def test_bytes_and_floats_match_the_reference(self, width: int) -> None:
        check_codec(self.config, widths=[width])

    @pytest.mark.parametrize("value", [0.0, 1.0, 0.3, -0.3, 1e-3, -7e-6, 2e-8, 1000.1])
    def test_constant_rows_keep_their_value(self, value: float) -> None:
        codec, count = self.codec(33), 4096
        rows = np.full((1, 33), value, dtype=np.float32)
        result = decoded(codec, encoded(codec, level_of(codec, rows), keys_of(count))).weights.astype(
            np.float64
        )
        exact = float(rows[0, 0])
        if not codec.layout.levels:
            step = float(float_step(rows[:, 0], self.config.kind)[0])
        elif codec.layout.wide_parameters:
            step = 0.0
        else:
            step = (
                float(float_step(rows[:, 0], "fp16")[0]) / codec.layout.levels * (1 + 2.0**-10) + 2.0**-24
            )
        storage = np.float16 if self.config.kind == "fp16" or codec.layout.levels else np.float32
        if float(storage(exact)) == exact and self.config.kind != "bf16":
            step = 0.0
        share = 0.5 if self.config.rounding == "nearest" else 1.0
        slack = abs(exact) * 2.0**-22 if step else 0.0
        assert np.abs(result - exact).max() <= share * step + slack
        if self.config.rounding == "stochastic":
            assert abs(result.mean() - exact) <= 5 * step / 2 / np.sqrt(len(result)) + slack

    def test_bfloat16_state_has_no_bias(self) -> None:
        count, width = 8192, 16
        codec = RecordCodec(replace(self.config, state="bf16"), width=width, row_state=True, full_state=1)
        level = level_of(codec, np.ones((1, width), dtype=np.float32))
        back = decoded(codec, encoded(codec, level, keys_of(count)))
        pairs = (
            (back.row_state, level.row_state),
            (back.full_state.reshape(count, width), level.full_state),
        )
        for stored, exact in pairs:
            error = (stored.astype(np.float64) - exact) / float_step(exact, "bf16")
            assert np.abs(error.mean(axis=0)).max() <= 5 / 2 / np.sqrt(count)

    @pytest.mark.parametrize("part", ["weights", "row_state", "full_state"])
    def test_the_first_entry_that_is_not_finite_is_named(self, part: str) -> None:
        for poison, width in product((np.nan, -np.nan, np.inf, -np.inf), (1, 64, 130)):
            codec = RecordCodec(self.config, width=width, row_state=True, full_state=1)
            level = level_of(codec, np.ones((40, width), dtype=np.float32))
            array = getattr(level, part)
            share = len(array) // 40
            for slot, element in ((17, share - 1), (5, 0)):
                array[slot * share + element] = poison
            slots = np.arange(39, -1, -1, dtype=np.int64)
            records = np.zeros((40, codec.record_bytes), dtype=np.uint8)
            assert codec.encode(level, slots, records, slots, keys_of(40), 0) == 39 - 17
            assert codec.encode(level, slots[23:], records, slots[23:], keys_of(17), 0) == 34 - 23

    def test_numbers_beyond_the_format_are_refused(self) -> None:
        codec = self.codec(3)
        kind = self.config.kind
        if codec.layout.levels:
            wide = codec.layout.wide_parameters
            representable = (
                [[-1.5e38, 0, 1.5e38]] if wide else [[-65504.0, 0, 65504.0], [65504.0, 65504.0, 65504.0]]
            )
            refused = [[-3e38, 0, 3e38]] if wide else [[-65505.0, 0, 0], [65536.0, 7e4, 7e4], [0, 0, 3e38]]
        else:
            largest = LARGEST[kind]
            representable = [[-largest, largest, 0]]
            refused = [] if kind == "fp32" else [[0, largest * (1 + 2.0**-22), 0], [-3.4e38, 0, 0]]
        for row in representable:
            rows = np.array([row], dtype=np.float32)
            assert np.isfinite(
                decoded(codec, encoded(codec, level_of(codec, rows), keys_of(200))).weights
            ).all()
        for row in refused:
            level = level_of(codec, np.array([[0, 0, 0], row, row], dtype=np.float32))
            order, records = np.arange(3, dtype=np.int64), np.zeros((3, codec.record_bytes), dtype=np.uint8)
            assert codec.encode(level, order, records, order, keys_of(3), 0) == 1

    def test_a_state_beyond_bfloat16_is_refused(self) -> None:
        codec = RecordCodec(replace(self.config, state="bf16"), width=2, row_state=True, full_state=1)
        for part in ("row_state", "full_state"):
            level = level_of(codec, np.ones((2, 2), dtype=np.float32))
            getattr(level, part)[-1] = 3.4e38
            order, records = np.arange(2, dtype=np.int64), np.zeros((2, codec.record_bytes), dtype=np.uint8)
            assert codec.encode(level, order, records, order, keys_of(2), 0) == 1

    def test_bytes_depend_only_on_key_write_and_column(self) -> None:
        codec = RecordCodec(replace(self.config, state="bf16"), width=33, row_state=True, full_state=1)
        random, count = np.random.default_rng(9), 300
        level = level_of(codec, random.standard_normal((count, 33), dtype=np.float32))
        keys = keys_of(count)
        expected = encoded(codec, level, keys, batch_number=1)
        order, places = random.permutation(count), random.permutation(2 * count)[:count]
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            records = np.full((2 * count, codec.record_bytes), 0xA5, dtype=np.uint8)
            assert codec.encode(level, order, records, places, keys[order], 1) == -1
            np.testing.assert_array_equal(records[places], expected[order])
            untouched = np.setdiff1d(np.arange(2 * count), places)
            assert (records[untouched] == 0xA5).all()
        # Some bytes change with either part of the noise: the state is always stochastic.
        assert (encoded(codec, level, keys, batch_number=2) != expected).any(axis=1).all()
        assert (encoded(codec, level, keys + np.uint64(1), batch_number=1) != expected).any(axis=1).all()

    def test_decode_writes_only_its_slots(self) -> None:
        codec = RecordCodec(self.config, width=7, row_state=True, full_state=1)
        before = level_of(codec, np.ones((20, 7), dtype=np.float32))
        level = level_of(codec, np.full((20, 7), np.nan, dtype=np.float32))
        level.row_state.fill(np.nan)
        level.full_state.fill(np.nan)
        slots = np.array([19, 3, 8], dtype=np.int64)
        codec.decode(encoded(codec, before, keys_of(20)), np.array([0, 5, 5]), level, slots)
        for array in (level.weights, level.row_state, level.full_state):
            written = ~np.isnan(array.reshape(20, -1))
            assert written[slots].all()
            assert written.sum() == 3 * written.shape[1]

    def test_the_format_is_fixed(self) -> None:
        codec = RecordCodec(replace(self.config, state="bf16"), width=7, row_state=True, full_state=1)
        level = FloatRows(
            weights=np.array(GOLDEN_ROW, dtype=np.float32),
            row_state=np.array([0.3], dtype=np.float32),
            full_state=np.full(7, 1 / 3, dtype=np.float32),
            clock=np.empty(0, dtype=np.int32),
            width=7,
        )
        assert (
            encoded(codec, level, np.array([7], dtype=np.uint64), batch_number=11)[0].tobytes().hex()
            == self.golden
        )

    def test_identity_creates_the_same_codec(self) -> None:
        for codec in every_shape(self.config, 7):
            again = RecordCodec.from_identity(codec.identity)
            assert again.identity == codec.identity
            rows, keys = difficult_rows(7), keys_of(14)
            np.testing.assert_array_equal(
                encoded(again, level_of(again, rows), keys), encoded(codec, level_of(codec, rows), keys)
            )

    def test_any_row_is_refused_or_encoded_like_the_reference(self) -> None:
        @settings(max_examples=40, deadline=None, derandomize=True)
        @given(
            row=st.lists(st.floats(width=32), min_size=1, max_size=20),
            key=st.integers(0, 2**64 - 1),
            batch_number=st.integers(0, 2**63),
        )
        def check(row: list[float], key: int, batch_number: int) -> None:
            codec, rows = self.codec(len(row)), np.array([row], dtype=np.float32)
            expected = reference.encode(rows[0], np.float32(0), rows[0], key, batch_number, codec.layout)
            records, zero = np.zeros((1, codec.record_bytes), dtype=np.uint8), np.zeros(1, dtype=np.int64)
            refused = codec.encode(
                level_of(codec, rows), zero, records, zero, np.array([key], dtype=np.uint64), batch_number
            )
            assert refused == (0 if expected is None else -1)
            if expected is not None:
                assert records[0].tobytes() == expected
                assert np.isfinite(decoded(codec, records).weights).all()

        check()


class StochasticTests(CodecTests):
    """Additional tests of codecs with stochastic rounding."""

    def test_stochastic_rounding_has_no_bias(self) -> None:
        codec, count, width = self.codec(130), 8192, 130
        random = np.random.default_rng(4)
        for magnitude in (1.0, 3e-5):
            rows = (random.standard_normal((1, width)) * magnitude).astype(np.float32)
            records = encoded(codec, level_of(codec, rows), keys_of(count))
            result = decoded(codec, records).weights.reshape(count, width)
            error = (result.astype(np.float64) - rows) / weight_step(codec, rows, records[:1])
            # A two-valued error of step 1 has a standard deviation of at most 1 / 2.
            assert np.abs(error.mean(axis=0)).max() <= 5 / 2 / np.sqrt(count)
            assert abs(error.mean()) <= 5 / 2 / np.sqrt(count * width)


class NearestFloatTests(CodecTests):
    """Additional tests of float formats without noise."""

    def test_a_decoded_row_keeps_its_bytes(self) -> None:
        codec, rows = self.codec(64), difficult_rows(64)
        records = encoded(codec, level_of(codec, rows), keys_of(len(rows)))
        again = encoded(codec, decoded(codec, records), keys_of(len(rows)), batch_number=4)
        np.testing.assert_array_equal(again, records)


class QuantisedTests(CodecTests):
    """Additional tests of codecs with codes between the smallest and the largest weight of a
    row.
    """

    @pytest.mark.parametrize("width", WIDTHS)
    def test_steps_are_no_wider_than_documented(self, width: int) -> None:
        codec, rows = self.codec(width), difficult_rows(width)
        scale, offset = stored_parameters(
            codec, encoded(codec, level_of(codec, rows), keys_of(len(rows)))
        ).T
        least, most = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
        if codec.layout.wide_parameters:
            assert (offset == least).all()
            assert (
                scale <= np.maximum((most - least) / codec.layout.levels * (1 + 2.0**-22), 2.0**-126)
            ).all()
        else:
            step = float_step(least.astype(np.float32), "fp16")
            assert ((offset <= least) & (offset >= least - step)).all()
            assert (scale <= (most - least + step) / codec.layout.levels * (1 + 2.0**-10) + 2.0**-24).all()
            # The greatest weight has a code: nothing is clamped.
            assert (offset + scale * codec.layout.levels >= most - np.abs(most) * 2.0**-22).all()
