"""Commands in processes that are forked from a warm one, so that hundreds of pairs of them take minutes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import stratarec

WARM = "STRATAREC_WARM"
"""Variable of the environment that names the recipe that the server trains."""
_SECONDS = 60


def server() -> ForkServerContext:
    """What forks commands, once it was warmed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["neighbours.warm"])
    return context


def warm(recipe: Path) -> None:
    """Start the server and train `recipe` in it, of tables in memory alone; its data are prepared.

    The kernels of other tables use OpenMP of Numba's, which ends a fork of a process that has used it.
    """
    before = dict(os.environ)
    # Threads are no more in a fork, so there must be none.
    paths = [str(Path(stratarec.__file__).parents[1]), str(Path(__file__).parents[1])]
    os.environ.update(
        {
            WARM: str(recipe),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
    )
    try:
        multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a command."""

    arguments: tuple[str, ...]
    code: int | None
    """None where it did not end."""
    said: str
    complained: str

    def __str__(self) -> str:
        return f"{' '.join(self.arguments)}\n  exit {self.code}: {self.said[-300:]}\n{self.complained[-2000:]}"


def _main(arguments: Sequence[str], out: str, err: str) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    from stratarec.cli import main

    code = main(list(arguments))
    os._exit(code)


class Command:
    """A `stratarec` command under way."""

    def __init__(self, context: ForkServerContext, arguments: Sequence[str], out: Path) -> None:
        self.arguments, self._out, self._err = tuple(arguments), out.with_suffix(".out"), out.with_suffix(".err")
        for path in (self._out, self._err):
            path.write_text("")
        self._process: ForkServerProcess = context.Process(
            target=_main, args=(self.arguments, str(self._out), str(self._err))
        )
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing where it has ended."""
        assert self._process.pid is not None
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def wait(self, seconds: float = _SECONDS) -> None:
        """Until it ends, or so long."""
        self._process.join(seconds)

    def outcome(self) -> Outcome:
        """What came of it; one that hangs is ended."""
        self.wait()
        code = self._process.exitcode
        self.signal(signal.SIGKILL)
        self._process.join()
        return Outcome(
            arguments=self.arguments, code=code, said=self._out.read_text(), complained=self._err.read_text()
        )


def interleave(
    context: ForkServerContext, draws: random.Random, first: Sequence[str], second: Sequence[str], out: Path
) -> list[Outcome]:
    """Two commands, the second begun at a random moment of the first, which may be stopped or killed meanwhile."""
    how = draws.choice(("beside", "beside", "stopped", "first is killed", "second is killed"))
    one = Command(context, first, out / "first")
    time.sleep(draws.random() ** 2 * 0.8)
    if how == "stopped":
        one.signal(signal.SIGSTOP)
    other = Command(context, second, out / "second")
    if how == "stopped":
        other.wait(draws.random())
        one.signal(signal.SIGCONT)
    if "killed" in how:
        time.sleep(draws.random() ** 2 * 0.8)
        (one if how.startswith("first") else other).signal(signal.SIGKILL)
    return [one.outcome(), other.outcome()]
