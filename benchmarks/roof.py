"""The least time that memory allows an embedding step: a bare kernel that moves the same cache lines and nothing else.

Forward reads every line of a batch's distinct rows once and writes the output; the update reads the gradient once, and
reads and writes every line of the distinct rows and their state; both read the ids. Rows come in ascending order, as
many ahead as our kernels ask for, on as many threads, in the arrays that our own step works on.
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
# Where our pooling writes past the caches.
_STREAM_BYTES = 4 << 20


@njit(**BODY)
def _read_lines(flat, first, last):
    """The lines ``first:last`` of flat words, in order."""
    found = np.uint32(0)
    for line in range(first, last):
        found ^= flat[line * U(16)]
    return found


@njit(**BODY)
def _lines(flat):
    return (U(len(flat)) + U(15)) // U(16)


@njit(**BODY)
def _forward(member, counter, weights, rows, width, ids, out, streaming, found):
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
            # A last line that is cut short is left out.
            for line in range(first, min(first + U(4096), U(len(out)) // U(16))):
                if streaming:
                    stream(out, line * U(16), broadcast(np.float32(0.0), 16))
                else:
                    store(out, line * U(16), broadcast(np.float32(0.0), 16))
        found[member * 16] ^= value


@njit(**BODY)
def _update(member, counter, weights, state, rows, width, ids, gradient, nothing, found):
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
        found[member * 16] ^= value


@njit(nogil=True, cache=True)
def _look_up(team, weights, rows, width, ids, out, streaming, found):
    run_team(team, _forward, (np.zeros(1, np.int64), weights, rows, width, ids, out, streaming, found))


@njit(nogil=True, cache=True)
def _train(team, weights, state, rows, width, ids, gradient, nothing, found):
    run_team(team, _update, (np.zeros(1, np.int64), weights, state, rows, width, ids, gradient, nothing, found))


class Roof:
    """What some batches must move in a collection whose tables are all resident, of one width and one feature each.

    Parameters
    ----------
    ours : TieredEmbeddingBagCollection
    batches : sequence of tuple of Tensor
        Ids of all features, one after the other, and offsets of bags, as `Shape.bags` gives them.
    gradient : Tensor
        ``[B, columns]`` of the pooled output.
    """

    def __init__(
        self, ours: TieredEmbeddingBagCollection, batches: list[tuple[Tensor, Tensor]], gradient: Tensor
    ) -> None:
        (group,) = ours.engine.tables
        self._width, self._gradient = group.width, gradient
        views = list(group.memory.views(0, group.memory.slots).values())
        self._weights, self._state = (_words(view) for view in views)
        bases, features, size = group.layout.base.tolist(), len(group.features), len(gradient)
        self._batches: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for ids, offsets in batches:
            places = offsets[::size][: features + 1].tolist()
            distinct = [
                np.unique(ids[first:last].numpy()) + base
                for base, first, last in zip(bases, places, places[1:], strict=False)
            ]
            self._batches.append((np.concatenate(distinct).astype(np.uint64), _words(ids)))

    def step(self, number: int) -> None:
        """Move what batch `number` must, as a step does."""
        # Half the batches on from the one that others just had, whose rows would still be in the cache.
        rows, ids = self._batches[(number + len(self._batches) // 2) % len(self._batches)]
        gradient = _words(self._gradient)
        out = RECYCLER.empty(*self._gradient.shape)
        threads = threads_for(len(ids) // 2)
        found = np.zeros(threads * _LINE, dtype=np.uint32)
        streaming = gradient.nbytes >= _STREAM_BYTES
        _look_up(team_of(threads), self._weights, rows, self._width, ids, out.view(-1).numpy(), streaming, found)
        _train(
            team_of(threads), self._weights, self._state, rows, self._width, ids, gradient, np.uint32(0), found
        )  # fmt: skip


def _words(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.reshape(-1).numpy().view(np.uint32)
