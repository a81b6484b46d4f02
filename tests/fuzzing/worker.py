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

from fuzzing.artefacts import ROWS, Artefact, artefacts
from fuzzing.free import is_free
from fuzzing.mutations import mutate

from stratarec.errors import StrataError

_SECONDS = 30
_GROWTH = 1 << 30
_LONGEST = 2000


def main(root: Path, work: Path, seed: int, first: int, last: int) -> None:
    warnings.simplefilter("ignore")  # of truncations to bytes and the like; what is wrong is an error
    found = artefacts(root)
    expected = {name: _run(each, root, work / f"as-is-{name}", None)[0] for name, each in found.items()}
    limit = _data_bytes() + _GROWTH
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    names = sorted(found)
    for case in range(first, last):
        artefact, draws = found[names[case % len(names)]], random.Random(f"{seed} {case}")
        began = time.monotonic()
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        outcome, what, error = _run(artefact, root, work / f"case-{case}", draws)
        faulthandler.cancel_dump_traceback_later()
        kind, fault = _judge(what, outcome, expected[artefact.name], error)
        print(
            json.dumps(
                {"case": case, "fault": fault, "kind": kind, "what": what, "s": round(time.monotonic() - began, 2)}
            ),
            flush=True,
        )


def _run(
    artefact: Artefact, root: Path, place: Path, draws: random.Random | None
) -> tuple[dict[str, str], str, BaseException | str | None]:
    """What comes of an artefact, what was done to it, and what was wrong."""
    shutil.copytree(root / artefact.name, place / artefact.name, symlinks=True)
    out = place / "out"
    out.mkdir()
    what = ""
    if draws is not None:
        what = f"{artefact.name}: {mutate(place / artefact.name, draws, root)}"
        print(json.dumps({"case": int(place.name.split("-")[1]), "what": what}), flush=True)
    before = _tree(root)
    outcome: dict[str, str] = {}
    error: BaseException | str | None = None
    try:
        outcome = artefact.use(place / artefact.name, out)
    except BaseException as fault:
        error = fault
    after = _tree(root)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    if changed:
        error = f"changed {sorted(changed)[:3]}"
    if {path.name for path in place.iterdir()} != {artefact.name, "out"}:
        error = f"made {sorted(path.name for path in place.iterdir())}"
    shutil.rmtree(place)
    return outcome, what, error


def _judge(
    what: str, outcome: dict[str, str], expected: dict[str, str], error: BaseException | str | None
) -> tuple[str, str]:
    if isinstance(error, StrataError):
        text = str(error)
        return "refused", f"a message of {len(text)}: {text[:300]}" if "\n" in text or len(text) > _LONGEST else ""
    if isinstance(error, BaseException):
        return "error", "".join(traceback.format_exception(error))
    if error is not None:
        return "error", error
    if outcome == expected:
        return "same", ""
    if is_free(what):
        return "free", ""
    return "other", f"another result: {[key for key in expected if outcome.get(key) != expected[key]]}"


def _tree(root: Path) -> dict[str, Any]:
    """Size, time and mode of everything in `root`; of the memory where logs are at work, what lies there."""
    rows = root / ROWS
    found: dict[str, Any] = {str(rows): sorted(os.listdir(rows))}
    for path in root.rglob("*"):
        if not path.is_relative_to(rows):
            status = path.lstat()
            found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return found


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


if __name__ == "__main__":
    folder, place, *numbers = sys.argv[1:]
    os.chdir(folder)
    main(Path(folder), Path(place), *map(int, numbers))
