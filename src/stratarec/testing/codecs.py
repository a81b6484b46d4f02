"""Check a row codec: its bytes, bounds of its error, and the rows that it refuses.

Shapes: n rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.codecs import FloatRows, RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.kernels.codec import reference

Floats = NDArray[np.float32]
Records = NDArray[np.uint8]


def check_codec(
    config: CodecConfig,
    error: Callable[[Floats], NDArray[Any]] | None = None,
    widths: Sequence[int] = (3, 33, 130),
) -> None:
    """Check that compiled code and the plain functions of a codec agree on rows of unusual
    magnitudes.

    Every optimizer state must be stored with the weights, and a row that is not finite must be
    refused.

    Parameters
    ----------
    config : CodecConfig
        Codec of a registered `Kind`.
    error : callable, optional
        Maps rows ``[n, D]`` float32 to the largest allowed error ``[n, D]`` of each decoded weight.
    widths : sequence of int
        Widths of the rows.

    Raises
    ------
    AssertionError
        The message names the codec and the row.

    Examples
    --------
    >>> from stratarec.embedding.config import CodecConfig
    >>> def error(rows):
    ...     return abs(rows) * 2.0**-7 + 2.0**-133
    >>> check_codec(CodecConfig(kind="bf16"), error=error, widths=[5])
    """
    assert isinstance(config, CodecConfig), f"config is {config!r}, expected CodecConfig(kind={config!r})"
    for width in widths:
        rows, keys = difficult_rows(width), keys_of(14)
        for codec in every_shape(config, width):
            level = level_of(codec, rows)
            records = encoded(codec, level, keys, batch_number=5)
            back = decoded(codec, records)
            _check_rows(codec, level, records, back)
            if error is not None:
                wrong = np.abs(back.weights.reshape(rows.shape).astype(np.float64) - rows) > error(rows)
                assert not wrong.any(), (
                    f"{config.kind}: row {np.argwhere(wrong)[0, 0]} exceeds the allowed error"
                )
            level.weights[width * 3 + 1] = np.nan
            order, empty = np.arange(14, dtype=np.int64), np.zeros_like(records)
            assert codec.encode(level, order, empty, order, keys, 5) == 3, (
                f"{config.kind}: stores a weight of NaN"
            )


def _check_rows(codec: RecordCodec, level: FloatRows, records: Records, back: FloatRows) -> None:
    """Compare the record and the decoded values of each row with those of the reference."""
    width, state_width = codec.width, codec.layout.full_state * codec.width
    for i, key in enumerate(keys_of(14)):
        place = f"{codec.config.kind}, width {width}, row {i}"
        row, full = slice(i * width, (i + 1) * width), slice(i * state_width, (i + 1) * state_width)
        state = level.row_state[i] if len(level.row_state) else np.float32(0), level.full_state[full]
        clock = int(level.clock[i]) if codec.layout.clock else 0
        record = reference.encode(level.weights[row], *state, int(key), 5, codec.layout, clock)
        assert record == records[i].tobytes(), f"{place}: other bytes than the plain encoder's"
        weights, row_state, full_state = reference.decode(records[i].tobytes(), codec.layout)
        assert back.weights[row].tobytes() == weights.tobytes(), (
            f"{place}: other weights than the plain decoder's"
        )
        assert not len(row_state) or back.row_state[i] == row_state[0], f"{place}: another state of the row"
        assert not len(full_state) or back.full_state[full].tobytes() == full_state.tobytes(), (
            f"{place}: other state"
        )
    assert back.clock.tobytes() == level.clock.tobytes(), f"{codec.config.kind}: other clocks"
    for before, after in ((level.row_state, back.row_state), (level.full_state, back.full_state)):
        error = np.abs(after.astype(np.float64) - before)
        exact = codec.config.state == "fp32"
        assert ((error == 0) if exact else (error < float_step(before, "bf16"))).all(), (
            f"{codec.config.kind}: state"
        )


def every_shape(config: CodecConfig, width: int) -> Iterator[RecordCodec]:
    """Yield the codecs of `config` for every kind of optimizer state."""
    for state, row_state, full_state in product(("fp32", "bf16"), (False, True), (0, 1, 2)):
        chosen: Any = state
        yield RecordCodec(
            replace(config, state=chosen),
            width=width,
            row_state=row_state,
            full_state=full_state,
            clock=full_state == 2,
        )


def difficult_rows(width: int, seed: int = 0) -> Floats:
    """Return rows ``[14, D]``: zeros of both signs, constants, subnormals, large, small and mixed
    magnitudes.
    """
    noise = np.random.default_rng(seed).standard_normal((14, width))
    rows = (noise * 10.0 ** np.arange(-9, 5)[:, None]).astype(np.float32)
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2] = 0.3
    rows[3] = -1e-9
    rows[13] = 1.0
    rows[4, ::2] *= np.float32(1e4)
    rows[5] = np.where(np.arange(width) % 2, 1e-39, -3e-39)
    rows[6, ::3] = 0.0
    return rows


def level_of(codec: RecordCodec, rows: Floats) -> FloatRows:
    """Return level 0 with these weights ``[n, D]`` and random positive state."""
    random = np.random.default_rng(1)
    row_states, full_states = len(rows) * codec.layout.row_state, rows.size * codec.layout.full_state
    return FloatRows(
        weights=rows.reshape(-1).copy(),
        row_state=random.random(row_states, dtype=np.float32),
        full_state=random.random(full_states, dtype=np.float32),
        clock=random.integers(0, 1 << 31, len(rows) * codec.layout.clock, dtype=np.int32),
        width=codec.width,
    )


def encoded(
    codec: RecordCodec, level: FloatRows, keys: NDArray[np.uint64], batch_number: int = 3
) -> Records:
    """Encode every slot in order; a level of one slot is encoded once for each key."""
    slots = np.arange(len(keys), dtype=np.int64) % level.slots
    records = np.zeros((len(keys), codec.record_bytes), dtype=np.uint8)
    assert (
        codec.encode(level, slots, records, np.arange(len(keys), dtype=np.int64), keys, batch_number) == -1
    )
    return records


def decoded(codec: RecordCodec, records: Records) -> FloatRows:
    """Decode all records in order into a new, poisoned level 0."""
    level = level_of(codec, np.full((len(records), codec.width), np.nan, dtype=np.float32))
    level.row_state.fill(np.nan)
    level.full_state.fill(np.nan)
    level.clock.fill(-1)
    order = np.arange(len(records), dtype=np.int64)
    codec.decode(records, order, level, order)
    return level


def keys_of(count: int) -> NDArray[np.uint64]:
    """Draw distinct random keys, the same in every call."""
    return np.random.default_rng(2).integers(0, 1 << 63, size=count, dtype=np.uint64)


def float_step(values: Floats, kind: str) -> NDArray[np.float64]:
    """Return the distance between neighbours of each value in a float format."""
    digits, least = {"fp32": (24, -149), "fp16": (11, -24), "bf16": (8, -133)}[kind]
    step: NDArray[np.float64] = 2.0 ** np.maximum(np.frexp(values.astype(np.float64))[1] - digits, least)
    return step
