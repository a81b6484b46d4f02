"""A batch on a device: its packed words, and the lists that the update of its rows needs, in one buffer.

The host packs the slots of all lookups, first those of pooled features, then those of each sequence feature, with room
behind them for other batches of the size class; the lookups of each table keep their order. The device sorts them
(`BatchLists.list_rows`), which depends on ids only, so it happens while earlier batches train. Sizes of all parts
follow from a `Form`, and numbers that change from batch to batch are in memory: so batches of a form have equal
addresses in a buffer, and a CUDA graph can read another buffer of the form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.rings import Place, Ring, room_for, sequence_room
from stratarec.embedding.slots.memory import StagedBatch, require_unchanged
from stratarec.kernels.bags import BagBatch, GroupLayout, list_slots
from stratarec.kernels.runtime.accelerator import Transfers
from stratarec.kernels.update import gpu

# Lookups per program of the kernels that list runs.
_BLOCK = 1024
# Slot of the room behind the lookups of a batch. It is larger than all slots, so it is sorted last.
_BEHIND = 2**31 - 1


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel. Products and sums are not fused, because that would change bits."""
    kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


class FeatureLists(NamedTuple):
    """Features of a layout in the order of staged lookups: pooled ones first.

    Parameters
    ----------
    order : ndarray
        Places of the features in the layout.
    pooled : int
        Number of pooled features.
    column, mean : Tensor
        ``[pooled]`` int64: `column` and `mean` of the layout for the pooled features, on the device.
    multiple : int
        Largest of 1, 2 and 4 that divides the width and all columns.
    averaged : bool
        Whether a feature is pooled by its mean.
    """

    order: NDArray[np.int64]
    pooled: int
    column: Tensor
    mean: Tensor
    multiple: int
    averaged: bool

    @classmethod
    def of(cls, layout: GroupLayout, transfers: Transfers) -> FeatureLists:
        """Build the lists of a layout."""
        order = np.argsort(layout.sequence, kind="stable")
        pooled = int((layout.sequence == 0).sum())
        column, mean = (part[order[:pooled]] for part in (layout.column, layout.mean))
        up = transfers.up(torch.from_numpy(np.concatenate([column, mean])))
        multiple = math.gcd(4, layout.width, *column.tolist())
        return cls(order, pooled, up[:pooled], up[pooled:], multiple, bool(mean.any()))


class Form(NamedTuple):
    """Sizes of the parts of a batch's buffer.

    Parameters
    ----------
    lookups : int
        Room for lookups.
    sequences : tuple of int
        Room for the lookups of each sequence feature, which is behind the room for pooled lookups.
    bags : int
        Number of pooled bags.
    jagged : bool
        Whether bags have other numbers of ids than one, or ids have weights.
    weighted, scaled : bool
        Whether ids have weights, and whether gradients are scaled by weights or numbers of ids.
    """

    lookups: int
    sequences: tuple[int, ...]
    bags: int
    jagged: bool
    weighted: bool
    scaled: bool


_WORDS = {torch.int32: 1, torch.float32: 1, torch.int64: 2}


@lru_cache(maxsize=256)
def _parts(form: Form) -> tuple[dict[str, tuple[int, int, torch.dtype]], int, int]:
    """Return first word, words and type of each part, the number of packed words, and the number of all words."""
    count, jagged = form.lookups, form.jagged
    packed = {"sizes": 2, "rows": count, "offsets": (form.bags + 1) * jagged, "share": count * form.weighted}
    lists = {
        "sorted_rows": (count, torch.int32), "begins": (count, torch.int32), "number": (count, torch.int32),
        "first": (count + 1, torch.int32), "runs": (1, torch.int32), "run_row": (count, torch.int32),
        "bag_of": (count * jagged, torch.int32), "order": (count, torch.int64), "at": (count, torch.int64),
        "run_at": (count, torch.int64), "scale": (count * form.scaled, torch.float32),
        "run_scale": (count * form.scaled, torch.float32),
    }  # fmt: skip
    kinds = {"share": torch.float32}
    sizes = {name: (size, kinds.get(name, torch.int32)) for name, size in packed.items()}
    parts, at, end = {}, 0, 0
    for name, (size, kind) in {**sizes, **lists}.items():
        words = size * _WORDS[kind]
        parts[name] = at, words, kind
        # Triton chooses kernels by alignment: each part starts at a multiple of 16 bytes.
        at += -(-words // 4) * 4
        end = at if name in packed else end
    return parts, end, at


class BatchLists:
    """Parts of a batch's buffer. A part that its form does not need is None.

    Parameters
    ----------
    form : Form
    words : Tensor
        ``[n]`` int32 buffer of the device.
    """

    sizes: Tensor
    """``[2]`` int32: the number of lookups, and the room for pooled lookups."""
    rows: Tensor
    """``[N]`` int32 slots of the lookups."""
    offsets: Tensor | None
    """``[pooled features * B + 1]`` int32, first lookup of each bag; None if every bag has one id."""
    share: Tensor | None
    """``[N]`` float32 weights of the lookups."""
    sorted_rows: Tensor
    begins: Tensor
    number: Tensor
    """``[N]`` int32 of the lookups sorted by slot: the slot, whether a run begins, and the number of its run from 1."""
    order: Tensor
    """``[N]`` int64 lookup of each sorted lookup."""
    first: Tensor
    runs: Tensor
    run_row: Tensor
    """First sorted lookup of each run ``[N + 1]``, the number of runs ``[1]``, and the slot of each run ``[N]``."""
    at: Tensor
    run_at: Tensor
    """``[N]`` int64 position of the gradient of each sorted lookup, and of the first lookup of each run."""
    scale: Tensor | None
    run_scale: Tensor | None
    """``[N]`` float32 factors of these gradients."""
    bag_of: Tensor | None
    """``[N]`` int32 bag of each pooled lookup; None if lookup i is in bag i."""

    def __init__(self, form: Form, words: Tensor) -> None:
        self.form = form
        self.words = words
        # Stride of the gradients for which the lists were computed; -1 if they were not.
        self.listed_for = -1
        for name, (first, size, kind) in _parts(form)[0].items():
            setattr(self, name, words[first : first + size].view(kind) if size else None)


@dataclass(frozen=True)
class DeviceBatch(StagedBatch):
    """A staged batch on the device.

    Parameters
    ----------
    features : FeatureLists
    begin : list of int
        First place of each feature's lookups in the lists, in the order of `features`, and the number of all places.
    pooled_lookups : int
        Number of lookups of pooled features.
    lists : BatchLists
    place, ring : Place or None, Ring or None
        Place of the lists in a ring, which receives it by `release`.
    """

    features: FeatureLists
    begin: list[int]
    pooled_lookups: int
    lists: BatchLists
    place: Place | None
    ring: Ring | None

    @classmethod
    def pack(cls, layout: GroupLayout, bags: BagBatch, features: FeatureLists, ring: Ring) -> DeviceBatch:
        """Write a batch into a pinned buffer and start its copy to the device."""
        counts = [last - first for first, last in map(bags.span, features.order.tolist())]
        lookups, pooled, size = sum(counts), sum(counts[: features.pooled]), features.pooled * bags.batch
        weighted = bags.weights is not None
        jagged = bags.offsets is not None or weighted
        # Batches of single ids have one size.
        room = room_for(pooled) if bags.offsets is not None else max(pooled, 1)
        sequences = tuple(map(sequence_room, counts[features.pooled :]))
        begin = np.cumsum([0, *counts[: features.pooled]])[:-1].tolist()
        begin += np.cumsum([room, *sequences]).tolist()
        form = Form(begin[-1], sequences, size, jagged, weighted, weighted or (features.averaged and jagged))
        parts, packed, total = _parts(form)
        place = ring.take(total)
        words = place.host.numpy()
        arrays = [words[at : at + length] for at, length, _ in (parts[name] for name in ("rows", "offsets", "share"))]
        words[:2] = lookups, room
        for first, count, end in zip(begin, counts, begin[1:], strict=False):
            arrays[0][first + count : end] = _BEHIND
        if not features.pooled:
            arrays[0][:room] = _BEHIND
        places = np.array(begin[:-1], dtype=np.int64)
        require_unchanged(list_slots(layout, bags, features.order, places, features.pooled, arrays))
        place.send(packed)
        return cls(layout, bags, features, begin, pooled, BatchLists(form, place.device[:total]), place, ring)

    def _list_bags(self) -> None:
        lists = self.lists
        if lists.bag_of is not None and lists.offsets is not None:
            # The same operation for all batches of a form; `repeat_interleave` depends on the number of lookups.
            # `first` is not filled yet and has room for the numbers of the lookups.
            lookups = torch.arange(lists.form.lookups, dtype=torch.int32, out=lists.first[:-1])
            torch.searchsorted(lists.offsets[1:], lookups, right=True, out_int32=True, out=lists.bag_of)

    def list_rows(self, stride: int) -> None:
        """Sort the lookups by slot, and list rows and positions of gradients; samples are `stride` floats apart.

        Lists that exist already are not computed again.
        """
        if self.lists.listed_for == stride:
            return
        self.arrive()
        self.lists.listed_for = stride
        lists, count, features = self.lists, self.lists.form.lookups, self.features
        torch.sort(lists.rows, stable=True, out=(lists.sorted_rows, lists.order))
        blocks = -(-count // _BLOCK)
        launch(gpu.mark_runs, blocks, lists.sorted_rows, lists.begins, count, BLOCK=_BLOCK)
        torch.cumsum(lists.begins, 0, dtype=torch.int32, out=lists.number)
        self._list_bags()
        launch(
            gpu.list_runs, blocks, lists.begins, lists.number, lists.order, lists.sorted_rows, lists.bag_of,
            lists.offsets, lists.share, features.column, features.mean, lists.first, lists.runs, lists.run_row,
            lists.run_at, lists.run_scale, lists.at, lists.scale, lists.sizes, max(self.bags.batch, 1), stride,
            D=self.layout.width, BLOCK=_BLOCK,
        )  # fmt: skip

    @property
    def form(self) -> tuple[Any, ...]:
        """Sizes that follow from the batch; batches of equal form have equal addresses in a buffer."""
        return self.lists.form, self.bags.batch

    def copied(self) -> DeviceBatch:
        """Return the batch in memory that belongs to no ring."""
        lists = BatchLists(self.lists.form, self.lists.words.clone())
        lists.listed_for = self.lists.listed_for
        return replace(self, lists=lists, place=None, ring=None)

    def take(self, other: DeviceBatch) -> None:
        """Copy the words of a batch of equal form."""
        self.lists.words.copy_(other.lists.words)

    def arrive(self) -> None:
        """Make the current stream wait for the packed words."""
        if self.place is not None:
            self.place.wait()

    def release(self) -> None:
        """Give the place back: all work with the batch is queued."""
        if self.place is not None and self.ring is not None:
            self.ring.give_back(self.place)
