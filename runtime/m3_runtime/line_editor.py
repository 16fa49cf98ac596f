"""prompt_toolkit set up for the chat."""

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

MAX_HISTORY_BYTES = 1 << 20  #: of the file; beyond that its older half is forgotten


def new_editor(
    screen: TextIO, history: Path | None, commands: Iterable[str], file_commands: Iterable[str]
) -> PromptSession[str]:
    """A prompt on the terminal `screen`. history: a file, None keeps it in memory."""
    output = Vt100_Output.from_pty(screen)
    # Asking where the cursor is mixes the answer with what is typed ahead, and warns where nobody answers.
    output.enable_cpr = False
    return PromptSession(
        output=output,
        history=InMemoryHistory() if history is None else PrivateHistory(history),
        completer=_Commands(tuple(commands), tuple(file_commands)),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        key_bindings=_bindings(),
        prompt_continuation=_continuation,
        enable_suspend=True,
    )


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _continuation(width: int, line: int, wraps: int) -> StyleAndTextTuples:
    return [("", " " * width)]


class PrivateHistory(FileHistory):
    """A history file that cannot end a chat: what cannot be written is not kept."""

    def __init__(self, path: Path) -> None:
        _forget_old(path)
        super().__init__(str(path))

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError:
            return


class _Commands(Completer):
    """Names of commands, and paths behind those that take one."""

    def __init__(self, names: tuple[str, ...], file_names: tuple[str, ...]) -> None:
        self._names = names
        self._file_names = file_names
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, rest = text.partition(" ")
        if not space:
            yield from (Completion(known, -len(text)) for known in self._names if text and known.startswith(text))
        elif name in self._file_names:
            path = rest.lstrip()
            yield from self._paths.get_completions(Document(path, len(path)), complete_event)


def _forget_old(path: Path) -> None:
    data = path.read_bytes()
    if len(data) <= MAX_HISTORY_BYTES:
        return
    entry = data.find(b"\n\n#", len(data) - MAX_HISTORY_BYTES // 2)
    path.write_bytes(data[entry + 1 :] if entry >= 0 else b"")
