"""The pieces of `prepare` as Ray tasks: where `prepare` runs, and on the machines of a cluster.

A worker that dies costs its piece, which Ray begins again. A task asks for one processor and the memory of its piece,
so that a machine gets as many as fit; and before it works, whether this machine sees the same logs, directory, versions
and code, on which the bytes of Parquet files depend. What it raises travels back as a value.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stratarec.data.prepare.executor import Stage
from stratarec.data.prepare.ray.connect import joined
from stratarec.data.prepare.ray.lease import grant, leased, revoke
from stratarec.errors import ClusterError, StrataError
from stratarec.io.versions import PYTHON, versions
from stratarec.progress import Progress

# How often a task is begun again whose worker or machine has died.
_RETRIES = 3
# Tasks that are handed out for each processor: one runs, one waits.
_AHEAD = 2
_ENDING_SECONDS = 30.0
# What decides about the bytes of a data set, beside the code.
_DECISIVE = (PYTHON, "stratarec", "numpy", "polars", "pyarrow", "xxhash")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What tasks must find where they run."""

    work: Path
    """Directory of the half-prepared data set."""
    token: str
    """By which tasks may work in it."""
    folder: str
    """Working directory, which relative paths are of."""
    logs: tuple[tuple[str, int, int], ...]
    """Path, bytes and time of change, in seconds, of each log that is a file."""
    versions: tuple[tuple[str, str], ...]
    """Of whatever decides about the bytes of a data set."""

    @classmethod
    def of(cls, work: Path, token: str, logs: Sequence[str]) -> Order:
        """By what is here."""
        local = [path for path in logs if "://" not in path]
        stamps = tuple((path, *_stamp(path)) for path in local)
        return cls(work=work, token=token, folder=os.getcwd(), logs=stamps, versions=_versions())

    def check(self) -> None:
        """Refuse to work on this machine, and make relative paths mean here what they mean where they were given.

        Raises
        ------
        ClusterError
            Naming the machine, and the library or path that is not as it was expected.
        """
        if os.path.isdir(self.folder):  # absolute paths need no such directory
            os.chdir(self.folder)
        for (name, wanted), (_, found) in zip(self.versions, _versions(), strict=True):
            if wanted != found:
                raise _refusal(f"has {name} {found}, expected {wanted}: install the same on all machines")
        for path, *known in self.logs:
            try:
                same = _stamp(path) == tuple(known)
            except OSError as error:
                raise _refusal(f"cannot read {path} ({error.strerror}): {_SEEN}") from error
            if not same:
                raise _refusal(f"has another file as {path}, of other size or time: {_SEEN}")
        if not self.work.is_dir():
            raise _refusal(f"has no {self.work.absolute()}: name a data.path that all machines share")


def _versions() -> tuple[tuple[str, str], ...]:
    return tuple(versions(*_DECISIVE).items())


_SEEN = "keep logs where all machines see them"


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, int(found.st_mtime)


def _refusal(reason: str) -> ClusterError:
    return ClusterError(f"machine {socket.gethostname()} of the cluster {reason}")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a piece."""

    advance: int = 0
    """Of the progress."""
    error: Exception | None = None
    trace: str = ""
    """Where the error came from."""
    warned: tuple[str, ...] = ()


def work(shared: list[Any], order: Order, number: int) -> Ended:
    """Do a piece of the stage that the first reference leads to; whatever it raises is in what this gives."""
    with warnings.catch_warnings(record=True) as heard:
        try:
            _check(order)
            advance = 0
            with leased(order.work, order.token) as check_lease:
                for amount in _stage(shared[0])(number):
                    advance += amount
                    check_lease()
        except Exception as error:
            return Ended(error=_portable(error), trace=traceback.format_exc())
    return Ended(advance=advance, warned=tuple(str(each.message) for each in heard))


# A worker is a process that does many pieces, of one stage after another.
@lru_cache(1)
def _check(order: Order) -> None:
    order.check()


@lru_cache(1)
def _stage(reference: Any) -> Stage:
    import ray

    found: Stage = ray.get(reference)
    return found


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def on_ray(address: str) -> Iterator[RayExecutor]:
    """An `Executor` whose pieces are tasks of a Ray cluster; see `connect.joined`."""
    with joined(address) as ray:
        yield RayExecutor(ray)


class RayExecutor:
    """An `Executor`. Several tasks share a machine as far as its processors and its memory go.

    Parameters
    ----------
    ray : module
        Joined to a cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._task = ray.remote(max_retries=_RETRIES, num_cpus=1)(work)

    @property
    def readers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        if not self._ray.cluster_resources().get("CPU"):
            raise ClusterError("the Ray cluster has no machine with a processor for tasks")
        self._order = Order.of(work, grant(work), logs)

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        order = replace(self._order, token=grant(self._order.work))
        shared, waiting = self._ray.put(stage), deque(numbers)
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD * self.readers:
                    number = waiting.popleft()
                    sized = self._task.options(memory=self._fitting(stage.memory(number)))
                    # In a list, so that a worker asks for the stage once, and not for every piece.
                    running[sized.remote([shared], order, number)] = number
                for done in self._ray.wait(list(running), num_returns=1)[0]:
                    self._take(self._get(done, f"piece {running.pop(done)}"), progress)
        except StrataError:
            self._stop(list(running))
            raise
        finally:
            revoke(order.work)

    def _stop(self, running: list[Any]) -> None:
        """Let tasks end soon whose outcomes nobody waits for."""
        # Not by `ray.cancel`: when a task ends meanwhile, Ray 2.60 ends this process.
        revoke(self._order.work)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_ENDING_SECONDS)

    def _take(self, ended: Ended, progress: Progress) -> None:
        for message in ended.warned:
            warnings.warn(message, stacklevel=2)
        if isinstance(ended.error, self._ray.exceptions.RayError):  # a worker that could not get its stage
            raise _lost("a worker", ended.error) from RuntimeError(ended.trace)
        if ended.error is not None:
            raise ended.error from RuntimeError(ended.trace)
        progress.advance(ended.advance)

    def _get(self, reference: Any, what: str) -> Any:
        """The outcome of a task; a cluster that lost it for good is a `ClusterError`."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _lost(what, error) from error

    def _fitting(self, memory: int) -> int:
        """What a task asks for: no more than the largest machine has, or it would wait for ever."""
        most = max((node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        return int(min(memory, most))


def _lost(what: str, error: Exception) -> ClusterError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ClusterError(f"the Ray cluster lost {what} ({said}); the same command goes on")
