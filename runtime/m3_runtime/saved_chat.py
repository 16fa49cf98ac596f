"""A chat on disk: its turns, and the pages of the session that hold them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from m3_runtime.chat import Conversation
from m3_runtime.engine import Session
from m3_runtime.errors import InputError, MachineError
from m3_runtime.held_tokens import HeldTokens
from m3_runtime.screen import FileProgress
from m3_runtime.session_file import load_session, read_header, save_session


@dataclass
class ChatFiles:
    """What /save and /load do with the sequence that `held` speaks of."""

    session: Session
    held: HeldTokens
    err: TextIO

    def save(self, path: Path, conversation: Conversation) -> int:
        """Writes a file, whole or not at all; its bytes. Raises InputError, for a full disk too.

        A file that is there is replaced if it is a saved session, and refused if it is anything else.
        """
        held = self.held
        if path.exists():
            try:
                read_header(path)
            except InputError as error:
                raise InputError(f"{error}; it is not replaced") from None
        note = {"chat": conversation.state(), "pinned": held.pinned, "dropped": held.dropped}
        progress = FileProgress(self.err, "saving")
        try:
            save_session(path, self.session, held.seq, held.ids, note, progress=progress)
        except MachineError as error:
            raise InputError(str(error)) from error  # the chat goes on
        finally:
            progress.clear()
        return path.stat().st_size

    def load(self, path: Path, conversation: Conversation) -> None:
        """Takes over what `save` wrote. Raises InputError; the conversation is then as it was, but if the file turned
        out to be damaged behind its header, the session has to evaluate it again.

        Where other tokens are pinned than when it was saved, what followed dropped ones is evaluated again.
        """
        note = read_header(path).note
        chat, pinned, dropped = _parts(path, note)
        Conversation.check_state(chat)
        progress = FileProgress(self.err, "loading")
        try:
            ids = load_session(path, self.session, self.held.seq, progress=progress).ids.tolist()
            self.held.reset(ids)
        except KeyboardInterrupt:
            # Wherever it came: the list and the session must not tell of different tokens.
            self.session.rewind(0, self.held.seq)
            self.held.reset([])
            raise
        except InputError:
            if not self.held.used:
                self.held.reset([])
            raise
        finally:
            progress.clear()
        conversation.restore(chat)
        if dropped:
            self.held.resume_shifted(pinned, dropped)


def _parts(path: Path, note: Any) -> tuple[Any, int, list[int]]:
    """The conversation's state, and pinned and dropped tokens, of what a file notes."""
    if isinstance(note, dict):
        chat, pinned, dropped = note.get("chat"), note.get("pinned"), note.get("dropped")
        if isinstance(pinned, int) and isinstance(dropped, list) and all(isinstance(id, int) for id in dropped):
            return chat, pinned, dropped
    raise InputError(f"{path}: holds a session, but no chat of m3-run")
