"""Kernel bodies that several threads call.

A body becomes a C function with one parameter, a pointer to the body's arguments, so that OpenMP or
a helper can call it. Numba has no public way to call compiled code from such a function, so
`numba_private` does it.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from stratarec.kernels.runtime.numba_private import InlinedCompiler, call_compiled, link_compiled

# Options for bodies of a team. They do not count references to arrays: counting costs two locked
# instructions for every array of every call that LLVM does not inline, which was most of the time
# of an update. So a body must not return an array to a function that counts, because that function
# would release a reference that was never taken, and the process would abort later. Backward at D =
# 16, batch 2,048, took 3.3 ms with counts and 2.4 without; later it took 1.6 ms, and 0.9 with
# bodies inlined. Only kernels call bodies, never Python: wrappers that unpack tuples of arrays took
# a third of the compilation time. Bodies are not cached on disk, so they may be closures over other
# compiled functions: Numba identifies a closure by its variables, and no other process knows the
# names of those functions.
BODY = {
    "nogil": True, "error_model": "numpy", "_nrt": False, "forceinline": True, "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True, "pipeline_class": InlinedCompiler,
}  # fmt: skip

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 6))
_WORD, _COUNT, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


@intrinsic
def take(typingctx, counter):
    """Return ``counter[0]`` and increase it by 1, atomically, so that no two results are equal."""
    signature = types.int64(counter)

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        # No memory order is needed: the threads share only the counter, and the end of the team
        # orders their writes.
        return builder.atomic_rmw("add", view.data, _WORD(1), "monotonic")

    return signature, codegen


def _outline(context, builder, body, arguments, values):
    """Return a C function and its data; the function calls the body with the next thread number and
    the arguments.
    """
    kinds = (types.int64, *arguments.types)
    kernel = link_compiled(context, builder, body.dispatcher, kinds)
    packed = ir.LiteralStructType([_WORD, values.type])

    function = ir.Function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTE]), f"{builder.function.name}.member"
    )
    function.linkage = "internal"
    inner = ir.IRBuilder(function.append_basic_block())
    data = inner.bitcast(function.args[0], packed.as_pointer())
    member = inner.atomic_rmw("add", inner.gep(data, [_COUNT(0), _COUNT(0)]), _WORD(1), "monotonic")
    arguments_of = inner.load(inner.gep(data, [_COUNT(0), _COUNT(1)]))
    parts = [inner.extract_value(arguments_of, place) for place in range(len(arguments.types))]
    call_compiled(context, inner, kernel, kinds, [member, *parts])
    inner.ret_void()

    with builder.goto_entry_block():
        # On the stack of the leader, which returns only when no other thread is in the function any
        # more.
        shared = builder.alloca(packed)
    builder.store(_WORD(0), builder.gep(shared, [_COUNT(0), _COUNT(0)]))
    builder.store(values, builder.gep(shared, [_COUNT(0), _COUNT(1)]))
    return function, builder.bitcast(shared, _BYTE)


def _start(builder, launch, threads, board, function, data):
    """Call a function with the parameters of `workers.lead`. GNU's ``GOMP_parallel`` has them, too:
    its flags, which are 32 bits, are in the place of the board.
    """
    kind = ir.FunctionType(ir.VoidType(), [function.type, _BYTE, _COUNT, _WORD]).as_pointer()
    builder.call(builder.inttoptr(launch, kind), [function, data, builder.trunc(threads, _COUNT), board])


@intrinsic(prefer_literal=True)
def run_team(typingctx, team, body, arguments):
    """Call ``body(member, *arguments)`` on this thread and on up to ``team.threads - 1`` others,
    and wait for them.

    `member` numbers the threads from 0 in the order in which they arrive. The body must not raise.
    """
    body.get_call_type(typingctx, (types.int64, *arguments.types), {})
    signature = types.void(team, body, arguments)

    def codegen(context, builder, signature, args):
        launch, threads, board = (builder.extract_value(args[0], place) for place in range(3))
        function, data = _outline(context, builder, body, arguments, args[2])
        with builder.if_else(builder.icmp_unsigned("!=", launch, _WORD(0))) as (together, alone):
            with together:
                _start(builder, launch, threads, board, function, data)
            with alone:
                builder.call(function, [data])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def run_openmp(typingctx, launch, threads, body, arguments):
    """Call ``body(member, *arguments)`` on up to `threads` OpenMP threads, started by `launch`."""
    body.get_call_type(typingctx, (types.int64, *arguments.types), {})
    signature = types.void(types.int64, types.int64, body, arguments)

    def codegen(context, builder, signature, args):
        _start(builder, *args[:2], _WORD(0), *_outline(context, builder, body, arguments, args[3]))
        return context.get_dummy_value()

    return signature, codegen


@njit(**BODY)
def _record_id(member, number, ids):
    ids[member] = _syscall(number, 0, 0, 0, 0, 0)


@njit(nogil=True, cache=True)
def write_thread_ids(launch, number, ids):
    """Write the system's id of each OpenMP thread to `ids`, one for each thread that may take part.

    `number` is the number of the system call gettid.
    """
    run_openmp(launch, len(ids), _record_id, (number, ids))
