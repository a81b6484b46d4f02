"""Teams of one thread: what kernels use where the interfaces that `outline.py` needs are not there.

The body is called as Numba calls any function, so nothing here is more than every intrinsic needs.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

BODY = {
    "nogil": True, "cache": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip


@njit(nogil=True)
def take(counter):
    """The next value of ``counter[0]``, counting from what it holds."""
    value = counter[0]
    counter[0] = value + 1
    return value


@intrinsic(prefer_literal=True)
def run_team(typingctx, team, body, arguments):
    """Call ``body(0, *arguments)`` on this thread, whatever the team."""
    call = body.get_call_type(typingctx, (types.int64, *arguments.types), {})
    signature = types.void(team, body, arguments)

    def codegen(context, builder, signature, args):
        parts = [builder.extract_value(args[2], place) for place in range(len(arguments.types))]
        context.get_function(body, call)(builder, [ir.IntType(64)(0), *parts])
        return context.get_dummy_value()

    return signature, codegen
