"""What of a machine slows runs, or stops them."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from stratarec.cli.doctor.finding import Finding
from stratarec.config.units import readable
from stratarec.errors import StrataError
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.runtime.cores import cores, quota
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.machine import measure_tiers
from stratarec.training.torch_setup import about, verified

_LEAST_MEMORY, _LEAST_DISK, _LEAST_FILES = 2 << 30, 1 << 30, 1024
_SLOW_WRITES, _SLOW_READS = 100 << 20, 10_000


def examine(root: Path, folder: Path) -> Iterator[Finding]:
    """What was found, one after another.

    Parameters
    ----------
    root : path
        Where the system's files lie.
    folder : path
        On the disk that is measured.
    """
    libraries = ("stratarec", "torch", "numba", "numpy", "polars")
    named = ", ".join(f"{name} {version(name)}" for name in libraries)
    yield Finding("versions", f"Python {platform.python_version()}, {named}")
    yield _processors()
    yield _vectors(root)
    yield _memory(root)
    yield _huge_pages(root)
    yield _files()
    yield from _speeds(folder)
    yield _gpu()


def _processors() -> Finding:
    share, wanted, usable = quota(), os.environ.get("OMP_NUM_THREADS", ""), cores()
    limited = "" if share == math.inf else f", of which a quota leaves {share:.1f}"
    said, change = f"{os.cpu_count()} processors{limited}; {usable} threads", ""
    if wanted.isdecimal() and int(wanted) > usable:
        change = f"OMP_NUM_THREADS is {wanted}, more than the {usable} that may be busy: unset it"
    return Finding("threads", said, change, must=False)


def _vectors(root: Path) -> Finding:
    flags = _value(root / "proc/cpuinfo", "flags").split()
    found = [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    if platform.machine() not in ("x86_64", "AMD64"):
        return Finding("processor", platform.machine())
    change = "" if {"avx2", "fma"} <= {*found} else "kernels are much slower without AVX2: take another machine type"
    return Finding(
        "processor", f"{platform.machine()}, {', '.join(found) or 'no vector instructions'}", change, must=False
    )


def _memory(root: Path) -> Finding:
    free = int((_value(root / "proc/meminfo", "MemAvailable").split() or ["0"])[0]) << 10
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = [limit for limit in (_number(root / "sys/fs/cgroup/memory.max"), resource.getrlimit(resource.RLIMIT_AS)[0])
            if 0 < limit < whole]  # fmt: skip
    said = f"{readable(whole)}, {readable(free)} free" + (f", limited to {readable(min(most))}" if most else "")
    change = "" if min([free, *most]) >= _LEAST_MEMORY else f"runs need {readable(_LEAST_MEMORY)} at least: end others"
    return Finding("memory", said, change)


def _huge_pages(root: Path) -> Finding:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = _text(path).partition("[")[2].partition("]")[0] or "none"
    change = ""
    if chosen in ("never", "none"):
        change = f"lookups of large tables take up to half as long again: echo madvise > {path}"
    return Finding("huge pages", chosen, change, must=False)


def _files() -> Finding:
    least, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"{least} open files, {'any' if locked == resource.RLIM_INFINITY else readable(locked)} locked memory"
    change = "" if least >= _LEAST_FILES else f"large data sets open more files: ulimit -n {_LEAST_FILES * 4}"
    return Finding("limits", said, change)


def _speeds(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        yield Finding("disk", f"{folder}: {readable(free)} free", f"free {readable(_LEAST_DISK)} at least")
        return
    try:
        tiers = measure_tiers(MemoryConfig(block=BlockConfig(path=str(folder))), again=True)
    except StrataError as error:
        yield Finding("disk", str(folder), str(error))
        return
    dram, block = tiers.dram, tiers.block
    assert block is not None
    rows = readable(round(dram.row_bytes_per_second))
    yield Finding("memory speed", f"{readable(round(dram.sequential_bytes_per_second))}/s, random rows {rows}/s")
    said = f"{folder}: writes {readable(round(block.write_bytes_per_second))}/s, {block.reads_per_second:,.0f} reads/s"
    slow = block.write_bytes_per_second < _SLOW_WRITES or block.reads_per_second < _SLOW_READS
    change = "tables whose rows lie here train slowly: name a local NVMe in memory.block.path" if slow else ""
    yield Finding("disk", f"{said}, {readable(free)} free", change, must=False)


def _gpu() -> Finding:
    built = torch.accelerator.current_accelerator(check_available=False)
    if built is None:
        return Finding("GPU", f"torch {torch.__version__} is built for the CPU alone")
    try:
        device = open_device(built.type)
    except StrataError as error:
        return Finding("GPU", "none", str(error), must=False)
    found, figures = about(device), verified(device)
    if figures is None:
        return Finding(
            "GPU", f"{found['device']}, not verified here",
            f"run `stratarec doctor --gpu {device.type}` before train.device is {device.type}", must=False,
        )  # fmt: skip
    return Finding("GPU", f"{found['device']}, verified; {found['driver']}")


def _value(path: Path, name: str) -> str:
    """What a line of a file of the system says of `name`; empty where it has none."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value
    return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
