"""Test the module of Numba's private interfaces."""

from __future__ import annotations

import runpy

import pytest
from numba.core.dispatcher import Dispatcher

from stratarec.errors import StrataError
from stratarec.kernels.runtime import numba_private


def test_a_numba_without_a_private_interface_is_refused_with_the_range_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Dispatcher, "get_compile_result")
    with pytest.raises(StrataError, match=r"get_compile_result.*install 'numba"):
        runpy.run_path(numba_private.__file__)
