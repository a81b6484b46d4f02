"""Small arrays on the stack, for Numba kernels."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD, _LINE_BYTES = ir.IntType(64), 64


@intrinsic(prefer_literal=True)
def stack_array(typingctx, count, kind):
    """Return an array of `count` zeros, a constant, of the type `kind`, which exists until the
    function returns.

    It has its own cache lines. To allocate an array by NumPy's functions, Numba compiles several
    functions of its own in each process that compiles a kernel: 0.3 s for each type and number of
    dimensions.
    """
    array = types.Array(kind.dtype, 1, "C")
    signature = array(count, kind)

    def codegen(context, builder, signature, args):
        element, size = context.get_data_type(array.dtype), array.dtype.bitwidth // 8
        room = ir.ArrayType(element, -(-count.literal_value * size // _LINE_BYTES) * _LINE_BYTES // size)
        with builder.goto_entry_block():
            memory = builder.alloca(room)
            memory.align = _LINE_BYTES
        address = builder.bitcast(memory, ir.IntType(8).as_pointer())
        kind_of_fill = ir.FunctionType(ir.VoidType(), [address.type, ir.IntType(8), _WORD, ir.IntType(1)])
        fill = builder.module.declare_intrinsic("llvm.memset.p0i8.i64", fnty=kind_of_fill)
        builder.call(fill, [address, ir.IntType(8)(0), _WORD(count.literal_value * size), ir.IntType(1)(0)])
        result = context.make_array(array)(context, builder)
        numbers = ir.ArrayType(_WORD, 1)
        result.data = builder.bitcast(memory, element.as_pointer())
        result.shape = numbers([count.literal_value])
        result.strides = numbers([size])
        result.nitems = _WORD(count.literal_value)
        result.itemsize = _WORD(size)
        for owner in ("meminfo", "parent"):  # nobody counts references to this memory
            setattr(result, owner, ir.Constant(getattr(result, owner).type, None))
        return result._getvalue()

    return signature, codegen
