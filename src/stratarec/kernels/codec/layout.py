"""Where the parts of a row lie in its record.

A record is ``[encoded weights | scale, offset | row state | full state | clock]``, little-endian, without padding. How
weights are encoded is what its kind says (`stratarec.kernels.codec.kinds`). Scale and offset are there for kinds with
codes; the states if the optimizer keeps them; the clock, a whole number of 32 bits, if rows have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stratarec.kernels.codec.kinds import KINDS, Form, Kind


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """The bytes of a record and how they are rounded."""

    kind: Kind
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
        """The greatest code of kinds with codes, otherwise 0."""
        return self.kind.levels

    @property
    def parameters_at(self) -> int:
        """First byte after the encoded weights: the scale, then the offset."""
        return self.kind.weight_bytes(self.width)

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
    def form(self) -> Form:
        """All of this as kernels take it."""
        return Form(
            kind=list(KINDS).index(self.kind.name),
            stochastic=self.stochastic,
            wide_parameters=self.wide_parameters,
            wide_state=self.wide_state,
            width=self.width,
            row_state=self.row_state,
            full_state=self.full_state,
            parameters_at=self.parameters_at,
            row_state_at=self.row_state_at,
            full_state_at=self.full_state_at,
            clock_at=self.clock_at,
            record_bytes=self.record_bytes,
        )
