"""Import LightGBM without the packages that it imports only because they are installed.

scikit-learn and pandas are used by LightGBM's other interfaces. Without them, its import takes 0.3
s instead of 1.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("sklearn", "pandas", "matplotlib", "graphviz", "dask")


class _Refusal:
    """Finder of modules that refuses to find some packages."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise `ModuleNotFoundError` for one of the packages; others are left to the other
        finders.
        """
        if name in _NAMES:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


@contextmanager
def hidden_packages() -> Iterator[None]:
    """Make importing these packages fail inside the context, unless they are already imported.

    LightGBM then lacks its scikit-learn classes until the process ends. So this is only for
    processes that run no code of a user.
    """
    # Not None in `sys.modules`: pyarrow would take it for pandas.
    refusal = _Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)
