"""What a part of a long benchmark found, kept for the next try: one that was ended goes on with its next part.

It is kept in ``data/benchmarks/<benchmark>`` and taken from there while what it was made of is the same, versions of
this code not among it: remove the folder when code has changed.
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
    """What `path` holds where it was made of `about`, else what `make` gives, which is written there."""
    plain = json.loads(json.dumps(about))
    if path.is_file() and (before := json.loads(path.read_text()))["about"] == plain:
        found: dict[str, Any] = before["found"]
        return found
    found = make()
    content = json.dumps({"about": plain, "found": found}).encode()
    write_atomic(path, lambda file: file.write(content))
    return found
