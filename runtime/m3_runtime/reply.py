"""What a model writes, split into thinking, text and tool calls while it streams.

The reply format of MiniMax-M3: `<mm:think>` reasoning `</mm:think>` text, and tool calls as
`]<]minimax[>[<tool_call>` ... `]<]minimax[>[</tool_call>`. The tags are found in the text, so it makes no difference
whether the model wrote them as one token or letter by letter, nor where the stream is cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from m3_runtime.tool_call import INVOKE_END, NAMESPACE, TOOL_END, ToolCalls, read_tool_calls

THINK = "<mm:think>"
UNTHINK = "</mm:think>"

_TOOL_BEGIN = NAMESPACE + "<tool_call>"

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

    def tool_calls(self, tools: Sequence[Mapping[str, Any]] | None = None) -> ToolCalls:
        """The calls in it so far, typed by the JSON schemas of `tools`; those that are broken are told apart."""
        return read_tool_calls(self.tools, tools)


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
    - The namespace token in front of a tag starts tool calls wherever it stands. `</tool_call>` ends them, or
      `</invoke>` if no `<tool_call>` came first: their markup never becomes text. A namespace token with no tag
      behind it disappears from the text (it is a TOOL piece) and changes nothing else.
    """

    thinking: bool = False  #: the stream starts inside the thinking
    _pending: str = field(default="", init=False)
    _tool_ends: tuple[str, ...] = field(default=(), init=False)  #: what ends the tool calls that it is in
    _thought: bool = field(default=False, init=False)
    _text: bool = field(default=False, init=False)

    def push(self, text: str) -> Iterator[Piece]:
        """Pieces that are certain after `text`; what may be the start of a tag is held back."""
        self._pending += text
        while found := self._first_tag():
            at, tag = found
            yield from self._give(self._take(at))
            if tag == NAMESPACE and len(self._pending) < len(_TOOL_BEGIN) and _TOOL_BEGIN.startswith(self._pending):
                return
            yield from self._at_tag(tag)
        held = max(
            (n for tag in self._tags() for n in range(1, len(tag)) if self._pending.endswith(tag[:n])), default=0
        )
        yield from self._give(self._take(len(self._pending) - held))

    def finish(self) -> Iterator[Piece]:
        """What was held back: the reply ended inside something that only looked like a tag."""
        ready = self._take(len(self._pending))
        if ready.startswith(NAMESPACE):
            yield Piece(Kind.TOOL, ready)
        else:
            yield from self._give(ready)

    def _take(self, n: int) -> str:
        taken, self._pending = self._pending[:n], self._pending[n:]
        return taken

    def _first_tag(self) -> tuple[int, str] | None:
        places = ((self._pending.find(tag), tag) for tag in self._tags())
        return min((place for place in places if place[0] >= 0), default=None)

    def _tags(self) -> tuple[str, ...]:
        return self._tool_ends or (THINK, UNTHINK, NAMESPACE)

    def _give(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._tool_ends:
            yield Piece(Kind.TOOL, text)
        elif self.thinking:
            yield Piece(Kind.THINKING, text)
        else:
            self._text = True
            yield Piece(Kind.TEXT, text)

    def _at_tag(self, tag: str) -> Iterator[Piece]:
        """Does what a tag at the start of what is pending asks for."""
        if self._tool_ends:
            yield from self._give(self._take(len(tag)))
            self._tool_ends = ()
        elif tag == NAMESPACE:
            yield from self._begin_tool()
        else:
            self._take(len(tag))
            if tag == UNTHINK:
                if not self.thinking and not self._thought and self._text:
                    yield Piece(Kind.RECLASSIFY, "")
                self._thought = True
            self.thinking = tag == THINK

    def _begin_tool(self) -> Iterator[Piece]:
        if self._pending.startswith(_TOOL_BEGIN):
            self._tool_ends = (TOOL_END,)
        elif self._pending.startswith(NAMESPACE + "<"):
            self._tool_ends = (TOOL_END, INVOKE_END)  # the closing tag of either may be this one
        else:
            yield Piece(Kind.TOOL, self._take(len(NAMESPACE)))
            return
        self._thought = self._thought or self.thinking
        self.thinking = False
