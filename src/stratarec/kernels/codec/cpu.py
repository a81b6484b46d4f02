"""Numba functions that encode and decode rows; a row's kind is looked up once per row.

`form` is a `Form`; `level` is a tuple of the arrays of all slots: weights, row state, full state
and clocks.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.codec.kinds.base import U, W
from stratarec.kernels.codec.kinds.floats import get_bf16, get_fp32, put_bf16, put_fp32
from stratarec.kernels.random.cpu import GOLDEN, mix
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.bits import bits_float, float_bits, load_f32, store_f32
from stratarec.kernels.simd.prefetch import prefetch

# Number of entries to prefetch ahead. Exchanging a cold row takes 165 ns, 47 of them for its cache
# lines; distances of 4, 8 and 20 were as good.
AHEAD = 12


def encoder(kinds, code=0):
    """Return a compiled function that encodes by the kind of `form`; it tests the kind once per
    row, outside loops.
    """
    first = kinds[0].encode
    if len(kinds) == 1:
        return first
    others = encoder(kinds[1:], code + 1)

    @njit(**BODY)
    def choose(form, values, start, records, at, base):
        if form.kind == code:
            return first(form, values, start, records, at, base)
        return others(form, values, start, records, at, base)

    return choose


def decoder(kinds, code=0):
    """Return one compiled function that decodes by the kind of `form`; see `encoder`."""
    first = kinds[0].decode
    if len(kinds) == 1:
        return first
    others = decoder(kinds[1:], code + 1)

    @njit(**BODY)
    def choose(form, values, start, records, at):
        if form.kind == code:
            first(form, values, start, records, at)
        else:
            others(form, values, start, records, at)

    return choose


IS_CACHED = KINDS.close()
encode_weights = encoder(tuple(KINDS.values()))
decode_weights = decoder(tuple(KINDS.values()))


@njit(**BODY)
def encode_state(form, values, start, count, records, at, base, column):
    # Never round to nearest: updates below half a step of bfloat16 would always be lost, and a sum
    # would stop growing.
    if form.wide_state:
        return put_fp32(values, start, count, records, at)
    return put_bf16(values, start, count, records, at, base, column)


@njit(**BODY)
def decode_state(form, values, start, count, records, at):
    if form.wide_state:
        get_fp32(values, start, count, records, at)
    else:
        get_bf16(values, start, count, records, at)


@njit(**BODY)
def prefetch_lines(array, first, count, line):
    """Prefetch all cache lines of ``array[first:first + count]``; a line has `line` elements."""
    for element in range(first, first + count, line):
        prefetch(array, element)
    # A row may start anywhere in a line, so it may touch one line more than its length suggests.
    prefetch(array, first + count - U(1))


@njit(**BODY)
def prefetch_slot(form, level, slot):
    weights, row_state, full_state, clock = level
    D = U(form.width)
    prefetch_lines(weights, slot * D, D, U(16))
    if form.row_state:
        prefetch(row_state, slot)
    if form.full_state:
        floats = U(form.full_state) * D
        prefetch_lines(full_state, slot * floats, floats, U(16))
    if form.clock_at < form.record_bytes:
        prefetch(clock, slot)


@njit(**BODY)
def encode_row(form, level, slot, records, at, key, key_of_batch):
    """Encode a slot into the record at byte `at`; return whether its numbers fit the codec."""
    weights, row_state, full_state, clock = level
    D, full = U(form.width), U(form.full_state) * U(form.width)
    base = mix(key ^ key_of_batch)
    valid = encode_weights(form, weights, slot * D, records, at, base)
    # Columns of the noise: first the weights, from column D the full state, then the row state.
    # These numbers determine bytes, so they are part of the format.
    if form.row_state:
        valid &= encode_state(
            form, row_state, slot, U(1), records, at + U(form.row_state_at), base, D + max(D, full)
        )
    if full:
        valid &= encode_state(
            form, full_state, slot * full, full, records, at + U(form.full_state_at), base, D
        )
    if form.clock_at < form.record_bytes:
        store_f32(records, at + U(form.clock_at), bits_float(W(clock[slot])))
    return valid


@njit(**BODY)
def decode_row(form, records, at, level, slot):
    """Decode the record at byte `at` into a slot."""
    weights, row_state, full_state, clock = level
    D, full = U(form.width), U(form.full_state) * U(form.width)
    decode_weights(form, weights, slot * D, records, at)
    if form.row_state:
        decode_state(form, row_state, slot, U(1), records, at + U(form.row_state_at))
    if full:
        decode_state(form, full_state, slot * full, full, records, at + U(form.full_state_at))
    if form.clock_at < form.record_bytes:
        clock[slot] = np.int32(float_bits(load_f32(records, at + U(form.clock_at))))


@njit(**BODY)
def batch_key(batch_number):
    """Return the word that is mixed into the noise keys of rows encoded for this batch."""
    return mix(batch_number * GOLDEN + U(1))


@njit(**BODY)
def encode_chunks(member, counter, form, level, slots, records, places, keys, batch_number, bad):
    """Encode slots[i] into record places[i] of flat `records`; set ``bad[chunk]`` to its first
    invalid entry.
    """
    count = len(slots)
    chunks = len(bad)
    size = U(form.record_bytes)
    key_of_batch = batch_key(batch_number)
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            j = min(i + AHEAD, last - 1)
            prefetch_slot(form, level, U(slots[j]))
            prefetch_lines(records, U(places[j]) * size, size, U(64))
            if not encode_row(
                form, level, U(slots[i]), records, U(places[i]) * size, keys[i], key_of_batch
            ):
                # The smallest of all chunks is the first invalid entry, whichever thread met it.
                bad[chunk] = i
                break


@njit(nogil=True, cache=IS_CACHED)
def encode(team, form, level, slots, records, places, keys, batch_number, chunks):
    """Encode every entry; return the first invalid entry, or the number of entries."""
    counter, bad = stack_array(1, np.int64), np.full(chunks, len(slots), np.int64)
    # Run on the team's threads, which are awake. When staging, encoding and decoding ran on a
    # separate pool of threads, a step of 26 tables (D = 64, batch 2,048) took 12.5 ms instead of
    # 6.6.
    run_team(team, encode_chunks, (counter, form, level, slots, records, places, keys, batch_number, bad))
    return bad.min()


@njit(**BODY)
def decode_chunks(member, counter, form, records, places, level, slots, chunks):
    """Decode record places[i] of flat `records` into slots[i]."""
    count, size = len(slots), U(form.record_bytes)
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            j = min(i + AHEAD, last - 1)
            prefetch_slot(form, level, U(slots[j]))
            prefetch_lines(records, U(places[j]) * size, size, U(64))
            decode_row(form, records, U(places[i]) * size, level, U(slots[i]))


@njit(nogil=True, cache=IS_CACHED)
def decode(team, form, records, places, level, slots, chunks):
    """Decode record places[i] of flat `records` into slots[i], for every entry i."""
    run_team(team, decode_chunks, (stack_array(1, np.int64), form, records, places, level, slots, chunks))
