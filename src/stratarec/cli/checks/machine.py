"""Find what slows or stops runs on this machine."""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from stratarec.config.units import format_bytes
from stratarec.errors import StrataError
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.runtime.cores import cores, quota
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.machine import measure_tiers
from stratarec.training.torch_setup import about, verified

_MIN_DISK = 1 << 30
_SLOW_WRITES, _SLOW_READS = 100 << 20, 10_000


class Finding(NamedTuple):
    """State of one part of the machine, and the advised change."""

    subject: str
    state: str
    change: str = ""
    """Recommended change; empty if nothing has to be changed."""
    must: bool = True
    """Whether runs stop or give wrong results without the change; otherwise they are only
    slower.
    """


def examine(root: Path, folder: Path) -> Iterator[Finding]:
    """Examine the parts of this machine one after another.

    Parameters
    ----------
    root : path
        Root of the file system to read, such as ``/``.
    folder : path
        Folder on the disk whose speed is measured.
    """
    libraries = ("stratarec", "torch", "numba", "numpy", "polars")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    yield Finding("versions", f"Python {platform.python_version()}, {versions}")
    yield _threads()
    yield _processor(root)
    yield _huge_pages(root)
    yield from _speeds(folder)
    yield _gpu()


def _threads() -> Finding:
    share, openmp, usable = quota(), os.environ.get("OMP_NUM_THREADS", ""), cores()
    limit = "" if share == math.inf else f", limited to {share:.1f} by a quota"
    state, change = f"{os.cpu_count()} processors{limit}; {usable} threads", ""
    if openmp.isdecimal() and int(openmp) > usable:
        change = f"OMP_NUM_THREADS is {openmp}, but only {usable} threads can run at a time: unset it"
    return Finding("threads", state, change, must=False)


def _processor(root: Path) -> Finding:
    if platform.machine() not in ("x86_64", "AMD64"):
        return Finding("processor", platform.machine())
    flags = _value(root / "proc/cpuinfo", "flags").split()
    vectors = [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    state = f"{platform.machine()}, {', '.join(vectors) or 'no vector instructions'}"
    change = (
        ""
        if {"avx2", "fma"} <= {*vectors}
        else "kernels are much slower without AVX2: use another machine type"
    )
    return Finding("processor", state, change, must=False)


def _huge_pages(root: Path) -> Finding:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    setting = _text(path).partition("[")[2].partition("]")[0] or "none"
    change = ""
    if setting in ("never", "none"):
        change = f"lookups in large tables take up to 50 % longer: run echo madvise > {path}"
    return Finding("huge pages", setting, change, must=False)


def _speeds(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < _MIN_DISK:
        yield Finding(
            "disk", f"{folder}: {format_bytes(free)} free", f"free at least {format_bytes(_MIN_DISK)}"
        )
        return
    try:
        tiers = measure_tiers(MemoryConfig(block=BlockConfig(path=str(folder))), again=True)
    except StrataError as error:
        yield Finding("disk", str(folder), str(error))
        return
    dram, block = tiers.dram, tiers.block
    assert block is not None
    rows, sequential = (
        format_bytes(round(rate)) for rate in (dram.row_bytes_per_second, dram.sequential_bytes_per_second)
    )
    yield Finding("memory speed", f"{sequential}/s sequential, {rows}/s random rows")
    state = (
        f"{folder}: writes {format_bytes(round(block.write_bytes_per_second))}/s, "
        f"{block.reads_per_second:,.0f} reads/s, {format_bytes(free)} free"
    )
    slow = block.write_bytes_per_second < _SLOW_WRITES or block.reads_per_second < _SLOW_READS
    change = (
        "tables with rows on this disk train slowly: name a local NVMe disk in memory.block.path"
        if slow
        else ""
    )
    yield Finding("disk", state, change, must=False)


def _gpu() -> Finding:
    default = torch.accelerator.current_accelerator(check_available=False)
    if default is None:
        return Finding("GPU", f"torch {torch.__version__} supports only the CPU")
    try:
        device = open_device(default.type)
    except StrataError as error:
        return Finding("GPU", "none", str(error), must=False)
    description = about(device)
    if verified(device) is None:
        return Finding(
            "GPU",
            f"{description['device']}, not verified",
            f"run `stratarec doctor --gpu {device.type}` before using train.device={device.type}",
            must=False,
        )
    return Finding("GPU", f"{description['device']}, verified; {description['driver']}")


def _value(path: Path, name: str) -> str:
    """Return the value of `name` in a file with lines ``name: value``, such as /proc/meminfo; empty
    if absent.
    """
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
