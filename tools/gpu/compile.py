"""Compile the kernels for an H100 or H200 (sm_90a), for which no GPU is needed, and report what they would use.

``python tools/gpu/compile.py`` prints a line a kernel, and exits with 1 where one spills registers or divides by other
than IEEE rules. Triton's interpreter accepts Python that Triton's compiler does not: both are needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton
from prototype import operations as ops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS, INTS, LONGS, BYTES = "*fp32", "*i32", "*i64", "*u8"
SLOTS = (FLOATS, FLOATS, FLOATS, INTS)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(kernel: Any, signature: dict[str, Any], constants: dict[str, Any], warps: int, aligned: Sequence[str]) -> Any:
    """Compile a kernel; addresses of `aligned` arguments are multiples of 16 bytes."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {}
    for name in aligned:
        place = names.index(name)
        parts = types[name] if isinstance(types[name], tuple) else ()
        attributes |= {(place, part): [["tt.divisibility", 16]] for part in range(len(parts))}
        if not parts:
            attributes[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def kernels() -> Iterator[tuple[str, Any]]:
    """Compile each kernel in its usual forms."""
    pool = {
        "weights": FLOATS, "rows": INTS, "offsets": INTS, "share": FLOATS, "column": LONGS, "mean": LONGS,
        "out": FLOATS, "bags": "i32", "batch": "i32", "stride": "i32",
    }  # fmt: skip
    for single in (True, False):
        shape = {"D": 64, "DP": 64, "K": 8, "U": 4, "SINGLE": single, "WEIGHTED": False, "BY": 4, "share": None}
        shape |= {"offsets": None} if single else {}
        aligned = ("weights", "rows", "out", "stride", "column")
        yield f"pool, {'one row' if single else 'several rows'} a bag", build(ops.pool, pool, shape, 4, aligned)
    train = {
        "slots": SLOTS, "sorted_rows": INTS, "first": INTS, "last_run": INTS, "at": LONGS, "scale": FLOATS,
        "pooled": FLOATS, "others": FLOATS, "parts": FLOATS, "part_count": "i32", "pace": ("fp32",) * 3,
        "rule": ("fp32",) * 8, "squares": FLOATS, "run": INTS, "lookups": "i32",
    }  # fmt: skip
    plain = {"SCALED": False, "SEQUENCES": False, "BY": 4, "scale": None, "others": None}
    for name, kind in (("SGD", 0), ("row-wise Adagrad", 1), ("Adam", 4)):
        shape = {
            "D": 64, "DP": 64, "K": 8, "U": 4, "L": 256, "LANES": 16, "KIND": kind, "CLOCKED": False, "NORM": False,
            "squares": None, **plain,
        }  # fmt: skip
        aligned = ("slots", "pooled", "parts", "at", "sorted_rows", "first")
        yield f"train, {name}", build(ops.train, train, shape, 4, aligned)
    shape = {"D": 64, "DP": 64, "K": 8, "L": 256, **plain}
    yield "part_sums", build(ops.part_sums, train, shape, 4, ("pooled", "parts", "at"))
    moves = {
        "slots": SLOTS, "places": LONGS, "keys": LONGS, "write_key": LONGS, "records": BYTES, "which": LONGS,
        "held": BYTES, "count": "i32", "bounds": FLOATS,
    }  # fmt: skip
    for name, kind, parameters_at, state_at, size in (("fp32", 0, 256, 256, 260), ("int4", 4, 32, 36, 40)):
        form = {
            "D": 64, "DP": 64, "K": 8, "KIND": kind, "WIDE": False, "STATE": 0, "ROW_STATE": True, "FULL": 0,
            "CLOCKED": False, "PARAMETERS_AT": parameters_at, "ROW_STATE_AT": state_at, "FULL_STATE_AT": size,
            "CLOCK_AT": size, "BYTES": size,
        }  # fmt: skip
        aligned = ("slots", "records")
        yield f"encode, {name}", build(ops.encode, moves, {"STOCHASTIC": True, "which": None, **form}, 4, aligned)
        yield f"decode, {name}", build(ops.decode, moves, form, 4, aligned)
    form = {"D": 64, "DP": 64, "K": 8, "ROW_STATE": True, "FULL": 0, "CLOCKED": False}
    yield "initialize", build(ops.initialize, moves, form, 4, ("slots",))
    apply_missed_steps = {
        "slots": SLOTS,
        "rows": INTS,
        "count": "i32",
        "steps": "i32",
        "paces": FLOATS,
        "rule": ("fp32",) * 8,
    }
    form = {"D": 64, "DP": 64, "K": 4, "LANES": 16, "KIND": 4}
    yield "apply_missed_steps, Adam", build(ops.apply_missed_steps, apply_missed_steps, form, 4, ("slots",))
    yield "starts", build(ops.starts, train, {"BLOCK": 1024}, 4, ())


def usage(kernel: Any) -> dict[str, int]:
    """Return the registers, and the bytes of stack, that a compiled kernel uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", lines)}


def main() -> int:
    failed = 0
    for name, kernel in kernels():
        used = usage(kernel)
        inexact = sorted(set(re.findall(r"div\.full|div\.approx|sqrt\.approx|fma\.rn\.f32", kernel.asm["ptx"])))
        failed += bool(inexact or used["STACK"] or used["LOCAL"])
        print(
            f"{name:28} {used['REG']:3} registers, {used['STACK'] + used['LOCAL']} bytes spilled", *inexact, flush=True
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
