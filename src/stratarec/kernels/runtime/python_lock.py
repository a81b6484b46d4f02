"""Python's lock in kernels that decide themselves whether to release it.

A kernel that is compiled with `nogil` always releases the lock. Next to other threads that is a
loss if the kernel takes only some microseconds: each release wakes a thread, and to get the lock
back may take longer than the kernel.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def release_lock(typingctx):
    """Release Python's lock, and return what `take_lock` needs to take it again.

    The kernel is compiled without `nogil`, and must not raise before it has the lock again.
    """

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.get_python_api(builder).save_thread(), _WORD)

    return types.int64(), codegen


@intrinsic
def take_lock(typingctx, state):
    """Wait until this thread has Python's lock again."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        context.get_python_api(builder).restore_thread(pointer)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
