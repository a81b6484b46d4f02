"""Teams of OpenMP threads, on interfaces of Numba that are not public.

A body becomes a C function that `GOMP_parallel` calls on every thread, and Numba has no public way to call compiled
code from there: how results of compilation are found, linked and called may change in any of its minor versions.
`members` runs a team that shows whether the installed version's are what this module takes them to be.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# How the bodies of a team are compiled. They hold no reference to the arrays that they get: counting references costs
# two locked instructions for every array of every call that LLVM does not inline, most of the time of an update.
BODY = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False, "forceinline": True}


@intrinsic
def take(typingctx, counter):
    """The next value of ``counter[0]``, counting from what it holds; every caller on any thread gets another."""
    signature = types.int64(counter)

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", view.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return signature, codegen


@intrinsic(prefer_literal=True)
def run_team(typingctx, launch, threads, body, arguments):
    """Call ``body(member, *arguments)`` once on each of up to `threads` threads and wait for all of them.

    `launch` is `launcher()`; 0 calls the body once, on this thread. Members count from 0. The body must not raise.
    """
    kinds = (types.int64, *arguments.types)
    body.get_call_type(typingctx, kinds, {})
    signature = types.void(types.int64, types.int64, body, arguments)

    def codegen(context, builder, signature, args):
        compiled = body.dispatcher.get_compile_result(types.none(*kinds))
        context.active_code_library.add_linking_library(compiled.library)
        kernel = context.declare_function(builder.module, compiled.fndesc)
        word, byte = ir.IntType(64), ir.IntType(8).as_pointer()
        packed = ir.LiteralStructType([word, args[3].type])

        outlined = ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte]), f"{builder.function.name}.member"
        )
        outlined.linkage = "internal"
        inner = ir.IRBuilder(outlined.append_basic_block())
        data = inner.bitcast(outlined.args[0], packed.as_pointer())
        counter = inner.gep(data, [ir.IntType(32)(0), ir.IntType(32)(0)])
        member = inner.atomic_rmw("add", counter, word(1), "monotonic")
        given = inner.load(inner.gep(data, [ir.IntType(32)(0), ir.IntType(32)(1)]))
        parts = [inner.extract_value(given, place) for place in range(len(arguments.types))]
        context.call_conv.call_function(inner, kernel, types.none, kinds, [member, *parts])
        inner.ret_void()

        with builder.goto_entry_block():
            shared = builder.alloca(packed)
        builder.store(word(0), builder.gep(shared, [ir.IntType(32)(0), ir.IntType(32)(0)]))
        builder.store(args[3], builder.gep(shared, [ir.IntType(32)(0), ir.IntType(32)(1)]))
        shared = builder.bitcast(shared, byte)
        alone = builder.or_(builder.icmp_unsigned("==", args[0], word(0)), builder.icmp_signed("<", args[1], word(2)))
        with builder.if_else(alone) as (one, several):
            with one:
                builder.call(outlined, [shared])
            with several:
                count = ir.IntType(32)
                start = ir.FunctionType(ir.VoidType(), [outlined.type, byte, count, count]).as_pointer()
                function = builder.inttoptr(args[0], start)
                builder.call(function, [outlined, shared, builder.trunc(args[1], count), count(0)])
        return context.get_dummy_value()

    return signature, codegen


@njit(**BODY)
def _note(member, counter, taken):
    taken[member] = take(counter)


@njit(nogil=True, cache=True)
def _run(launch, threads, counter, taken):
    run_team(launch, threads, _note, (counter, taken))


def members(launch: int, threads: int) -> list[int]:
    """What each of `threads` members took from a counter that started at 1, or 0 for one that never ran."""
    counter, taken = np.ones(1, dtype=np.int64), np.zeros(threads, dtype=np.int64)
    _run(launch, threads, counter, taken)
    return [int(number) for number in taken]
