"""Ranks for tests: processes that stay and run one job after another, each job on a mesh of its own.

Starting a process costs a second (compiled kernels), a mesh milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from typing import Any

import forked

Job = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(rank: int, key: bytes) -> None:
    """Run jobs of the pipe that is the standard input, until it ends."""
    current_process().authkey = key
    pipe = Connection(os.dup(0))
    pipe.send(os.getpid())
    import torch

    from stratarec.distributed.config import DistributedConfig
    from stratarec.distributed.mesh import joined

    torch.set_num_threads(1)
    while True:
        try:
            job, arguments, ranks, port, timeout, local, towers = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            LOCAL_WORLD_SIZE=str(local or ranks),
        )  # fmt: skip
        try:
            torch.manual_seed(0)
            with joined(DistributedConfig(timeout=timeout), towers) as mesh:
                answer = (job(mesh, *arguments), "")
        except BaseException as error:
            answer = (error if _is_plain(error) else repr(error), traceback.format_exc())
        pipe.send(answer)


def _is_plain(error: BaseException) -> bool:
    from stratarec.errors import StrataError

    return isinstance(error, StrataError)


class _Rank:
    """The process of a rank, and the pipe to it."""

    def __init__(self, rank: int) -> None:
        self.pipe, there = Pipe()
        with there:
            key = bytes(current_process().authkey)  # tensors travel as files, which are handed to whoever knows it
            code = f"import sys; sys.path[:] = {sys.path!r}; from distributed.ranks import serve; serve({rank}, {key})"
            self._ended = forked.begin(code, there.fileno())
        self.pid: int = self.pipe.recv()

    def alive(self, seconds: float = 0.0) -> bool:
        """Whether it has not ended by then."""
        return not select.select([self._ended], [], [], seconds)[0]

    def close(self) -> None:
        self.pipe.close()
        if self.alive(5.0):
            os.kill(self.pid, signal.SIGKILL)
        self._ended.close()


class Ranks:
    """Up to four ranks on this machine; a context manager."""

    def __init__(self) -> None:
        self._workers: list[_Rank] = []

    def start(self, ranks: int) -> None:
        """Have so many processes, each able to run jobs."""
        for rank in range(ranks):
            if rank == len(self._workers):
                self._workers.append(_Rank(rank))
            elif not self._workers[rank].alive():
                self._workers[rank].close()
                self._workers[rank] = _Rank(rank)

    def begin(
        self, ranks: int, job: Job, arguments: Sequence[Sequence[Any]], timeout: float = 30.0, local: int = 0,
        towers: int = 0,
    ) -> None:  # fmt: skip
        """Let every rank run ``job(mesh, *arguments[rank])``."""
        self.start(ranks)
        port = free_port()
        for worker, given in zip(self._workers[:ranks], arguments, strict=True):
            worker.pipe.send((job, given, ranks, port, timeout, local, towers))

    def end(self, ranks: int) -> list[Any]:
        """Return the result or the exception of each rank; None for a rank that died."""
        found = []
        for worker in self._workers[:ranks]:
            try:
                answer, where = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                answer, where = None, ""
            if isinstance(answer, str) and where:
                answer = AssertionError(where)
            found.append(answer)
        return found

    def run(self, ranks: int, job: Job, *arguments: Any, **options: Any) -> list[Any]:
        """Return the result of each rank. All ranks have the same arguments. An error of any rank is raised here."""
        self.begin(ranks, job, [arguments] * ranks, **options)
        found = self.end(ranks)
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found

    def refused(self, ranks: int, job: Job, *arguments: Any, **options: Any) -> set[str]:
        """Return the error messages of the ranks; every rank must raise an error."""
        self.begin(ranks, job, [arguments] * ranks, **options)
        found = self.end(ranks)
        assert all(isinstance(answer, Exception) for answer in found), found
        return {str(answer) for answer in found}

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank; wait for the end of one that is killed, or the next job is sent to it."""
        os.kill(self._workers[rank].pid, number)
        if number == signal.SIGKILL:
            self._workers[rank].alive(5.0)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


@contextlib.contextmanager
def running() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()
