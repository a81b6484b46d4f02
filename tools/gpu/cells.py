"""Results of the measurements, one line of JSON a cell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write(**cell: Any) -> None:
    """Append a cell to the file that the command line names, or print it."""
    line = json.dumps(cell)
    if len(sys.argv) > 1:
        with Path(sys.argv[1]).open("a") as file:
            file.write(f"{line}\n")
    else:
        print(line, flush=True)
