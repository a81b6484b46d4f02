"""A software prefetch that Numba kernels can call."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typingctx, array, element):
    """Ask for the cache line that holds ``array[element]`` (a C-contiguous 1-D array); never faults."""
    signature = types.void(array, types.int64)

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.bitcast(builder.gep(view.data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0i8", fnty=kind)
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return signature, codegen
