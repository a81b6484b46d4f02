"""The private interfaces of Numba that this package uses. No other module of it imports from
`numba.core`.

A new minor version of Numba may move or change any of them, so the range of Numba in pyproject.toml
ends before the next one. If an interface is missing, importing this module raises an error that
names it and the versions that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import requires
from typing import Any

import numba

from stratarec.errors import StrataError

try:
    from numba.core.base import BaseContext
    from numba.core.caching import IndexDataCacheFile
    from numba.core.callconv import CPUCallConv
    from numba.core.ccallback import CFunc
    from numba.core.codegen import CodeLibrary, JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.cpu import CPUTargetOptions
    from numba.core.dispatcher import Dispatcher

    # Attributes that are used below, and options of `njit` that Numba does not document.
    _ = (
        BaseContext.declare_function, BaseContext.make_array, BaseContext.compile_internal, CPUCallConv.call_function,
        CodeLibrary.add_linking_library, JITCodeLibrary.finalize, JITCodeLibrary._get_module_for_linking,
        JITCodeLibrary.codegen, Compiler.define_pipelines, Dispatcher.enable_caching, Dispatcher.get_compile_result,
        CFunc.enable_caching, IndexDataCacheFile._load_index, CPUTargetOptions._nrt, CPUTargetOptions.forceinline,
        CPUTargetOptions.no_cpython_wrapper, CPUTargetOptions.no_cfunc_wrapper,
    )  # fmt: skip
except (ImportError, AttributeError) as error:
    _range = next(line for line in requires("stratarec") or () if line.startswith("numba"))
    raise StrataError(
        f"numba {numba.__version__} lacks a private interface that kernels are built on "
        f"({error}); install {_range!r}"
    ) from error

__all__ = [
    "InlinedCompiler",
    "call_compiled",
    "global_compiler_lock",
    "has_cached_kernel",
    "link_compiled",
    "never_cache",
]


class _InlinedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code of a function that LLVM optimizes and translates only as part of the kernels that call
    it.

    Numba would do both for the function alone, too, which was 40 % of the time in which a row
    update compiled.
    """

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    @property
    def codegen(self) -> _InlinedLibrary:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: Numba would write to a variable of the machine code. It is for exceptions and
        Python objects.
        """


class InlinedCompiler(Compiler):  # type: ignore[misc]
    """Compiler of functions that only kernels call, without Python objects. Numba cannot cache them
    on disk.
    """

    def define_pipelines(self) -> Any:
        self.state.library = _InlinedLibrary(
            self.state.targetctx.codegen(), self.state.func_id.func_qualname
        )
        return super().define_pipelines()


def link_compiled(context: Any, builder: Any, dispatcher: Any, kinds: Sequence[Any]) -> Any:
    """Compile a function that returns nothing, link it to the function in `builder`, and return its
    declaration.

    Parameters
    ----------
    context, builder
        Numba's target context, and the builder of the function that calls.
    dispatcher : Dispatcher
        The function to call.
    kinds : sequence of Numba types
        Types of its arguments.
    """
    compiled = dispatcher.get_compile_result(numba.types.none(*kinds))
    context.active_code_library.add_linking_library(compiled.library)
    return context.declare_function(builder.module, compiled.fndesc)


def call_compiled(
    context: Any, builder: Any, function: Any, kinds: Sequence[Any], values: Sequence[Any]
) -> None:
    """Call a function from `link_compiled` with arguments `values` of the types `kinds`."""
    context.call_conv.call_function(builder, function, numba.types.none, kinds, values)


def has_cached_kernel(dispatcher: Any) -> bool:
    """Return whether Numba's cache has `dispatcher`; true if caching or compilation is off."""
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return cache_file is None or bool(cache_file._load_index())


def never_cache() -> None:
    """Make Numba compile in every process, instead of an error, if no directory is writable."""
    Dispatcher.enable_caching = CFunc.enable_caching = lambda function: None  # type: ignore[method-assign, assignment]
