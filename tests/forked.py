"""Run commands in processes that are forked from a process with all imports: a start takes a tenth
of the time.

One server process serves all workers of a session. It runs no kernel and starts no thread, so that
a fork loses nothing. The encoding of streams and the options of the interpreter are those of the
server, and closed pipes end a command in another way. Tests of these properties start a new Python
process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_NAME = "STRATAREC_TESTS_FORKED"
"""Environment variable with the name of the server's socket."""

_LONGEST = 1 << 20
"""Largest number of bytes of a request."""

_PATIENCE = 300.0
"""Timeout of a command in seconds."""


def run(
    arguments: list[str],
    *,
    before: str = "",
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    stdout: IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `stratarec` with these arguments; `before` is Python code that is executed first.

    The command reads `stdin`, or nothing. The result contains its output, except output that is
    redirected to `stdout`.
    """
    code = "import sys\nfrom stratarec.cli import main\nsys.exit(main(sys.argv[1:]))"
    return python(
        f"{before}\n{code}", arguments, cwd=cwd, environment=environment, stdin=stdin, stdout=stdout
    )


def python(
    code: str,
    arguments: Sequence[str] = (),
    *,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    stdout: IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c code` with these arguments; the other parameters are those of `run`."""
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        line = _line(threading.get_ident())
        chosen = (nothing if stdin is None else stdin, stdout or out, err)
        streams = [each if isinstance(each, int) else each.fileno() for each in chosen]
        _ask(line, code, arguments, streams, cwd, environment)
        status = int(line.recv(16))
        texts = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(list(arguments), status, *texts)


def begin(code: str, stdin: int) -> socket.socket:
    """Start `python -c code` with the file descriptor `stdin` and the streams of this process.

    Returns a socket that becomes readable when the process has ended.
    """
    line = connect()
    _ask(line, code, (), [stdin, 1, 2])
    return line


def _ask(
    line: socket.socket,
    code: str,
    arguments: Sequence[str],
    streams: list[int],
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    request = {
        "arguments": list(arguments),
        "code": code,
        "cwd": str(cwd or Path.cwd()),
        "environment": {**os.environ, **(environment or {})},
    }
    socket.send_fds(line, [json.dumps(request).encode()], streams)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def start() -> None:
    """Start the server for this process and its children; the server imports modules at the first
    request.
    """
    if _NAME in os.environ:
        return
    os.environ[_NAME] = f"stratarec-tests-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{os.environ[_NAME]}")
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno())]
        # Forked processes may use more threads.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(
            command, pass_fds=[listener.fileno()], env=environment, stdin=subprocess.PIPE
        )
    atexit.register(server.communicate)  # it ends when its input does


def connect() -> socket.socket:
    """Return a new connection to the server."""
    start()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(_PATIENCE)
    line.connect(f"\0{os.environ[_NAME]}")
    return line


@cache
def _line(_thread: int) -> socket.socket:
    """Return the connection of a thread: the server answers one command after another on each
    connection.
    """
    line = connect()
    atexit.register(line.close)
    return line


def leave_unsynced() -> None:
    """Make `os.fsync` do nothing in this process and its forks.

    No test cuts the power, and waiting for disks took a third of the time of `prepare` and `train`.
    """
    os.fsync = os.fstat  # also raises an error for closed files


def _listen(listener: socket.socket) -> None:
    """Fork a process for each connection, which forks the requested commands; end when standard
    input does.
    """
    while select.select([listener, 0], [], [])[0] == [listener]:
        line, _ = listener.accept()
        _import()
        if not os.fork():
            listener.close()
            _serve(line)
            os._exit(0)
        line.close()


@cache
def _import() -> None:
    """Import all modules, and do what each process of them would do first."""
    leave_unsynced()
    import scipy.optimize  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from numba.core.registry import cpu_target

    import stratarec.cli
    import stratarec.data.prepare.prepare
    import stratarec.distributed.mesh
    import stratarec.distributed.sharded_engine
    import stratarec.serving
    import stratarec.training.trainer
    from stratarec.recipe import Recipe

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    Recipe.load(Path(stratarec.__file__).parent / "recipes" / "demo.yaml")
    gc.freeze()  # a collection in a child would copy the pages of all objects


def _serve(line: socket.socket) -> None:
    while True:
        try:
            text, streams, *_ = socket.recv_fds(line, _LONGEST, 3)
        except ConnectionResetError:
            return
        if not text:
            return
        child = os.fork()
        if not child:
            line.close()
            _execute(json.loads(text), streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        with suppress(BrokenPipeError):  # the client has closed the connection
            line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _execute(request: dict[str, Any], streams: list[int]) -> None:
    """Execute a request as `python -c` does, and exit."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it depends on the environment
    if sys.version_info < (3, 11):
        # Polars 2.0, the last version for this Python, would wait at the exit for a thread that
        # only the parent has.
        atexit.register(_leave)
    sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
    main = sys.modules["__main__"] = ModuleType("__main__")  # dataclasses look names up there
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
        sys.exit()
    except SystemExit as ended:
        _status.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except Exception:
        _status.append(1)
        raise


_status: list[int] = []
"""Exit code of the command of this process, as soon as the command has ended."""


def _leave() -> None:
    """End the process of a command, after its threads and all other functions that are called at
    the exit.

    Deleting the modules of the server took a second of a processor for each command.
    """
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


if __name__ == "__main__":
    atexit.register(_leave)  # before any other function, so that it is called last
    _listen(socket.socket(fileno=int(sys.argv[1])))
