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
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from m3_runtime.errors import ExitCode, InputError, M3Error, MachineError

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


class _Command(TyperCommand):
    """A command that looks at its process before its function runs."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("as_json") and isinstance(sys.stdout, _Nowhere):
            raise InputError("--json: standard output is closed")
        # Here, so that an engine that cannot be loaded is an error of the command like any other.
        from m3_runtime.native import end_on_bus_error

        end_on_bus_error(str(ctx.info_name))
        return super().invoke(ctx)


class _App(typer.Typer):
    """An application whose commands refuse empty names of files."""

    def command(self, *arguments: Any, **more: Any) -> Callable[[Command], Command]:
        register = super().command(*arguments, **{"cls": _Command, **more})

        def look_and_register(function: Command) -> Command:
            for hint in get_type_hints(function, include_extras=True).values():
                kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
                if kind in (Path, Path | None):
                    for option in about:
                        option.parser = _path
            return register(function)

        return look_and_register


def _path(text: str) -> Path:
    """Python takes an empty path for the folder that one is in: a variable of a script that was not set."""
    if not text:
        raise typer.BadParameter("it is empty, expected the name of a file or folder")
    return Path(text)


def new_app() -> typer.Typer:
    """An application without boxes, completion options or rich tracebacks. Its commands refuse empty names of files,
    and end with a line if a file that they have mapped is shortened."""
    return _App(
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


class _Nowhere(io.TextIOWrapper):
    """A stream in place of one that was closed."""


def _prepare_streams() -> None:
    """A closed stream becomes /dev/null, and a character that the terminal's encoding lacks ends no command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is the closed one. Left free, the next file to be opened would take its place.
            os.open(os.devnull, os.O_RDWR)
            raw = io.FileIO(number, "w" if number else "r", closefd=False)
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
            setattr(sys, name, _Nowhere(buffer, encoding="utf-8"))
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


def tell(name: str, text: str) -> None:
    """A line for people, of the command `name`."""
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
    tell(name, "interrupted")
    return ExitCode.INTERRUPTED


def _report(name: str, error: Exception) -> int:
    # typer carries its own copy of click, so the class is taken from what typer exports.
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return _interrupted(name)
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        tell(name, f"{format_message()} (see {name} --help)")
        return ExitCode.BAD_INPUT
    if isinstance(error, M3Error):
        tell(name, str(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        tell(name, "not enough memory")
        return ExitCode.MACHINE
    if isinstance(error, OSError) and error.errno is not None:
        what = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        tell(name, f"{what}{error.strerror}")
        return ExitCode.MACHINE if error.errno in _NO_ROOM else ExitCode.BAD_INPUT
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    tell(name, f"internal error, please report: {type(error).__name__}: {error} ({where})")
    return ExitCode.BUG
