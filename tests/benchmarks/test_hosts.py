"""Emulated hosts: what passes between them is shaped and counted, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, HostsMissing, clean

ROOT = Path(__file__).parents[2]
TALK = """
import socket, sys, time
if sys.argv[1] == "hear":
    with socket.create_server((sys.argv[2], 7000)) as server:
        heard, _ = server.accept()
        while heard.recv(1 << 16): pass
else:
    while True:
        try: told = socket.create_connection((sys.argv[2], 7000)); break
        except ConnectionRefusedError: time.sleep(0.01)
    began = time.monotonic()
    told.sendall(bytes(2_000_000)); told.shutdown(socket.SHUT_WR); told.recv(1)
    sys.exit(0 if time.monotonic() - began > 0.25 else 3)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    try:
        with Hosts(1):
            pass
    except HostsMissing as error:
        pytest.skip(str(error))


def left() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if f"-{os.getpid()}-" in line]


def test_a_wire_is_as_slow_as_asked_for_and_counts_its_bytes() -> None:
    with Hosts(2, mbit=40) as hosts:
        hear = hosts.start(1, [sys.executable, "-c", TALK, "hear", hosts.address(1)])
        tell = hosts.start(0, [sys.executable, "-c", TALK, "tell", hosts.address(1)])
        assert (tell.wait(30), hear.wait(30)) == (0, 0)  # 2 MB at 5 MB/s, less what the bucket lets pass at once
        sent = hosts.sent_bytes()
        assert 2_000_000 < sent[0] < 2_400_000
        assert sent[1] < 400_000
        endless = hosts.start(0, ["sleep", "1000"])
    assert endless.returncode == -signal.SIGKILL
    assert not left()


def test_what_a_killed_start_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os; from benchmarks.hosts import Hosts; hosts = Hosts(1).__enter__();"
        "print(hosts.start(0, ['sleep', '1000']).pid, hosts.namespace(0), flush=True); os.kill(os.getpid(), 9)"
    )
    with (tmp_path / "said").open("w") as said:  # no pipe: what it started holds it open
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=said, check=False)
    pid, namespace = (tmp_path / "said").read_text().split()
    clean()  # or a start of another process, since then
    assert not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()
    assert namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
