"""Stored results of the parts of a long benchmark, so that an interrupted benchmark resumes with
its next part.

Results are stored in ``data/benchmarks/<benchmark>`` and reused while the description of the part
is the same. The description does not include the version of the code: remove the folder after the
code has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sessions import ROOT
from stratarec.io.atomic import write_atomic

FOLDER = ROOT / "data" / "benchmarks"


def kept(path: Path, about: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the stored result at `path` if its description is `about`; otherwise call `make` and
    store its result.
    """
    plain = json.loads(json.dumps(about))
    if path.is_file() and (before := json.loads(path.read_text()))["about"] == plain:
        result: dict[str, Any] = before["found"]
        return result
    result = make()
    content = json.dumps({"about": plain, "found": result}).encode()
    write_atomic(path, lambda file: file.write(content))
    return result
