"""Test where compiled kernels are cached if neither the package nor the home directory is
writable.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import pytest
from numba import cfunc, config, njit, types
from numba.core.caching import CacheImpl
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

from stratarec.kernels.runtime import kernel_cache


@pytest.fixture(autouse=True)
def nothing_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setattr(config, "CACHE_DIR", "/dev/null/cache")
    for kind in (Dispatcher, CFunc):
        monkeypatch.setattr(kind, "enable_caching", kind.enable_caching)
    monkeypatch.setattr(kernel_cache, "_usual", lambda: [Path("/dev/null/home/numba")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def doubled(x: int) -> int:
    return 2 * x


def test_kernels_are_cached_in_a_private_temporary_directory_and_this_is_said_once(tmp_path: Path) -> None:
    folder = tmp_path / f"stratarec-kernels-{os.geteuid()}"
    with pytest.warns(UserWarning, match=str(folder)):
        kernel_cache.choose_cache()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["NUMBA_CACHE_DIR"] == config.CACHE_DIR == str(folder)
    kernel_cache.choose_cache()  # a warning would be an error
    assert njit(cache=True)(doubled)(3) == 6
    assert list(folder.rglob("*.nbc"))


def test_kernels_of_a_directory_that_cannot_be_written_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image compiles them, and its root is read-only when it runs."""
    shipped, temporary = tmp_path / "shipped", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(config, "CACHE_DIR", str(shipped))
    assert njit(cache=True)(doubled)(3) == 6
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(shipped))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kernel_cache.choose_cache()  # a warning would be an error
    assert Path(config.CACHE_DIR).parent == temporary
    again = njit(cache=True)(doubled)
    assert again(3) == 6
    assert sum(again.stats.cache_hits.values()) == 1
    assert njit(cache=True)(doubled)(1.5) == 3.0
    assert len(list(temporary.rglob("*.nbc"))) == 2
    assert len(list(shipped.rglob("*.nbc"))) == 1


@pytest.mark.parametrize("others", ["may write", "own a link"])
def test_a_directory_that_others_may_write_is_not_used(
    tmp_path: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba unpickles what it finds there."""
    # no directory is writable, so caching is an error
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    folder = tmp_path / f"stratarec-kernels-{os.geteuid()}"
    if others == "may write":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="not cached"):
        kernel_cache.choose_cache()
    assert njit(cache=True)(doubled)(3) == 6
    assert cfunc(types.int64(types.int64), cache=True)(doubled).address  # as helper threads are started
    assert not list(tmp_path.rglob("*.nbc"))


def test_a_cache_that_is_writable_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_usual", lambda: [tmp_path / "numba"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_cache.choose_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == "/dev/null/cache"
