"""Where the messages of a chat come from: a person at a terminal, or a pipe."""

import os
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from m3_runtime.errors import InputError
from m3_runtime.screen import is_capable
from m3_runtime.text import invalid_utf8

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "


class Reader(Protocol):
    """Where messages come from."""

    interactive: bool

    def read(self) -> str | None:
        """The next message without its line break, None at the end. Raises InputError for invalid UTF-8."""

    def quiet(self) -> AbstractContextManager[None]:
        """While it lasts, what is typed ahead is not shown: it would stand in the middle of an answer."""


class PipeReader:
    """One message a line, from a file or a program."""

    interactive = False

    def __init__(self) -> None:
        self._line = 0

    def read(self) -> str | None:
        line = sys.stdin.buffer.readline()
        self._line += 1
        if not line:
            return None
        try:
            return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(f"input, line {self._line}: {invalid_utf8(error)}") from None

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()


class PlainReader:
    """A person at a terminal without escape sequences: a message is a line."""

    interactive = True

    def __init__(self, out: TextIO, err: TextIO) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() its line editing)
        self._err = None if out.isatty() else err

    def read(self) -> str | None:
        try:
            if self._err is None:
                return input(PROMPT)
            self._err.write(PROMPT)
            self._err.flush()
            return input()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"input: {invalid_utf8(error)}") from None

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()


class EditingReader:
    """A person at a terminal: line editing, history, messages of several lines by pasting or with Alt-Enter."""

    interactive = True

    def __init__(self, screen: TextIO, commands: Iterable[str], file_commands: Iterable[str]) -> None:
        """screen: a capable terminal. commands: names to complete; file_commands: those that a path follows."""
        # Here: prompt_toolkit takes a moment to load, which a pipe need not wait for.
        from m3_runtime.line_editor import new_editor

        self.warning: str | None = None  #: why there is no history on disk
        try:
            history: Path | None = history_file()
        except OSError as error:
            history = None
            self.warning = f"no history is kept: {error.filename}: {error.strerror}"
        self._session: PromptSession[str] = new_editor(screen, history, commands, file_commands)

    def read(self) -> str | None:
        try:
            return self._session.prompt(PROMPT)
        except EOFError:
            return None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        silent = termios.tcgetattr(terminal)
        silent[3] &= ~termios.ECHO
        try:
            termios.tcsetattr(terminal, termios.TCSANOW, silent)
            yield
        finally:
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def new_reader(out: TextIO, err: TextIO, commands: Iterable[str], file_commands: Iterable[str]) -> Reader:
    """The reader for stdin. What it shows goes to a terminal: `out`, else `err`."""
    if not sys.stdin.isatty():
        return PipeReader()
    screens = [stream for stream in (out, err) if is_capable(stream)]
    return EditingReader(screens[0], commands, file_commands) if screens else PlainReader(out, err)


def history_file() -> Path:
    """Of the messages that were typed, for this user only (mode 600); made if it is not there. Raises OSError."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # A relative path is to be ignored (source: XDG Base Directory Specification).
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    folder = base / "m3-gguf"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "history"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path
