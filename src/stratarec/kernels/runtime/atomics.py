"""Atomic operations on words that several threads share, for Numba kernels.

A word is an element of a C-contiguous 1-D int64 array. Every operation is sequentially consistent.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_ORDER = "seq_cst"


def _address(context, builder, signature, array, place):
    view = context.make_array(signature.args[0])(context, builder, array)
    return builder.gep(view.data, [place])


def _changing(operation):
    """Return an intrinsic: applies `operation` to ``words[place]``, returns the old word."""

    @intrinsic
    def change(typingctx, words, place, value):
        signature = types.int64(words, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature, *args[:2])
            return builder.atomic_rmw(operation, address, args[2], _ORDER)

        return signature, codegen

    return change


add = _changing("add")
keep = _changing("and")
mark = _changing("or")
raise_to = _changing("max")


@intrinsic
def read(typingctx, words, place):
    """Return ``words[place]``."""
    signature = types.int64(words, types.int64)

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_address(context, builder, signature, *args), _ORDER, 8)

    return signature, codegen


@intrinsic
def write(typingctx, words, place, value):
    """Set ``words[place] = value``."""
    signature = types.void(words, types.int64, types.int64)

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[2], _address(context, builder, signature, *args[:2]), _ORDER, 8)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def replace(typingctx, words, place, old, new):
    """Set ``words[place] = new`` if the word is `old`; return whether it was `old`."""
    signature = types.boolean(words, types.int64, types.int64, types.int64)

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature, *args[:2])
        return builder.extract_value(builder.cmpxchg(address, args[2], args[3], _ORDER, _ORDER), 1)

    return signature, codegen


@intrinsic
def pause(typingctx):
    """Leave the core to its other hardware thread for a moment, while waiting for a word."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            wait = builder.module.declare_intrinsic(
                "llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])
            )
            builder.call(wait, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call(typingctx, function, data):
    """Call the function at address `function` with the pointer `data` as its only argument."""
    signature = types.void(types.int64, types.int64)

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return signature, codegen
