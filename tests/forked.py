"""Commands in processes of their own, forked from one that has imported what they need: a start takes a tenth.

That process runs no kernel and starts no thread, so that nothing is lost in a fork. What Python does once, when it
starts, is done for all: the encoding of streams, the interpreter's options; and pipes that nobody reads end a command
in another way. Tests of these start a Python of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

_LONGEST = 1 << 20
"""Bytes of a request."""

_PATIENCE = 300.0
"""Seconds after which a command hangs."""


def run(
    arguments: list[str],
    *,
    before: str = "",
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    stdout: IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`stratarec` with these arguments; `before` is Python that is executed first.

    It reads `stdin`, or nothing. What it writes is in the result, but what goes to `stdout`, where that is given.
    """
    code = "import sys\nfrom stratarec.cli import main\nsys.exit(main(sys.argv[1:]))"
    return python(f"{before}\n{code}", arguments, cwd=cwd, environment=environment, stdin=stdin, stdout=stdout)


def python(
    code: str,
    arguments: Sequence[str] = (),
    *,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    stdout: IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `python -c code` with these arguments; the rest as in `run`."""
    request = {
        "arguments": list(arguments),
        "code": code,
        "cwd": str(cwd or Path.cwd()),
        "environment": {**os.environ, **(environment or {})},
    }
    with Path(os.devnull).open() as nothing, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        line = _server()
        chosen = (nothing if stdin is None else stdin, stdout or out, err)
        streams = [each if isinstance(each, int) else each.fileno() for each in chosen]
        socket.send_fds(line, [json.dumps(request).encode()], streams)
        status = int(line.recv(16))
        texts = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(list(arguments), status, *texts)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def _server() -> socket.socket:
    """A line to the process that forks; it ends with this one."""
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(_PATIENCE)
    with other:
        command = [sys.executable, __file__, str(other.fileno())]
        # Whoever is forked may be told to take more threads.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL)
    atexit.register(_stop, line, server)
    return line


def _stop(line: socket.socket, server: subprocess.Popen[bytes]) -> None:
    line.close()
    server.wait()


def _serve(line: socket.socket) -> None:
    import torch.utils.tensorboard  # noqa: F401

    import stratarec.cli
    import stratarec.data.prepare.prepare
    import stratarec.serving
    import stratarec.training.trainer  # noqa: F401

    while True:
        text, streams, *_ = socket.recv_fds(line, _LONGEST, 3)
        if not text:
            return
        child = os.fork()
        if not child:
            line.close()
            _execute(json.loads(text), streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _execute(request: dict[str, Any], streams: list[int]) -> None:
    """What `python -c` does with the request, to its exit."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    sys.exit()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
