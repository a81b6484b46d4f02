"""Rows as float32 arrays (`FloatRows`) and as records, and the codec that converts between them.

A *record* is one row as it is stored outside level 0: the bytes of its encoded weights, their scale
and offset, and its optimizer state. `KINDS` lists the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.config import CodecConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.sealed import newer_format
from stratarec.kernels.codec import records as kernels
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.runtime.memory import allocate

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FloatRows:
    """S rows of one width in DRAM: weights and optimizer state."""

    weights: Floats
    """Flat ``[S * D]`` float32: slot s is ``weights[s * D:(s + 1) * D]``."""
    row_state: Floats
    """``[S]`` float32, one value per slot; empty if the optimizer has no such state."""
    full_state: Floats
    """Flat ``[S * k * D]`` float32, k values per weight. A slot has the first value of each weight,
    then the second value of each weight. Empty if the optimizer has no such state."""
    clock: NDArray[np.int32]
    """``[S]`` int32, the number of steps that each row has taken; empty if rows have no clock."""
    width: int
    """D, floats per row."""

    def __post_init__(self) -> None:
        assert all(part.ndim == 1 and part.flags.c_contiguous for part in self.parts), (
            "rows are flat arrays"
        )
        assert [part.dtype for part in self.parts] == [np.float32] * 3 + [np.int32], (
            "clocks are int32, the rest float32"
        )
        assert len(self.weights) % self.width == 0, "weights are complete rows"

    @classmethod
    def allocate(cls, slots: int, width: int, *, row_state: int, full_state: int, clock: int) -> FloatRows:
        """Return zeroed rows on huge pages.

        Parameters
        ----------
        slots : int
            Number of rows, S.
        width : int
            Floats per row, D.
        row_state, full_state, clock : int
            Numbers of states with one float per row and with one float per weight, and 1 if rows
            have clocks, as `RowOptimizerConfig.state_shape` returns them.
        """
        return cls(
            weights=allocate(slots * width),
            row_state=allocate(slots * row_state),
            full_state=allocate(slots * width * full_state),
            clock=allocate(slots * clock).view(np.int32),
            width=width,
        )

    @classmethod
    def without_state(cls, weights: Floats, width: int) -> FloatRows:
        """Return rows without optimizer state; `weights` is flat ``[S * width]`` float32."""
        empty = np.empty(0, dtype=np.float32)
        return cls(
            weights=weights, row_state=empty, full_state=empty, clock=empty.view(np.int32), width=width
        )

    @property
    def slots(self) -> int:
        """Number of rows, S."""
        return len(self.weights) // self.width

    @property
    def nbytes(self) -> int:
        """Bytes of weights, state and clocks."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Floats, Floats, Floats, NDArray[np.int32]]:
        """Weights, row state, full state and clocks, in the order that kernels expect."""
        return self.weights, self.row_state, self.full_state, self.clock

    def copy(self, rows: Indices, source: FloatRows, source_rows: Indices) -> None:
        """Overwrite `rows` with the rows `source_rows` of `source`."""
        for target_part, source_part in zip(self.parts, source.parts, strict=True):
            if len(target_part) and len(source_rows):  # a source without rows has no shape
                target_part.reshape(self.slots, -1)[rows] = source_part.reshape(source.slots, -1)[
                    source_rows
                ]

    def to_records(self) -> NDArray[np.uint8]:
        """Return ``[S, bytes]`` uint8: weights, state and clock of each row, in this order."""
        parts = [part.reshape(self.slots, -1).view(np.uint8) for part in self.parts if len(part)]
        return np.concatenate(parts, axis=1) if parts else np.empty((0, 0), dtype=np.uint8)

    def load_records(self, records: NDArray[np.uint8]) -> None:
        """Overwrite all rows with the records that `to_records` returned."""
        at = 0
        for part in (part for part in self.parts if len(part)):
            end = at + part.nbytes // self.slots
            part.reshape(self.slots, -1)[:] = np.ascontiguousarray(records[:, at:end]).view(part.dtype)
            at = end


Records = NDArray[np.uint8]

# Incremented when the bytes of a record, or the noise that rounds them, change.
FORMAT = 1


class RecordCodec:
    """Encodes slots of level 0 into records and decodes them back.

    A record is ``[encoded weights | scale, offset | row state | full state | clock]``,
    little-endian, without padding (`stratarec.kernels.codec.layout`).

    Parameters
    ----------
    config : CodecConfig
        Number format and rounding of the weights.
    width : int
        D, floats per row.
    row_state : bool
        Whether the optimizer state has a float for each row.
    full_state : int
        Floats of optimizer state for each weight, 0 to 2.
    clock : bool
        Whether each row stores how many steps it has taken.

    Raises
    ------
    ConfigError
        If `width` is not positive.

    Notes
    -----
    *Bounds.* Let w be a weight and w' its decoded value. fp32 keeps the bits. fp16 and bf16 give
    one of the two neighbours of w in the format (nearest: the nearer one, ties to even), including
    subnormals. int8 and int4 give ``|w' - w| <= scale / 2`` (nearest) or ``< scale`` (stochastic),
    apart from float32 rounding of ``offset + code * scale`` (a few 2**-24 of the row's largest
    magnitude), where with L = 255 or 15

    - fp32 parameters: ``scale <= max((max - min) / L, 2**-126)``, offset = min;
    - fp16 parameters: the offset is min rounded *down* and the scale ``(max - offset) / L`` rounded
      *up*, so that no weight is outside the codes and none is clamped. That widens a step to at
      most ``((max - min + ulp16(min)) / L) * (1 + 2**-10) + 2**-24``.

    *Constant rows.* With fp32 parameters a row of equal weights v is decoded exactly (the sign of a
    zero is lost). With fp16 parameters it is exact if v is a float16. Otherwise the codes divide
    the distance between v and the float16 below it, and the error is at most one step, ``ulp16(v) /
    L * (1 + 2**-10) + 2**-24``, or half a step for nearest. This is less than the error of rounding
    v to float16, and stochastic rounding remains unbiased.

    *Bias.* Stochastic rounding selects either neighbour with the probability that makes the mean
    the exact value, to 2**-24 of a step. A value that the format represents exactly does not
    change, except by float32 rounding of int codes. Source: Yang et al., Mixed-Precision Embedding
    Using a Cache (arXiv 2010.11305).

    *Threads.* The bytes do not depend on the number of threads, nor on the order or the places of
    the entries.
    """

    def __init__(
        self, config: CodecConfig, *, width: int, row_state: bool, full_state: int, clock: bool = False
    ) -> None:
        if width < 1:
            raise ConfigError(f"the width of records is {width}, expected at least 1")
        self.config = config
        self.layout = RecordLayout(
            kind=KINDS[config.kind],
            stochastic=config.rounding == "stochastic",
            wide_parameters=config.parameters == "fp32",
            wide_state=config.state == "fp32",
            width=width,
            row_state=row_state,
            full_state=full_state,
            clock=clock,
        )
        self.width = width
        self.record_bytes = self.layout.record_bytes

    @classmethod
    def of(cls, config: CodecConfig, width: int, optimizer: RowOptimizerConfig) -> RecordCodec:
        """Return the codec of rows of `width` floats that `optimizer` trains."""
        return cls(
            config,
            width=width,
            row_state=bool(optimizer.row_state),
            full_state=len(optimizer.full_state),
            clock=optimizer.clocked,
        )

    def exact(self) -> RecordCodec:
        """Return the codec that stores the same rows as float32."""
        layout = self.layout
        return RecordCodec(
            CodecConfig(),
            width=self.width,
            row_state=layout.row_state,
            full_state=layout.full_state,
            clock=layout.clock,
        )

    @property
    def is_exact(self) -> bool:
        """Whether decoding returns the same bits that were encoded."""
        has_state = self.layout.row_state or self.layout.full_state
        return self.config.kind == "fp32" and (self.layout.wide_state or not has_state)

    @property
    def identity(self) -> dict[str, Any]:
        """Parameters that determine the bytes, as JSON for checkpoints; equal identities encode to
        equal bytes.

        A field without effect (such as the rounding of fp32) is left out.
        """
        config: dict[str, str] = {"kind": self.config.kind}
        # A checkpoint must load with a recipe that differs only in fields that do not affect the
        # bytes.
        if self.config.kind != "fp32":
            config["rounding"] = self.config.rounding
        if self.layout.levels:
            config["parameters"] = self.config.parameters
        if self.layout.row_state or self.layout.full_state:
            config["state"] = self.config.state
        shape = {
            "width": self.width,
            "row_state": self.layout.row_state,
            "full_state": self.layout.full_state,
        }
        return {"format": FORMAT, **config, **shape, **({"clock": True} if self.layout.clock else {})}

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> RecordCodec:
        """Return the codec of an `identity`; `CheckpointError` if it is not supported."""
        if identity.get("format") != FORMAT:
            number = identity.get("format")
            fault = newer_format(number, FORMAT) or f"format {number!r}, this version reads format {FORMAT}"
            raise CheckpointError(f"records of {fault}")
        try:
            config = CodecConfig(
                **{name: identity[name] for name in asdict(CodecConfig()) if name in identity}
            )
            shape = {name: identity[name] for name in ("width", "row_state", "full_state")}
            return cls(config, **shape, clock=identity.get("clock", False))
        except (KeyError, ConfigError) as error:
            raise CheckpointError(
                f"this version does not support the record codec {dict(identity)}"
            ) from error

    def encode(
        self,
        level: FloatRows,
        slots: Indices,
        records: Records,
        places: Indices,
        keys: NDArray[np.uint64],
        batch_number: int,
    ) -> int:
        """Encode ``slots[i]`` into ``records[places[i]]`` for every entry i.

        Parameters
        ----------
        level : FloatRows
            Rows as floats, indexed by slot.
        slots : ndarray
            ``[n]`` int64 slots of `level` to encode.
        records : ndarray
            ``[M, record_bytes]`` uint8, C-contiguous.
        places : ndarray
            ``[n]`` int64 rows of `records` to write, distinct.
        keys : ndarray
            ``[n]`` uint64, one for each (seed, table, row). The noise of an entry is a function
            only of its key, `batch_number` and the column.
        batch_number : int
            A number that is never used twice with the same key, such as the number of the batch.

        Returns
        -------
        int
            -1, or the first entry with a NaN, an infinity or a number that the codec cannot
            represent: a weight beyond float16 (65504) or bfloat16, a float16 offset or scale beyond
            65504, max - min beyond float32, a state beyond bfloat16. Some records may then have
            been written.

        Raises
        ------
        ConfigError
            If arrays do not fit this codec or an index is out of range; nothing is then read or
            written.
        """
        self._check(level, slots, records, places)
        if keys.shape != slots.shape or keys.dtype != np.uint64:
            raise ConfigError(
                f"keys are {keys.dtype} of shape {keys.shape}, expected uint64 of shape {slots.shape}"
            )
        return kernels.encode(self.layout, level.parts, slots, records, places, keys, batch_number)

    def decode(self, records: Records, places: Indices, level: FloatRows, slots: Indices) -> None:
        """Decode ``records[places[i]]`` into ``slots[i]`` for every entry i.

        The arguments are those of `encode`, except that the slots must be distinct and the places
        need not.

        Raises
        ------
        ConfigError
            If arrays do not fit this codec or an index is out of range; nothing is then read or
            written.
        """
        self._check(level, slots, records, places)
        kernels.decode(self.layout, records, places, level.parts, slots)

    def _check(self, level: FloatRows, slots: Indices, records: Records, places: Indices) -> None:
        if records.ndim != 2 or records.dtype != np.uint8 or not records.flags.c_contiguous:
            raise ConfigError(
                f"records are {records.dtype} of {records.ndim} dimensions, expected contiguous uint8 of 2"
            )
        if level.width != self.width or records.shape[1] != self.record_bytes:
            raise ConfigError(
                f"level 0 of width {level.width} and records of {records.shape[1]} bytes, "
                f"expected {self.width} and {self.record_bytes}"
            )
        state_sizes = (
            (self.layout.row_state, len(level.row_state), 1),
            (self.layout.full_state, len(level.full_state), self.layout.full_state * self.width),
            (self.layout.clock, len(level.clock), 1),
        )
        if any(used and size != level.slots * share for used, size, share in state_sizes):
            raise ConfigError(f"the optimizer state of the {level.slots} slots of level 0 is missing")
        if slots.shape != places.shape:
            raise ConfigError(f"{slots.shape} slots for {places.shape} places, expected equal numbers")
        _check_indices("slots", slots, level.slots)
        _check_indices("places", places, len(records))


def _check_indices(name: str, indices: Indices, limit: int) -> None:
    if indices.ndim != 1 or indices.dtype != np.int64:
        raise ConfigError(f"{name} are {indices.dtype} of {indices.ndim} dimensions, expected int64 of 1")
    # Kernels do not check indices: with an index out of range they would read or write other
    # memory.
    if len(indices) and not 0 <= indices.min() <= indices.max() < limit:
        raise ConfigError(f"{name} from {indices.min()} to {indices.max()}, expected 0 to {limit - 1}")
