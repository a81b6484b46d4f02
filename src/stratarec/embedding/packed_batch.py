"""A batch in one buffer of a device: tensors from the host, and lists for the update of rows.

    tensors   labels, dense features, numbers of the step: whatever a step reads in addition to ids
    packed    of each table group, the slots of all lookups: first those of pooled features, then
              those of each sequence feature, with room behind them for other batches of the size
              class; the lookups of each table keep their order
    lists     of each table group, what the device computes from its slots

The host writes tensors and packed parts into one pinned buffer, and starts one copy. The device
sorts the slots (`DeviceBatch.list_rows`), which depends on ids only, so it happens while earlier
batches train. The places of all parts follow from a `Layout`, and numbers that change from batch to
batch are in memory: so batches of equal layout have equal addresses in a buffer, and a CUDA graph
can read a copy of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.rings import Place, Ring, room_for, sequence_room
from stratarec.embedding.slots.memory import PackedBatch, StagedBags, Tensors, require_unchanged
from stratarec.kernels.bags import BagBatch, GroupLayout, list_slots
from stratarec.kernels.runtime.accelerator import Transfers

# Lookups per program of the kernels that list segments.
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
        ``[pooled]`` int64: `column` and `mean` of the layout for the pooled features, on the
        device.
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
    """Sizes of the parts of a table group.

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


class Layout(NamedTuple):
    """Sizes of all parts of a buffer.

    Parameters
    ----------
    tensors : tuple
        Shape and type of each tensor; None for a tensor that the batch lacks.
    groups : tuple of Form
        Sizes of the parts of each table group.
    """

    tensors: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    groups: tuple[Form, ...]


Part = tuple[int, int, torch.dtype]
"""First word of a part, its number of words, and the type of its elements."""
_WORDS = {torch.int32: 1, torch.float32: 1, torch.int64: 2}


class _Parts(NamedTuple):
    """Parts of a buffer, in this order."""

    tensors: tuple[Part, ...]
    groups: tuple[dict[str, Part], ...]
    """Parts of each table group, by name."""
    sent: int
    """Number of words that the host sends."""
    total: int
    """Number of all words."""


@lru_cache(maxsize=256)
def _parts(layout: Layout) -> _Parts:
    end = 0

    def part(size: int, kind: torch.dtype = torch.int32) -> Part:
        nonlocal end
        first, words = end, size * _WORDS[kind]
        # Triton chooses kernels by alignment: each part starts at a multiple of 16 bytes.
        end += -(-words // 4) * 4
        return first, words, kind

    tensors = tuple(part(0) if form is None else part(form[0].numel(), form[1]) for form in layout.tensors)
    groups = tuple(
        {
            "sizes": part(2),
            "rows": part(form.lookups),
            "offsets": part((form.bags + 1) * form.jagged),
            "share": part(form.lookups * form.weighted, torch.float32),
        }
        for form in layout.groups
    )
    sent = end
    for form, parts in zip(layout.groups, groups, strict=True):
        count = form.lookups
        for name in ("sorted_rows", "begins", "number", "segment_row"):
            parts[name] = part(count)
        parts |= {"first": part(count + 1), "segments": part(1), "bag_of": part(count * form.jagged)}
        for name in ("order", "at", "segment_at"):
            parts[name] = part(count, torch.int64)
        for name in ("scale", "segment_scale"):
            parts[name] = part(count * form.scaled, torch.float32)
    return _Parts(tensors, groups, sent, end)


class BatchLists:
    """Parts of one table group in a buffer, once `bind` has been called. A part that its form does
    not need is None.

    Parameters
    ----------
    form : Form
        Sizes of the lists.
    """

    sizes: Tensor
    """``[2]`` int32: the number of lookups, and the room for pooled lookups."""
    rows: Tensor
    """``[N]`` int32 slots of the lookups."""
    offsets: Tensor | None
    """``[pooled features * B + 1]`` int32 first lookup of each bag; None if all bags have one id.
    """
    share: Tensor | None
    """``[N]`` float32 weights of the lookups."""
    sorted_rows: Tensor
    begins: Tensor
    number: Tensor
    """``[N]`` int32 of the lookups sorted by slot: slot, whether a segment begins, and number of
    the segment from 1.
    """
    order: Tensor
    """``[N]`` int64 lookup of each sorted lookup."""
    first: Tensor
    segments: Tensor
    segment_row: Tensor
    """First sorted lookup of each segment ``[N + 1]``, number of segments ``[1]``, and slot of each
    segment ``[N]``.
    """
    at: Tensor
    segment_at: Tensor
    """``[N]`` int64 position of the gradient of each sorted lookup, and of the first lookup of each
    segment.
    """
    scale: Tensor | None
    segment_scale: Tensor | None
    """``[N]`` float32 factors of these gradients."""
    bag_of: Tensor | None
    """``[N]`` int32 bag of each pooled lookup; None if lookup i is in bag i."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._place: Place | None = None
        # Stride of the gradients for which the lists were computed; -1 if they were not.
        self.listed_for = -1

    def bind(self, words: Tensor, parts: Mapping[str, Part], place: Place | None) -> None:
        """Use the `parts` of a buffer ``[n]`` int32 of the device. `place` is its place in a ring,
        if it has one.
        """
        self._place = place
        for name, (first, size, kind) in parts.items():
            setattr(self, name, words[first : first + size].view(kind) if size else None)

    def arrive(self) -> None:
        """Make the current stream wait for the packed words."""
        if self._place is not None:
            self._place.wait()


@dataclass(frozen=True)
class DeviceBatch(StagedBags):
    """Staged bags of one table group on the device.

    Parameters
    ----------
    features : FeatureLists
        Features of the table group.
    counts : list of int
        Number of lookups of each feature, in the order of `features`.
    begin : list of int
        First place of each feature's lookups in the lists, in the order of `features`, and the
        number of all places.
    lists : BatchLists
        Lists that the device computes from the slots.
    """

    features: FeatureLists
    counts: list[int]
    begin: list[int]
    lists: BatchLists

    @classmethod
    def of(cls, layout: GroupLayout, bags: BagBatch, features: FeatureLists) -> DeviceBatch:
        """Choose the sizes of a batch's parts."""
        counts = [last - first for first, last in map(bags.span, features.order.tolist())]
        pooled = sum(counts[: features.pooled])
        weighted = bags.weights is not None
        jagged = bags.offsets is not None or weighted
        # If every bag has one id, all batches have the same number of lookups, so no room is
        # needed.
        room = room_for(pooled) if bags.offsets is not None else max(pooled, 1)
        sequences = tuple(map(sequence_room, counts[features.pooled :]))
        begin = np.cumsum([0, *counts[: features.pooled]])[:-1].tolist()
        begin += np.cumsum([room, *sequences]).tolist()
        scaled = weighted or (features.averaged and jagged)
        form = Form(begin[-1], sequences, features.pooled * bags.batch, jagged, weighted, scaled)
        return cls(layout, bags, features, counts, begin, BatchLists(form))

    @property
    def pooled_lookups(self) -> int:
        """Number of lookups of pooled features."""
        return sum(self.counts[: self.features.pooled])

    def write(self, words: NDArray[np.int32], parts: Mapping[str, Part]) -> None:
        """Write slots, offsets and weights of the bags to their parts of a pinned buffer."""
        features, begin = self.features, self.begin
        packed = [parts[name] for name in ("sizes", "rows", "offsets", "share")]
        sizes, *arrays = (words[first : first + size] for first, size, _ in packed)
        sizes[:] = sum(self.counts), begin[features.pooled]
        for first, count, end in zip(begin[:-1], self.counts, begin[1:], strict=True):
            arrays[0][first + count : end] = _BEHIND
        if not features.pooled:
            arrays[0][: begin[0]] = _BEHIND
        places = np.array(begin[:-1], dtype=np.int64)
        require_unchanged(
            list_slots(self.layout, self.bags, features.order, places, features.pooled, arrays)
        )

    def _list_bags(self) -> None:
        lists = self.lists
        if lists.bag_of is not None and lists.offsets is not None:
            # The same operation for all batches of a form; `repeat_interleave` depends on the
            # number of lookups. `first` is not filled yet and has room for the numbers of the
            # lookups.
            lookups = torch.arange(lists.form.lookups, dtype=torch.int32, out=lists.first[:-1])
            torch.searchsorted(lists.offsets[1:], lookups, right=True, out_int32=True, out=lists.bag_of)

    def list_rows(self, stride: int) -> None:
        """Sort the lookups by slot, and list rows and positions of gradients; samples are `stride`
        floats apart.

        Lists that exist already are not computed again.
        """
        if self.lists.listed_for == stride:
            return
        # Imported late: buffers of a network on a device do not need Triton, which is an optional
        # dependency.
        from stratarec.kernels.update import gpu

        self.lists.arrive()
        self.lists.listed_for = stride
        lists, count, features = self.lists, self.lists.form.lookups, self.features
        torch.sort(lists.rows, stable=True, out=(lists.sorted_rows, lists.order))
        blocks = -(-count // _BLOCK)
        launch(gpu.mark_segments, blocks, lists.sorted_rows, lists.begins, count, BLOCK=_BLOCK)
        torch.cumsum(lists.begins, 0, dtype=torch.int32, out=lists.number)
        self._list_bags()
        launch(
            gpu.list_segments,
            blocks,
            lists.begins,
            lists.number,
            lists.order,
            lists.sorted_rows,
            lists.bag_of,
            lists.offsets,
            lists.share,
            features.column,
            features.mean,
            lists.first,
            lists.segments,
            lists.segment_row,
            lists.segment_at,
            lists.segment_scale,
            lists.at,
            lists.scale,
            lists.sizes,
            max(self.bags.batch, 1),
            stride,
            D=self.layout.width,
            BLOCK=_BLOCK,
        )

    def unbound(self) -> DeviceBatch:
        """Return the batch with lists that are not bound to a buffer."""
        lists = BatchLists(self.lists.form)
        lists.listed_for = self.lists.listed_for
        return replace(self, lists=lists)


class BatchBuffer(PackedBatch):
    """A batch in one buffer of a device.

    Parameters
    ----------
    layout : Layout
        Sizes of the parts.
    words : Tensor
        ``[n]`` int32 buffer of the device.
    staged : tuple of DeviceBatch
        Staged bags of each table group. Its lists are bound to the buffer.
    host_tensors : sequence of Tensor or None
        Tensors of the host that were packed.
    place, ring : Place or None, Ring or None
        Place of the buffer in a ring, which receives it by `release`.
    """

    def __init__(
        self,
        layout: Layout,
        words: Tensor,
        staged: tuple[DeviceBatch, ...] = (),
        *,
        host_tensors: Tensors = (),
        place: Place | None = None,
        ring: Ring | None = None,
    ) -> None:
        super().__init__(staged)
        self.layout = layout
        self.words = words
        self.host_tensors = host_tensors
        self._place = place
        self._ring = ring
        self._groups = staged
        parts = _parts(layout)
        self.tensors = tuple(
            None if form is None else words[first : first + size].view(kind).view(form[0])
            for (first, size, kind), form in zip(parts.tensors, layout.tensors, strict=True)
        )
        """Tensors on the device."""
        for group, of_group in zip(staged, parts.groups, strict=True):
            group.lists.bind(words, of_group, place)

    @classmethod
    def pack(cls, ring: Ring, staged: Sequence[StagedBags], tensors: Tensors) -> BatchBuffer:
        """Write a batch into a pinned buffer, and start to copy it to the device.

        Parameters
        ----------
        ring : Ring
            Buffers of the device.
        staged : sequence of DeviceBatch
            Staged bags of each table group.
        tensors : sequence of Tensor or None
            Tensors of the host with elements of 4 bytes.
        """
        groups = tuple(batch for batch in staged if isinstance(batch, DeviceBatch))
        forms = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        layout = Layout(forms, tuple(group.lists.form for group in groups))
        parts = _parts(layout)
        place = ring.take(parts.sent, parts.total)
        for (first, size, kind), tensor in zip(parts.tensors, tensors, strict=True):
            if tensor is not None:
                place.host[first : first + size].view(kind).view(tensor.shape).copy_(tensor)
        words = place.host.numpy()
        for group, of_group in zip(groups, parts.groups, strict=True):
            group.write(words, of_group)
        place.send(parts.sent)
        return cls(
            layout, place.device[: parts.total], groups, host_tensors=tensors, place=place, ring=ring
        )

    def without_groups(self) -> BatchBuffer:
        """Return the same tensors, in a buffer that ends behind them and belongs to no ring."""
        layout = self.layout._replace(groups=())
        return BatchBuffer(layout, self.words[: _parts(layout).total], host_tensors=self.host_tensors)

    def copied(self) -> BatchBuffer:
        """Return the batch in memory that belongs to no ring."""
        return BatchBuffer(
            self.layout, self.words.clone(), tuple(group.unbound() for group in self._groups)
        )

    def take(self, other: BatchBuffer) -> None:
        """Copy the words of a batch of equal layout."""
        self.words.copy_(other.words)

    def arrive(self) -> None:
        """Make the current stream wait for the copy."""
        if self._place is not None:
            self._place.wait()

    def release(self) -> None:
        if self._place is not None and self._ring is not None:
            self._ring.give_back(self._place)
