"""Directories of one process's use: those of the dead go, those of the living stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stratarec.io.scratch import ScratchDirectory


def made(folder: Path, age: float) -> Path:
    """What a process leaves that was killed while it made a directory `age` seconds ago."""
    folder.mkdir()
    (folder / ".owner").touch()
    os.utime(folder, (time.time() - age, time.time() - age))
    return folder


def test_what_was_never_finished_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, new, other = (
        made(tmp_path / f".making-{name}", age) for name, age in (("a-1", 3600), ("a-2", 0), ("b-1", 3600))
    )
    with ScratchDirectory(tmp_path, "a-") as path:
        assert sorted(tmp_path.iterdir()) == sorted([new, other, path])
    assert not old.exists()
