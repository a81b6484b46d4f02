"""Tells when kernels are compiled: once on a machine, since Numba keeps on disk what it compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event


class _First(event.Listener):  # type: ignore[misc]
    """Calls `tell` at the first event."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: object) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, event: object) -> None: ...


@contextmanager
def watch_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when the first kernel inside is about to be compiled, whichever thread asks for it.

    A kernel that is found on disk is loaded without a word.
    """
    with event.install_listener("numba:compile", _First(tell)):
        yield
