"""Exceptions that users meet, in one tree.

Every message names the file, row, field or option, its value, what it must be, and what to do. The
command line prints the message as one line and exits with code 2.
"""

from signal import SIGINT, SIGTERM

# Longest message: its head and its end, which says what to do. A value from a file may be of any
# length.
_HEAD, _TAIL = 1000, 400
UNREGISTERED = "unregistered"
"""Type of pydantic's error about a choice in a file that StrataRec wrote, if nothing that is
installed provides it.
"""


class StrataError(Exception):
    """Any input or state that StrataRec refuses; the message is one line of bounded length.

    Examples
    --------
    >>> import stratarec
    >>> try:
    ...     stratarec.Dataset.open("absent")
    ... except stratarec.StrataError as error:
    ...     print(type(error).__name__)
    DatasetError
    """

    def __init__(self, message: str) -> None:
        line = "\\n".join(message.splitlines())
        super().__init__(line if len(line) <= _HEAD + _TAIL else f"{line[:_HEAD]} ... {line[-_TAIL:]}")


class ConfigError(StrataError, ValueError):
    """A recipe field, option or argument that is unknown or out of range."""


class DataError(StrataError, ValueError):
    """A raw log that cannot be read as its recipe says; the message names file, row and field."""


class DatasetError(StrataError, RuntimeError):
    """A prepared data set that is missing, damaged, of another format version, or of another
    schema.
    """


class CheckpointError(StrataError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another model."""


class ExportError(StrataError, RuntimeError):
    """An exported model that is missing, damaged, or differs from its manifest."""


class StorageError(StrataError, OSError):
    """A path that cannot be written: a full disk, a missing permission, a file where a directory is
    needed.
    """


class TrainingError(StrataError, ArithmeticError):
    """Training that cannot continue because the loss is not finite."""


class RankError(StrataError, RuntimeError):
    """Distributed processes that cannot continue; the message names the rank that failed or has
    other settings.
    """


class ClusterError(StrataError, RuntimeError):
    """A Ray cluster that is unreachable, lost a task, or has a machine that cannot do the work;
    names the machine.
    """


class Alarm(Exception):
    """Raised after a command has finished, because a metric crossed the limit of ``--alert``. The
    exit code is 3.
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which ends a command with the same cleanup as Ctrl-C.

    Parameters
    ----------
    signal : int
        Number of the signal.
    """

    def __init__(self, signal: int = SIGTERM) -> None:
        super().__init__()
        self.signal = signal


class Interrupted(Exception):
    """A run that the user stopped; the message names the checkpoint that was written and how to
    resume.

    Parameters
    ----------
    message : str
        Text of the error.
    signal : int
        Number of the signal: SIGINT, SIGTERM or SIGHUP.
    """

    def __init__(self, message: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.signal = signal
