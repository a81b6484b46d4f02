"""Layout of a row's record.

A record is ``[encoded weights | scale, offset | row state | full state | clock]``, little-endian,
without padding. Its kind (`stratarec.kernels.codec.kinds`) defines how weights are encoded. Scale
and offset exist only for kinds that store codes, the states only if the optimizer keeps them, and
the clock, a 32-bit integer, only if rows have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stratarec.kernels.codec.kinds import KINDS, Form, Kind


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Bytes of a record, and how its numbers are rounded.

    Parameters
    ----------
    kind : Kind
        Encoding of the weights.
    stochastic : bool
        Whether weights are rounded stochastically; otherwise to nearest.
    wide_parameters : bool
        Whether scale and offset are float32; otherwise float16.
    wide_state : bool
        Whether optimizer state is float32; otherwise bfloat16, rounded stochastically.
    width : int
        D.
    row_state : bool
        Whether a row has one float of state.
    full_state : int
        Floats of state per weight.
    clock : bool
        Whether rows have a clock.
    """

    kind: Kind
    stochastic: bool
    wide_parameters: bool
    wide_state: bool
    width: int
    row_state: bool
    full_state: int
    clock: bool = False

    @property
    def levels(self) -> int:
        """Greatest code of kinds that store codes, otherwise 0."""
        return self.kind.levels

    @property
    def parameters_at(self) -> int:
        """Byte of a record at which scale and offset begin, right after the encoded weights."""
        return self.kind.weight_bytes(self.width)

    @property
    def row_state_at(self) -> int:
        """Byte of a record at which the optimizer state of the row begins."""
        return self.parameters_at + (2 * (4 if self.wide_parameters else 2) if self.levels else 0)

    @property
    def full_state_at(self) -> int:
        """Byte of a record at which the optimizer state of the weights begins."""
        return self.row_state_at + (self.state_bytes if self.row_state else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of optimizer state."""
        return 4 if self.wide_state else 2

    @property
    def clock_at(self) -> int:
        """Byte of a record at which the clock begins, an int32."""
        return self.full_state_at + self.full_state * self.width * self.state_bytes

    @property
    def record_bytes(self) -> int:
        """Size of a record in bytes, without padding."""
        return self.clock_at + 4 * self.clock

    @property
    def state_shape(self) -> dict[str, int]:
        """Numbers of a row other than weights: floats per row, floats per weight, and whether there
        is a clock.
        """
        return {"row_state": self.row_state, "full_state": self.full_state, "clock": self.clock}

    @cached_property
    def form(self) -> Form:
        """This layout for kernels."""
        return Form(
            list(KINDS).index(self.kind.name),
            self.stochastic,
            self.wide_parameters,
            self.wide_state,
            self.width,
            self.row_state,
            self.full_state,
            self.parameters_at,
            self.row_state_at,
            self.full_state_at,
            self.clock_at,
            self.record_bytes,
        )
