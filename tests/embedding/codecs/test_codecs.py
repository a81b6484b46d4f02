"""Run the conformance suite for every codec, with bytes that must not change unless `record.FORMAT`
does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codec_conformance import NearestFloatTests, QuantisedTests, StochasticTests
from errors import refuses
from stratarec.embedding.codecs import FloatRows, RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.codec.kinds import KINDS


class TestFp32(NearestFloatTests):
    config = CodecConfig(kind="fp32")
    golden = "cdcccc3d000080be0000803fd00f4940acc527b600000000333333bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestFp16Nearest(NearestFloatTests):
    config = CodecConfig(kind="fp16", rounding="nearest")
    golden = "662e00b4003c48422a8000009ab9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestFp16Stochastic(StochasticTests):
    config = CodecConfig(kind="fp16", rounding="stochastic")
    golden = "672e00b4003c48422a80000099b9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestBf16Nearest(NearestFloatTests):
    config = CodecConfig(kind="bf16", rounding="nearest")
    golden = "cd3d80be803f494028b6000033bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestBf16Stochastic(StochasticTests):
    config = CodecConfig(kind="bf16", rounding="stochastic")
    golden = "cd3d80be803f494028b6000034bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt8NearestHalf(QuantisedTests):
    config = CodecConfig(kind="int8", rounding="nearest", parameters="fp16")
    golden = "351e71ff2e2e00b7239ab9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt8NearestWide(QuantisedTests):
    config = CodecConfig(kind="int8", rounding="nearest", parameters="fp32")
    golden = "351e71ff2e2e0070d3763c333333bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt8StochasticHalf(StochasticTests, QuantisedTests):
    config = CodecConfig(kind="int8", rounding="stochastic", parameters="fp16")
    golden = "351d71ff2f2e00b7239ab9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt8StochasticWide(StochasticTests, QuantisedTests):
    config = CodecConfig(kind="int8", rounding="stochastic", parameters="fp32")
    golden = "351d71ff2f2e0070d3763c333333bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt4NearestHalf(QuantisedTests):
    config = CodecConfig(kind="int4", rounding="nearest", parameters="fp16")
    golden = "3332070f1a349ab9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt4NearestWide(QuantisedTests):
    config = CodecConfig(kind="int4", rounding="nearest", parameters="fp32")
    golden = "3332070f5420833e333333bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt4StochasticHalf(StochasticTests, QuantisedTests):
    config = CodecConfig(kind="int4", rounding="stochastic", parameters="fp16")
    golden = "3321070f1a349ab9993eab3eaa3eaa3eab3eaa3eab3eab3e"


class TestInt4StochasticWide(StochasticTests, QuantisedTests):
    config = CodecConfig(kind="int4", rounding="stochastic", parameters="fp32")
    golden = "3321070f5420833e333333bf993eab3eaa3eaa3eab3eaa3eab3eab3e"


def test_every_codec_has_a_conformance_suite() -> None:
    suites = {
        suite.config.kind
        for suite in globals().values()
        if isinstance(suite, type) and hasattr(suite, "config")
    }
    assert suites == set(KINDS)


def codec_of(**fields: str) -> RecordCodec:
    return RecordCodec(CodecConfig(**fields), width=4, row_state=True, full_state=0)


def level_of_four() -> FloatRows:
    zeros = np.zeros(3, dtype=np.float32)
    return FloatRows(
        weights=np.zeros(12, dtype=np.float32),
        row_state=zeros,
        full_state=np.zeros(0, np.float32),
        clock=np.zeros(0, np.int32),
        width=4,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "int3"}, f"codec.kind int3 {' '.join(KINDS)}"),
        ({"rounding": "up"}, "codec.rounding 'up'"),
        ({"parameters": "bf16"}, "codec.parameters bf16 fp16 fp32"),
        ({"state": "fp16"}, "codec.state fp16 fp32 bf16"),
    ],
)
def test_unknown_choices_are_refused(fields: dict[str, str], message: str) -> None:
    with refuses(ConfigError, message):
        codec_of(**fields)


@pytest.mark.parametrize("change", [{"format": 99}, {"kind": "int3"}, {"width": None}])
def test_identities_of_other_versions_are_refused(change: dict[str, object]) -> None:
    identity = {**codec_of(kind="int8").identity, **change}
    if change == {"width": None}:
        del identity["width"]
    with pytest.raises(CheckpointError, match=r"(newer|this) version"):
        RecordCodec.from_identity(identity)


def test_invalid_indices_and_arrays_are_refused() -> None:
    codec, level = codec_of(kind="int8"), level_of_four()
    records, keys = np.zeros((5, codec.record_bytes), np.uint8), np.zeros(2, np.uint64)
    good, high, low = np.array([0, 2]), np.array([0, 5]), np.array([-1, 0])
    with refuses(ConfigError, "slots 0 5 2"):
        codec.encode(level, high, records, good, keys, 0)
    with refuses(ConfigError, "places 0 5 4"):
        codec.encode(level, good, records, high, keys, 0)
    with refuses(ConfigError, "slots -1 0"):
        codec.decode(records, good, level, low)
    with refuses(ConfigError, "int32"):
        codec.decode(records, good.astype(np.int32), level, good)
    with refuses(ConfigError, "uint64 1"):
        codec.encode(level, good, records, good, keys[:1], 0)
    with refuses(ConfigError, "9 bytes 4 12"):
        codec.decode(records[:, :9].copy(), good, level, good)
    with refuses(ConfigError, "uint8"):
        codec.decode(records[:, ::2], good, level, good)
    stateful = RecordCodec(CodecConfig(), width=4, row_state=True, full_state=1)
    with refuses(ConfigError, "optimizer 3 slots"):
        stateful.decode(np.zeros((3, stateful.record_bytes), np.uint8), good, level, good)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("sgd", "batch"), ("rowwise_adagrad", "batch"), ("rowwise_adam", "all"), ("adam", "all")],
)
def test_rows_have_the_bytes_of_an_exact_codec(kind: Any, rows: Any) -> None:
    optimizer = RowOptimizerConfig(kind=kind, rows=rows)
    codec = RecordCodec.of(CodecConfig(), 3, optimizer)
    float_rows = FloatRows.allocate(5, 3, **optimizer.state_shape)
    for part in float_rows.parts:
        part[:] = np.random.default_rng(len(part)).integers(1, 99, len(part))
    expected = np.zeros((5, codec.record_bytes), dtype=np.uint8)
    assert (
        codec.encode(float_rows, np.arange(5), expected, np.arange(5), np.zeros(5, dtype=np.uint64), 0)
        == -1
    )
    np.testing.assert_array_equal(float_rows.to_records(), expected)
    other = FloatRows.allocate(5, 3, **optimizer.state_shape)
    other.load_records(expected)
    np.testing.assert_array_equal(other.to_records(), expected)
