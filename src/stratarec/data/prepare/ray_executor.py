"""Run `prepare` on a Ray cluster: connect to a cluster, and run the pieces of each pass as Ray
tasks.

Ray is an optional dependency (``stratarec[ray]``), imported on first use. If a worker dies, Ray
runs its piece again. A task requests one processor and the memory of its piece, so that each
machine gets as many tasks as fit. A task first checks that its machine has the same logs,
directory, versions and code, because the bytes of Parquet files depend on them. An error in a task
is returned as a value.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import socket
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stratarec.data.prepare.executor import Pass, grant, leased, revoke
from stratarec.errors import ClusterError, ConfigError, StrataError
from stratarec.io.hashes import PYTHON, versions
from stratarec.progress import Progress

_CONNECT_SECONDS, _TASK_END_SECONDS = 10.0, 30.0
# No usage statistics are sent. Ray reports dead workers on standard output.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_SCHEDULER_EVENTS": "0",
}
# A task uses one processor; several tasks share a machine.
_ONE_THREAD = dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def import_ray() -> Any:
    """Import Ray. Raises `ClusterError` if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(
            f"--ray needs Ray, which is not installed ({error}): pip install 'stratarec[ray]'"
        ) from error


@contextmanager
def connect(address: str) -> Iterator[Any]:
    """Connect to a cluster; yield the module `ray`.

    Parameters
    ----------
    address : str
        ``auto`` for the cluster of this machine, which `ray start --head` starts, or ``HOST:PORT``
        for the head of a cluster.

    Raises
    ------
    ConfigError
        If `address` is neither.
    ClusterError
        If the cluster cannot be reached, or Ray is not installed.
    """
    if not address or "://" in address:
        raise ConfigError(
            f"--ray is {address!r}, expected auto or HOST:PORT; run on a machine of the cluster"
        )
    environment = dict(os.environ)
    os.environ.update(_QUIET)
    try:
        ray = import_ray()  # it reads the environment when it is loaded
        try:
            _init(ray, address)
            yield ray
        finally:
            with suppress(Exception):  # the earlier error is the one to report
                ray.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _init(ray: Any, address: str) -> None:
    try:
        _try_connection(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        environment = {"env_vars": _ONE_THREAD}
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many types
        reason = " ".join(str(error).split())[:200]
        raise ClusterError(
            f"no Ray cluster at {address} ({reason}): start one by `ray start --head`"
        ) from error


def _try_connection(address: str) -> None:
    """Check that a cluster answers. Without an answer, Ray would try for four minutes and print a
    message each time.
    """
    host, _, port = address.rpartition(":")
    if address:  # else Ray finds the address that `ray start` stored
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


# Restarts of a task whose worker or machine has died.
_RETRIES = 3
# Submitted tasks for each processor: one runs, one waits.
_AHEAD = 2
# Versions on which the bytes of a data set depend, in addition to the code.
_VERSIONED = (PYTHON, "stratarec", "numpy", "polars", "pyarrow", "xxhash")


@dataclass(frozen=True, kw_only=True)
class TaskRequirements:
    """Properties that the machine of a task must share with the machine that runs `prepare`."""

    work: Path
    """Working directory of `prepare`."""
    token: str
    """Token of the lease on `work`."""
    folder: str
    """Current directory, to which relative paths refer."""
    logs: tuple[tuple[str, int, int], ...]
    """Path, size in bytes and modification time in seconds of each log that is a file."""
    versions: tuple[tuple[str, str], ...]
    """Versions on which the bytes of a data set depend."""

    @classmethod
    def of(cls, work: Path, token: str, logs: Sequence[str]) -> TaskRequirements:
        """Describe this machine."""
        local = [path for path in logs if "://" not in path]
        stamps = tuple((path, *_stamp(path)) for path in local)
        return cls(work=work, token=token, folder=os.getcwd(), logs=stamps, versions=_versions())

    def check(self) -> None:
        """Change to the directory in which `prepare` runs, and check that this machine meets the
        requirements.

        Raises
        ------
        ClusterError
            If a version or a log differs. The message names the machine, and the library or path.
        """
        if os.path.isdir(self.folder):  # absolute paths need no such directory
            os.chdir(self.folder)
        for (name, expected), (_, version) in zip(self.versions, _versions(), strict=True):
            if version != expected:
                raise _refusal(
                    f"has {name} {version}, expected {expected}: install the same version on all machines"
                )
        for path, *stamp in self.logs:
            try:
                same = _stamp(path) == tuple(stamp)
            except OSError as error:
                raise _refusal(f"cannot read {path} ({error.strerror}): {_SHARED}") from error
            if not same:
                raise _refusal(f"has another file at {path}: its size or time differs; {_SHARED}")
        if not self.work.is_dir():
            raise _refusal(f"has no {self.work.absolute()}: name a data.path that all machines share")


def _versions() -> tuple[tuple[str, str], ...]:
    return tuple(versions(*_VERSIONED).items())


_SHARED = "keep logs in a directory that all machines share"


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, int(status.st_mtime)


def _refusal(reason: str) -> ClusterError:
    return ClusterError(f"machine {socket.gethostname()} of the cluster {reason}")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Report of a task on another machine when it has ended."""

    advance: int = 0
    """Number of steps by which progress advances."""
    error: Exception | None = None
    trace: str = ""
    """Traceback of the error; empty if there was none."""
    warned: tuple[str, ...] = ()


def work(shared: list[Any], requirements: TaskRequirements, number: int) -> TaskResult:
    """Run a piece of the pass that `shared` refers to. An error is not raised, but returned in the
    result.
    """
    with warnings.catch_warnings(record=True) as heard:
        try:
            _check(requirements)
            advance = 0
            with leased(requirements.work, requirements.token) as check_lease:
                for amount in _pass_of(shared[0])(number):
                    advance += amount
                    check_lease()
        except Exception as error:
            return TaskResult(error=_portable(error), trace=traceback.format_exc())
    return TaskResult(advance=advance, warned=tuple(str(warning.message) for warning in heard))


# A worker process runs many pieces of one pass, one after another.
@lru_cache(1)
def _check(requirements: TaskRequirements) -> None:
    requirements.check()


@lru_cache(1)
def _pass_of(reference: Any) -> Pass:
    import ray

    data_pass: Pass = ray.get(reference)
    return data_pass


def _portable(error: Exception) -> Exception:
    """Return the error itself, or, if it cannot be pickled, another error with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def on_ray(address: str) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster; yield an `Executor` that runs pieces as Ray tasks."""
    with connect(address) as ray:
        yield RayExecutor(ray)


class RayExecutor:
    """An `Executor` on a Ray cluster. Each machine runs as many tasks as its processors and memory
    allow.

    Parameters
    ----------
    ray : module
        The module `ray`, connected to a cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._task = ray.remote(max_retries=_RETRIES, num_cpus=1)(work)

    @property
    def readers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        if not self._ray.cluster_resources().get("CPU"):
            raise ClusterError("the Ray cluster has no machine with CPUs for tasks; add one")
        self._requirements = TaskRequirements.of(work, grant(work), logs)

    def run(self, data_pass: Pass, numbers: Sequence[int], progress: Progress) -> None:
        requirements = replace(self._requirements, token=grant(self._requirements.work))
        shared, waiting = self._ray.put(data_pass), deque(numbers)
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD * self.readers:
                    number = waiting.popleft()
                    sized = self._task.options(memory=self._fitting(data_pass.memory(number)))
                    # The reference is inside a list, which Ray does not replace by the pass: so a
                    # worker reads the pass once, and not with every piece.
                    running[sized.remote([shared], requirements, number)] = number
                for done in self._ray.wait(list(running), num_returns=1)[0]:
                    self._take(self._get(done, f"piece {running.pop(done)}"), progress)
        except StrataError:
            self._stop(list(running))
            raise
        finally:
            revoke(requirements.work)

    def _stop(self, running: list[Any]) -> None:
        """Stop running tasks after an error."""
        # `ray.cancel` is not used: if the task ends at the same time, Ray 2.60 ends this process.
        revoke(self._requirements.work)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_TASK_END_SECONDS)

    def _take(self, ended: TaskResult, progress: Progress) -> None:
        for message in ended.warned:
            warnings.warn(message, stacklevel=2)
        if isinstance(ended.error, self._ray.exceptions.RayError):  # a worker that could not get its pass
            raise _lost("a worker", ended.error) from RuntimeError(ended.trace)
        if ended.error is not None:
            raise ended.error from RuntimeError(ended.trace)
        progress.advance(ended.advance)

    def _get(self, reference: Any, what: str) -> Any:
        """Return the result of a task. Raises `ClusterError` if the cluster lost it."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _lost(what, error) from error

    def _fitting(self, memory: int) -> int:
        """Return the memory that a task requests: `memory`, but not more than the largest machine
        has.

        A task that requests more would never start.
        """
        most = max(
            (node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0
        )
        return int(min(memory, most))


def _lost(what: str, error: Exception) -> ClusterError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ClusterError(f"the Ray cluster lost {what} ({reason}); run the same command again to resume")
