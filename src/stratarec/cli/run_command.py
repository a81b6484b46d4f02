"""Run one subcommand and report how it ended.

An error is one line on standard error (with --json a line of JSON). `EXIT_CODES` lists the exit
codes.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import signal
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType

from stratarec.cli import (
    check_command,
    compare_commands,
    continual_commands,
    data_commands,
    doctor_command,
    init_command,
    model_commands,
    plan_command,
    train_command,
    tune_command,
)
from stratarec.cli.arguments import Parser, shortened
from stratarec.errors import Alarm, ConfigError, Interrupted, StrataError, Terminated
from stratarec.io.names import visible
from stratarec.kernels.runtime.cores import narrow_libraries

COMMANDS = (
    init_command.init, data_commands.prepare, plan_command.plan, data_commands.profile, train_command.train,
    continual_commands.continue_run, continual_commands.forget, continual_commands.rebase, continual_commands.revert,
    model_commands.evaluate, model_commands.predict, model_commands.explain, compare_commands.baseline,
    tune_command.tune, compare_commands.compare, check_command.check, model_commands.export, doctor_command.doctor,
)  # fmt: skip
"""All subcommands, in the order in which --help lists them."""

# 70 as in sysexits.h; 128 + number of the signal as in shells.
_USER_ERROR, _ALARM, _BUG = 2, 3, 70
_HUNG_UP = 129
_INTERRUPTED = 130
_CLOSED_PIPE = 141
_TERMINATED = 143
EXIT_CODES = {
    0: "success",
    _USER_ERROR: "an error that you can fix: one line says what is wrong and what to change; "
    "no output is half-written",
    _ALARM: "success, but a metric triggered an alarm (`continue --alert`)",
    _BUG: "a bug in StrataRec: the error names a file with the traceback",
    _HUNG_UP: "stopped by SIGHUP, as when a terminal closes: the error says what "
    "was kept and how to resume",
    _INTERRUPTED: "interrupted by Ctrl-C: the error says what was kept and how to resume",
    _CLOSED_PIPE: "the reader of the output closed the pipe, as `head` does",
    _TERMINATED: "stopped by SIGTERM: the error says what was kept and how to resume",
}
_HELP_WIDTH = 78
_LISTS = "overrides", "data", "files", "runs", "log"
"""Positional arguments that take any number of values."""
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "bad_alloc",
)


def run(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # Printing a name that the terminal cannot encode must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code, format_warning = 0, warnings.formatwarning
    warnings.formatwarning = _format_warning
    try:
        code = _run(arguments)
    finally:
        warnings.formatwarning = format_warning
        code = code or _flush()
    return code


def make_parser() -> Parser:
    """Build the parser of all subcommands; it stores the chosen `Subcommand` as `command`."""
    parser = Parser(
        prog="stratarec",
        description="Train recommendation models whose embedding tables are larger than fast memory.",
        epilog="start with your own log:\n  stratarec init LOG\nor with synthetic data:\n  stratarec init "
        "--recipe demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stratarec {version('stratarec')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.text,
            description=textwrap.fill(command.text, _HELP_WIDTH),
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=command)
        subparser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
        command.options(subparser)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides and log files may come before or after options."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # set while a shell completes a line; the import is slow
        import argcomplete

        argcomplete.autocomplete(parser)
    args, extra = parser.parse_known_args(arguments)
    if not extra:
        return args
    # argparse does not assign values after options to the list of a positional argument: they are
    # added here.
    name = next((name for name in _LISTS if isinstance(getattr(args, name, None), list)), "")
    if not name or any(word.startswith("-") or (name == "overrides" and "=" not in word) for word in extra):
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    setattr(args, name, [*getattr(args, name), *extra])
    return args


def _run(arguments: Sequence[str] | None) -> int:
    as_json, command = False, None
    try:
        with _signals_as_exceptions():
            args = parse(arguments)
            as_json, command = getattr(args, "json", False), args.command
            if as_json:
                warnings.formatwarning = _format_json_warning
            if os.environ.get("WORLD_SIZE", "1") != "1" and not command.multi_process:
                raise ConfigError(f"`{command.name}` runs in one process: start it without torchrun")
            narrow_libraries()
            command.run(args)
    except BrokenPipeError:
        return _CLOSED_PIPE
    except (KeyboardInterrupt, Exception) as error:
        message, code = _message_and_code(error, resumable=command is not None and command.resumable)
        if as_json:
            from stratarec.reporting.progress import JsonProgress

            JsonProgress().fail(message, code)
            return code
        return _print_error(message, code)
    return 0


def _message_and_code(error: BaseException, *, resumable: bool) -> tuple[str, int]:
    """Return the message of a failed command and its exit code."""
    if isinstance(error, StrataError):
        return str(error), _USER_ERROR
    if isinstance(error, Alarm):
        return str(error), _ALARM
    if isinstance(error, KeyboardInterrupt):
        number = error.signal if isinstance(error, Terminated) else signal.SIGINT
        reason = (
            f"stopped by {signal.Signals(number).name}" if isinstance(error, Terminated) else "interrupted"
        )
        advice = (
            "finished parts are kept; run the same command again to resume"
            if resumable
            else "unfinished outputs are removed; run the same command again"
        )
        return f"{reason}; {advice}", 128 + number
    if isinstance(error, Interrupted):
        return str(error), 128 + error.signal
    assert isinstance(error, Exception)
    message = _environment_error(error)
    return (message, _USER_ERROR) if message else (_report_bug(error), _BUG)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP and `KeyboardInterrupt` on Ctrl-C, also inside
    imports.

    Further SIGTERM and SIGHUP are ignored, so that cleaning up is not cut short. A handler that the
    caller of `main` has set, and a signal that the caller ignores (`nohup`), stay as they are.

    If an import catches the exception, modules stay half loaded, and the command fails later with
    another error. So any error after a signal is reported as the signal.
    """
    received: list[KeyboardInterrupt] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        if number != signal.SIGINT:
            for name in handlers:
                signal.signal(name, signal.SIG_IGN)
        raise received[-1]

    defaults = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    is_main = threading.current_thread() is threading.main_thread()  # only this one may set handlers
    handlers = {
        name: default for name, default in defaults.items() if is_main and signal.getsignal(name) == default
    }
    for name in handlers:
        signal.signal(name, interrupt)
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if received:
            raise received[0] from error
        raise
    finally:
        for name, default in handlers.items():
            signal.signal(name, default)


def _environment_error(error: Exception) -> str:
    """Describe an error that the machine caused, such as a full disk; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else 0
    reason = shortened(str(error))
    if (
        number == errno.ENOMEM
        or isinstance(error, MemoryError)
        or any(words in str(error) for words in _OUT_OF_MEMORY)
    ):
        return (
            f"out of memory ({reason}); use smaller batches or tables, or set memory.dram so that "
            "`stratarec plan` moves tables to other memories"
        )
    # Errors of torch, compared by name because torch may not be imported.
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        return f"the device failed ({reason}); try --device cpu, or train.device=cpu"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return f"cannot write: {reason}"
    if number in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EIO):
        return f"cannot use a path: {reason}"
    return ""


def _flush() -> int:
    """Flush standard output while an error can still be reported; return the exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter would flush standard output again at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _CLOSED_PIPE
        return _print_error(f"cannot write: {error}", _USER_ERROR)
    return 0


def _print_error(message: str, code: int) -> int:
    print(f"stratarec: {visible(message)}", file=sys.stderr)
    return code


def _format_warning(message: Warning | str, category: type[Warning], *place: object, **more: object) -> str:
    return f"stratarec: {category.__name__}: {visible(' '.join(str(message).split()))}\n"


def _format_json_warning(
    message: Warning | str, category: type[Warning], *place: object, **more: object
) -> str:
    from stratarec.reporting.progress import json_line

    return json_line("warning", text=f"{category.__name__}: {message}") + "\n"


def _report_bug(error: Exception) -> str:
    """Write the traceback to a file, and return a message of one line that names it."""
    trace = "".join(traceback.format_exception(error))
    versions = (
        f"stratarec {version('stratarec')}, Python {platform.python_version()}, {platform.platform()}"
    )
    message = f"unexpected {type(error).__name__}: {shortened(str(error))}"
    message += "; this is a bug in StrataRec: please report it"
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="stratarec-error-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(f"{versions}\n{sys.argv}\n\n{trace}")
    except OSError:
        print(*map(visible, trace.splitlines()), sep="\n", file=sys.stderr)
        return f"{message} with the traceback above"
    return f"{message} with the traceback in {file.name}"
