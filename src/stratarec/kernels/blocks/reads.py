"""Read the records of many cells with few, concurrent reads."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.bit_rows.cpu import copy_bytes
from stratarec.kernels.blocks.aio import EVENT_WORDS, collect, fill_request, submit
from stratarec.kernels.blocks.cpu import cell_place, is_intact, read_on, record_place, tag_of

U = np.uint64
# Columns of `ReadBuffers.spans`. The last two are bytes of the segment file.
FIRST = 0
LAST = 1
BEGIN = 2
SIZE = 3
# Cells with at most this many bytes between them share a read: a read costs the processor 2 to 3
# us, whatever its size. With 4096, reading 7,000 of 300,000 records took 1.75 us a record instead
# of 1.12.
GAP = 8192


@njit(nogil=True, cache=True)
def next_read(cells, first, most, alignment, shape, span):
    """Set `span` to one read: the cells from `first` on that are near each other in one segment, up
    to `most` bytes.
    """
    per_segment = shape.per_block * shape.segment_blocks
    slot = cells[first] // per_segment
    begin = cell_place(shape, cells[first] - slot * per_segment) // alignment * alignment
    last, stop = first, begin
    while last < len(cells) and cells[last] // per_segment == slot:
        place = cell_place(shape, cells[last] - slot * per_segment)
        # Blocks are multiples of every alignment, so a read never goes beyond the last block.
        end = -(-(place + shape.cell_words * 8) // alignment) * alignment
        if last > first and (place > stop + GAP or end - begin > most):
            break
        stop = max(stop, end)
        last += 1
    span[FIRST] = first
    span[LAST] = last
    span[BEGIN] = begin
    span[SIZE] = stop - begin


@njit(nogil=True, cache=True)
def take_records(number, got, request, buffers, shape):
    """Verify the cells of read `number`, which returned `got` bytes, and copy their records to
    `request.out`.

    Returns -1, or the number of a failed block.
    """
    span, offset = buffers.spans[number], number * (len(buffers.data) // len(buffers.spans))
    per_segment = shape.per_block * shape.segment_blocks
    slot = request.cells[span[FIRST]] // per_segment
    for i in range(span[FIRST], span[LAST]):
        cell = request.cells[i] - slot * per_segment
        local = cell_place(shape, cell) - span[BEGIN]
        place, entry = offset + local, request.entries[i]
        if local + shape.cell_words * 8 > got or not is_intact(
            buffers.words, place >> 3, shape, request.sequences[slot], cell
        ):
            return request.cells[i] // shape.per_block
        # A damaged location may point to an intact cell with another row's record.
        if tag_of(buffers.words, shape, place) != U(request.rows[entry] + 1):
            return request.cells[i] // shape.per_block
        start = U(record_place(shape, place))
        copy_bytes(buffers.data, start, request.out, U(entry * shape.record_bytes), U(shape.record_bytes))
    return -1


@njit(nogil=True, cache=True)
def finish_read(number, got, request, buffers, shape):
    """If read `number` is incomplete, finish it synchronously; verify its cells and copy their
    records.

    Returns -1, or the number of a failed block.
    """
    span = buffers.spans[number]
    if got < span[SIZE]:
        slot = request.cells[span[FIRST]] // (shape.per_block * shape.segment_blocks)
        address = buffers.words.ctypes.data + number * (len(buffers.data) // len(buffers.spans))
        got = read_on(request.descriptors[slot], address, span[SIZE], span[BEGIN], got)
    return take_records(number, got, request, buffers, shape)


@njit(nogil=True, cache=True)
def read_cells(context, request, buffers, alignment, shape):
    """Read the records of `request.cells` and copy each to its entry of `request.out`; return -1,
    or a failed block.

    Cells that are near each other are read at once. Reads begin and end at multiples of
    `alignment`. Reads that the context does not accept are synchronous.
    """
    depth, size = len(buffers.spans), len(buffers.data) // len(buffers.spans)
    cells, per_segment = request.cells, shape.per_block * shape.segment_blocks
    # `free[waiting:]` are the numbers of unused reads; the other reads are in flight.
    free = np.arange(depth)
    first, waiting, bad = 0, 0, np.int64(-1)
    # After a failure no read is started. Reads in flight are still awaited, because they write into
    # these buffers.
    while waiting > 0 or (first < len(cells) and bad < 0):
        count = 0
        while first < len(cells) and bad < 0 and count < depth - waiting:
            number = free[waiting + count]
            span = buffers.spans[number]
            next_read(cells, first, size, alignment, shape, span)
            descriptor = request.descriptors[cells[first] // per_segment]
            address = buffers.words.ctypes.data
            buffers.addresses[count] = fill_request(
                buffers.requests, number, descriptor, address + number * size, span[SIZE], span[BEGIN]
            )
            first = span[LAST]
            count += 1
        accepted = submit(context, buffers.addresses, count)
        for i in range(waiting + accepted, waiting + count):
            bad = max(bad, finish_read(free[i], 0, request, buffers, shape))
        waiting += accepted
        if waiting > 0:
            # Wait for a quarter of the reads: that takes fewer calls than one at a time, and the
            # device is never idle.
            done = collect(context, buffers.events, max(waiting // 4, 1))
            for i in range(done):
                number = buffers.events[i * EVENT_WORDS]
                bad = max(
                    bad, finish_read(number, buffers.events[i * EVENT_WORDS + 2], request, buffers, shape)
                )
                waiting -= 1
                free[waiting] = number
    return bad
