"""Prototype of `SlotMemory` in the memory of a GPU, of which no recipe makes use yet.

Frequent operations are the Triton kernels of `operations`; all others are torch.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import Any

import numpy as np
import torch
from prototype import operations as ops
from torch import Tensor

from stratarec.embedding.codecs import FloatRows
from stratarec.embedding.slots import CpuSlots, Level0, SlotMemory
from stratarec.kernels import cache
from stratarec.kernels.random.reference import mix
from stratarec.kernels.simd.vector import LANES
from stratarec.kernels.update import rules

U, L = 4, 256

if os.environ.get("TRITON_INTERPRET") == "1":  # it patches triton.language while a kernel runs: one thread at a time
    import threading

    from triton.runtime import interpreter

    _LOCK, _CALL = threading.RLock(), interpreter.GridExecutor.__call__

    def _locked(self: Any, *given: Any, **named: Any) -> Any:
        with _LOCK:
            return _CALL(self, *given, **named)

    interpreter.GridExecutor.__call__ = _locked


def tile(width: int, floats: int = 1024) -> tuple[int, int]:
    """Columns of a row in a program, and rows."""
    columns = 1 << max(width - 1, 0).bit_length()
    return columns, max(floats // columns, 1)


def grid(count: int, size: int) -> tuple[int]:
    return (max(-(-count // size), 1),)


class DeviceTaken:
    """A batch's lists on the device: pooled features first, then sequences; row numbers are those of all slots."""

    def __init__(self, layout: Any, bags: Any, up: Any, device: torch.device) -> None:
        self.layout, self.bags, self.device = layout, bags, device
        sequence = layout.sequence != 0
        self.pooled, self.sequences = np.flatnonzero(~sequence), np.flatnonzero(sequence)
        order = [*self.pooled.tolist(), *self.sequences.tolist()]
        spans = [bags.span(feature) for feature in order]
        parts = [
            bags.values[first:last].astype(np.int32) + np.int32(layout.base[f])
            for f, (first, last) in zip(order, spans, strict=True)
        ]
        self.rows = up(torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int32)))
        self.lookups = self.rows.numel()
        self.single = bags.offsets is None and bags.weights is None
        counts = []
        for f in order:
            first = int(bags.key[f]) * bags.batch
            counts.append(
                np.ones(bags.batch, np.int64)
                if bags.offsets is None
                else np.diff(bags.offsets[first : first + bags.batch + 1])
            )
        self.lengths = np.concatenate(counts[: len(self.pooled)] or [np.zeros(0, np.int64)])
        self.begin = np.concatenate([[0], np.cumsum([last - first for first, last in spans])]).astype(np.int64)
        self.offsets = (
            None
            if self.single
            else up(torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)))
        )
        self.share = None
        if bags.weights is not None:
            self.share = up(torch.from_numpy(np.concatenate([bags.weights[first:last] for first, last in spans])))
        self.columns = up(torch.from_numpy(layout.column[self.pooled].copy()))
        self.mean = up(torch.from_numpy(layout.mean[self.pooled].copy()))

    def by(self, stride: int) -> int:
        """Of how many floats, up to 4, all columns and the width are multiples."""
        return math.gcd(4, stride, self.layout.width, *self.layout.column[self.pooled].tolist())

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sorted rows, the lookup of each, the run of each, and where runs begin."""
        rows, order = torch.sort(self.rows, stable=True)
        new = torch.ones_like(rows)
        new[1:] = rows[1:] != rows[:-1]
        run = (new.cumsum(0) - 1).int()
        first = torch.full((self.lookups + 1,), self.lookups, dtype=torch.int32, device=self.device)
        ops.starts[grid(self.lookups, 1024)](rows, run, first, self.lookups, BLOCK=1024)
        return rows, order, run, first

    def sources(self, stride: int) -> tuple[Tensor, Tensor | None]:
        """Where the gradient of each lookup begins (complement: in those of sequences), and its scale."""
        bags = torch.arange(len(self.lengths), device=self.device)
        if self.offsets is not None:
            length = self.offsets.diff()
            bags = torch.repeat_interleave(bags, length, output_size=int(self.lengths.sum()))
        feature = bags // max(self.bags.batch, 1)
        at = bags % max(self.bags.batch, 1) * stride + self.columns[feature] if len(bags) else bags
        scale = None
        if self.share is not None or (self.layout.mean[self.pooled].any() and self.offsets is not None):
            length = self.offsets.diff()[bags] if self.offsets is not None else torch.ones_like(bags)
            averaged = (self.mean[feature] != 0) & (length > 1)
            scale = torch.where(averaged, 1 / length.float(), torch.ones((), device=self.device))
            if self.share is not None:
                scale = scale * self.share[: len(bags)]
        if len(self.sequences):
            rest = self.lookups - len(bags)
            at = torch.cat([at, ~(torch.arange(rest, device=self.device) * self.layout.width)])
            scale = None if scale is None else torch.cat([scale, torch.ones(rest, device=self.device)])
        return at, scale


class DeviceSlots(SlotMemory):
    addresses_host = False

    def __init__(self, level0: Level0, slots: int, width: int, optimizer: Any) -> None:
        self._level0, self._optimizer, self.slots, self.width = level0, optimizer, slots, width
        self._device, kept = level0.device, optimizer.state_shape
        sizes = slots * width, slots * kept["row_state"], slots * width * kept["full_state"], slots * kept["clock"]
        kinds = (torch.float32,) * 3 + (torch.int32,)
        self._parts = tuple(
            torch.zeros(size, dtype=kind, device=self._device) for size, kind in zip(sizes, kinds, strict=True)
        )
        self._kept = kept
        self._kind = rules.KINDS[optimizer.kind]
        self._columns, self._many = tile(width)
        self._lanes = LANES if width >= LANES else math.gcd(width, LANES)

    def _up(self, host: Tensor) -> Tensor:
        return host.to(self._device)  # the mover's own `DeviceTransfers`

    def _numbers(self, array: Any) -> Tensor:
        return self._up(torch.from_numpy(np.ascontiguousarray(array)))

    @property
    def _rows(self) -> list[tuple[int, Tensor]]:
        return [(place, part.view(self.slots, -1)) for place, part in enumerate(self._parts) if part.numel()]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def like(self, slots: int) -> SlotMemory:
        return type(self)(self._level0, slots, self.width, self._optimizer)

    def stage(self, layout: Any, bags: Any) -> Any:
        return DeviceTaken(layout, bags, self._up, self._device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device)

    def pool(self, staged: Any, out: Tensor) -> None:
        bags = len(staged.lengths)
        if not bags:
            return
        columns, many = tile(self.width)
        ops.pool[grid(bags, many)](
            self._parts[0],
            staged.rows,
            staged.offsets,
            staged.share,
            staged.columns,
            staged.mean,
            out,
            bags,
            staged.bags.batch,
            out.stride(0),
            D=self.width,
            DP=columns,
            K=many,
            U=U,
            SINGLE=staged.single,
            WEIGHTED=staged.share is not None,
            BY=staged.by(out.stride(0)),
        )

    def gather(self, staged: Any, feature: int, out: Tensor) -> None:
        place = len(staged.pooled) + int(np.flatnonzero(staged.sequences == feature)[0])
        rows = staged.rows[staged.begin[place] : staged.begin[place + 1]]
        torch.index_select(self._parts[0].view(-1, self.width), 0, rows, out=out)

    def _train(self, staged: Any, gradients: Any, rule: Any, squares: Tensor | None) -> None:
        if not staged.lookups:
            return
        rows, order, run, first = staged.groups
        at, scale = staged.sources(gradients.pooled.shape[1])
        at, scale = at[order], None if scale is None else scale[order]
        others = torch.cat([part.reshape(-1) for part in gradients.rows]) if gradients.rows else None
        numbers, pace = rules.compiled(rule)[0][1:], rules.step_numbers(rule)
        columns, many, n = self._columns, self._many, staged.lookups
        blocks = -(-n // L)
        parts = torch.empty(2 * blocks * self.width, device=self._device)
        flags = {
            "SCALED": scale is not None,
            "SEQUENCES": bool(gradients.rows),
            "BY": staged.by(gradients.pooled.shape[1]),
        }
        ops.part_sums[(blocks,)](
            rows, run, first, at, scale, gradients.pooled, others, parts, n, D=self.width, DP=columns, K=8, L=L, **flags
        )
        ops.train[grid(n, many)](
            self._parts,
            rows,
            first,
            run[-1:],
            at,
            scale,
            gradients.pooled,
            others,
            parts,
            blocks,
            pace,
            numbers,
            squares,
            D=self.width,
            DP=columns,
            K=many,
            U=U,
            L=L,
            LANES=self._lanes,
            KIND=self._kind,
            CLOCKED=self._kept["clock"],
            NORM=squares is not None,
            **flags,
        )

    def update(self, staged: Any, gradients: Any, rule: Any, missed: Any) -> None:
        if missed is not None:
            self.apply_missed_steps(staged, missed)
        self._train(staged, gradients, rule, None)

    def square_norms(self, staged: Any, gradients: Any) -> Any:
        layout = staged.layout
        found = np.zeros(len(layout.table_start) - 1)
        if staged.lookups:
            rows, order, run, first = staged.groups
            squares = torch.zeros(staged.lookups, device=self._device)
            rule = self._optimizer.rule(0, 0, 1.0, 1.0)
            self._train(staged, gradients, rule, squares)
            many = int(run[-1]) + 1
            begin, squares = first[:many].cpu().numpy(), squares[:many].cpu().numpy().astype(np.float64)
            which, when = rows.cpu().numpy()[begin], order.cpu().numpy()[begin]
            base = layout.base[layout.table_features[layout.table_start[:-1]]]
            table = np.searchsorted(base, which, side="right") - 1
            for place in range(len(found)):
                mine = np.flatnonzero(table == place)
                total = 0.0
                for square in squares[mine[np.argsort(when[mine])]]:
                    total += square
                found[place] = total
        return found

    def apply_missed_steps(self, staged: Any, missed: Any) -> None:
        if staged.lookups:
            rows, _, run, first = staged.groups
            self._apply_missed_steps(rows[first[: int(run[-1]) + 1]], missed)

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Any) -> None:
        self._apply_missed_steps(torch.arange(first, last, dtype=torch.int32, device=self._device), missed)

    def _apply_missed_steps(self, rows: Tensor, missed: Any) -> None:
        if not rows.numel() or not missed.steps:
            return
        columns, many = self._columns, self._many
        ops.apply_missed_steps[grid(rows.numel(), many)](
            self._parts,
            rows,
            rows.numel(),
            missed.steps,
            self._numbers(missed.numbers[: missed.steps]),
            rules.compiled(missed.rule)[0][1:],
            D=self.width,
            DP=columns,
            K=many,
            LANES=self._lanes,
            KIND=self._kind,
        )

    def weight_gradient(self, staged: Any, pooled: Tensor, out: Tensor) -> None:
        at, _ = staged.sources(pooled.shape[1])
        bags = int(staged.lengths.sum())
        rows = self._parts[0].view(-1, self.width)[staged.rows[:bags].long()]
        grad = pooled.reshape(-1)[at[:bags, None] + torch.arange(self.width, device=self._device)]
        found = (rows * grad).sum(1)
        bag = (
            torch.repeat_interleave(torch.arange(len(staged.lengths)), torch.from_numpy(staged.lengths))
            if not staged.single
            else torch.arange(bags)
        )
        length = torch.from_numpy(staged.lengths)[bag]
        mean = torch.from_numpy(staged.layout.mean[staged.pooled])[bag // staged.bags.batch]
        found = found.cpu() * torch.where((mean != 0) & (length > 1), 1 / length.float(), 1.0)
        for place, feature in enumerate(staged.pooled):
            first, last = staged.bags.span(int(feature))
            out[first:last] += found[staged.begin[place] : staged.begin[place + 1]]

    # Rows

    def read(self, slots: Any) -> FloatRows:
        found = FloatRows.allocate(len(slots), self.width, **self._kept)
        places = self._numbers(slots)
        for place, rows in self._rows if len(slots) else ():
            found.parts[place].reshape(len(slots), -1)[:] = rows[places].cpu().numpy()
        return found

    def write(self, slots: Any, rows: FloatRows, places: Any) -> None:
        for place, mine in self._rows if len(slots) else ():
            mine[self._numbers(slots)] = self._numbers(rows.parts[place].reshape(rows.slots, -1)[places])

    def copy_from(self, slots: Any, source: Any, theirs: Any) -> None:
        for place, mine in self._rows if len(slots) else ():
            mine[self._numbers(slots)] = source._parts[place].view(source.slots, -1)[self._numbers(theirs)]

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        names, (weights, row_state, full_state, clock) = self._optimizer.full_state, self._parts
        views = {"weight": weights.view(-1, self.width)[first:last]}
        if self._optimizer.row_state:
            views[self._optimizer.row_state] = row_state[first:last]
        if names:
            views.update(zip(names, full_state.view(-1, len(names), self.width)[first:last].unbind(1), strict=True))
        if self._optimizer.clocked:
            views["clock"] = clock[first:last]
        return views

    def fill(self, first: int, last: int, key: int, table: Any) -> None:
        part = table.numbering
        for begin in range(first, last, 1 << 22):
            end = min(begin + (1 << 22), last)
            ids = part.first + np.arange(begin - first, end - first, dtype=np.int64) * part.stride
            noise = np.array([key], np.uint64), np.zeros(1, np.uint64), np.ones(1, np.uint64)
            keys = cache.cpu.row_keys(noise, np.zeros(end - begin, np.int32), ids)
            self._initialize(np.arange(begin, end), keys, np.full(end - begin, table.bound, np.float32))

    def trained(self, first: int, last: int, key: int, table: Any, row: int) -> Any:
        host = CpuSlots(self._level0, last - first, self.width, self._optimizer)
        host._rows = self.read(np.arange(first, last))
        return host.trained(0, last - first, key, table, row)

    def clear_state(self) -> None:
        for part in self._parts[1:]:
            part.zero_()

    # Moves

    def _form(self, codec: Any) -> dict[str, Any]:
        form = codec.layout
        names = ("fp32", "fp16", "bf16", "int8", "int4")
        return dict(
            D=self.width,
            DP=self._columns,
            K=self._many,
            KIND=names.index(form.kind.name),
            WIDE=form.wide_parameters,
            STATE=0 if form.wide_state else 2,
            ROW_STATE=bool(form.row_state),
            FULL=form.full_state,
            CLOCKED=bool(form.clock),
            PARAMETERS_AT=form.parameters_at,
            ROW_STATE_AT=form.row_state_at,
            FULL_STATE_AT=form.full_state_at,
            CLOCK_AT=form.clock_at,
            BYTES=form.record_bytes,
        )

    def encode(self, codec: Any, slots: Any, records: Any, places: Any, keys: Any, write: int) -> int:
        n = len(slots)
        if not n:
            return -1
        made = torch.empty(n * codec.record_bytes, dtype=torch.uint8, device=self._device)
        held = torch.empty(n, dtype=torch.uint8, device=self._device)
        write_key = np.array([mix((write * 0x9E3779B97F4A7C15 + 1) & ((1 << 64) - 1))], dtype=np.uint64).view(np.int64)
        ops.encode[grid(n, self._many)](
            self._parts,
            self._numbers(slots),
            self._numbers(keys.view(np.int64)),
            self._numbers(write_key),
            made,
            None,
            held,
            n,
            STOCHASTIC=codec.layout.stochastic,
            **self._form(codec),
        )
        records[places] = made.cpu().numpy().reshape(n, -1)
        bad = np.flatnonzero(held.cpu().numpy() == 0)
        return int(bad[0]) if len(bad) else -1

    def decode(self, codec: Any, records: Any, places: Any, slots: Any) -> None:
        if len(slots):
            given = self._numbers(records[places].reshape(-1))
            ops.decode[grid(len(slots), self._many)](
                self._parts, self._numbers(slots), given, None, len(slots), **self._form(codec)
            )

    def initialize(self, layout: Any, moves: Any, absent: Any) -> None:
        at = np.flatnonzero(absent)
        self._initialize(moves.slots[at], moves.keys[at], layout.bound[moves.tables[at]])

    def _initialize(self, slots: Any, keys: Any, bounds: Any) -> None:
        if len(slots):
            ops.initialize[grid(len(slots), self._many)](
                self._parts,
                self._numbers(slots),
                self._numbers(keys.view(np.int64)),
                self._numbers(bounds.astype(np.float32)),
                len(slots),
                D=self.width,
                DP=self._columns,
                K=self._many,
                ROW_STATE=bool(self._kept["row_state"]),
                FULL=self._kept["full_state"],
                CLOCKED=bool(self._kept["clock"]),
            )
