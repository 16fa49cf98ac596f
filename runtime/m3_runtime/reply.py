"""What a model writes, split into thinking, text and tool calls while it streams.

The reply format of MiniMax-M3: `<mm:think>` reasoning `</mm:think>` text, and tool calls as
`]<]minimax[>[<tool_call>` ... `]<]minimax[>[</tool_call>`. The tags are found in the text, so it makes no difference
whether the model wrote them as one token or letter by letter, nor where the stream is cut.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

THINK = "<mm:think>"
UNTHINK = "</mm:think>"
NAMESPACE = "]<]minimax[>["  #: stands before every tag of a tool call
TOOL_END = NAMESPACE + "</tool_call>"

# Named tokens that are part of the reply format and therefore read as text, whatever type the file gives them.
MARKUP = (THINK, UNTHINK, NAMESPACE, "<tool_call>", "</tool_call>")


class Kind(Enum):
    """What a piece of a reply is."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL = "tool"  #: tool calls with their markup, as the model wrote them
    RECLASSIFY = "reclassify"  #: no text; all TEXT so far was THINKING: a closing tag came without an opening one


@dataclass(frozen=True)
class Piece:
    kind: Kind
    text: str


@dataclass
class Reply:
    """A reply as far as it has come."""

    text: str = ""  #: the answer, without thinking, tool calls and tags
    thinking: str = ""
    tools: str = ""  #: the markup of tool calls
    content: str = ""  #: text and tool calls in the order in which they came, for the chat history

    def add(self, piece: Piece) -> None:
        if piece.kind is Kind.TEXT:
            self.text += piece.text
            self.content += piece.text
        elif piece.kind is Kind.TOOL:
            self.tools += piece.text
            self.content += piece.text
        elif piece.kind is Kind.THINKING:
            self.thinking += piece.text
        else:
            self.thinking, self.text, self.content = self.text, "", self.tools


def opens_thinking(prompt: str) -> bool:
    """Whether a reply to this prompt starts inside the thinking: the template has already written the opening tag."""
    return prompt.rstrip().endswith(THINK)


@dataclass
class ReplySplitter:
    """Splits a stream of text into pieces.

    - Thinking lies between the tags. A missing closing tag leaves all that follows thinking, up to a tool call.
    - A closing tag without an opening one (thinking switched off, or after a tool's result): what came before it
      was thinking. It has been given out as text by then, so RECLASSIFY says so. At the very start of a reply it
      just disappears.
    - The namespace token starts a tool call wherever it stands, and only the call's closing tag ends it: its markup
      never becomes text.
    """

    thinking: bool = False  #: the stream starts inside the thinking
    _pending: str = field(default="", init=False)
    _tool: bool = field(default=False, init=False)
    _thought: bool = field(default=False, init=False)
    _text: bool = field(default=False, init=False)

    def push(self, text: str) -> Iterator[Piece]:
        """Pieces that are certain after `text`; what may be the start of a tag is held back."""
        self._pending += text
        while found := self._first_tag():
            at, tag = found
            yield from self._give(self._pending[:at])
            self._pending = self._pending[at + len(tag) :]
            yield from self._tags()[tag](tag)
        held = max(
            (n for tag in self._tags() for n in range(1, len(tag)) if self._pending.endswith(tag[:n])), default=0
        )
        ready, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        yield from self._give(ready)

    def finish(self) -> Iterator[Piece]:
        """What was held back: the reply ended inside something that only looked like a tag."""
        ready, self._pending = self._pending, ""
        yield from self._give(ready)

    def _first_tag(self) -> tuple[int, str] | None:
        places = ((self._pending.find(tag), tag) for tag in self._tags())
        return min((place for place in places if place[0] >= 0), default=None)

    def _tags(self) -> dict[str, Callable[[str], Iterator[Piece]]]:
        if self._tool:
            return {TOOL_END: self._end_tool}
        return {THINK: self._begin_thinking, UNTHINK: self._end_thinking, NAMESPACE: self._begin_tool}

    def _give(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._tool:
            yield Piece(Kind.TOOL, text)
        elif self.thinking:
            yield Piece(Kind.THINKING, text)
        else:
            self._text = True
            yield Piece(Kind.TEXT, text)

    def _begin_thinking(self, tag: str) -> Iterator[Piece]:
        self.thinking = True
        yield from ()

    def _end_thinking(self, tag: str) -> Iterator[Piece]:
        if not self.thinking and not self._thought and self._text:
            yield Piece(Kind.RECLASSIFY, "")
        self.thinking, self._thought = False, True

    def _begin_tool(self, tag: str) -> Iterator[Piece]:
        self._thought = self._thought or self.thinking
        self.thinking, self._tool = False, True
        yield Piece(Kind.TOOL, tag)

    def _end_tool(self, tag: str) -> Iterator[Piece]:
        self._tool = False
        yield Piece(Kind.TOOL, tag)
