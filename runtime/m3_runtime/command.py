"""What every command shares: one-line errors on stderr, and the exit codes of `m3_runtime.errors`."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

from m3_runtime.errors import ExitCode, M3Error


def new_app() -> typer.Typer:
    """A typer application without boxes, completion options or rich tracebacks."""
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
    sys.exit(_exit_code(lambda: app(args=argv, prog_name=name, standalone_mode=False), name))


def _exit_code(call: Callable[[], Any], name: str) -> int:
    try:
        result = call()
        sys.stdout.flush()
    except Exception as error:
        return _report(name, error)
    except KeyboardInterrupt:
        return _interrupted(name)
    # typer turns Ctrl-C into a result of its own: the exit code, without a word.
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
    if isinstance(error, BrokenPipeError):
        # The reader of stdout left (for example `| head`); nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
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
