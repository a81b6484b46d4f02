"""Encoding of rows and gradients between ranks, and their layout in messages.

Rows are sent as float32 or as records of a codec. Gradients of rare rows are small: the loss is a
mean over a batch, so the gradient of a single sample may be 1e-6 or less. In that range float16 has
few bits or none, also for the scale and offset of a codec. Adaptive optimizers would still take a
full step in the rounded direction. So each row is divided by a power of two, which is stored in its
record and brings the largest number into the range of float16.

An owner sends rows, and later receives gradients for the same rows. So one `MessageLayout` on each
side describes both directions.

Shapes: n consecutive rows of width D. Rows of several widths are consecutive spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratarec.config.validate import check_choice
from stratarec.distributed.wire_formats import WIRES, WireKind
from stratarec.embedding.codecs import FloatRows, RecordCodec
from stratarec.errors import TrainingError
from stratarec.kernels.random import mix_array, table_key
from stratarec.kernels.rectangles import Parts, copy_parts, parts_of, swapped


class Span(NamedTuple):
    """Adjacent rows of equal width in a message."""

    rows: int
    """Number of rows."""
    width: int
    """Floats per row."""


# The absolute values of a scaled row are below 2 ** 15, and neither a scale nor its inverse is
# subnormal.
_LARGEST, _LEAST = 15, -126
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Wire:
    """Encoder and decoder of float32 rows.

    Parameters
    ----------
    kind : str
        ``fp16`` and ``bf16`` round to nearest. ``int8`` has a scale and an offset per row, and
        rounds stochastically, without bias. The noise is a function of (seed, rank, direction,
        step, place), so runs repeat.
    seed, rank : int
        Seed and rank of the sender's noise.
    """

    def __init__(self, kind: WireKind, seed: int, rank: int) -> None:
        check_choice(kind, "wire", WIRES)
        codec = WIRES[kind].codec
        self._config = None if codec is None else codec()
        self._scaled = WIRES[kind].scaled
        self.kind = kind
        self._seed = seed
        self._rank = rank
        self._codecs: dict[int, RecordCodec] = {}

    def bytes_of(self, spans: Sequence[Span]) -> int:
        """Return the bytes of the rows in `spans` on the wire."""
        return sum(rows * self.row_bytes(width) for rows, width in spans)

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row of `width` floats on the wire."""
        return 4 * width if self._config is None else self._codec(width).record_bytes

    def encode(self, rows: Tensor, spans: Sequence[Span], direction: str, step: int) -> Tensor:
        """Encode rows as flat uint8.

        Parameters
        ----------
        rows : Tensor
            Flat float32 rows.
        spans : sequence of Span
            Shapes of these rows, which follow each other.
        direction : str
            Name of the direction (such as ``rows`` or ``gradients``), of which the noise is a
            function.
        step : int
            Number of the batch, of which the noise is a function.

        Raises
        ------
        TrainingError
            If the format cannot represent a row, for example because a number is not finite.
            float32 never fails.
        """
        if self._config is None:
            # A view without a copy: most runs use this wire.
            return rows.view(torch.uint8)
        out = np.empty(self.bytes_of(spans), dtype=np.uint8)
        key = table_key(self._seed, f"{direction}/{self._rank}")
        floats = rows.numpy()
        done = 0
        at = 0
        number = 0
        for count, width in merged(spans):
            codec, end = self._codec(width), at + count * self.row_bytes(width)
            places = np.arange(count, dtype=np.int64)
            level = FloatRows.without_state(floats[done : done + count * width], width)
            if self._scaled:
                level = _scaled_down(level)
            # Rows are numbered over the complete message. With equal noise, equal rows would round
            # equally and errors add up.
            noise = np.arange(number, number + count, dtype=np.uint64)
            keys = mix_array(noise * _GOLDEN ^ np.uint64(key))
            bad = codec.encode(level, places, out[at:end].reshape(count, -1), places, keys, step)
            if bad >= 0:
                raise TrainingError(
                    f"a row of the {direction} exchange of step {step} does not fit {self.kind}: it is not "
                    "finite; lower the learning rate"
                )
            done, at, number = done + count * width, end, number + count
        return torch.from_numpy(out)

    def decode(self, content: Tensor, spans: Sequence[Span]) -> Tensor:
        """Decode `content`, the output of `encode`, to flat float32 rows of the shapes `spans`."""
        if self._config is None:
            return content.view(torch.float32)
        out = np.empty(sum(rows * width for rows, width in spans), dtype=np.float32)
        array, done, at = content.numpy(), 0, 0
        for count, width in merged(spans):
            codec, end = self._codec(width), at + count * self.row_bytes(width)
            places = np.arange(count, dtype=np.int64)
            level = FloatRows.without_state(out[done : done + count * width], width)
            if self._scaled:
                level = replace(level, row_state=np.empty(count, dtype=np.float32))
            codec.decode(array[at:end].reshape(count, -1), places, level, places)
            if self._scaled:
                values = level.weights.reshape(count, width)
                values *= level.row_state[:, None]
            done, at = done + count * width, end
        return torch.from_numpy(out)

    def _codec(self, width: int) -> RecordCodec:
        if width not in self._codecs:
            assert self._config is not None
            self._codecs[width] = RecordCodec(
                self._config, width=width, row_state=self._scaled, full_state=0
            )
        return self._codecs[width]


def _scaled_down(rows: FloatRows) -> FloatRows:
    """Divide each row by a power of two that brings it into the range of float16, and store the
    power as row state.
    """
    values = rows.weights.reshape(-1, rows.width)
    _, exponents = np.frexp(np.abs(values).max(axis=1))
    # Division by a power of two is exact, so only the codec rounds. A row of zeros has the exponent
    # 0.
    exponents = np.clip(exponents - _LARGEST, _LEAST, None)
    scales = np.ldexp(np.float32(1), exponents)
    return replace(
        rows, weights=(values * np.ldexp(np.float32(1), -exponents)[:, None]).reshape(-1), row_state=scales
    )


def merged(spans: Sequence[Span]) -> list[Span]:
    """Join adjacent spans of equal width, and remove empty spans."""
    joined: list[Span] = []
    for rows, width in spans:
        if not rows:
            continue
        # One kernel call for each width, instead of one for each stream of each rank.
        if joined and joined[-1].width == width:
            joined[-1] = Span(joined[-1].rows + rows, width)
        else:
            joined.append(Span(rows, width))
    return joined


class Rectangle(NamedTuple):
    """Rectangle of an array and its position in a message; fields have the order of
    `kernels.rectangles.Parts`.

    `first` is the first float in the array and `stride` the number of floats from row to row; `at`
    and `at_stride` are the same for the message.
    """

    rows: int
    width: int
    first: int
    stride: int
    at: int
    at_stride: int


class MessageLayout:
    """Layout of the messages that a rank sends to, or receives from, all ranks in one exchange of
    floats.

    It is built once per batch: `begin` starts the part of the next rank, and `add` appends to this
    part.

    Parameters
    ----------
    arrays : int
        Number of arrays whose rows are in the messages. They are referred to by number, from 0 to
        `arrays` - 1.
    """

    def __init__(self, arrays: int) -> None:
        self._rectangles: list[list[Rectangle]] = [[] for _ in range(arrays)]
        self._spans: list[list[Span]] = []
        self._parts: list[Parts] | None = None
        self.floats = 0

    def begin(self) -> None:
        """Start the part of the next rank."""
        self._spans.append([])

    def add(self, array: int, rows: int, width: int, first: int, stride: int) -> None:
        """Append a rectangle of an array to the current part.

        Parameters
        ----------
        array : int
            Number of the array.
        rows, width : int
            Number of rows of the rectangle, and floats per row.
        first : int
            Index of its first float in the flat array.
        stride : int
            Number of floats in the array from row to row.
        """
        # Empty rectangles, one for each rank and stream, are skipped.
        if rows:
            self._rectangles[array].append(Rectangle(rows, width, first, stride, self.floats, width))
            self._spans[-1].append(Span(rows, width))
            self.floats += rows * width

    def sizes(self, wire: Wire) -> list[int]:
        """Return the number of bytes for each rank if rows are encoded by `wire`."""
        return [wire.bytes_of(spans) for spans in self._spans]

    @property
    def spans(self) -> list[Span]:
        """Shapes of all rows, in the order of the message."""
        return [span for spans in self._spans for span in spans]

    def pack(self, arrays: Sequence[Tensor]) -> Tensor:
        """Copy the rows of all `arrays` (float32, by number) to a flat float32 message."""
        # The message need not be zeroed, because rectangles cover it completely.
        message = torch.empty(self.floats)
        for array, parts in zip(arrays, self._copies(), strict=True):
            copy_parts(array, message, parts)
        return message

    def unpack(self, message: Tensor, arrays: Sequence[Tensor]) -> None:
        """Copy the rows of a flat float32 `message` to all `arrays` (float32, by number)."""
        for array, parts in zip(arrays, self._copies(), strict=True):
            copy_parts(message, array, swapped(parts))

    def _copies(self) -> list[Parts]:
        if self._parts is None:
            self._parts = [parts_of(rectangles) for rectangles in self._rectangles]
        return self._parts
