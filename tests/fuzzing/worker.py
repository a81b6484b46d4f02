"""Runs cases of the fuzzer one after another, telling of each when it begins and what came of it: a line of JSON."""

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
from fuzzing.contents import rewrite, written_again
from fuzzing.guards import Guards

from stratarec.errors import StrataError

_SECONDS = 30
_GROWTH = 1 << 30
_LONGEST = 2000
_USES = 2
"""So many things, on average, are done with contents."""
_OUT = sys.stdout


def contents(root: Path, work: Path, seed: int, first: int, last: int) -> None:
    """Artefacts whose contents somebody wrote and sealed: each use of one gives what is legal, or one clear error.

    Kernels get their arrays between guard pages. The first case of each artefact changes nothing, and must be accepted.
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
        place, whole = work / f"case-{case}", case < len(uses)
        shutil.copytree(root / name, place / name, symlinks=True)
        if whole:
            written_again(place / name)
        what = f"{name}: {'as it is' if whole else rewrite(place / name, draws)}"
        _say(case=case, what=what)
        outcomes, faults = {}, []
        chosen = [use for use in uses[name] if whole or draws.random() < _USES / len(uses[name])]
        for use in chosen or [draws.choice(uses[name])]:
            outcome, fault = _used(use, root, place / name)
            outcomes[use.__qualname__.split(".")[0]] = outcome
            if fault or (whole and outcome != "accepted"):
                faults.append(f"{use.__qualname__}: {fault or outcome}")
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place)
        kind = "accepted" if set(outcomes.values()) == {"accepted"} else "refused"
        seconds = round(time.monotonic() - began, 2)
        _say(case=case, fault="\n".join(faults), kind="error" if faults else kind, what=what, uses=outcomes, s=seconds)


def _used(use: Use, root: Path, path: Path) -> tuple[str, str]:
    """What came of it, and what was wrong with that."""
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
    """Size, time and mode of everything in `root`; of the memory where logs are at work, its content."""
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
    warnings.simplefilter("ignore")  # of truncations to bytes and the like; what is wrong is an error
    contents(Path(folder), Path(place), *map(int, numbers))
