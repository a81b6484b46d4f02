"""Rank processes for tests. They stay alive and run one job after another, each job on its own
mesh.

Starting a process takes a second (compiled kernels), starting a mesh takes milliseconds.
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
    """Run jobs from the pipe that is the standard input until it closes."""
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
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            LOCAL_WORLD_SIZE=str(local or ranks),
        )
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
    """Process of a rank, and the pipe to it."""

    def __init__(self, rank: int) -> None:
        self.pipe, there = Pipe()
        with there:
            key = bytes(current_process().authkey)  # tensors are sent as files, which need this key
            code = f"import sys; sys.path[:] = {sys.path!r}; from distributed.ranks import serve; serve({rank}, {key})"
            self._ended = forked.begin(code, there.fileno())
        self.pid: int = self.pipe.recv()

    def alive(self, seconds: float = 0.0) -> bool:
        """Return whether the process is still running after `seconds`."""
        return not select.select([self._ended], [], [], seconds)[0]

    def close(self) -> None:
        self.pipe.close()
        if self.alive(5.0):
            os.kill(self.pid, signal.SIGKILL)
        self._ended.close()


class Ranks:
    """Context manager for up to four ranks on this machine."""

    def __init__(self) -> None:
        self._workers: list[_Rank] = []

    def start(self, ranks: int) -> None:
        """Ensure that this many processes are running, each ready for a job."""
        for rank in range(ranks):
            if rank == len(self._workers):
                self._workers.append(_Rank(rank))
            elif not self._workers[rank].alive():
                self._workers[rank].close()
                self._workers[rank] = _Rank(rank)

    def begin(
        self,
        ranks: int,
        job: Job,
        arguments: Sequence[Sequence[Any]],
        timeout: float = 30.0,
        local: int = 0,
        towers: int = 0,
    ) -> None:
        """Start ``job(mesh, *arguments[rank])`` on every rank."""
        self.start(ranks)
        port = free_port()
        for worker, given in zip(self._workers[:ranks], arguments, strict=True):
            worker.pipe.send((job, given, ranks, port, timeout, local, towers))

    def end(self, ranks: int) -> list[Any]:
        """Return the result or the exception of each rank, and None for a rank that died."""
        answers = []
        for worker in self._workers[:ranks]:
            try:
                answer, where = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                answer, where = None, ""
            if isinstance(answer, str) and where:
                answer = AssertionError(where)
            answers.append(answer)
        return answers

    def run(self, ranks: int, job: Job, *arguments: Any, **options: Any) -> list[Any]:
        """Run a job on all ranks with the same arguments and return their results. Raise the error
        of any rank.
        """
        self.begin(ranks, job, [arguments] * ranks, **options)
        answers = self.end(ranks)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def refused(self, ranks: int, job: Job, *arguments: Any, **options: Any) -> set[str]:
        """Return the error messages of the ranks; every rank must raise an error."""
        self.begin(ranks, job, [arguments] * ranks, **options)
        answers = self.end(ranks)
        assert all(isinstance(answer, Exception) for answer in answers), answers
        return {str(answer) for answer in answers}

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank. After SIGKILL, wait until the process ends, so that no later job
        is sent to it.
        """
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
