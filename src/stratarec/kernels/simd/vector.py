"""Rows of a width known at compile time, in vector registers, for Numba kernels.

Numba vectorizes loops over a row only behind tests for overlap and for short rows, and keeps a
running sum in memory. A `Row` instead is D float32 numbers in a few LLVM vectors: loading, adding
and storing a row are plain vector instructions, and a sum over a row's gradients stays in
registers.
"""

from __future__ import annotations

import math
from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

# Number of float32 values in a cache line, and in the widest vector register.
LANES = 16

_WIDEST = 128

_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)


@cache
def blocks(width: int, multiple: int = 1) -> tuple[int, bool]:
    """Return the constants of kernels for rows of `width`: lanes of a block, and whether a row is a
    single block.

    The number of lanes is a multiple of `multiple`, which divides `width`.
    """
    # Use as few blocks of equal size as possible.
    lanes = next(
        width // parts
        for parts in range(-(-width // _WIDEST), width + 1)
        if width % (parts * multiple) == 0
    )
    return lanes, lanes == width


class Row(types.Type):
    """Numba type of a row of D float32 values."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(f"Row({width})")


@register_model(Row)
class _RowModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        vectors = [ir.VectorType(_FLOAT, size) for size in _sizes(kind.width)]
        super().__init__(manager, kind, vectors[0] if len(vectors) == 1 else ir.LiteralStructType(vectors))


def _sizes(width):
    """Return the sizes of the vectors of a row: powers of two, the largest first.

    LLVM would widen a single vector of 100 to 128, which was twice as slow as blocks of 4. It would
    split a vector of 15 into scalars: steps with rows of 444 (four times 111) took twice as long as
    with rows of 448.
    """
    return [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]


def _vectors(builder, row):
    """Return the LLVM vectors that together are a `Row`, in the order of `_sizes`."""
    if isinstance(row.type, ir.VectorType):
        return [row]
    return [builder.extract_value(row, place) for place in range(len(row.type.elements))]


def _row(builder, vectors):
    """Return the row that consists of the given vectors."""
    if len(vectors) == 1:
        return vectors[0]
    row = ir.Constant(ir.LiteralStructType([vector.type for vector in vectors]), ir.Undefined)
    for place, vector in enumerate(vectors):
        row = builder.insert_value(row, vector, place)
    return row


def _by_vectors(builder, operation, *rows):
    """Apply `operation` to the first vector of every row, then to the second, and so on; return the
    resulting row.
    """
    return _row(
        builder,
        [operation(*parts) for parts in zip(*(_vectors(builder, row) for row in rows), strict=True)],
    )


def _addresses(context, builder, kind, array, element, width):
    """Return pointers to the vectors of the row from ``array[element]`` on, 1-D C-contiguous."""
    view = context.make_array(kind)(context, builder, array)
    number = _I16 if kind.dtype == types.uint16 else _FLOAT
    first = builder.gep(view.data, [element])
    addresses = []
    for size in _sizes(width):
        addresses.append(builder.bitcast(first, ir.VectorType(number, size).as_pointer()))
        first = builder.gep(first, [_I32(size)])
    return addresses


def _splat(kind, number, width):
    return ir.Constant(ir.VectorType(kind, width), [number] * width)


def _widen(builder, halves, width):
    """Return the float32 numbers with the given bfloat16 bits."""
    words = builder.zext(halves, ir.VectorType(_I32, width))
    return builder.bitcast(builder.shl(words, _splat(_I32, 16, width)), ir.VectorType(_FLOAT, width))


def _narrow(builder, row, width):
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    words = builder.bitcast(row, ir.VectorType(_I32, width))
    odd = builder.and_(builder.lshr(words, _splat(_I32, 16, width)), _splat(_I32, 1, width))
    rounded = builder.add(words, builder.add(odd, _splat(_I32, 0x7FFF, width)))
    bits = builder.select(builder.fcmp_unordered("uno", row, row), _splat(_I32, 0x7FC00000, width), rounded)
    return builder.trunc(builder.lshr(bits, _splat(_I32, 16, width)), ir.VectorType(_I16, width))


@intrinsic(prefer_literal=True)
def load(typingctx, array, element, width):
    """Return ``array[element:element + width]`` as a `Row`; `width` is a constant.

    The array holds float32, or bfloat16 bits as uint16.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes = width.literal_value
    signature = Row(lanes)(array, types.uint64, width)

    def codegen(context, builder, signature, args):
        half = signature.args[0].dtype == types.uint16
        parts = [
            builder.load(address, align=2 if half else 4)
            for address in _addresses(context, builder, signature.args[0], args[0], args[1], lanes)
        ]
        return _row(builder, [_widen(builder, part, part.type.count) for part in parts] if half else parts)

    return signature, codegen


@intrinsic
def store(typingctx, array, element, row):
    """Set ``array[element:element + D] = row``, rounded if the array holds bfloat16 bits."""
    signature = types.void(array, types.uint64, row)

    def codegen(context, builder, signature, args):
        half, width = signature.args[0].dtype == types.uint16, signature.args[2].width
        for address, part in zip(
            _addresses(context, builder, signature.args[0], args[0], args[1], width),
            _vectors(builder, args[2]),
            strict=True,
        ):
            value = _narrow(builder, part, part.type.count) if half else part
            builder.store(value, address, align=2 if half else 4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def stream(typingctx, array, element, row):
    """Store a row without reading its cache lines, bypassing the caches.

    The address of each vector must be a multiple of 64 bytes, or the process is killed by SIGSEGV.
    So a row must start at a cache line, and its number of floats must be a multiple of `LANES`.
    """
    signature = types.void(array, types.uint64, row)

    def codegen(context, builder, signature, args):
        places = _addresses(context, builder, signature.args[0], args[0], args[1], signature.args[2].width)
        for place, part in zip(places, _vectors(builder, args[2]), strict=True):
            stored = builder.store(part, place, align=64)
            stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return signature, codegen


def _elementwise(name, operation):
    """Return an intrinsic that applies the builder's `operation` to two rows by element."""

    def combine(typingctx, one, other):
        def codegen(context, builder, signature, args):
            return _by_vectors(builder, getattr(builder, operation), *args)

        return one(one, other), codegen

    combine.__name__ = name
    return intrinsic(combine)


add, subtract = _elementwise("add", "fadd"), _elementwise("subtract", "fsub")
multiply, divide = _elementwise("multiply", "fmul"), _elementwise("divide", "fdiv")


@intrinsic
def square_root(typingctx, row):
    """Return the element-wise square root of a row, correctly rounded."""

    def codegen(context, builder, signature, args):
        def root(part):
            kind, name = ir.FunctionType(part.type, [part.type]), f"llvm.sqrt.v{part.type.count}f32"
            return builder.call(builder.module.declare_intrinsic(name, fnty=kind), [part])

        return _by_vectors(builder, root, *args)

    return row(row), codegen


@intrinsic
def passed(typingctx, row, by):
    """Return `row` with zeros wherever `by` <= 0; a NaN in `by` keeps the number of `row`."""

    def codegen(context, builder, signature, args):
        def select(part, by):
            zeros = _splat(_FLOAT, 0.0, part.type.count)
            return builder.select(builder.fcmp_ordered("<=", by, zeros), zeros, part)

        return _by_vectors(builder, select, *args)

    return row(row, by), codegen


@intrinsic(prefer_literal=True)
def broadcast(typingctx, number, width):
    """Return a row with `number` in each of its `width` lanes; `width` is a constant."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes = width.literal_value
    signature = Row(lanes)(types.float32, width)

    def codegen(context, builder, signature, args):
        parts = []
        for size in _sizes(lanes):
            vector = ir.VectorType(_FLOAT, size)
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), args[0], _I32(0))
            parts.append(_part(builder, first, [0] * size))
        return _row(builder, parts)

    return signature, codegen


@intrinsic
def multiply_add(typingctx, one, other, sum):
    """Return ``sum + one * other``, rounded only once if the machine can do so."""

    def codegen(context, builder, signature, args):
        def combine(one, other, sum):
            return builder.fadd(sum, builder.fmul(one, other, flags=("contract",)), flags=("contract",))

        return _by_vectors(builder, combine, *args)

    return one(one, other, sum), codegen


def _part(builder, vector, places, other=None):
    """Return the elements `places` of `vector`, or of `vector` and `other` concatenated."""
    mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
    return builder.shuffle_vector(
        vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, mask
    )


def _whole_blocks(builder, row):
    """Return the vectors of a row; vectors shorter than a block are joined to one vector."""
    vectors = _vectors(builder, row)
    short = [vector for vector in vectors if vector.type.count < LANES]
    full, joined = vectors[: len(vectors) - len(short)], short[:1]
    for vector in short[1:]:
        size, count = joined[0].type.count, vector.type.count
        # Both operands of a shuffle must have the same size.
        wide = _part(builder, vector, [min(lane, count - 1) for lane in range(size)])
        joined = [_part(builder, joined[0], list(range(size + count)), wide)]
    return full + joined


def _fold(builder, row):
    """Return up to 16 partial sums of a row: each block of 16 lanes is added to them; the last may
    be shorter.
    """
    sums, lanes = None, 0
    for vector in _whole_blocks(builder, row):
        width = vector.type.count
        if sums is None:
            lanes = math.gcd(width, LANES)
        if sums is not None and width < lanes:
            # Adding -0.0 changes no number.
            vector = _part(
                builder, vector, [*range(width), *[width] * (lanes - width)], _splat(_FLOAT, -0.0, width)
            )
            width = lanes
        for first in range(0, width, lanes):
            part = _part(builder, vector, list(range(first, first + lanes)))
            sums = part if sums is None else builder.fadd(sums, part)
    return sums, lanes


@intrinsic
def total(typingctx, row):
    """Sum a row in a fixed order: add blocks of 16 lanes to each other, then the halves of the 16
    sums, and so on.

    A short last block is added to the first of the 16 sums. This order determines the bits of the
    result, so it is not left to the compiler and the machine.
    """

    def codegen(context, builder, signature, args):
        sums, lanes = _fold(builder, args[0])
        while lanes > 1:
            lanes //= 2
            low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
            sums = builder.fadd(_part(builder, sums, low), _part(builder, sums, high))
        return builder.extract_element(sums, _I32(0))

    return types.float32(row), codegen


@intrinsic
def store_totals(typingctx, array, element, one, two, three, four):
    """Set ``array[element:element + 4]`` to the `total` of each of four rows, with half the
    shuffles of four calls.
    """
    signature = types.void(array, types.uint64, one, two, three, four)

    def codegen(context, builder, signature, args):
        folded = [_fold(builder, row) for row in args[2:]]
        parts, lanes = [part for part, _ in folded], folded[0][1]
        while lanes > 1 or len(parts) > 1:
            if len(parts) > 1:
                # Two vectors side by side, so that one addition halves both.
                size = parts[0].type.count
                parts = [
                    _part(builder, left, list(range(2 * size)), right)
                    for left, right in zip(parts[::2], parts[1::2], strict=True)
                ]
            if lanes > 1:
                size, half = parts[0].type.count, lanes // 2
                low = [place for place in range(size) if place % lanes < half]
                high = [place + half for place in low]
                parts = [
                    builder.fadd(_part(builder, part, low), _part(builder, part, high)) for part in parts
                ]
                lanes = half
        (place,) = _addresses(context, builder, signature.args[0], args[0], args[1], 4)
        builder.store(parts[0], place, align=4)
        return context.get_dummy_value()

    return signature, codegen
