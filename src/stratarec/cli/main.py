"""Runs one subcommand and says how it ended.

Errors are one line on standard error, with --json a line of JSON; `EXIT_CODES` says what a command ends with.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import resource
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
    baseline_command,
    compare_command,
    evaluate_command,
    explain_command,
    export_command,
    init_command,
    plan_command,
    predict_command,
    prepare_command,
    profile_command,
    train_command,
    tune_command,
)
from stratarec.cli.arguments import Parser, Subcommand, shortened
from stratarec.cli.check import check_command
from stratarec.cli.continual import continue_command, forget_command, rebase_command, revert_command
from stratarec.cli.doctor import doctor_command
from stratarec.errors import Alarm, ConfigError, Interrupted, StrataError, Terminated
from stratarec.io.names import visible
from stratarec.kernels.runtime.cores import narrow_libraries

# In the order of --help.
_MODULES = (
    init_command, prepare_command, plan_command, profile_command, train_command, continue_command, forget_command,
    rebase_command, revert_command, evaluate_command, predict_command, explain_command, baseline_command, tune_command,
    compare_command, check_command, export_command, doctor_command,
)  # fmt: skip

# 70 as in sysexits.h; 130, 141 and 143 as shells have it of programs that SIGINT, a closed pipe or SIGTERM ended.
_MISTAKE, _ALARM, _DEFECT, _INTERRUPTED, _CLOSED_PIPE, _TERMINATED = 2, 3, 70, 130, 141, 143
EXIT_CODES = {
    0: "done",
    _MISTAKE: "something that you can mend: one line says what, and what to change; nothing is half-written",
    _ALARM: "done, and a figure is one that you asked to be alarmed by (`continue --alert`)",
    _DEFECT: "a defect of StrataRec: the line names a file with the traceback",
    _INTERRUPTED: "interrupted (Ctrl-C): the line says what was kept and how to resume",
    _CLOSED_PIPE: "the reader of the output has closed it, as `head` does",
    _TERMINATED: "ended by SIGTERM: the line says what was kept and how to resume",
}
_WIDTH = 78
# Addresses that a run without data takes, for code, stacks and heaps of threads: 3.3 GiB on two cores.
_ADDRESSES, _ADDRESSES_OF_CORE = 7 << 29, 1 << 28
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "failed to map segment", "can't start new thread", "bad_alloc",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code, format_warning = 0, warnings.formatwarning
    warnings.formatwarning = _warning
    try:
        code = _run(arguments)
    finally:
        warnings.formatwarning = format_warning
        code = code or _flush()
    return code


def make_parser() -> Parser:
    """The parser of all subcommands; `command` of what it parses is the `Subcommand`."""
    parser = Parser(
        prog="stratarec",
        description="Train recommendation models whose embedding tables outgrow fast memory.",
        epilog="start with your own log:\n  stratarec init LOG\nor with a made-up one:\n  stratarec init --recipe demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stratarec {version('stratarec')}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _MODULES:
        command = module.COMMAND
        own = subcommands.add_parser(
            command.name,
            help=command.text,
            description=textwrap.fill(command.text, _WIDTH),
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(command=command)
        own.add_argument("-q", "--quiet", action="store_true", help="no progress")
        command.options(own)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with overrides, or logs, allowed behind options."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell completes a line; for anything else the import would be in vain
        import argcomplete

        argcomplete.autocomplete(parser)
    args, rest = parser.parse_known_args(arguments)
    several = next((name for name in ("overrides", "data") if isinstance(getattr(args, name, None), list)), "")
    strange = (item for item in rest if item.startswith("-") or (several == "overrides" and "=" not in item))
    if rest and (not several or any(strange)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        setattr(args, several, [*getattr(args, several), *rest])
    return args


def _run(arguments: Sequence[str] | None) -> int:
    args = parse(arguments)
    command: Subcommand = args.command
    if getattr(args, "json", False):
        warnings.formatwarning = _json_warning
    try:
        if os.environ.get("WORLD_SIZE", "1") != "1" and not command.by_ranks:
            raise ConfigError(f"`{command.name}` is work of one process: start it without torchrun")
        _check_address_space()
        narrow_libraries()
        with _termination():
            command.run(args)
    except BrokenPipeError:
        return _CLOSED_PIPE
    except (KeyboardInterrupt, Exception) as error:
        message, code = _ended(error, command)
        if getattr(args, "json", False):
            from stratarec.reporting.progress import JsonProgress

            JsonProgress().fail(message, code)
            return code
        return _complain(message, code)
    return 0


def _ended(error: BaseException, command: Subcommand) -> tuple[str, int]:
    """What a command that did not come to its end says, and its exit code."""
    if isinstance(error, StrataError):
        return str(error), _MISTAKE
    if isinstance(error, Alarm):
        return str(error), _ALARM
    if isinstance(error, KeyboardInterrupt):
        kept = "finished parts are kept" if command.goes_on else "unfinished outputs are removed"
        again = "; run the same command again" + (" to resume" if command.goes_on else "")
        if isinstance(error, Terminated):
            return f"ended by SIGTERM; {kept}{again}", _TERMINATED
        return f"interrupted; {kept}{again}", _INTERRUPTED
    if isinstance(error, Interrupted):
        return str(error), 128 + error.signal
    assert isinstance(error, Exception)
    refusal = _refusal(error)
    return (refusal, _MISTAKE) if refusal else (_report(error), _DEFECT)


@contextmanager
def _termination() -> Iterator[None]:
    """Raise `Terminated` on the first SIGTERM and ignore the others, so that cleaning up is not cut short.

    A caller of `main` with a handler of its own keeps it. What fails after the signal failed because of it: an import
    that swallows the exception leaves modules that are half loaded.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    received = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if received:
            raise Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_address_space() -> None:
    """Refuse a limit in which libraries cannot be loaded: some of them end the process where it is reached."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = _ADDRESSES + _ADDRESSES_OF_CORE * min(os.cpu_count() or 1, 16)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"out of memory: addresses of this process are limited to {limit / 2**30:.1f} GiB (ulimit -v), and "
            f"libraries with their threads take {needed / 2**30:.1f} GiB of them; raise the limit, or set one on "
            "memory itself (systemd-run --scope -p MemoryMax=...)"
        )


def _refusal(error: Exception) -> str:
    """What the machine ran out of or refuses, if that is what the error says; it comes in several forms."""
    number = error.errno if isinstance(error, OSError) else 0
    said = shortened(str(error))
    if number == errno.ENOMEM or isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        advice = "use smaller batches or tables, or let `stratarec plan` place them within memory.dram"
        return f"out of memory ({said}); {advice}"
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):  # torch's, which may not be imported
        return f"the device failed ({said}); try --device cpu, or train.device=cpu"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return f"cannot write: {said}"
    if number in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EIO):
        return f"cannot use a path: {said}"
    return ""


def _flush() -> int:
    """Write what is still to be written, where an error can be told; quiet where a reader has gone, as `head` does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Else the interpreter tries once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _CLOSED_PIPE
        return _complain(f"cannot write: {error}", _MISTAKE)
    return 0


def _complain(message: str, code: int) -> int:
    print(f"stratarec: {visible(message)}", file=sys.stderr)
    return code


def _warning(message: Warning | str, category: type[Warning], *place: object, **more: object) -> str:
    return f"stratarec: {category.__name__}: {visible(' '.join(str(message).split()))}\n"


def _json_warning(message: Warning | str, category: type[Warning], *place: object, **more: object) -> str:
    from stratarec.reporting.progress import json_line

    return json_line("warning", text=f"{category.__name__}: {message}") + "\n"


def _report(error: Exception) -> str:
    """What went wrong in a line, once the whole of it is in a file of its own."""
    trace = "".join(traceback.format_exception(error))
    about = f"stratarec {version('stratarec')}, Python {platform.python_version()}, {platform.platform()}"
    said = f"unexpected {type(error).__name__}: {shortened(str(error))}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="stratarec-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{about}\n{sys.argv}\n\n{trace}")
    except OSError:
        print(*map(visible, trace.splitlines()), sep="\n", file=sys.stderr)
        return f"{said}; this is a defect of StrataRec: please report it with the traceback above"
    return f"{said}; this is a defect of StrataRec: please report it with the traceback in {file.name}"
