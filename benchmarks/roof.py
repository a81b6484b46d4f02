"""Least time that memory bandwidth allows an embedding step: a bare kernel that moves the same
cache lines.

Forward reads every line of the distinct rows of a batch once and writes the output. The update
reads the gradient once, and reads and writes every line of the distinct rows and their state. Both
read the ids. Rows are visited in ascending order, with the same prefetch distance, threads and
arrays as the embedding step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding import TieredEmbeddingBagCollection
from stratarec.kernels.runtime.memory import RECYCLER
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import threads_for
from stratarec.kernels.simd.prefetch import U, ahead_of, prefetch, prefetch_row
from stratarec.kernels.simd.vector import broadcast, store, stream

_LINE = 16
# Output size from which pooling uses non-temporal stores.
_STREAM_BYTES = 4 << 20


@njit(**BODY)
def _read_lines(flat, first, last):
    """Read the lines ``first:last`` of flat words, in order."""
    checksum = np.uint32(0)
    for line in range(first, last):
        checksum ^= flat[line * U(16)]
    return checksum


@njit(**BODY)
def _lines(flat):
    return (U(len(flat)) + U(15)) // U(16)


@njit(**BODY)
def _forward(member, counter, weights, rows, width, ids, out, streaming, checksums):
    D, chunk = U(width), max(U(65536) // U(width), U(16))
    row_tasks = (U(len(rows)) + chunk - U(1)) // chunk
    id_tasks, out_tasks = _lines(ids) // U(4096) + U(1), _lines(out) // U(4096) + U(1)
    while True:
        task = U(take(counter))
        if task >= row_tasks + id_tasks + out_tasks:
            break
        value = np.uint32(0)
        if task < row_tasks:
            for i in range(task * chunk, min(task * chunk + chunk, U(len(rows)))):
                prefetch_row(weights, rows[min(i + ahead_of(D), U(len(rows) - 1))] * D, D)
                begin = rows[i] * D
                for element in range(begin, begin + D, U(16)):
                    value ^= weights[element]
                value ^= weights[begin + D - U(1)]
        elif task < row_tasks + id_tasks:
            first = (task - row_tasks) * U(4096)
            value = _read_lines(ids, first, min(first + U(4096), _lines(ids)))
        else:
            first = (task - row_tasks - id_tasks) * U(4096)
            # An incomplete last line is skipped.
            for line in range(first, min(first + U(4096), U(len(out)) // U(16))):
                if streaming:
                    stream(out, line * U(16), broadcast(np.float32(0.0), 16))
                else:
                    store(out, line * U(16), broadcast(np.float32(0.0), 16))
        checksums[member * 16] ^= value


@njit(**BODY)
def _update(member, counter, weights, state, rows, width, ids, gradient, nothing, checksums):
    D, chunk = U(width), max(U(65536) // U(width), U(16))
    row_tasks = (U(len(rows)) + chunk - U(1)) // chunk
    id_tasks, gradient_tasks = _lines(ids) // U(4096) + U(1), _lines(gradient) // U(4096) + U(1)
    while True:
        task = U(take(counter))
        if task >= row_tasks + id_tasks + gradient_tasks:
            break
        value = np.uint32(0)
        if task < row_tasks:
            for i in range(task * chunk, min(task * chunk + chunk, U(len(rows)))):
                ahead = rows[min(i + ahead_of(D), U(len(rows) - 1))]
                prefetch_row(weights, ahead * D, D)
                prefetch(state, ahead)
                begin = rows[i] * D
                for element in range(begin, begin + D, U(16)):
                    weights[element] ^= nothing
                weights[begin + D - U(1)] ^= nothing
                state[rows[i]] ^= nothing
        elif task < row_tasks + id_tasks:
            first = (task - row_tasks) * U(4096)
            value = _read_lines(ids, first, min(first + U(4096), _lines(ids)))
        else:
            first = (task - row_tasks - id_tasks) * U(4096)
            value = _read_lines(gradient, first, min(first + U(4096), _lines(gradient)))
        checksums[member * 16] ^= value


@njit(nogil=True, cache=True)
def _look_up(team, weights, rows, width, ids, out, streaming, checksums):
    run_team(team, _forward, (np.zeros(1, np.int64), weights, rows, width, ids, out, streaming, checksums))


@njit(nogil=True, cache=True)
def _train(team, weights, state, rows, width, ids, gradient, nothing, checksums):
    run_team(
        team,
        _update,
        (np.zeros(1, np.int64), weights, state, rows, width, ids, gradient, nothing, checksums),
    )


class Roof:
    """The memory traffic of some batches, for a collection of resident tables of one width with one
    feature each.

    Parameters
    ----------
    ours : TieredEmbeddingBagCollection
    batches : sequence of tuple of Tensor
        Ids of all features, one after the other, and offsets of bags, as returned by `Shape.bags`.
    gradient : Tensor
        ``[B, columns]`` of the pooled output.
    """

    def __init__(
        self, ours: TieredEmbeddingBagCollection, batches: list[tuple[Tensor, Tensor]], gradient: Tensor
    ) -> None:
        (group,) = ours.engine.tables
        self._width = group.width
        self._gradient = gradient
        views = list(group.memory.views(0, group.memory.slots).values())
        self._weights, self._state = (_words(view) for view in views)
        bases, features, size = group.layout.base.tolist(), len(group.features), len(gradient)
        self._batches: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for ids, offsets in batches:
            starts = offsets[::size][: features + 1].tolist()
            distinct = [
                np.unique(ids[first:last].numpy()) + base
                for base, first, last in zip(bases, starts, starts[1:], strict=False)
            ]
            self._batches.append((np.concatenate(distinct).astype(np.uint64), _words(ids)))

    def step(self, number: int) -> None:
        """Read and write the memory that a step on batch `number` reads and writes."""
        # The other contenders just used batch `number`, whose rows may be in the cache, so use a
        # distant batch.
        rows, ids = self._batches[(number + len(self._batches) // 2) % len(self._batches)]
        gradient = _words(self._gradient)
        out = RECYCLER.empty(*self._gradient.shape)
        threads = threads_for(len(ids) // 2)
        checksums = np.zeros(threads * _LINE, dtype=np.uint32)
        streaming = gradient.nbytes >= _STREAM_BYTES
        _look_up(
            team_of(threads),
            self._weights,
            rows,
            self._width,
            ids,
            out.view(-1).numpy(),
            streaming,
            checksums,
        )
        _train(
            team_of(threads),
            self._weights,
            self._state,
            rows,
            self._width,
            ids,
            gradient,
            np.uint32(0),
            checksums,
        )


def _words(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.reshape(-1).numpy().view(np.uint32)
