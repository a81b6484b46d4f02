"""Compile the kernels of rows in GPU memory for an A100 (sm_80) and an H100 or H200 (sm_90a); no
GPU is needed.

``python tools/gpu/compile.py`` prints a line for each kernel and processor. It exits with 1 if a
kernel spills registers, contracts a product and a sum, or does not divide by IEEE rules. Triton's
interpreter accepts Python code that its compiler rejects, so both are needed.
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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stratarec.kernels.codec import gpu as codec
from stratarec.kernels.pooling import gpu as pooling
from stratarec.kernels.random import gpu as random
from stratarec.kernels.update import gpu as update
from stratarec.kernels.update import rules

FLOATS, INTS, LONGS, BYTES = "*fp32", "*i32", "*i64", "*u8"
SLOTS = (FLOATS, FLOATS, FLOATS, INTS)
TYPES: dict[str, Any] = {
    "slots": SLOTS, "weights": FLOATS, "rows": INTS, "offsets": INTS, "share": FLOATS, "column": LONGS, "mean": LONGS,
    "out": FLOATS, "bag_of": INTS, "pooled": FLOATS, "begins": INTS, "segment": INTS, "order": LONGS, "first": INTS,
    "segments": INTS, "at": LONGS, "scale": FLOATS, "sequences": FLOATS, "parts": FLOATS, "numbers": FLOATS,
    "rule": ("fp32",) * 8, "squares": FLOATS, "places": LONGS, "sizes": INTS,
    "segment_row": INTS, "segment_at": LONGS, "segment_scale": FLOATS, "ok": INTS, "keys": LONGS, "bounds": FLOATS,
    "records": BYTES, "fits": BYTES, "record_of": LONGS,
}  # fmt: skip
"""Argument -> type; all others are int32."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PROCESSORS = (80, 90)


def build(kernel: Any, constants: dict[str, Any], warps: int, processor: int, types: dict[str, Any]) -> Any:
    """Compile a kernel; addresses are multiples of 16 bytes, as in torch's allocations."""
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in constants else {**TYPES, **types}.get(name, "i32") for name in names
    }
    attributes: dict[tuple[int, ...], Any] = {}
    for place, kind in enumerate(types.values()):
        for part, address in enumerate(kind) if isinstance(kind, tuple) else ((None, kind),):
            if address.startswith("*") or names[place] == "stride":
                attributes[(place,) if part is None else (place, part)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options)


def kernels(processor: int) -> Iterator[tuple[str, Any]]:
    """Compile each kernel in its usual forms, with the tiles of `DeviceSlots`."""
    width = {"D": 64, "DP": 64}

    def built(
        kernel: Any, warps: int, *absent: str, types: dict[str, Any] | None = None, **constants: Any
    ) -> Any:
        return build(kernel, {**dict.fromkeys(absent), **constants}, warps, processor, types or {})

    single: Sequence[str] = ("offsets", "share")
    yield "pool, one row a bag", built(pooling.pool, 1, *single, **width, K=4, U=4, SINGLE=True, BY=4)
    yield "pool, several rows a bag", built(pooling.pool, 1, "share", **width, K=4, U=4, SINGLE=False, BY=4)
    yield "weight_gradient", built(pooling.weight_gradient, 4, **width, K=8, LANES=16)
    yield "mark_segments", built(update.mark_segments, 4, BLOCK=1024)
    yield "list_segments", built(update.list_segments, 4, D=64, BLOCK=1024)
    yield "sum_parts", built(update.sum_parts, 4, "scale", "sequences", **width, K=16, L=64, BY=4)
    for kind in ("rowwise_adagrad", "adam"):
        step = {**width, "K": 8, "LANES": 16, "KIND": rules.KINDS[kind]}
        absent = ("scale", "segment_scale", "sequences", "squares")
        yield f"update, {kind}", built(update.update, 4, *absent, **step, U=4, L=64, CLOCKED=False, BY=4)
    narrow = {**step, "D": 16, "DP": 16, "K": 32}
    yield "update with all", built(update.update, 4, "squares", **narrow, U=4, L=64, CLOCKED=True, BY=1)
    yield "square norms", built(update.update, 4, **step, U=4, L=64, CLOCKED=False, BY=4)
    yield "apply_missed_steps", built(update.apply_missed_steps, 4, **step)
    yield "initialize", built(random.initialize, 4, **width, K=8, ROW_STATE=True, FULL=0, CLOCKED=False)
    for name, kind, parameters_at, state_at, size in (("fp32", 0, 256, 256, 260), ("int4", 4, 32, 36, 40)):
        form = {
            **width, "K": 8, "KIND": kind, "WIDE": False, "STATE": 0, "ROW_STATE": True, "FULL": 0, "CLOCKED": False,
            "PARAMETERS_AT": parameters_at, "ROW_STATE_AT": state_at, "FULL_STATE_AT": size, "CLOCK_AT": size,
            "BYTES": size,
        }  # fmt: skip
        yield f"encode, {name}", built(codec.encode, 4, "record_of", STOCHASTIC=True, **form)
        yield f"decode, {name}", built(codec.decode, 4, "record_of", **form)
    # Records in GPU memory, padded to whole words.
    form |= {
        "KIND": 3,
        "STATE": 2,
        "PARAMETERS_AT": 64,
        "ROW_STATE_AT": 68,
        "FULL_STATE_AT": 70,
        "CLOCK_AT": 70,
        "BYTES": 72,
    }
    yield "encode in place, int8", built(codec.encode, 4, STOCHASTIC=True, **form)
    yield "decode in place, int8", built(codec.decode, 4, **form)


def usage(kernel: Any) -> dict[str, int]:
    """Return the registers and the bytes of stack of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", lines)}


def main() -> int:
    failed = 0
    for processor in PROCESSORS:
        for name, kernel in kernels(processor):
            used = usage(kernel)
            inexact = sorted(set(re.findall(r"div\.full|\w+\.approx|fma\.rn\.f32", kernel.asm["ptx"])))
            failed += bool(inexact or used["STACK"] or used["LOCAL"])
            print(
                f"sm_{processor} {name:28} {used['REG']:3} registers, "
                f"{used['STACK'] + used['LOCAL']} bytes spilled",
                *inexact,
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
