"""Loaded once by the server that forks commands: what they import and compile is there already, no threads are."""

from __future__ import annotations

import contextlib
import io
import os
import shutil

from neighbours.commands import WARM

from stratarec.cli import main

# Imported for those who are forked.


def _warm(recipe: str) -> None:
    """Train, so that kernels are compiled; by one thread, since threads are no more in a fork."""
    run = f"{recipe}.warm"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", "-q", recipe, "--overwrite", f"train.run={run}"]) == 0
        assert main(["evaluate", "-q", run]) == 0
    shutil.rmtree(run)


_warm(os.environ[WARM])
