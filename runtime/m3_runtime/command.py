"""What every command shares: one-line errors on stderr, and the exit codes of `m3_runtime.errors`."""

import errno
import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import typer

from m3_runtime.errors import ExitCode, M3Error, MachineError

# What the machine, not the user, is to blame for.
_NO_ROOM = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
)

Command = TypeVar("Command", bound=Callable[..., Any])


def guarded(function: Command) -> Command:
    """A command that ends quietly when the reader of stdout leaves, as in `| head`, and on Ctrl-C.

    typer itself would exit with 1 for the one, and print an empty line for the other.
    """

    @functools.wraps(function)
    def run_guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            abandon_stdout()
            return ExitCode.OK
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_ROOM:
                raise
            abandon_stdout()
            raise MachineError(f"the output cannot be written: {error.strerror}") from error
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        return result

    return cast(Command, run_guarded)


def abandon_stdout() -> None:
    """Sends what is still to come to nowhere: its reader left, and what is buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_app() -> typer.Typer:
    """An application without boxes, completion options or rich tracebacks."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def one_line(text: str) -> str:
    """`text` with line breaks folded into spaces and other control characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def run(app: typer.Typer, name: str, argv: list[str] | None = None) -> NoReturn:
    """Runs `app` as the command `name` and exits with a code of `ExitCode`.

    argv: arguments without the program name; None takes those of the process.
    """
    _prepare_streams()
    _end_on_signals()
    sys.exit(_exit_code(lambda: app(args=argv, prog_name=name, standalone_mode=False), name))


class _ForPeople(io.FileIO):
    """stderr: when it cannot be written any more, its reader gone or its disk full, what is still to come goes nowhere.

    An error would end the work for the sake of its progress, and a broken pipe would look like that of stdout.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def _prepare_streams() -> None:
    """A closed stream becomes /dev/null, and a character that the terminal's encoding lacks ends no command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is the closed one. Left free, the next file to be opened would take its place.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    stderr = sys.__stderr__
    if stderr is not None and stderr is sys.stderr:  # not one that a test looks at
        raw = _ForPeople(stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _end_on_signals() -> None:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that files are removed and the terminal is put back as it was."""

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(ExitCode.INTERRUPTED)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # one that was ignored (nohup) stays so
            signal.signal(number, end)


def _complain(name: str, text: str) -> None:
    """The last line of a command."""
    print(f"{name}: {one_line(text)}", file=sys.stderr, flush=True)


def _exit_code(call: Callable[[], Any], name: str) -> int:
    try:
        result = call()
    except Exception as error:
        return _report(name, error)
    except KeyboardInterrupt:
        return _interrupted(name)
    except SystemExit as left:
        if left.code == ExitCode.INTERRUPTED:
            return _interrupted(name)
        raise
    # From a guarded command, or from typer, which makes Ctrl-C a result of its own without a word.
    if result == ExitCode.INTERRUPTED:
        return _interrupted(name)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _interrupted(name: str) -> int:
    _complain(name, "interrupted")
    return ExitCode.INTERRUPTED


def _report(name: str, error: Exception) -> int:
    # typer carries its own copy of click, so the class is taken from what typer exports.
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return _interrupted(name)
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        _complain(name, f"{format_message()} (see {name} --help)")
        return ExitCode.BAD_INPUT
    if isinstance(error, M3Error):
        _complain(name, str(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        _complain(name, "not enough memory")
        return ExitCode.MACHINE
    if isinstance(error, OSError) and error.errno is not None:
        what = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _complain(name, f"{what}{error.strerror}")
        return ExitCode.MACHINE if error.errno in _NO_ROOM else ExitCode.BAD_INPUT
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    _complain(name, f"internal error, please report: {type(error).__name__}: {error} ({where})")
    return ExitCode.BUG
