"""Compile kernels for 64-bit ARM on this machine; they are not run.

Numba compiles for the processor that LLVM reports. This script reports an ARM server instead, so
that Numba's own code, the intrinsics of this package and LLVM's instruction selection are those of
an ARM machine. An instruction that only x86 has cannot be selected, which ends the process.

Without arguments, each intrinsic of `kernels/` is compiled in a small function. With ``--all``,
every kernel that is in Numba's cache on disk is compiled, too, with the types that it was called
with; `make venv` and the tests fill the cache.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np

TRIPLE = "aarch64-unknown-linux-gnu"
os.environ |= {"NUMBA_CPU_NAME": "neoverse-n1", "NUMBA_CPU_FEATURES": "+neon"}


def report_arm(machine: str) -> None:
    """Make LLVM and `platform` report an ARM machine; must be called before Numba is imported."""
    assert "numba" not in sys.modules
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: TRIPLE
    platform.machine = lambda: machine


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return for each intrinsic a function that calls it, and the types of the function's
    arguments.
    """
    from numba import njit, types

    from stratarec.kernels.runtime import atomics, outline, python_lock, stack, team
    from stratarec.kernels.simd import bits, lanes, prefetch, vector

    u8, u16, f32, i32 = (kind[::1] for kind in (types.uint8, types.uint16, types.float32, types.int32))
    words = types.int64[::1]
    word = types.int64
    index = types.uint64
    number = types.float32
    short = types.uint32

    @njit(**team.BODY)
    def body(member: Any, array: Any) -> None:
        array[member] = member

    def two(operation: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def kernel(array: Any, element: Any) -> None:
            # 15 needs vectors of several sizes, 100 more than one register of any machine.
            one, other = vector.load(array, element, 100), vector.broadcast(array[element], 100)
            vector.store(array, element, operation(one, other))
            narrow = vector.load(array, element, 15)
            vector.store(array, element, operation(narrow, narrow))

        return kernel, (f32, index)

    def convert(array: Any, halves: Any, element: Any) -> None:
        vector.store(halves, element, vector.load(array, element, 24))
        vector.store(array, element, vector.load(halves, element, 24))

    def root(array: Any, element: Any) -> None:
        vector.store(array, element, vector.square_root(vector.load(array, element, 7)))

    def fused(array: Any, element: Any) -> None:
        row = vector.load(array, element, 7)
        vector.store(array, element, vector.multiply_add(row, row, row))

    def totals(array: Any, element: Any) -> None:
        row = vector.load(array, element, 52)
        vector.store_totals(array, element, row, row, row, row)

    def release() -> None:
        python_lock.take_lock(python_lock.release_lock())

    board = types.NamedTuple((word, word, word), team.Team)
    plain = {
        "atomics.add": (words, word, word),
        "atomics.call": (word, word),
        "atomics.keep": (words, word, word),
        "atomics.mark": (words, word, word),
        "atomics.pause": (),
        "atomics.raise_to": (words, word, word),
        "atomics.read": (words, word),
        "atomics.replace": (words, word, word, word),
        "atomics.write": (words, word, word),
        "bits.add32": (short, short),
        "bits.bits_float": (short,),
        "bits.float_bits": (number,),
        "bits.fold32": (short, short),
        "bits.fold_product": (index, index),
        "bits.from_half": (types.uint16,),
        "bits.load_f32": (u8, index),
        "bits.load_u16": (u8, index),
        "bits.load_u32": (u8, index),
        "bits.load_u64": (u8, index),
        "bits.multiply32": (short, short),
        "bits.reverse_bytes": (index,),
        "bits.select32": (types.boolean, short, short),
        "bits.set_bit": (u8, index),
        "bits.store_f32": (u8, index, number),
        "bits.store_u16": (u8, index, types.uint16),
        "bits.test_bit": (u8, index),
        "bits.to_half": (number,),
        "lanes.find_equal": (i32, index, types.int32),
        "lanes.largest_below": (i32, i32, index, index, types.int32),
        "lanes.least": (i32, index, index),
        "outline.take": (words,),
        "prefetch.prefetch": (f32, word),
    }
    found = {each.__name__.rpartition(".")[2]: each for each in (atomics, bits, lanes, outline, prefetch)}
    return {name: (call(found, name, len(kinds)), kinds) for name, kinds in plain.items()} | {
        "outline.run_openmp": (
            lambda launch, a: outline.run_openmp(launch, launch, body, (a,)),
            (word, words),
        ),
        "outline.run_team": (lambda threads, a: outline.run_team(threads, body, (a,)), (board, words)),
        "python_lock.release_lock": (release, ()),
        "python_lock.take_lock": (release, ()),
        "stack.stack_array": (lambda place: stack.stack_array(9, np.int64)[place], (word,)),
        "vector.add": two(vector.add),
        "vector.broadcast": two(vector.add),
        "vector.divide": two(vector.divide),
        "vector.load": (convert, (f32, u16, index)),
        "vector.multiply": two(vector.multiply),
        "vector.multiply_add": (fused, (f32, index)),
        "vector.passed": two(vector.passed),
        "vector.square_root": (root, (f32, index)),
        "vector.store": (convert, (f32, u16, index)),
        "vector.store_totals": (totals, (f32, index)),
        "vector.stream": (lambda a, i: vector.stream(a, i, vector.load(a, i, 48)), (f32, index)),
        "vector.subtract": two(vector.subtract),
        "vector.total": (lambda a, i: vector.total(vector.load(a, i, 52)), (f32, index)),
    }


def call(found: dict[str, Any], name: str, count: int) -> Callable[..., Any]:
    """Return a function of `count` arguments that calls an intrinsic such as atomics.add with
    them.
    """
    module, _, attribute = name.partition(".")
    arguments = ", ".join(f"argument{place}" for place in range(count))
    # Numba compiles only functions with a fixed number of arguments for types that are given.
    function: Callable[..., Any] = eval(
        f"lambda {arguments}: {attribute}({arguments})", vars(found[module])
    )
    return function


def modules() -> Iterator[Any]:
    """Yield all modules of kernels for the CPU."""
    import stratarec.kernels

    for found in pkgutil.walk_packages(stratarec.kernels.__path__, "stratarec.kernels."):
        if found.name.rpartition(".")[2] != "gpu":
            yield importlib.import_module(found.name)


def intrinsics() -> set[str]:
    """Return the names of all intrinsics of the package."""
    from numba.core.extending import _Intrinsic

    return {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, _Intrinsic) and value._defn.__module__ == module.__name__
    }


def check(name: str, dispatcher: Any, kinds: tuple[Any, ...]) -> None:
    """Compile for `kinds` and check that the result is for ARM."""
    print(name, flush=True)  # the last line names the kernel, if LLVM ends the process
    dispatcher.compile(kinds)
    (*_, text) = dispatcher.inspect_asm().values()
    if not re.search(r"\b(ldr|str|ldp|stp|mov)\s+[xw]\d+", text):
        raise SystemExit(f"{name}: the result has no instruction of ARM")


def cached_kernels() -> Iterator[tuple[str, Any, set[Any]]]:
    """Yield name, function and types of arguments of each kernel in Numba's cache."""
    from numba.core.caching import NullCache
    from numba.core.dispatcher import Dispatcher

    for module in [*modules()]:
        dispatchers = {name: each for name, each in vars(module).items() if isinstance(each, Dispatcher)}
        for width in (4, 8, 16):
            dispatchers |= {f"{name} of {width}": each for name, each in made(module, width)}
        for name, each in dispatchers.items():
            cache = getattr(each._cache, "_cache_file", None)
            if cache is not None and each.__module__ == module.__name__:
                kinds = {key[0] for key in cache._load_index()}
                each._cache = NullCache()  # what is compiled here is not for this machine
                yield f"{module.__name__}.{name}", each, kinds


def made(module: Any, width: int) -> Iterator[tuple[str, Any]]:
    """Yield kernels that a module creates for rows of `width`."""
    from stratarec.kernels.simd.vector import blocks

    create = getattr(module, "kernels", None)
    if not hasattr(create, "cache_info"):
        return
    try:
        result = create(*blocks(width))
    except TypeError:  # kernels of something else than rows
        return
    for name, value in vars(result).items():
        if hasattr(value, "inspect_asm"):
            yield name, value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="also compile every kernel that Numba has cached"
    )
    parser.add_argument(
        "--only", default="", help="compile only names with this regular expression, such as bits.to_"
    )
    parser.add_argument(
        "--machine", default="aarch64", help="machine that the package sees (default: aarch64)"
    )
    options = parser.parse_args()
    report_arm(options.machine)
    from numba import njit

    wanted = cases()
    if missing := intrinsics() ^ wanted.keys():
        raise SystemExit(
            f"{', '.join(sorted(missing))}: without a case here, or a case without an intrinsic"
        )
    for name, (function, kinds) in wanted.items():
        if re.search(options.only, name):
            check(name, njit(function, nogil=True), kinds)
    count, never_called = 0, 0
    for name, dispatcher, calls in cached_kernels() if options.all else ():
        if not re.search(options.only, name):
            continue
        for kinds in calls:
            check(name, dispatcher, kinds)
        count += len(calls)
        never_called += not calls
    print(
        f"compiled for {TRIPLE}: {count} kernels of the cache, which has no call of {never_called} others"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at its end, the interpreter would run code that was compiled for ARM
