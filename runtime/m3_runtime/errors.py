"""The exceptions of the project and the exit codes that its commands give them.

Every message is one line that names the thing, what was expected and what was found.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    FELL_SHORT = 1  #: a check ran and its threshold was not met
    BAD_INPUT = 2  #: the input or the arguments are wrong
    NOTHING_TESTED = 3  #: no query had a choice of blocks
    MACHINE = 4  #: the machine lacks memory, disk or the device
    BUG = 70  #: an error of this program
    INTERRUPTED = 130


class M3Error(Exception):
    """Base of every error that this project raises on purpose. `str()` of it is one line."""

    exit_code = ExitCode.BUG


class InputError(M3Error):
    """A file, a checkpoint, an option or a prompt is wrong."""

    exit_code = ExitCode.BAD_INPUT


class ContextError(InputError):
    """The tokens do not fit in the context of the session."""


class MachineError(M3Error):
    """Memory, disk space, a device or an instruction set is missing."""

    exit_code = ExitCode.MACHINE


class NotFiniteError(M3Error):
    """A layer computed NaN or infinity: the weights are broken."""

    exit_code = ExitCode.BAD_INPUT


class CancelledError(M3Error):
    """An evaluation was stopped by `Session.cancel`."""

    exit_code = ExitCode.INTERRUPTED


class NothingTestedError(M3Error):
    """A check had nothing to compare: no query had a choice of blocks."""

    exit_code = ExitCode.NOTHING_TESTED
