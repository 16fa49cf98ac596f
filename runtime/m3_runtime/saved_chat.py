"""Conversations on disk: their turns, and the pages of the session that hold them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m3_runtime.chat import Conversation
from m3_runtime.engine import Session
from m3_runtime.held_tokens import HeldTokens


@dataclass
class ChatFiles:
    session: Session
    held: HeldTokens
    facts: Mapping[str, str]
