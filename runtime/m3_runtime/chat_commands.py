"""The commands of the chat: lines that begin with a slash."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol, TextIO

from m3_runtime.chat import Conversation
from m3_runtime.errors import InputError
from m3_runtime.quantities import format_bytes
from m3_runtime.screen import PrefillProgress, Screen, ThinkingView
from m3_runtime.text import ChatTokenizer, invalid_utf8

_MODES = {"on": "enabled", "off": "disabled", "auto": "adaptive"}
_MODE_TEXTS = {
    None: "the chat template decides whether the model thinks",
    "enabled": "the model thinks before every answer",
    "disabled": "the model is told not to think",
    "adaptive": "the model thinks when it sees fit",
}

HELP = """\
/help              this list
/new               forgets the conversation
/undo              takes the last message and its answer back
/retry             answers the last message again
/read FILE         reads a text file, to ask about it
/save FILE         writes the conversation and what the model has read of it to a file
/load FILE         goes on with a saved conversation
/system TEXT       sets the system message, off removes it; alone: shows it
/thinking WORD     show or fold what the model thinks; last: shows it once; on, off, auto: whether it thinks
/context           what fills the context
/stats             speed, memory, attention mode
/quit              leaves; so do Ctrl-D, and Ctrl-C twice
Ctrl-C stops an answer and keeps the chat. Alt-Enter begins a new line, and a paste may have several. A space in front
sends a message that starts with "/"."""

NAMES = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))
FILE_NAMES = ("/read", "/save", "/load")


class Next(Enum):
    """What the loop does after a command."""

    GO_ON = auto()
    RETRY = auto()
    LEAVE = auto()


class SavedSessions(Protocol):
    """Conversations on disk, with what the session holds of them."""

    def save(self, path: Path, conversation: Conversation) -> int:
        """Writes a file, whole or not at all; its bytes. Raises InputError; so it does for some other file there."""

    def load(self, path: Path, conversation: Conversation) -> None:
        """Takes over a saved conversation. Raises InputError; the conversation is then as it was or, if the file
        broke off in the middle, has to be evaluated again."""


@dataclass
class ChatCommands:
    """Carries commands out, and says what they did."""

    conversation: Conversation
    screen: Screen
    tokenizer: ChatTokenizer
    sessions: SavedSessions
    err: TextIO
    status: str  #: the run's status line, repeated by /stats

    def run(self, line: str) -> Next:
        """Raises InputError for what is no command or cannot be done, KeyboardInterrupt while a file is read."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name == "/quit":
            return Next.LEAVE
        if name == "/retry":
            return Next.RETRY
        actions: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/new": self._new,
            "/undo": self._undo,
            "/read": self._read,
            "/save": self._save,
            "/load": self._load,
            "/system": self._system,
            "/thinking": self._thinking,
            "/context": self._context,
            "/stats": self._stats,
        }
        if name not in actions:
            raise InputError(f"{name}: no such command, /help lists them")
        self.screen.note(actions[name](argument))
        return Next.GO_ON

    def _new(self, _: str) -> str:
        self.conversation.reset()
        return "(new chat)"

    def _undo(self, _: str) -> str:
        had_document = bool(self.conversation.document)
        taken = self.conversation.undo()
        if taken is None:
            return "(there is nothing to take back)"
        what = "the file" if had_document else f'"{_shortened(taken)}" and its answer'
        rest = "; the file it asked about is still there" if self.conversation.document and not had_document else ""
        return f"(took back {what}{rest}; {self._used()})"

    def _read(self, argument: str) -> str:
        path = _path("/read", argument)
        text = read_text(path, self.conversation.context * self.tokenizer.longest_token)
        progress: PrefillProgress | None = None

        def new_progress(n_tokens: int) -> PrefillProgress:
            nonlocal progress
            progress = PrefillProgress(self.err, n_tokens)
            return progress

        try:
            n, timings = self.conversation.read(path.name, text, new_progress)
        except KeyboardInterrupt:
            self.screen.note(f"(stopped, {path.name} is not read)")
            raise
        finally:
            if progress:
                progress.clear()
        rate = f" at {timings.prefill_rate:.1f} tok/s" if timings.prefill_rate is not None else ""
        lines = [f"({path.name}: {n} tokens read{rate}; {self._used()}; the next message asks about it)"]
        if names := self.tokenizer.named_tokens(text):
            lines.insert(
                0, f"note: {path.name} has {', '.join(names)}, which the model reads as part of the chat format"
            )
        return "\n".join(lines)

    def _save(self, argument: str) -> str:
        path = _path("/save", argument)
        n_bytes = self.sessions.save(path, self.conversation)
        n_turns = len(self.conversation.turns)
        return f"(saved to {path}: {n_turns} turns, {self.conversation.used} tokens, {format_bytes(n_bytes)})"

    def _load(self, argument: str) -> str:
        path = _path("/load", argument)
        self.sessions.load(path, self.conversation)
        turns = self.conversation.turns
        last = f'; the last one: "{_shortened(turns[-1].text)}"' if turns else ""
        return f"({path}: {len(turns)} turns{last}; {self._used()})"

    def _system(self, argument: str) -> str:
        if not argument:
            system = self.conversation.system
            return "(no system message)" if system is None else system
        self.conversation.system = None if argument == "off" else argument
        again = "; the conversation will be evaluated again" if self.conversation.turns else ""
        return f"(system message {'removed' if argument == 'off' else 'set'}{again})"

    def _thinking(self, argument: str) -> str:
        if argument == "last":
            turns = self.conversation.turns
            if turns and (thinking := turns[-1].thinking.strip("\n")):
                self.screen.dimmed(thinking)
                return "(end of the thinking)"
            return "(the last answer came without thinking)"
        if argument in _MODES:
            self.conversation.thinking = _MODES[argument]
            again = "; the conversation will be evaluated again" if self.conversation.turns else ""
            return f"({_MODE_TEXTS[_MODES[argument]]}{again})"
        if argument in tuple(ThinkingView):
            self.screen.thinking = ThinkingView(argument)
        elif argument:
            raise InputError(f"/thinking {argument}: expected show, fold, on, off, auto or last")
        shown = "shown" if self.screen.thinking is ThinkingView.SHOW else "folded"
        return f"(thinking is {shown}; {_MODE_TEXTS[self.conversation.thinking]})"

    def _context(self, _: str) -> str:
        conversation = self.conversation
        left = conversation.context - conversation.used
        lines = [f"used     {conversation.used} of {conversation.context} tokens, {left} left"]
        if conversation.pinned is None:
            lines.append("pinned   nothing; nothing is dropped when the context is full (--on-full stop)")
        else:
            lines.append(f"pinned   {conversation.pinned} tokens at the start (--on-full shift)")
        lines.append(f"dropped  {conversation.dropped} tokens of this conversation")
        if conversation.document:
            lines.append("file     read, for the next message to ask about")
        return "\n".join(lines)

    def _stats(self, _: str) -> str:
        answer = self.conversation.answer
        lines = [self.status, f"context {self._used()}"]
        timings = answer.timings
        if timings.prefill_rate is not None:
            lines.append(
                f"last prompt: {timings.prefill_tokens} tokens at {timings.prefill_rate:.1f} tok/s, "
                f"{timings.reused_tokens} reused"
            )
        if timings.decode_rate is not None:
            lines.append(f"last answer: {len(answer.ids)} tokens at {timings.decode_rate:.1f} tok/s")
        return "\n".join(lines)

    def _used(self) -> str:
        return f"{self.conversation.used}/{self.conversation.context} tokens"


def _shortened(text: str) -> str:
    folded = " ".join(text.split())
    return folded if len(folded) <= 40 else f"{folded[:40]}..."


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InputError(f"{command} needs the name of a file")
    return Path(os.path.expanduser(argument))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file. Raises InputError for what is no text or has more than `most_bytes`."""
    try:
        if not path.is_file():
            raise InputError(f"{path}: {'is no file' if path.exists() else 'does not exist'}")
        size = path.stat().st_size
        if size > most_bytes:
            raise InputError(f"{path}: {size} bytes, a context of this size holds at most {most_bytes}")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if (at := data.find(b"\0")) >= 0:
        raise InputError(f"{path}: is no text, byte {at} is NUL")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no text, {invalid_utf8(error)}") from None
    if not text.strip():
        raise InputError(f"{path}: is empty")
    return text
