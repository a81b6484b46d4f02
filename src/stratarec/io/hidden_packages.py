"""Import LightGBM without the packages that it imports only because they are installed.

scikit-learn and pandas are used by LightGBM's other interfaces. Without them, its import takes 0.3 s instead of 1.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("sklearn", "pandas", "matplotlib", "graphviz", "dask")


@contextmanager
def hidden_packages() -> Iterator[None]:
    """Make importing these packages fail inside the context, unless they are already imported.

    LightGBM then lacks its scikit-learn classes until the process ends. So this is only for processes that run no code
    of a user.
    """
    names = [name for name in _NAMES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
