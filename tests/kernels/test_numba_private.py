"""Test the module of Numba's private interfaces, and what Numba needs of the system."""

from __future__ import annotations

import runpy
from ctypes.util import find_library

import forked
import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher

from stratarec.errors import StrataError
from stratarec.kernels.runtime import numba_private
from stratarec.kernels.runtime.team import BODY


def test_a_numba_without_a_private_interface_is_refused_with_the_range_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Dispatcher, "get_compile_result")
    with pytest.raises(StrataError, match=r"get_compile_result.*install 'numba"):
        runpy.run_path(numba_private.__file__)


def test_functions_that_only_kernels_call_have_machine_code_only_there() -> None:
    @njit(**BODY)
    def once(number):
        return number + 1

    @njit(**BODY)
    def twice(number):
        return once(once(number))

    @njit
    def kernel(number):
        return twice(number)

    assert kernel(3) == 5
    for function, has_code in ((once, False), (twice, False), (kernel, True)):
        (compiled,) = function.overloads.values()
        assert bool(compiled.library.get_pointer_to_function(compiled.fndesc.mangled_name)) == has_code


@pytest.mark.skipif(
    find_library("tbb") is not None, reason="the library that the test needs to be absent is installed"
)
def test_a_system_without_a_library_of_threads_is_refused() -> None:
    code = (
        "from stratarec.kernels.runtime import threads\n"
        "threads.numba.config.THREADING_LAYER = 'tbb'  # as absent as libgomp is in a small container\n"
        "threads.use_torch_threads()\n"
    )
    result = forked.python(code)
    assert result.returncode == 1
    assert "StrataError: Numba cannot start threads" in result.stderr
