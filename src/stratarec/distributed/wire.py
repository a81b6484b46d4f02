"""How rows and gradients look while they travel: float32 as they are, or records of a codec.

Gradients of rare rows are small: a batch's mean loss leaves 1e-6 and less of a single sample, where float16 has a few
bits or none, and so have a scale and an offset in float16. Optimizers that divide by a row's own gradients take a full
step by them all the same, in whatever direction rounding left. So each row travels divided by a power of two, which is
in its record, and the largest of its numbers is where float16 is fine.

Shapes: n rows of width D, one after another; rows of several widths follow in spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stratarec.embedding.codecs import CodecConfig, FloatRows, RecordCodec
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.random import table_key
from stratarec.kernels.random.vector import mix_array


class Span(NamedTuple):
    """Neighbouring rows of one width."""

    rows: int
    width: int


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How a kind of wire makes bytes of float32."""

    codec: CodecConfig | None
    """Of a row; None: the floats as they are."""
    scaled: bool = False
    """Whether rows have a power of two of their own, for the sake of float16's few exponents."""
    dense: torch.dtype | None = None
    """In which gradients of the network travel; None where they cannot."""


WIRES: Mapping[str, WireFormat] = {
    "fp32": WireFormat(codec=None, dense=torch.float32),
    "fp16": WireFormat(codec=CodecConfig(kind="fp16", rounding="nearest", state="bf16"), scaled=True),
    "bf16": WireFormat(codec=CodecConfig(kind="bf16", rounding="nearest"), dense=torch.bfloat16),
    # A row of int8 that rounded to nearest would have a bias, which sums over steps.
    "int8": WireFormat(codec=CodecConfig(kind="int8", rounding="stochastic", state="bf16"), scaled=True),
}
"""Every kind; a new one is an entry here."""

if TYPE_CHECKING:
    WireKind: TypeAlias = str
    DenseWireKind: TypeAlias = str
else:  # recipes name the kinds that there are where they refuse another
    WireKind = Literal[tuple(WIRES)]
    DenseWireKind = Literal[tuple(kind for kind, wire in WIRES.items() if wire.dense is not None)]

# Magnitudes of a row are below 2 ** 15 on the wire, and a scale or its inverse is no subnormal number.
_LARGEST, _LEAST = 15, -126
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Wire:
    """Turns float32 rows into bytes and back.

    Parameters
    ----------
    kind : str
        ``fp16`` and ``bf16`` round to nearest. ``int8`` has a scale and an offset a row and rounds at random, without
        bias: the noise is a function of (seed, rank, direction, step, place), so runs repeat.
    seed, rank : int
        Of the sender's noise.
    """

    def __init__(self, kind: WireKind, seed: int, rank: int) -> None:
        if kind not in WIRES:
            raise ConfigError(f"wire is {kind!r}, expected one of {', '.join(WIRES)}")
        self._config, self._scaled = WIRES[kind].codec, WIRES[kind].scaled
        self.kind, self._seed, self._rank = kind, seed, rank
        self._codecs: dict[int, RecordCodec] = {}

    def bytes_of(self, spans: Sequence[Span]) -> int:
        """Bytes that rows take on the wire."""
        return sum(rows * self.row_bytes(width) for rows, width in spans)

    def row_bytes(self, width: int) -> int:
        """Bytes of one row."""
        return 4 * width if self._config is None else self._codec(width).record_bytes

    def encode(self, rows: Tensor, spans: Sequence[Span], direction: str, step: int) -> Tensor:
        """Flat uint8 of flat float32 `rows`, which are those of `spans` one after another.

        Raises
        ------
        TrainingError
            For a row that the format cannot hold; float32 holds all.
        """
        if self._config is None:
            # Not copied: most runs use this wire.
            return rows.view(torch.uint8)
        out, key = np.empty(self.bytes_of(spans), dtype=np.uint8), table_key(self._seed, f"{direction}/{self._rank}")
        floats, done, at, number = rows.numpy(), 0, 0, 0
        for count, width in merged(spans):
            codec, end = self._codec(width), at + count * self.row_bytes(width)
            places = np.arange(count, dtype=np.int64)
            level = FloatRows.without_state(floats[done : done + count * width], width)
            if self._scaled:
                level = _scaled_down(level)
            # Numbered over the whole message: rows of equal value must not round alike, or errors would add up.
            noise = np.arange(number, number + count, dtype=np.uint64)
            keys = mix_array(noise * _GOLDEN ^ np.uint64(key))
            bad = codec.encode(level, places, out[at:end].reshape(count, -1), places, keys, step)
            if bad >= 0:
                raise TrainingError(
                    f"a row of the {direction} exchange of step {step} does not fit {self.kind}: it is not finite; "
                    "lower the learning rate"
                )
            done, at, number = done + count * width, end, number + count
        return torch.from_numpy(out)

    def decode(self, content: Tensor, spans: Sequence[Span]) -> Tensor:
        """Flat float32 of what `encode` gave."""
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
            self._codecs[width] = RecordCodec(self._config, width=width, row_state=self._scaled, full_state=0)
        return self._codecs[width]


def _scaled_down(rows: FloatRows) -> FloatRows:
    """Rows with magnitudes of which float16 is fine, and as their state the powers of two that they were divided by."""
    values = rows.weights.reshape(-1, rows.width)
    _, exponents = np.frexp(np.abs(values).max(axis=1))
    # Exact, so nothing is lost beside what the codec rounds; a row of zeros has the exponent 0.
    exponents = np.clip(exponents - _LARGEST, _LEAST, None)
    scales = np.ldexp(np.float32(1), exponents)
    return replace(rows, weights=(values * np.ldexp(np.float32(1), -exponents)[:, None]).reshape(-1), row_state=scales)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbouring spans of one width as one; empty ones are left out."""
    found: list[Span] = []
    for rows, width in spans:
        if not rows:
            continue
        # One kernel call a width, not one for each stream of each rank.
        if found and found[-1].width == width:
            found[-1] = Span(found[-1].rows + rows, width)
        else:
            found.append(Span(rows, width))
    return found
