"""Emulated hosts: network namespaces of this machine, joined by a bridge, with a limited rate
between them.

``python -m benchmarks.hosts check`` reports whether this machine can emulate hosts, and what is
missing if not; ``run`` starts torchrun on them; ``clean`` removes the namespaces of a killed run,
as does every start.

Each host is a namespace with one interface, the end of a veth pair. The other ends are joined by a
bridge in another namespace, so the network of the machine does not change. A token bucket (``tc
tbf``) at each end of a pair limits what the host sends and receives. Ranks of one host communicate
without this limit. All hosts share the processors, memory and clock of the machine: only the
network between them is emulated.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from stratarec.errors import StrataError

INTERFACE = "eth0"
"""Network interface of a host, for ``GLOO_SOCKET_IFNAME``."""
_NETWORK, _PORT = "10.77.0", 29500
_PREFIX = "stratarec-host"
# Size of the token bucket, and the longest time that a packet waits in it.
_BURST, _LATENCY = "256kb", "50ms"
# Every kernel has reno, and it fills a link. BBR, the default of some machines, leaves a third of
# 100 Mbit/s unused when several flows share the link.
_CONTROL = "reno"
_MOST_HOSTS = 16
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel end this process when its parent ends, even by kill -9; call it as
    ``preexec_fn``.
    """
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class HostsMissing(StrataError):
    """Hosts cannot be emulated on this machine."""


def missing() -> str:
    """Return what this machine lacks to emulate hosts, or an empty string if nothing is known to be
    missing.
    """
    if not sys.platform.startswith("linux"):
        return f"network namespaces require Linux; this system is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces require root; run the command as root"
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(tools)} not found: apt-get install iproute2" if tools else ""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise HostsMissing(
            f"hosts cannot be emulated here: {' '.join(command)!r} failed: "
            f"{lines[0] if lines else done.returncode}"
        )
    return done.stdout


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks of the kernel, or an empty string if the process
    does not exist.

    Process id and start time identify a process uniquely.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespaces() -> list[str]:
    return [
        line.split()[0]
        for line in _run("ip", "netns", "list").splitlines()
        if line.startswith(f"{_PREFIX}-")
    ]


def _remove(namespace: str) -> None:
    """Kill the processes in a namespace and remove it with its interfaces. Another process may do
    the same.
    """
    deadline = time.monotonic() + 10
    try:
        while (pids := _run("ip", "netns", "pids", namespace).split()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        _run("ip", "netns", "delete", namespace)
    except HostsMissing:
        if namespace in _namespaces():
            raise


def clean() -> list[str]:
    """Remove the namespaces whose creator no longer runs, kill the processes in them, and return
    their names.
    """
    removed = []
    for namespace in _namespaces():
        pid, started = namespace.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if _start_time(int(pid)) != started:
            _remove(namespace)
            removed.append(namespace)
    return removed


class Hosts:
    """Emulated hosts as a context manager that removes them on exit.

    Parameters
    ----------
    count : int
    mbit : float or None
        Rate of each host's link in each direction, in Mbit/s; None sets no limit.

    Raises
    ------
    HostsMissing
        On entry, if this machine cannot emulate hosts.
    """

    def __init__(self, count: int, mbit: float | None = None) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise HostsMissing(f"the number of hosts must be between 1 and {_MOST_HOSTS}; got {count}")
        if mbit is not None and not 1 <= mbit <= 100_000:
            raise HostsMissing(f"mbit must be between 1 and 100000; got {mbit}")
        self.count = count
        self.mbit = mbit
        self._name = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self._started: list[subprocess.Popen[bytes]] = []

    def namespace(self, host: int | str) -> str:
        """Return the namespace of a host, by its number."""
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def __enter__(self) -> Hosts:
        lacking = missing()
        if lacking:
            raise HostsMissing(f"hosts cannot be emulated here: {lacking}")
        clean()
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def _create(self) -> None:
        switch = self.namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for host in range(self.count):
            namespace, port = self.namespace(host), f"port{host}"
            _run("ip", "netns", "add", namespace)
            _run(
                "ip",
                "netns",
                "exec",
                namespace,
                "sh",
                "-c",
                f"echo {_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control",
            )
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", namespace, "link", "add", INTERFACE, *pair)
            _run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            if self.mbit is not None:
                bucket = ("root", "tbf", "rate", f"{self.mbit:g}mbit", "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *bucket)
                _run("tc", "-n", switch, "qdisc", "add", "dev", port, *bucket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all started processes and remove all hosts that still exist."""
        for namespace in _namespaces():
            if namespace.startswith(f"{self._name}-"):
                _remove(namespace)
        for process in self._started:
            process.wait()
        self._started = []

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        inside = ["ip", "netns", "exec", self.namespace(host), *command]
        process = subprocess.Popen(inside, env=environment, preexec_fn=end_with_parent)  # noqa: PLW1509 - one system call, no lock
        self._started.append(process)
        return process

    def torchrun(
        self,
        per_host: int,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
    ) -> int:
        """Run ``torchrun ARGUMENTS`` with `per_host` ranks on every host; return the first exit
        status that is not 0.

        If one host fails, all others are ended.
        """
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.count}",
            f"--nproc-per-node={per_host}",
            f"--master-addr={self.address(0)}",
            f"--master-port={_PORT}",
        ]
        running = [
            self.start(
                host,
                [*command, f"--node-rank={host}", f"--local-addr={self.address(host)}", *arguments],
                env,
            )
            for host in range(self.count)
        ]
        return first_failure(running, timeout)

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host has sent so far."""
        name = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [
            int(_run("ip", "netns", "exec", self.namespace(host), "cat", name))
            for host in range(self.count)
        ]


def first_failure(running: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """Wait until all processes succeed, one fails, or `timeout` passes; then end the others and
    return the status.
    """
    deadline = time.monotonic() + timeout
    try:
        while True:
            ended = [process.poll() for process in running]
            bad = [status for status in ended if status]
            if bad or all(status == 0 for status in ended):
                return bad[0] if bad else 0
            if time.monotonic() > deadline:
                return 124
            time.sleep(0.05)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def _ended(signal_number: int, frame: object) -> None:
    sys.exit(128 + signal_number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="report whether this machine can emulate hosts")
    commands.add_parser("clean", help="remove the namespaces of a killed run")
    run = commands.add_parser(
        "run", help="run torchrun on emulated hosts: run --hosts 2 -- -m stratarec train RECIPE"
    )
    run.add_argument("--hosts", type=int, default=2)
    run.add_argument("--ranks", type=int, default=2, help="start this many ranks on each host")
    run.add_argument(
        "--mbit", type=float, help="limit the rate of each host to this many Mbit/s (default: no limit)"
    )
    run.add_argument("arguments", nargs="+", help="arguments of torchrun")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _ended)
    try:
        if args.command == "clean":
            lacking = missing()
            print(lacking or f"removed {len(clean())} namespaces")
            return 2 if lacking else 0
        if args.command == "check":
            with Hosts(2, mbit=1000):
                print("hosts can be emulated here")
            return 0
        with Hosts(args.hosts, args.mbit) as hosts:
            status = hosts.torchrun(args.ranks, args.arguments)
            sent = hosts.sent_bytes()
        print(
            "sent " + ", ".join(f"{count / 1e6:.1f} MB by host {host}" for host, count in enumerate(sent))
        )
        return status
    except HostsMissing as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
