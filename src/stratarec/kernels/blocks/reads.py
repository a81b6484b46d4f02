"""Reading the records of many cells at once."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.bit_rows.cpu import copy_bytes
from stratarec.kernels.blocks.aio import EVENT_WORDS, collect, prepare, submit
from stratarec.kernels.blocks.cpu import first_damaged, read_on, record_place, tag_of

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
def take_records(number, got, wanted, buffers, shape):
    """Check the blocks of read `number`, of which `got` bytes came, and copy their records to where they belong; -1, or
    the block that failed.
    """
    span, offset = buffers.spans[number], number * (len(buffers.words) // len(buffers.spans))
    begin, blocks = span[BEGIN], span[BLOCKS]
    slot = begin // shape.segment_blocks
    whole = max(got, 0) // (shape.block_words * 8)
    inside = begin - slot * shape.segment_blocks
    bad = first_damaged(buffers.words[offset:], shape, min(whole, blocks), wanted.sequences[slot], inside)
    if bad < 0 and whole < blocks:
        bad = whole
    if bad >= 0:
        return begin + bad
    first_block = offset // shape.block_words
    for i in range(span[FIRST], span[LAST]):
        local = wanted.cells[i] - begin * shape.per_block
        block = first_block + local // shape.per_block
        k = local % shape.per_block
        entry = wanted.entries[i]
        # A block that is whole may still be another than the location says, if the location is what is damaged.
        if tag_of(buffers.tags, shape, block, k) != U(wanted.rows[entry] + 1):
            return wanted.cells[i] // shape.per_block
        start = U(record_place(shape, block, k))
        copy_bytes(buffers.data, start, wanted.out, U(entry * shape.record_bytes), U(shape.record_bytes))
    return -1


@njit(nogil=True, cache=True)
def finish_read(number, got, wanted, buffers, shape):
    """Read here and now what is missing of read `number`, and take its records; -1, or the block that failed."""
    span = buffers.spans[number]
    slot, offset = file_place(span, shape)
    size = span[BLOCKS] * shape.block_words * 8
    if got < size:
        address = buffers.words.ctypes.data + number * (len(buffers.words) // len(buffers.spans)) * 8
        got = read_on(wanted.descriptors[slot], address, size, offset, got)
    return take_records(number, got, wanted, buffers, shape)


@njit(nogil=True, cache=True)
def read_cells(context, wanted, buffers, shape):
    """Read the records in `wanted.cells` into their entries of `out`; -1, or a block that failed.

    Each block is read once, neighbours by one read. What the context does not accept is read here and now.
    """
    depth, size = len(buffers.spans), len(buffers.words) // len(buffers.spans)
    cells, most = wanted.cells, size // shape.block_words
    # The reads that are free are those from `waiting` on; the others are under way.
    free = np.arange(depth)
    first, waiting, bad = 0, 0, np.int64(-1)
    # After a failure nothing more is begun, but what is under way is waited for: it writes into our buffers.
    while waiting > 0 or (first < len(cells) and bad < 0):
        count = 0
        while first < len(cells) and bad < 0 and count < depth - waiting:
            number = free[waiting + count]
            span = buffers.spans[number]
            run_of(cells, first, most, shape, span)
            slot, offset = file_place(span, shape)
            address, length = buffers.words.ctypes.data + number * size * 8, span[BLOCKS] * shape.block_words * 8
            descriptor = wanted.descriptors[slot]
            buffers.addresses[count] = prepare(buffers.requests, number, descriptor, address, length, offset)
            first = span[LAST]
            count += 1
        accepted = submit(context, buffers.addresses, count)
        for i in range(waiting + accepted, waiting + count):
            bad = max(bad, finish_read(free[i], 0, wanted, buffers, shape))
        waiting += accepted
        if waiting > 0:
            # A quarter at a time: fewer calls than one by one, and the device is never idle.
            done = collect(context, buffers.events, max(waiting // 4, 1))
            for i in range(done):
                number = buffers.events[i * EVENT_WORDS]
                bad = max(bad, finish_read(number, buffers.events[i * EVENT_WORDS + 2], wanted, buffers, shape))
                waiting -= 1
                free[waiting] = number
    return bad
