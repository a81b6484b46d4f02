"""The one tree of errors a user can meet.

Every message says what was got, what was expected, and the file, row, field or flag to change. The command line prints
it as one line and exits with code 2.
"""

from signal import SIGINT

# Characters of a message: what a file says may be of any length. Its end says what to do.
_HEAD, _TAIL = 1000, 400


class StrataError(Exception):
    """Anything that StrataRec refuses, with a message that says what to do instead: one line, of bounded length."""

    def __init__(self, message: str) -> None:
        line = "\\n".join(message.splitlines())
        super().__init__(line if len(line) <= _HEAD + _TAIL else f"{line[:_HEAD]} ... {line[-_TAIL:]}")


class ConfigError(StrataError, ValueError):
    """A recipe field, flag or argument that is unknown or out of range."""


class DataError(StrataError, ValueError):
    """A raw log that cannot be read as its recipe says: names the file, the row and the field."""


class DatasetError(StrataError, RuntimeError):
    """A prepared data set that is missing, damaged, of another format version, or of another schema."""


class CheckpointError(StrataError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another model."""


class ExportError(StrataError, RuntimeError):
    """An exported model that is missing, damaged, or not what its manifest says."""


class StorageError(StrataError, OSError):
    """A path that cannot be written: a full disk, a missing permission, a file where a directory is needed."""


class TrainingError(StrataError, ArithmeticError):
    """Training that cannot go on: the loss is no number."""


class RankError(StrataError, RuntimeError):
    """Processes that cannot go on together: names the rank that failed, is gone, or was started otherwise."""


class ClusterError(StrataError, RuntimeError):
    """A Ray cluster that is not there, lost a task for good, or has a machine that cannot do the work: names it."""


class Alarm(Exception):
    """What was done is done, and a figure of it is one that the user asked to be alarmed by: exit code 3."""


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the command, which cleans up as after Ctrl-C."""


class Interrupted(Exception):
    """The user asked a run to stop; its message says which checkpoint was written and how to go on.

    Parameters
    ----------
    message : str
    signal : int
        Number of the signal: SIGINT or SIGTERM.
    """

    def __init__(self, message: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.signal = signal
