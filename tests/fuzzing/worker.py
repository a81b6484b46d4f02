"""Run cases of the fuzzer one after another. Print a line of JSON when each begins and when it
ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from fuzzing.artefacts import ROWS, Use
from fuzzing.commands import uses_of
from fuzzing.contents import rewrite, rewrite_unchanged
from fuzzing.guards import Guards

from stratarec.errors import StrataError

_SECONDS = 30
_GROWTH = 1 << 30
_LONGEST = 2000
_USES = 2
"""Average number of uses of a changed artifact."""
_OUT = sys.stdout


def contents(root: Path, work: Path, seed: int, first: int, last: int) -> None:
    """Use artifacts that an attacker changed and sealed. Each use gives a valid result or one clear
    error.

    Kernels get their arrays between guard pages. The first case of each artifact changes nothing
    and must be accepted.
    """
    guards, uses = Guards(), uses_of(root)
    guards.install()
    limit = _data_bytes() + 2 * _GROWTH
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for case in range(first, last):
        draws = random.Random(f"contents {seed} {case}")
        name = sorted(uses)[case % len(uses)]
        guards.at_end = draws.random() < 0.5
        began = time.monotonic()
        faulthandler.dump_traceback_later(5 * _SECONDS, exit=True)
        place, unchanged = work / f"case-{case}", case < len(uses)
        shutil.copytree(root / name, place / name, symlinks=True)
        if unchanged:
            rewrite_unchanged(place / name)
        what = f"{name}: {'as it is' if unchanged else rewrite(place / name, draws)}"
        _say(case=case, what=what)
        outcomes, faults = {}, []
        chosen = [use for use in uses[name] if unchanged or draws.random() < _USES / len(uses[name])]
        for use in chosen or [draws.choice(uses[name])]:
            outcome, fault = _used(use, root, place / name)
            outcomes[use.__qualname__.split(".")[0]] = outcome
            if fault or (unchanged and outcome != "accepted"):
                faults.append(f"{use.__qualname__}: {fault or outcome}")
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place)
        kind = "accepted" if set(outcomes.values()) == {"accepted"} else "refused"
        seconds = round(time.monotonic() - began, 2)
        _say(
            case=case,
            fault="\n".join(faults),
            kind="error" if faults else kind,
            what=what,
            uses=outcomes,
            s=seconds,
        )


def _used(use: Use, root: Path, path: Path) -> tuple[str, str]:
    """Return the outcome of a use, and its fault, if any."""
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    before = _tree(root)
    try:
        use(path, out)
    except StrataError as error:
        text = str(error)
        clear = "\n" not in text and len(text) <= _LONGEST
        return f"refused: {text[:300]}", "" if clear else f"a message of {len(text)}: {text[:300]}"
    except BaseException as error:
        return "error", "".join(traceback.format_exception(error))
    if _tree(root) != before or {each.name for each in path.parent.iterdir()} != {path.name, "out"}:
        return "error", f"changed something beside {path}"
    return "accepted", ""


def _say(**line: Any) -> None:
    print(json.dumps(line), file=_OUT, flush=True)


def _tree(root: Path) -> dict[str, Any]:
    """Return size, time and mode of every file in `root`.

    Log homes change all the time, so only their file names count.
    """
    rows = root / ROWS
    results: dict[str, Any] = {str(rows): sorted(os.listdir(rows))}
    for path in root.rglob("*"):
        if not path.is_relative_to(rows):
            status = path.lstat()
            results[str(path)] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return results


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


if __name__ == "__main__":
    folder, place, *numbers = sys.argv[1:]
    os.chdir(folder)
    faulthandler.enable()
    warnings.simplefilter("ignore")  # NumPy warns of truncations; real faults are errors
    contents(Path(folder), Path(place), *map(int, numbers))
