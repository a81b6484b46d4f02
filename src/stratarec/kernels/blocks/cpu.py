"""Numba kernels of checksummed blocks; `shape` is a `Shape`, `state` is `Buffer.state`.

To compute the checksum, each word is combined with its position in the cell and mapped by a
bijection; the results are added. A change of one word changes exactly one term, and therefore
always the sum, of which a cell with a tag of 4 bytes stores half. The loop is vectorized.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types, uint64

from stratarec.kernels.bit_rows.cpu import copy_bytes
from stratarec.kernels.random.cpu import GOLDEN, mix
from stratarec.kernels.simd.prefetch import prefetch

AHEAD = 16
U = np.uint64
# Entries of `Buffer.state`.
BASE = 0
FIRST = 1
NEXT = 2
LIMIT = 3
ALIGNMENT = 4096
# Number of consecutive reads without new bytes, after which a block counts as unreadable.
TRIES = 8

# Called by its symbol, not by a ctypes pointer: machine code that contains an address cannot be
# cached.
pread = types.ExternalFunction("pread", types.int64(types.int32, types.uint64, types.uint64, types.int64))


@njit(nogil=True, cache=True, inline="always")
def term(word, i):
    product = (word ^ (U(i) * U(0x9E3779B97F4A7C15))) * U(0xBF58476D1CE4E5B9)
    return (product ^ (product >> U(32))) * U(0x94D049BB133111EB)


@njit(nogil=True, cache=True, inline="always")
def checksum_bits(shape):
    """Return a mask of the bits of a cell's first word that hold the checksum, not the tag."""
    return U(0xFFFFFFFF) if shape.tag_words == 1 else ~U(0)


@njit(nogil=True, cache=True)
def checksum(words, first, shape, sequence, cell):
    """Return the checksum of the cell at ``words[first]``, number `cell` of its segment."""
    start, bits = U(first), checksum_bits(shape)
    total = term(words[start] & ~bits, 0)
    # A sum of independent products vectorizes; a chained hash would wait for each word. The
    # position of a word is part of its term, so that swapped words are detected.
    for i in range(U(1), U(shape.cell_words)):
        total += term(words[start + i], i)
    return mix(total ^ mix(uint64(sequence) * GOLDEN + uint64(cell))) & bits


@njit(nogil=True, cache=True)
def is_intact(words, first, shape, sequence, cell):
    """Whether the checksum of the cell at ``words[first]`` is right."""
    return words[U(first)] & checksum_bits(shape) == checksum(words, first, shape, sequence, cell)


@njit(nogil=True, cache=True)
def seal(words, shape, blocks, sequence, first_block):
    """Compute and store the checksum of every cell of the first `blocks` blocks in `words`, also of
    empty cells.
    """
    bits = checksum_bits(shape)
    for b in range(blocks):
        for k in range(shape.per_block):
            first = b * shape.block_words + k * shape.cell_words
            value = checksum(words, first, shape, sequence, (first_block + b) * shape.per_block + k)
            words[U(first)] = (words[U(first)] & ~bits) | value


@njit(nogil=True, cache=True)
def first_damaged(words, shape, blocks, sequence, first_block):
    """Return the index of the first damaged one of `blocks` blocks in `words`, or -1."""
    for b in range(blocks):
        for k in range(shape.per_block):
            first = b * shape.block_words + k * shape.cell_words
            if not is_intact(words, first, shape, sequence, (first_block + b) * shape.per_block + k):
                return b
        for i in range(shape.per_block * shape.cell_words, shape.block_words):
            if words[U(b * shape.block_words + i)] != U(0):
                return b
    return -1


@njit(nogil=True, cache=True, inline="always")
def cell_place(shape, cell):
    """Return the byte offset of a cell, counted from the cell 0 that is at offset 0."""
    block = cell // shape.per_block
    return 8 * (block * shape.block_words + (cell - block * shape.per_block) * shape.cell_words)


@njit(nogil=True, cache=True, inline="always")
def record_place(shape, place):
    """Return the byte offset of the record in the cell at byte `place`."""
    return place + shape.tag_words * 8


@njit(nogil=True, cache=True, inline="always")
def tag_of(words, shape, place):
    """Return the tag of the cell at byte `place` of the 64-bit `words`."""
    first = U(place >> 3)
    return words[first] >> U(32) if shape.tag_words == 1 else words[first + U(1)]


@njit(nogil=True, cache=True, inline="always")
def put(buffer, shape, row, source, start):
    """Copy a record into the next cell of the buffer; return its location."""
    state, words, data = buffer
    place = cell_place(shape, state[NEXT] - state[FIRST])
    first = U(place >> 3)
    if shape.tag_words == 1:
        words[first] = U(row + 1) << U(32)
    else:
        words[first + U(1)] = U(row + 1)
    copy_bytes(source, U(start), data, U(record_place(shape, place)), U(shape.record_bytes))
    state[NEXT] += 1
    return state[BASE] + state[NEXT]


@njit(nogil=True, cache=True)
def append(rows, entries, records, begin, index, buffer, shape):
    """Copy the records of rows[entries[begin:]] into the buffer; return the index of the first
    entry that did not fit.

    If the buffer already contains a record of the row, the new record overwrites it and takes no
    more file space.
    """
    locations, changed, live = index
    state, _, data = buffer
    per_segment = shape.per_block * shape.segment_blocks
    for k in range(begin, len(entries)):
        prefetch(locations, rows[entries[min(k + AHEAD, len(entries) - 1)]])
        i = entries[k]
        row = rows[i]
        cell = np.int64(locations[U(row)]) - 1
        inside = cell - state[BASE] - state[FIRST]
        if cell >= 0 and inside >= 0 and inside < state[NEXT] - state[FIRST]:
            target = record_place(shape, cell_place(shape, inside))
            copy_bytes(records, U(i * shape.record_bytes), data, U(target), U(shape.record_bytes))
            continue
        if state[NEXT] == state[LIMIT]:
            return k
        # The old record is dead. Its space becomes free only when compaction empties its segment.
        if cell >= 0:
            live[cell // per_segment] -= 1
        locations[U(row)] = put(buffer, shape, row, records, i * shape.record_bytes)
        live[state[BASE] // per_segment] += 1
        # No atomics: one writer at a time, under the store's lock.
        changed[U(row >> 3)] |= np.uint8(1) << np.uint8(row & 7)
    return len(entries)


@njit(nogil=True, cache=True)
def relocate(source_words, source, first_cell, begin, cells, index, buffer, shape):
    """Move the live records of `cells` cells in memory into the buffer; return the first cell that
    did not fit.

    `source` contains complete blocks, whose first cell has number `first_cell`. A record is live if
    the location of its row is this cell.
    """
    locations, changed, live = index
    state = buffer.state
    per_segment = shape.per_block * shape.segment_blocks
    for i in range(begin, cells):
        place = cell_place(shape, i)
        tag = tag_of(source_words, shape, place)
        if tag == U(0):
            continue
        row = tag - U(1)
        # Skip a record that is outdated, perhaps since its block was read. The caller holds the
        # lock until the record has its new location.
        if U(locations[row]) != U(first_cell + i + 1):
            continue
        if state[NEXT] == state[LIMIT]:
            return i
        locations[row] = put(buffer, shape, np.int64(row), source, record_place(shape, place))
        live[first_cell // per_segment] -= 1
        live[state[BASE] // per_segment] += 1
        changed[row >> U(3)] |= np.uint8(1) << np.uint8(row & U(7))
    return cells


@njit(nogil=True, cache=True, inline="always")
def from_buffer(cell, buffer, shape, out, place):
    """Copy the record of `cell` to `out` if it is in the buffer; return whether it is."""
    state, _, data = buffer
    inside = cell - state[BASE] - state[FIRST]
    if inside < 0 or inside >= state[NEXT] - state[FIRST]:
        return False
    source = record_place(shape, cell_place(shape, inside))
    copy_bytes(data, U(source), out, U(place), U(shape.record_bytes))
    return True


@njit(nogil=True, cache=True)
def find(rows, entries, locations, front, back, shape, out, written, cells):
    """Copy the records of rows[entries] that are in one of the two buffers; list the cells of all
    others.

    ``written[i]`` is set to whether row ``rows[i]`` has a record. Returns the number n of cells
    listed; ``entries[:n]`` becomes their entries.
    """
    count = 0
    for k in range(len(entries)):
        prefetch(locations, rows[entries[min(k + AHEAD, len(entries) - 1)]])
        i = entries[k]
        cell = np.int64(locations[U(rows[i])]) - 1
        # New memory is zero, so location 0 is a row that was never written.
        written[i] = cell >= 0
        if cell < 0:
            continue
        place = i * shape.record_bytes
        if from_buffer(cell, front, shape, out, place) or from_buffer(cell, back, shape, out, place):
            continue
        cells[count] = cell
        entries[count] = i
        count += 1
    return count


@njit(nogil=True, cache=True)
def read_on(descriptor, address, size, offset, got):
    """Continue an incomplete read of `size` bytes; return the number of bytes read in all.

    `got` is the number of bytes that arrived, or a negative error code. A signal, a network or a
    busy device may cut a read short, which does not mean damage. Reads begin at aligned offsets.
    """
    got, tries = max(np.int64(got), np.int64(0)), TRIES
    while got < size and tries > 0:
        # Direct reads begin at blocks of the device, so a block that was read in part is read
        # again.
        done = got // ALIGNMENT * ALIGNMENT
        more = pread(np.int32(descriptor), U(address + done), U(size - done), offset + done)
        # No more bytes: the file was truncated.
        if more == 0:
            break
        if done + more > got:
            got = done + more
        else:
            tries -= 1
    return got


@njit(nogil=True, cache=True)
def read_checked(descriptor, sequence, first, blocks, words, shape):
    """Read `blocks` blocks of a segment, from block `first` on, into `words` (aligned) and verify
    them.

    Returns -1, or the index of a failed block in `words`.
    """
    block_bytes = shape.block_words * 8
    got = read_on(descriptor, words.ctypes.data, blocks * block_bytes, first * block_bytes, 0)
    complete = max(got, 0) // block_bytes
    bad = first_damaged(words, shape, complete, sequence, first)
    if bad < 0 and complete < blocks:
        return complete
    return bad


@njit(nogil=True, cache=True)
def verify_segment(descriptor, sequence, first, last, scratch, shape):
    """Read and verify blocks [first, last) of a segment; return a failed block, or -1."""
    most = len(scratch) // shape.block_words
    while first < last:
        count = min(most, last - first)
        bad = read_checked(descriptor, sequence, first, count, scratch, shape)
        if bad >= 0:
            return first + bad
        first += count
    return -1


@njit(nogil=True, cache=True)
def count_live(locations, live, blocks, shape):
    """Count the live cells of each segment into `live`.

    Returns -1, or the first row whose location is not in a block that was written.
    """
    per_segment = U(shape.per_block * shape.segment_blocks)
    per_block = U(shape.per_block)
    for row in range(len(locations)):
        location = U(locations[U(row)])
        if location == U(0):
            continue
        slot = (location - U(1)) // per_segment
        # Locations come from a file: the unsigned comparison rejects all values out of range.
        if slot >= U(len(live)) or (location - U(1) - slot * per_segment) // per_block >= U(blocks[slot]):
            return row
        live[slot] += 1
    return -1
