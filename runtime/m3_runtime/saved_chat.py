"""Conversations on disk: their turns, and the pages of the session that hold them."""

from dataclasses import dataclass
from pathlib import Path

from m3_runtime.chat import Conversation
from m3_runtime.engine import Session
from m3_runtime.errors import InputError
from m3_runtime.held_tokens import HeldTokens


@dataclass
class ChatFiles:
    """What /save and /load do."""

    session: Session
    held: HeldTokens

    def save(self, path: Path, conversation: Conversation) -> int:
        raise InputError("WIP")

    def load(self, path: Path, conversation: Conversation) -> None:
        raise InputError("WIP")
