"""Where the parts of a row lie in its record, and the numbers that both the kernels and the reference use.

A record is ``[encoded weights | scale, offset | row state | full state | clock]``, little-endian, without padding:

=====  ======================================  ============
kind   encoded weights                         bytes
=====  ======================================  ============
fp32   IEEE binary32                           4 D
fp16   IEEE binary16                           2 D
bf16   upper half of binary32                  2 D
int8   unsigned codes                          D
int4   byte p: code p low, code H + p high     H = (D+1)//2
=====  ======================================  ============

Codes p and H + p share a byte, rather than neighbours, so that the kernels read and write two contiguous runs. The last
high half of an odd width is 0. Scale and offset exist for int8 and int4 only; the states if the optimizer
keeps them; the clock, a whole number of 32 bits, if rows have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FP32, FP16, BF16, INT8, INT4 = range(5)
KINDS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "int8": INT8, "int4": INT4}

# Float32 bits of the largest finite magnitude of each float format: any larger pattern, infinity and NaN among them,
# is refused.
FP32_LIMIT = 0x7F7FFFFF
FP16_LIMIT = 0x477FE000
BF16_LIMIT = 0x7F7F0000

# Column d of a record's noise is the finaliser of murmur3 of ((low + d * STEP) ^ high): a Weyl sequence of 32 bits.
STEP = 0x9E3779B9
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The bytes of a record and how they are rounded."""

    kind: int
    """One of `KINDS`."""
    stochastic: bool
    """Rounding of the weights."""
    wide_parameters: bool
    """Scale and offset are float32, otherwise float16."""
    wide_state: bool
    """Optimizer state is float32, otherwise bfloat16, stochastically rounded."""
    width: int
    """D."""
    row_state: bool
    full_state: int
    """Floats a weight."""
    clock: bool = False

    @property
    def levels(self) -> int:
        """The greatest code of int8 or int4, otherwise 0."""
        return {INT8: 255, INT4: 15}.get(self.kind, 0)

    @property
    def parameters_at(self) -> int:
        """First byte after the encoded weights: the scale, then the offset."""
        bytes_of = {FP32: 4 * self.width, FP16: 2 * self.width, BF16: 2 * self.width, INT8: self.width}
        return bytes_of.get(self.kind, (self.width + 1) // 2)

    @property
    def row_state_at(self) -> int:
        """First byte of the row state."""
        return self.parameters_at + (2 * (4 if self.wide_parameters else 2) if self.levels else 0)

    @property
    def full_state_at(self) -> int:
        """First byte of the full state."""
        return self.row_state_at + (self.state_bytes if self.row_state else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one value of optimizer state."""
        return 4 if self.wide_state else 2

    @property
    def clock_at(self) -> int:
        """First byte of the clock."""
        return self.full_state_at + self.full_state * self.width * self.state_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.clock_at + 4 * self.clock

    @property
    def kept(self) -> dict[str, int]:
        """What there is beside the weights: floats a row, floats a weight, whether there are clocks."""
        return {"row_state": self.row_state, "full_state": self.full_state, "clock": self.clock}

    @cached_property
    def form(self) -> tuple[int | bool, ...]:
        """All of this as kernels take it."""
        return (
            self.kind, self.stochastic, self.wide_parameters, self.wide_state, self.width, self.row_state,
            self.full_state, self.parameters_at, self.row_state_at, self.full_state_at, self.clock_at,
            self.record_bytes,
        )  # fmt: skip
