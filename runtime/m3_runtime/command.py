"""What every command shares: one-line errors on stderr, and the exit codes of `m3_runtime.errors`."""

import functools
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import typer

from m3_runtime.errors import ExitCode, M3Error

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
            # Nothing more can be said there; what is still buffered must not raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.OK
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        return result

    return cast(Command, run_guarded)


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
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(_exit_code(lambda: app(args=argv, prog_name=name, standalone_mode=False), name))


def _exit_code(call: Callable[[], Any], name: str) -> int:
    try:
        result = call()
    except Exception as error:
        return _report(name, error)
    except KeyboardInterrupt:
        return _interrupted(name)
    # From a guarded command, or from typer, which makes Ctrl-C a result of its own without a word.
    if result == ExitCode.INTERRUPTED:
        return _interrupted(name)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _interrupted(name: str) -> int:
    print(f"{name}: interrupted", file=sys.stderr)
    return ExitCode.INTERRUPTED


def _report(name: str, error: Exception) -> int:
    # typer carries its own copy of click, so the class is taken from what typer exports.
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return _interrupted(name)
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        print(f"{name}: {one_line(format_message())} (see {name} --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    if isinstance(error, M3Error):
        print(f"{name}: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, MemoryError):
        print(f"{name}: not enough memory", file=sys.stderr)
        return ExitCode.MACHINE
    place = traceback.extract_tb(error.__traceback__)[-1]
    print(
        f"{name}: internal error, please report: {type(error).__name__}: {one_line(str(error))} "
        f"({Path(place.filename).name}:{place.lineno})",
        file=sys.stderr,
    )
    return ExitCode.BUG
