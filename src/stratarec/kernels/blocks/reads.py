"""Read the records of many cells with few, concurrent reads."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.bit_rows.cpu import copy_bytes
from stratarec.kernels.blocks.aio import EVENT_WORDS, collect, prepare, submit
from stratarec.kernels.blocks.cpu import first_damaged, read_on, record_place, tag_of

U = np.uint64
# Columns of `ReadBuffers.spans`.
FIRST, LAST, BEGIN, BLOCKS = 0, 1, 2, 3


@njit(nogil=True, cache=True)
def run_of(cells, first, most, shape, span):
    """Set `span` to one read: the cells from `first` on that are in up to `most` neighbouring blocks of one segment."""
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
    """Return the slot of the span's segment, and the offset in the segment's file at which the span begins."""
    slot = span[BEGIN] // shape.segment_blocks
    return slot, (span[BEGIN] - slot * shape.segment_blocks) * shape.block_words * 8


@njit(nogil=True, cache=True)
def take_records(number, got, request, buffers, shape):
    """Verify the blocks of read `number`, which returned `got` bytes, and copy their records to `request.out`.

    Returns -1, or the number of a failed block.
    """
    span, offset = buffers.spans[number], number * (len(buffers.words) // len(buffers.spans))
    begin, blocks = span[BEGIN], span[BLOCKS]
    slot = begin // shape.segment_blocks
    complete = max(got, 0) // (shape.block_words * 8)
    inside = begin - slot * shape.segment_blocks
    bad = first_damaged(buffers.words[offset:], shape, min(complete, blocks), request.sequences[slot], inside)
    if bad < 0 and complete < blocks:
        bad = complete
    if bad >= 0:
        return begin + bad
    first_block = offset // shape.block_words
    for i in range(span[FIRST], span[LAST]):
        local = request.cells[i] - begin * shape.per_block
        block = first_block + local // shape.per_block
        k = local % shape.per_block
        entry = request.entries[i]
        # A damaged location may point to an intact block with another row's record.
        if tag_of(buffers.tags, shape, block, k) != U(request.rows[entry] + 1):
            return request.cells[i] // shape.per_block
        start = U(record_place(shape, block, k))
        copy_bytes(buffers.data, start, request.out, U(entry * shape.record_bytes), U(shape.record_bytes))
    return -1


@njit(nogil=True, cache=True)
def finish_read(number, got, request, buffers, shape):
    """If read `number` is incomplete, finish it synchronously; verify its blocks and copy their records.

    Returns -1, or the number of a failed block.
    """
    span = buffers.spans[number]
    slot, offset = file_place(span, shape)
    size = span[BLOCKS] * shape.block_words * 8
    if got < size:
        address = buffers.words.ctypes.data + number * (len(buffers.words) // len(buffers.spans)) * 8
        got = read_on(request.descriptors[slot], address, size, offset, got)
    return take_records(number, got, request, buffers, shape)


@njit(nogil=True, cache=True)
def read_cells(context, request, buffers, shape):
    """Read the records of `request.cells` and copy each to its entry of `request.out`; return -1, or a failed block.

    Each block is read once, neighbouring blocks with one read. Reads that the context does not accept are synchronous.
    """
    depth, size = len(buffers.spans), len(buffers.words) // len(buffers.spans)
    cells, most = request.cells, size // shape.block_words
    # `free[waiting:]` are the numbers of unused reads; the other reads are in flight.
    free = np.arange(depth)
    first, waiting, bad = 0, 0, np.int64(-1)
    # After a failure no read is started. Reads in flight are still awaited, because they write into these buffers.
    while waiting > 0 or (first < len(cells) and bad < 0):
        count = 0
        while first < len(cells) and bad < 0 and count < depth - waiting:
            number = free[waiting + count]
            span = buffers.spans[number]
            run_of(cells, first, most, shape, span)
            slot, offset = file_place(span, shape)
            address, length = buffers.words.ctypes.data + number * size * 8, span[BLOCKS] * shape.block_words * 8
            descriptor = request.descriptors[slot]
            buffers.addresses[count] = prepare(buffers.requests, number, descriptor, address, length, offset)
            first = span[LAST]
            count += 1
        accepted = submit(context, buffers.addresses, count)
        for i in range(waiting + accepted, waiting + count):
            bad = max(bad, finish_read(free[i], 0, request, buffers, shape))
        waiting += accepted
        if waiting > 0:
            # Wait for a quarter of the reads: that takes fewer calls than one at a time, and the device is never idle.
            done = collect(context, buffers.events, max(waiting // 4, 1))
            for i in range(done):
                number = buffers.events[i * EVENT_WORDS]
                bad = max(bad, finish_read(number, buffers.events[i * EVENT_WORDS + 2], request, buffers, shape))
                waiting -= 1
                free[waiting] = number
    return bad
