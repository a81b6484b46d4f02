"""Rows of a width known at compile time, held in vector registers, for Numba kernels.

Numba vectorises loops over a row only behind tests for overlap and for short rows, and keeps a running sum in memory.
A `Row` is one LLVM vector of D float32 instead: loading, adding and storing it are straight vector moves, and a sum
over a row's gradients never leaves the registers.
"""

from __future__ import annotations

import math
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
"""float32 values in a cache line and in the widest vector register."""

_WIDEST = 256

_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)


@cache
def blocks(width: int) -> tuple[int, bool]:
    """The constants that kernels for rows of `width` are compiled for: lanes of a block, and whether it is the row."""
    # Rows of ten floats went in pairs, as 10 is no multiple of 4: 1.35 ms a backward; as one vector 0.89.
    whole = (width % LANES == 0 and width <= _WIDEST) or width < LANES
    # A row of 100 as one vector was twice as slow as blocks of 4, since LLVM widens it to 128.
    lanes = width if whole else next(lanes for lanes in (256, 128, 64, 32, 16, 8, 4, 2, 1) if width % lanes == 0)
    return lanes, whole


class Row(types.Type):
    """D float32 values."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(f"Row({width})")


@register_model(Row)
class _RowModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(_FLOAT, kind.width))


def _address(context, builder, kind, array, element, width):
    """A pointer to a vector of `width` at ``array[element]`` of a C-contiguous 1-D array."""
    view = context.make_array(kind)(context, builder, array)
    number = _I16 if kind.dtype == types.uint16 else _FLOAT
    return builder.bitcast(builder.gep(view.data, [element]), ir.VectorType(number, width).as_pointer())


def _splat(kind, number, width):
    return ir.Constant(ir.VectorType(kind, width), [number] * width)


def _widen(builder, halves, width):
    """The float32 that bfloat16 bits are."""
    words = builder.zext(halves, ir.VectorType(_I32, width))
    return builder.bitcast(builder.shl(words, _splat(_I32, 16, width)), ir.VectorType(_FLOAT, width))


def _narrow(builder, row, width):
    """The bits of the nearest bfloat16, ties to even; what is no number stays so."""
    words = builder.bitcast(row, ir.VectorType(_I32, width))
    odd = builder.and_(builder.lshr(words, _splat(_I32, 16, width)), _splat(_I32, 1, width))
    rounded = builder.add(words, builder.add(odd, _splat(_I32, 0x7FFF, width)))
    kept = builder.select(builder.fcmp_unordered("uno", row, row), _splat(_I32, 0x7FC00000, width), rounded)
    return builder.trunc(builder.lshr(kept, _splat(_I32, 16, width)), ir.VectorType(_I16, width))


@intrinsic(prefer_literal=True)
def load(typingctx, array, element, width):
    """``array[element:element + width]`` as a `Row`; `width` is a constant.

    The array is of float32, or of uint16 that are the bits of bfloat16.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes = width.literal_value
    signature = Row(lanes)(array, types.uint64, width)

    def codegen(context, builder, signature, args):
        half = signature.args[0].dtype == types.uint16
        address = _address(context, builder, signature.args[0], args[0], args[1], lanes)
        found = builder.load(address, align=2 if half else 4)
        return _widen(builder, found, lanes) if half else found

    return signature, codegen


@intrinsic
def store(typingctx, array, element, row):
    """``array[element:element + D] = row``, rounded where the array is of bfloat16 bits."""
    signature = types.void(array, types.uint64, row)

    def codegen(context, builder, signature, args):
        half, width = signature.args[0].dtype == types.uint16, signature.args[2].width
        address = _address(context, builder, signature.args[0], args[0], args[1], width)
        builder.store(_narrow(builder, args[2], width) if half else args[2], address, align=2 if half else 4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def stream(typingctx, array, element, row):
    """`store` past the caches, which spares reading the lines first; the address must be a multiple of 64 bytes."""
    signature = types.void(array, types.uint64, row)

    def codegen(context, builder, signature, args):
        kind = signature.args[2]
        place = _address(context, builder, signature.args[0], args[0], args[1], kind.width)
        stored = builder.store(args[2], place, align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add(typingctx, one, other):
    """Sum of two rows."""

    def codegen(context, builder, signature, args):
        return builder.fadd(args[0], args[1])

    return one(one, other), codegen


@intrinsic
def subtract(typingctx, one, other):
    """Difference of two rows."""

    def codegen(context, builder, signature, args):
        return builder.fsub(args[0], args[1])

    return one(one, other), codegen


@intrinsic
def multiply(typingctx, one, other):
    """Element-wise product of two rows."""

    def codegen(context, builder, signature, args):
        return builder.fmul(args[0], args[1])

    return one(one, other), codegen


@intrinsic
def divide(typingctx, one, other):
    """Element-wise quotient of two rows."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(args[0], args[1])

    return one(one, other), codegen


@intrinsic
def square_root(typingctx, row):
    """Element-wise root of a row, correctly rounded."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(args[0].type, [args[0].type])
        name = f"llvm.sqrt.v{signature.args[0].width}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [args[0]])

    return row(row), codegen


@intrinsic
def passed(typingctx, row, by):
    """`row` where `by` is above zero or no number, else zero."""

    def codegen(context, builder, signature, args):
        zeros = _splat(_FLOAT, 0.0, signature.args[0].width)
        return builder.select(builder.fcmp_ordered("<=", args[1], zeros), zeros, args[0])

    return row(row, by), codegen


@intrinsic(prefer_literal=True)
def broadcast(typingctx, number, width):
    """A row of `width` times `number`; `width` is a constant."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes = width.literal_value
    signature = Row(lanes)(types.float32, width)

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(_FLOAT, lanes)
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), args[0], _I32(0))
        return builder.shuffle_vector(
            first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        )

    return signature, codegen


@intrinsic
def multiply_add(typingctx, one, other, sum):
    """``sum + one * other``, rounded once where the machine can."""

    def codegen(context, builder, signature, args):
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(args[2], product, flags=("contract",))

    return one(one, other, sum), codegen


def _part(builder, vector, places, other=None):
    """The elements `places` of `vector`, or of the two vectors one after the other."""
    mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, mask)


def _fold(builder, vector, width):
    """Up to 16 partial sums: lanes of 16, block after block."""
    lanes = math.gcd(width, LANES)
    found = _part(builder, vector, list(range(lanes)))
    for first in range(lanes, width, lanes):
        found = builder.fadd(found, _part(builder, vector, list(range(first, first + lanes))))
    return found, lanes


@intrinsic
def total(typingctx, row):
    """Sum of a row in a fixed order: 16 lanes, block after block, then halves.

    The order is part of the result's bits, so it is spelled out rather than left to the compiler and the machine.
    """

    def codegen(context, builder, signature, args):
        found, lanes = _fold(builder, args[0], signature.args[0].width)
        while lanes > 1:
            lanes //= 2
            low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
            found = builder.fadd(_part(builder, found, low), _part(builder, found, high))
        return builder.extract_element(found, _I32(0))

    return types.float32(row), codegen


@intrinsic
def store_totals(typingctx, array, element, one, two, three, four):
    """``array[element:element + 4]`` = `total` of each of four rows, with half the shuffles of four calls."""
    signature = types.void(array, types.uint64, one, two, three, four)

    def codegen(context, builder, signature, args):
        parts = [_fold(builder, row, one.width)[0] for row in args[2:]]
        lanes = math.gcd(one.width, LANES)
        while lanes > 1 or len(parts) > 1:
            if len(parts) > 1:
                # Two vectors side by side from here on, so that one addition halves both.
                size = parts[0].type.count
                parts = [
                    _part(builder, left, list(range(2 * size)), right)
                    for left, right in zip(parts[::2], parts[1::2], strict=True)
                ]
            if lanes > 1:
                size, half = parts[0].type.count, lanes // 2
                low = [place for place in range(size) if place % lanes < half]
                high = [place + half for place in low]
                parts = [builder.fadd(_part(builder, part, low), _part(builder, part, high)) for part in parts]
                lanes = half
        builder.store(parts[0], _address(context, builder, signature.args[0], args[0], args[1], 4), align=4)
        return context.get_dummy_value()

    return signature, codegen
