"""Joining a Ray cluster, or starting one on this machine, without its noise."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stratarec.errors import ClusterError, ConfigError
from stratarec.io.scratch import ScratchDirectory
from stratarec.kernels.runtime.cores import cores

_LOCAL, _PREFIX, _TOKEN_BYTES = "local", "stratarec-ray-", 4
# Ray's sockets lie some 60 characters below its directory, and the path of a socket has at most 107.
_LONGEST_FOLDER = 43
_REACH_SECONDS, _ENDING_SECONDS = 10.0, 5.0
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
def joined(address: str) -> Iterator[Any]:
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
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()


def _parent() -> str:
    """Where a cluster of this machine has its files: with other temporary files, where their names are short enough."""
    usual = tempfile.gettempdir()
    return usual if len(usual) + len(_PREFIX) + 2 * _TOKEN_BYTES + 1 <= _LONGEST_FOLDER else "/tmp"


def _remove(folder: Path) -> None:
    """Remove what a cluster left; some of its processes write a little longer than `ray.shutdown` takes."""
    limit = time.monotonic() + _ENDING_SECONDS
    while folder.exists() and time.monotonic() < limit:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
