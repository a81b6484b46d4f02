"""Triton's interpreter: runs kernels for GPUs on tensors of the CPU. Import this module before
Triton.

`watched` detects errors that occur on a GPU only by chance: two programs that write one address,
and a program that reads an address that the same launch writes, before or after. `plant` changes
the source of a module with kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

assert "triton" not in sys.modules, "Triton reads the variable when it is imported"
os.environ["TRITON_INTERPRET"] = "1"

from triton import language  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

# The interpreter runs one kernel at a time.
_LOCK, _CALL = threading.RLock(), interpreter.GridExecutor.__call__
_LOAD, _STORE = interpreter._interpreter.load, interpreter._interpreter.store
_Access = tuple[int, int, NDArray[Any], NDArray[Any]]
"""Program, number in the order of execution, start address and bytes of each element."""


class Accesses:
    """Loads and stores of one launch."""

    def __init__(self) -> None:
        self.loads: list[_Access] = []
        self.stores: list[_Access] = []

    def add(self, accesses: list[_Access], addresses: Any, mask: Any, size: int) -> None:
        chosen = np.unique(addresses[mask.astype(bool)].astype(np.int64))
        program, _, _ = interpreter.interpreter_builder.grid_idx
        accesses.append((program, len(self.loads) + len(self.stores), chosen, np.full(len(chosen), size)))

    def faults(self) -> list[str]:
        """Return descriptions of all faults of the accesses."""
        if not self.stores:
            return []
        address, size, program, order = _joined(self.stores)
        places = np.argsort(address, kind="stable")
        address, size, program, order = address[places], size[places], program[places], order[places]
        overlaps = (address[:-1] + size[:-1] > address[1:]) & (program[:-1] != program[1:])
        result = ["two programs write one address"] if overlaps.any() else []
        if self.loads:
            read, _, reader, when = _joined(self.loads)
            at = np.clip(np.searchsorted(address, read, side="right") - 1, 0, None)
            hits = (address[at] <= read) & (read < address[at] + size[at])
            if (hits & ((reader != program[at]) | (when > order[at]))).any():
                result.append("a program reads what the launch wrote")
        return result


def _joined(accesses: list[_Access]) -> tuple[NDArray[Any], ...]:
    address, size = (np.concatenate([each[part] for each in accesses]) for part in (2, 3))
    program, order = (
        np.repeat([each[part] for each in accesses], [len(each[2]) for each in accesses]) for part in (0, 1)
    )
    return address, size, program, order


_accesses: Accesses | None = None
_watching: list[str] | None = None
_patched: set[int] = set()


def _call(self: Any, *given: Any, **named: Any) -> Any:
    global _accesses
    with _LOCK:
        if _watching is None:
            return _CALL(self, *given, **named)
        _accesses = Accesses()
        try:
            return _CALL(self, *given, **named)
        finally:
            _watching.extend(f"{self.fn.__name__}: {fault}" for fault in _accesses.faults())
            _accesses = None


class _Kept:
    """Patches of the language that stay after a launch."""

    def restore(self) -> None:
        pass


def _patch(function: Any) -> _Kept:
    """Patch the language once, because patching it for each launch took a tenth of the time."""
    modules = {
        id(value) for value in function.__globals__.values() if value is language or value is language.core
    }
    if not modules <= _patched:
        _PATCH(function)
        _patched.update(modules)
    return _Kept()


def _load(addresses: Any, mask: Any, other: Any, kind: Any) -> Any:
    if _accesses is not None:
        _accesses.add(_accesses.loads, addresses, mask, np.dtype(kind).itemsize)
    return _LOAD(addresses, mask, other, kind)


def _store(addresses: Any, value: Any, mask: Any) -> Any:
    if _accesses is not None:
        _accesses.add(_accesses.stores, addresses, mask, value.itemsize)
    return _STORE(addresses, value, mask)


# Types are equal if their names are. Building them anew for every operation took a third of the
# time.
_DTYPE_OF = interpreter._get_np_dtype
_BLOCK = language.block_type.__init__
_TENSOR = language.tensor.__init__
_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}


def _dtype_of(kind: Any) -> Any:
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _DTYPE_OF(kind)
    return _dtypes[kind.name]


def _build_block(self: Any, element: Any, shape: Any) -> None:
    key = (element.name, *(int(getattr(size, "value", size)) for size in shape))
    if key not in _blocks:
        _BLOCK(self, element, shape)
        _blocks[key] = vars(self).copy()
    vars(self).update(_blocks[key])


def _build_tensor(self: Any, handle: Any, kind: Any) -> None:
    if kind.name not in _tensors:
        _TENSOR(self, handle, kind)
        _tensors[kind.name] = vars(self).copy()
    vars(self).update(_tensors[kind.name], handle=handle)


interpreter._get_np_dtype = _dtype_of
language.block_type.__init__ = _build_block
language.tensor.__init__ = _build_tensor
interpreter.GridExecutor.__call__ = _call
_PATCH, interpreter._patch_lang = interpreter._patch_lang, _patch


class _Watched:
    """Memory of the interpreter, with watched loads and stores."""

    load, store = staticmethod(_load), staticmethod(_store)

    def __getattr__(self, name: str) -> Any:
        return getattr(_INTERPRETER, name)


_INTERPRETER, interpreter._interpreter = interpreter._interpreter, _Watched()


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect the faults of all launches within the context, with the names of their kernels."""
    global _watching
    _watching = faults = []
    try:
        yield faults
    finally:
        _watching = None


def plant(module: str, old: str, new: str) -> None:
    """Import a module with `new` instead of `old` in its source, where `old` must occur once."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, (module, source.count(old), old)
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source.replace(old, new))
    changed = importlib.util.spec_from_file_location(module, file.name)
    assert changed is not None
    assert changed.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(changed)
    changed.loader.exec_module(sys.modules[module])
    package, _, name = module.rpartition(".")
    setattr(sys.modules[package], name, sys.modules[module])
