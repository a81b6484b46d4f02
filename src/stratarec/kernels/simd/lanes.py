"""Search 32 int32 numbers at once, for Numba kernels.

Numba does not vectorize a search that stops at a match. The functions read 32 elements from `first`
on, so an array needs `PADDING` elements after the last one to search.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
PADDING = LANES - 1

_I32 = ir.IntType(32)
_VECTOR = ir.VectorType(_I32, LANES)


def _load(context, builder, kind, array, element):
    view = context.make_array(kind)(context, builder, array)
    return builder.load(builder.bitcast(builder.gep(view.data, [element]), _VECTOR.as_pointer()), align=4)


def _splat(builder, number):
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(
        first, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_VECTOR, [0] * LANES)
    )


@intrinsic
def find_equal(typingctx, array, first, value):
    """Return the first i < 32 for which int32 ``array[first + i]`` equals `value`, or 32."""
    signature = types.uint64(array, types.uint64, types.int32)

    def codegen(context, builder, signature, args):
        array, first, value = args
        # One comparison for a complete set: with prefetched sets and no branch on a hit, looking up
        # a batch of 16,384 and choosing victims took 2.7 ms instead of 8.9.
        lanes = _load(context, builder, signature.args[0], array, first)
        equal = builder.bitcast(builder.icmp_signed("==", lanes, _splat(builder, value)), _I32)
        # A bit beyond the last lane marks the end of the search.
        bits = builder.or_(builder.zext(equal, ir.IntType(64)), ir.Constant(ir.IntType(64), 1 << LANES))
        return builder.cttz(bits, ir.IntType(1)(1))

    return signature, codegen


def _within(builder, count):
    """Return a mask of the lanes whose number is below `count`, a uint64."""
    beyond = ir.Constant(ir.IntType(64), LANES)
    count = builder.select(builder.icmp_unsigned("<", count, beyond), count, beyond)
    return builder.icmp_signed(
        "<", ir.Constant(_VECTOR, list(range(LANES))), _splat(builder, builder.trunc(count, _I32))
    )


def _reduce(builder, operation, within, lanes, other):
    """Return the minimum or maximum of a vector of int32.

    `operation` is smin or smax. Lanes whose mask `within` is false are replaced by the number
    `other` first.
    """
    lanes = builder.select(within, lanes, ir.Constant(_VECTOR, [other] * LANES))
    kind = ir.FunctionType(_I32, [_VECTOR])
    reduce = builder.module.declare_intrinsic(f"llvm.vector.reduce.{operation}.v{LANES}i32", fnty=kind)
    return builder.call(reduce, [lanes])


@intrinsic
def least(typingctx, array, first, count):
    """Return the minimum of ``array[first:first + min(count, 32)]``, int32."""
    signature = types.int32(array, types.uint64, types.uint64)

    def codegen(context, builder, signature, args):
        array, first, count = args
        lanes = _load(context, builder, signature.args[0], array, first)
        return _reduce(builder, "smin", _within(builder, count), lanes, 0x7FFFFFFF)

    return signature, codegen


@intrinsic
def largest_below(typingctx, array, keys, first, count, limit):
    """Return the maximum of 0 and each ``array[i]``, int32, whose ``keys[i]``, int32, is below
    `limit`.

    i runs over ``first:first + min(count, 32)``.
    """
    signature = types.int32(array, keys, types.uint64, types.uint64, types.int32)

    def codegen(context, builder, signature, args):
        array, keys, first, count, limit = args
        lanes = _load(context, builder, signature.args[0], array, first)
        below = builder.icmp_signed(
            "<", _load(context, builder, signature.args[1], keys, first), _splat(builder, limit)
        )
        return _reduce(builder, "smax", builder.and_(below, _within(builder, count)), lanes, 0)

    return signature, codegen
