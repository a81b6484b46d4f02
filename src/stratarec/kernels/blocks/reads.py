"""Reading the records of many cells at once."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.blocks.aio import EVENT_WORDS, collect, prepare, submit
from stratarec.kernels.blocks.cpu import first_damaged, read_on, record_place, tag_of
from stratarec.kernels.records.cpu import copy_bytes

U = np.uint64
# What a buffer is being filled with.
FIRST, LAST, BEGIN, BLOCKS = 0, 1, 2, 3


@njit(nogil=True, cache=True)
def run_of(cells, first, most, shape, span):
    """Note in `span` the cells from `first` on that lie in up to `most` neighbouring blocks of one segment."""
    begin = cells[first] // shape.per_block
    slot = begin // shape.segment_blocks
    stop, last = begin + 1, first + 1
    while last < len(cells):
        block = cells[last] // shape.per_block
        if block > stop or block - begin >= most or block // shape.segment_blocks != slot:
            break
        stop = max(stop, block + 1)
        last += 1
    span[FIRST], span[LAST], span[BEGIN], span[BLOCKS] = first, last, begin, stop - begin


@njit(nogil=True, cache=True)
def file_place(span, shape):
    """The segment's slot, and the byte of its file at which the span begins."""
    slot = span[BEGIN] // shape.segment_blocks
    return slot, (span[BEGIN] - slot * shape.segment_blocks) * shape.block_words * 8


@njit(nogil=True, cache=True)
def take_records(span, got, offset, sequences, cells, entries, rows, words, tags, data, shape, out):
    """Check the blocks at word `offset` and copy their records to where they belong; -1, or the block that failed."""
    begin, blocks = span[BEGIN], span[BLOCKS]
    slot = begin // shape.segment_blocks
    whole = max(got, 0) // (shape.block_words * 8)
    inside = begin - slot * shape.segment_blocks
    bad = first_damaged(words[offset:], shape, min(whole, blocks), sequences[slot], inside)
    if bad < 0 and whole < blocks:
        bad = whole
    if bad >= 0:
        return begin + bad
    first_block = offset // shape.block_words
    for i in range(span[FIRST], span[LAST]):
        local = cells[i] - begin * shape.per_block
        block = first_block + local // shape.per_block
        k = local % shape.per_block
        entry = entries[i]
        if tag_of(tags, shape, block, k) != U(rows[entry] + 1):
            return cells[i] // shape.per_block
        start = U(record_place(shape, block, k))
        copy_bytes(data, start, out, U(entry * shape.record_bytes), U(shape.record_bytes))
    return -1


@njit(nogil=True, cache=True)
def read_cells(
    context,
    descriptors,
    sequences,
    cells,
    entries,
    rows,
    spans,
    requests,
    addresses,
    events,
    words,
    tags,
    data,
    shape,
    out,
):
    """Read the records in `cells` (ascending) into their entries of `out`; -1, or a block that failed.

    Each block is read once, neighbours by one read. `words` (aligned) are as many buffers as there may be reads at
    once, one a row of `spans`; what the context does not accept is read here and now.
    """
    depth, size = len(spans), len(words) // len(spans)
    block_bytes, most = shape.block_words * 8, size // shape.block_words
    free = np.arange(depth)
    first, waiting, bad = 0, 0, np.int64(-1)
    while waiting > 0 or (first < len(cells) and bad < 0):
        count = 0
        while first < len(cells) and bad < 0 and count < depth - waiting:
            number = free[waiting + count]
            span = spans[number]
            run_of(cells, first, most, shape, span)
            slot, offset = file_place(span, shape)
            addresses[count] = prepare(
                requests, number, descriptors[slot], words.ctypes.data + number * size * 8, span[BLOCKS] * block_bytes,
                offset,
            )  # fmt: skip
            first = span[LAST]
            count += 1
        accepted = submit(context, addresses, count)
        for i in range(waiting + accepted, waiting + count):
            number = free[i]
            span = spans[number]
            slot, offset = file_place(span, shape)
            got = read_on(
                descriptors[slot], words.ctypes.data + number * size * 8, span[BLOCKS] * block_bytes, offset, 0
            )
            found = take_records(
                span, got, number * size, sequences, cells, entries, rows, words, tags, data, shape, out
            )
            bad = max(bad, found)
        waiting += accepted
        if waiting > 0:
            done = collect(context, events, max(waiting // 4, 1))
            for i in range(done):
                number, got = events[i * EVENT_WORDS], events[i * EVENT_WORDS + 2]
                wanted = spans[number][BLOCKS] * block_bytes
                if got < wanted:
                    slot, offset = file_place(spans[number], shape)
                    got = read_on(descriptors[slot], words.ctypes.data + number * size * 8, wanted, offset, got)
                found = take_records(
                    spans[number], got, number * size, sequences, cells, entries, rows, words, tags, data, shape, out
                )
                bad = max(bad, found)
                waiting -= 1
                free[waiting] = number
    return bad
