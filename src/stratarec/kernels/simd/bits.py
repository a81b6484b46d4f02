"""Bits of floats, half floats and unaligned memory access for Numba kernels.

Unaligned addresses are elements of a C-contiguous 1-D uint8 array and are not checked. Bytes are in
the order of the machine, which is little-endian wherever Numba runs.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.extending import intrinsic

_HALF, _FLOAT = ir.HalfType(), ir.FloatType()


def _pointer(context, builder, array_type, array, byte, element):
    view = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(view.data, [byte]), element.as_pointer())


def _load(array, element):
    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args, context.get_value_type(element))
        return builder.load(pointer, align=1)

    return element(array, types.uint64), codegen


def _store(array, element):
    def codegen(context, builder, signature, args):
        array, byte, value = args
        pointer = _pointer(context, builder, signature.args[0], array, byte, value.type)
        builder.store(value, pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, element), codegen


def _bit(context, builder, signature, args):
    """Return the address of the byte with the bit of a row, and the mask of the bit."""
    bits, row = args
    word, byte = ir.IntType(64), ir.IntType(8)
    pointer = _pointer(context, builder, signature.args[0], bits, builder.lshr(row, word(3)), byte)
    return pointer, builder.shl(byte(1), builder.trunc(builder.and_(row, word(7)), byte))


@intrinsic
def load_u16(typingctx, array, byte):
    """Read the uint16 that starts at element `byte`, at any alignment."""
    return _load(array, types.uint16)


@intrinsic
def load_u32(typingctx, array, byte):
    """Read the uint32 that starts at element `byte`, at any alignment."""
    return _load(array, types.uint32)


@intrinsic
def load_u64(typingctx, array, byte):
    """Read the uint64 that starts at element `byte`, at any alignment."""
    return _load(array, types.uint64)


@intrinsic
def load_f32(typingctx, array, byte):
    """Read the float32 that starts at element `byte`, at any alignment."""
    return _load(array, types.float32)


@intrinsic
def store_u16(typingctx, array, byte, value):
    """Write a uint16 from element `byte` on, at any alignment."""
    return _store(array, types.uint16)


@intrinsic
def store_f32(typingctx, array, byte, value):
    """Write a float32 from element `byte` on, at any alignment."""
    return _store(array, types.float32)


@intrinsic
def float_bits(typingctx, value):
    """Return the bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):
    """Return the float32 with the given bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), codegen


def _modulo32(name, operation):
    """Return an intrinsic of two uint32: the builder's `operation`, not widened to 64 bits."""

    def combine(typingctx, first, second):
        def codegen(context, builder, signature, args):
            return getattr(builder, operation)(*args)

        return types.uint32(types.uint32, types.uint32), codegen

    combine.__name__ = name
    return intrinsic(combine)


add32, multiply32 = _modulo32("add32", "add"), _modulo32("multiply32", "mul")


@intrinsic
def select32(typingctx, condition, first, second):
    """Return `first` if the condition holds, else `second`, uint32, without a branch."""

    def codegen(context, builder, signature, args):
        chosen = builder.select(*args)
        chosen.set_metadata("unpredictable", builder.module.add_metadata([]))
        return chosen

    return types.uint32(types.boolean, types.uint32, types.uint32), codegen


@intrinsic
def fold32(typingctx, word, shift):
    """Return ``word ^ (word >> shift)`` of a uint32, without widening it to 64 bits."""

    def codegen(context, builder, signature, args):
        return builder.xor(args[0], builder.lshr(*args))

    return types.uint32(types.uint32, types.uint32), codegen


@intrinsic
def fold_product(typingctx, first, second):
    """Return the exclusive or of both halves of the product, of 128 bits, of two uint64."""

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(word, wide) for word in args))
        halves = (builder.trunc(part, args[0].type) for part in (product, builder.lshr(product, wide(64))))
        return builder.xor(*halves)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def reverse_bytes(typingctx, word):
    """Return the bytes of a uint64 in reverse order."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.bswap(args[0])


def _half_instructions():
    """Return whether Numba compiles for a processor that converts half floats itself.

    For other processors, LLVM calls functions that no library of the process may define. The
    process died at the first such call.
    """
    features = get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return platform.machine() not in ("x86_64", "AMD64") or "+f16c" in features.split(",")


def _to_half(value):
    """Return the bits of the nearest float16 (Giesen, "Float->half variants", 2012)."""
    word = float_bits(value)
    sign, size = (word >> np.uint32(16)) & np.uint32(0x8000), word & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):
        half = np.uint32(0x7E00) | (size >> np.uint32(13)) & np.uint32(0x3FF)
    elif size >= np.uint32(0x47800000):
        half = np.uint32(0x7C00)
    elif size < np.uint32(0x38800000):
        # The addition rounds to a multiple of 2^-24, the step of the smallest half floats.
        half = float_bits(bits_float(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    else:
        odd = size >> np.uint32(13) & np.uint32(1)
        half = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(sign | half)


def _from_half(half):
    """Return the float32 of float16 bits, by integer operations."""
    size = (np.uint32(half) & np.uint32(0x7FFF)) << np.uint32(13)
    if size >= np.uint32(0x0F800000):
        word = np.uint32(size + np.uint32(0x70000000))
    elif size < np.uint32(0x00800000):
        word = float_bits(bits_float(np.uint32(size + np.uint32(0x38800000))) - np.float32(2.0**-14))
    else:
        word = np.uint32(size + np.uint32(0x38000000))
    return bits_float(np.uint32(word | (np.uint32(half) & np.uint32(0x8000)) << np.uint32(16)))


@intrinsic
def to_half(typingctx, value):
    """Return the uint16 bits of the nearest float16, ties to even; infinite from 65520 on."""

    def codegen(context, builder, signature, args):
        if not _half_instructions():
            return context.compile_internal(builder, _to_half, signature, args)
        return builder.bitcast(builder.fptrunc(args[0], _HALF), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def from_half(typingctx, bits):
    """Return the float32 of float16 bits; the conversion is exact."""

    def codegen(context, builder, signature, args):
        if not _half_instructions():
            return context.compile_internal(builder, _from_half, signature, args)
        return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def test_bit(typingctx, bits, row):
    """Return bit ``row & 7`` of byte ``row >> 3`` of a 1-D uint8 array."""
    signature = types.boolean(bits, types.uint64)

    def codegen(context, builder, signature, args):
        pointer, mask = _bit(context, builder, signature, args)
        return builder.icmp_unsigned("!=", builder.and_(builder.load(pointer), mask), ir.IntType(8)(0))

    return signature, codegen


@intrinsic
def set_bit(typingctx, bits, row):
    """Set the bit of a row if it is not set; threads may set other bits of a byte meanwhile."""
    signature = types.void(bits, types.uint64)

    def codegen(context, builder, signature, args):
        pointer, mask = _bit(context, builder, signature, args)
        missing = builder.icmp_unsigned("==", builder.and_(builder.load(pointer), mask), ir.IntType(8)(0))
        with builder.if_then(missing):
            builder.atomic_rmw("or", pointer, mask, "monotonic")
        return context.get_dummy_value()

    return signature, codegen
