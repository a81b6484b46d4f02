"""`prepare` on a Ray cluster: joining or starting one, and running the pieces of each stage as Ray tasks.

Ray is an optional dependency (``stratarec[ray]``), imported on first use. A worker that dies costs its piece, which Ray
runs again. A task asks for one processor and the memory of its piece, so that each machine gets as many tasks as fit.
Before it works, a task checks that its machine has the same logs, directory, versions and code, because the bytes of
Parquet files depend on them. Errors of a task travel back as values.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import secrets
import shutil
import socket
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stratarec.data.prepare.executor import Stage, grant, leased, revoke
from stratarec.errors import ClusterError, ConfigError, StrataError
from stratarec.io.hashes import PYTHON, versions
from stratarec.io.scratch import ScratchDirectory
from stratarec.kernels.runtime.cores import cores
from stratarec.progress import Progress

_LOCAL, _PREFIX, _TOKEN_BYTES = "local", "stratarec-ray-", 4
# Ray's sockets lie some 60 characters below its directory, and the path of a socket has at most 107.
_LONGEST_FOLDER = 43
_CONNECT_SECONDS, _REMOVAL_SECONDS, _TASK_END_SECONDS = 10.0, 5.0, 30.0
# No statistics are sent anywhere; what Ray says of workers that died, it says on standard output.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_SCHEDULER_EVENTS": "0",
}
# A task is reckoned with one processor; several tasks share a machine.
_ALONE = dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def import_ray() -> Any:
    """The library; `ClusterError` where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(
            f"--ray needs Ray, which is not installed ({error}): pip install 'stratarec[ray]'"
        ) from error


@contextmanager
def connect(address: str) -> Iterator[Any]:
    """The library `ray`, joined to a cluster for as long as this lasts.

    Parameters
    ----------
    address : str
        ``auto`` for the cluster that this machine is of, the address of a cluster's head as ``HOST:PORT``, or
        ``local`` and ``local:N`` for a cluster of this machine and N processors (default: all that this process may
        use) that ends with this.

    Raises
    ------
    ClusterError
        When there is no such cluster, or no Ray.
    """
    processors = _processors(address)
    scratch = ScratchDirectory(Path(_parent()), _PREFIX, secrets.token_hex(_TOKEN_BYTES)) if processors else None
    before, own = dict(os.environ), {}
    os.environ.update(_QUIET)
    if scratch is not None:
        own = {"num_cpus": processors, "include_dashboard": False, "_temp_dir": str(scratch.path)}
        # Whoever reaches a cluster can run anything in it, and Ray listens on all interfaces.
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        ray = import_ray()  # it reads the environment when it is loaded
        try:
            _init(ray, address, own)
            yield ray
        finally:
            with suppress(Exception):  # what went wrong before is what matters
                ray.shutdown()
    finally:
        # Another cluster that this process joins later has another token, or none.
        os.environ.clear()
        os.environ.update(before)
        if scratch is not None:
            _remove(scratch.path)
            scratch.close()


def _processors(address: str) -> int:
    """Of a cluster on this machine; 0 for one that is there already."""
    kind, _, count = address.partition(":")
    if kind != _LOCAL:
        if not address or "://" in address:
            raise ConfigError(
                f"--ray is {address!r}, expected auto, HOST:PORT, local or local:N, on a machine of the cluster"
            )
        return 0
    most = cores()
    if not count:
        return most
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise ConfigError(f"--ray is {address!r}, expected local:N with N from 1 to {most}, the processors there are")
    return int(count)


def _init(ray: Any, address: str, own: dict[str, Any]) -> None:
    try:
        if not own:
            _reach(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        ray.init(
            _LOCAL if own else address,
            runtime_env={"env_vars": _ALONE},
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own,
        )
    except Exception as error:  # of many kinds, by what is missing
        said = " ".join(str(error).split())[:200]
        if own:
            raise ClusterError(f"cannot start a Ray cluster on this machine ({said})") from error
        raise ClusterError(
            f"no Ray cluster at {address} ({said}): `ray start --head` starts one, and --ray local needs none"
        ) from error


def _reach(address: str) -> None:
    """Connect once: where nothing answers, Ray itself tries for four minutes, and says every few seconds that it
    does."""
    host, _, port = address.rpartition(":")
    if address:  # else `ray start` left it where Ray finds it
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _parent() -> str:
    """Where a cluster of this machine has its files: with other temporary files, where their names are short enough."""
    usual = tempfile.gettempdir()
    return usual if len(usual) + len(_PREFIX) + 2 * _TOKEN_BYTES + 1 <= _LONGEST_FOLDER else "/tmp"


def _remove(folder: Path) -> None:
    """Remove what a cluster left; some of its processes write a little longer than `ray.shutdown` takes."""
    limit = time.monotonic() + _REMOVAL_SECONDS
    while folder.exists() and time.monotonic() < limit:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


# How often a task is begun again whose worker or machine has died.
_RETRIES = 3
# Tasks that are handed out for each processor: one runs, one waits.
_AHEAD = 2
# What decides about the bytes of a data set, beside the code.
_DECISIVE = (PYTHON, "stratarec", "numpy", "polars", "pyarrow", "xxhash")


@dataclass(frozen=True, kw_only=True)
class TaskRequirements:
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
    def of(cls, work: Path, token: str, logs: Sequence[str]) -> TaskRequirements:
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
class TaskResult:
    """What became of a piece."""

    advance: int = 0
    """Of the progress."""
    error: Exception | None = None
    trace: str = ""
    """Where the error came from."""
    warned: tuple[str, ...] = ()


def work(shared: list[Any], order: TaskRequirements, number: int) -> TaskResult:
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
            return TaskResult(error=_portable(error), trace=traceback.format_exc())
    return TaskResult(advance=advance, warned=tuple(str(each.message) for each in heard))


# A worker is a process that does many pieces, of one stage after another.
@lru_cache(1)
def _check(order: TaskRequirements) -> None:
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
    """An `Executor` whose pieces are tasks of a Ray cluster; see `connect`."""
    with connect(address) as ray:
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
        self._order = TaskRequirements.of(work, grant(work), logs)

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
            self._ray.wait(running, num_returns=len(running), timeout=_TASK_END_SECONDS)

    def _take(self, ended: TaskResult, progress: Progress) -> None:
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
