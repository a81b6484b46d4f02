"""Emulated hosts: network namespaces of this machine, joined by a bridge, each with a wire of a given rate.

``python -m benchmarks.hosts check`` says whether they can be had here, and what is missing where not; ``run`` starts
torchrun in them; ``clean`` removes what a killed start left, as every start does first.

Each host is a namespace with one interface, the end of a veth pair; the other ends meet in a bridge in a namespace of
its own, so nothing is left in the machine's own network. Both ends of a pair have a token bucket (``tc tbf``): what a
host sends and what it is sent. Ranks of one host reach each other without passing the wire. The hosts share the
machine's processors, memory and clock: only the network between them is emulated.
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
"""The interface of a host, for ``GLOO_SOCKET_IFNAME``."""
_NETWORK, _PORT = "10.77.0", 29500
_PREFIX = "stratarec-host"
# What the bucket lets pass at once, and how long a packet may wait in it.
_BURST, _LATENCY = "256kb", "50ms"
# Every kernel has it, and it fills a link. Flows by BBR, which some machines have as a default, leave a third of 100
# Mbit/s unused where several share them.
_CONTROL = "reno"
_MOST_HOSTS = 16
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Between fork and exec (``preexec_fn``): the kernel ends what is started when we are gone, even by kill -9."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class HostsMissing(StrataError):
    """Hosts cannot be emulated on this machine."""


def missing() -> str:
    """What this machine lacks to emulate hosts, in one line; empty where nothing is known to be missing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces can be made by root alone: run it as root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found: apt-get install iproute2" if lacking else ""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HostsMissing(
            f"hosts cannot be emulated here: {' '.join(command)!r} said {said[0] if said else done.returncode}"
        )
    return done.stdout


def _born(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number, no other process has it; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(f"{_PREFIX}-")]


def _remove(namespace: str) -> None:
    """End what runs in a namespace, and remove it; its interfaces go with it. Another start may do the same."""
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
    """Remove the namespaces whose maker is gone, and what still runs in them; returns their names."""
    found = []
    for namespace in _namespaces():
        pid, born = namespace.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if _born(int(pid)) != born:
            _remove(namespace)
            found.append(namespace)
    return found


class Hosts:
    """Hosts with wires between them; a context manager that leaves nothing behind.

    Parameters
    ----------
    count : int
    mbit : float or None
        Rate of each wire, either way, in Mbit/s; None leaves it as fast as it is.

    Raises
    ------
    HostsMissing
        On entry, with what is missing.
    """

    def __init__(self, count: int, mbit: float | None = None) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise HostsMissing(f"{count} hosts, expected 1 to {_MOST_HOSTS}")
        if mbit is not None and not 1 <= mbit <= 100_000:
            raise HostsMissing(f"a wire of {mbit} Mbit/s, expected 1 to 100000")
        self.count, self.mbit = count, mbit
        self._name = f"{_PREFIX}-{os.getpid()}-{_born(os.getpid())}"
        self._started: list[subprocess.Popen[bytes]] = []

    def namespace(self, host: int | str) -> str:
        """The namespace of a host, by its number."""
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        """IPv4."""
        return f"{_NETWORK}.{host + 1}"

    def __enter__(self) -> Hosts:
        lacking = missing()
        if lacking:
            raise HostsMissing(f"hosts cannot be emulated here: {lacking}")
        clean()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def _make(self) -> None:
        switch = self.namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for host in range(self.count):
            own, port = self.namespace(host), f"port{host}"
            _run("ip", "netns", "add", own)
            _run("ip", "netns", "exec", own, "sh", "-c", f"echo {_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control")
            _run("ip", "-n", own, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", own, "link", "add", INTERFACE, *pair)
            _run("ip", "-n", own, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", own, "link", "set", INTERFACE, "up")
            if self.mbit is not None:
                bucket = ("root", "tbf", "rate", f"{self.mbit:g}mbit", "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", own, "qdisc", "add", "dev", INTERFACE, *bucket)
                _run("tc", "-n", switch, "qdisc", "add", "dev", port, *bucket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was started and remove all hosts; what is gone already is left out."""
        for namespace in _namespaces():
            if namespace.startswith(f"{self._name}-"):
                _remove(namespace)
        for process in self._started:
            process.wait()
        self._started = []

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        given = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        inside = ["ip", "netns", "exec", self.namespace(host), *command]
        process = subprocess.Popen(inside, env=given, preexec_fn=end_with_parent)  # noqa: PLW1509 - one system call, no lock
        self._started.append(process)
        return process

    def torchrun(
        self, per_host: int, arguments: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 3600.0
    ) -> int:
        """Run ``torchrun ARGUMENTS`` with so many ranks on every host; returns the first exit status that is not 0.

        The first host that fails ends all others.
        """
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}", f"--nproc-per-node={per_host}",
            f"--master-addr={self.address(0)}", f"--master-port={_PORT}",
        ]  # fmt: skip
        running = [
            self.start(host, [*command, f"--node-rank={host}", f"--local-addr={self.address(host)}", *arguments], env)
            for host in range(self.count)
        ]
        return first_failure(running, timeout)

    def sent_bytes(self) -> list[int]:
        """Bytes that each host has sent on its wire so far."""
        name = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [int(_run("ip", "netns", "exec", self.namespace(host), "cat", name)) for host in range(self.count)]


def first_failure(running: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """Wait until all have ended well, or one has not, or until `timeout`: then the others are ended, too."""
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
    commands.add_parser("check", help="say whether hosts can be emulated here")
    commands.add_parser("clean", help="remove what a killed start left")
    run = commands.add_parser("run", help="torchrun on emulated hosts: run --hosts 2 -- -m stratarec train RECIPE")
    run.add_argument("--hosts", type=int, default=2)
    run.add_argument("--ranks", type=int, default=2, help="of each host")
    run.add_argument("--mbit", type=float, help="rate of each host's wire in Mbit/s (default: as fast as it is)")
    run.add_argument("arguments", nargs="+", help="of torchrun")
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
        print("sent " + ", ".join(f"{count / 1e6:.1f} MB by host {host}" for host, count in enumerate(sent)))
        return status
    except HostsMissing as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
