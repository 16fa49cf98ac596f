"""Tokens of a reply to what a client is told: text, thinking, tool calls, log probabilities."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from m3_runtime.reply import MARKUP, THINK, UNTHINK, Kind, Piece, Reply, ReplySplitter
from m3_runtime.request import Token
from m3_runtime.server.constraint import ReplyConstraint
from m3_runtime.server.stop_strings import StopFilter
from m3_runtime.text import ChatTokenizer, TokenStream
from m3_runtime.tool_call import NAMESPACE, BrokenCall, ToolCall, ToolCallParser


@dataclass
class Update:
    """What came with one token, or at the end."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[BrokenCall] = field(default_factory=list)
    logprobs: list[Token] = field(default_factory=list)  #: of tokens of the text so far
    reclassified: str | None = None  #: the text up to here was thinking

    @property
    def is_empty(self) -> bool:
        return self == Update()


class Reading(Protocol):
    """Reads one reply."""

    stopped: bool  #: nothing more is wanted
    thinking_tokens: int

    @property
    def stop_string(self) -> str | None:
        """The one that ended it."""

    def push(self, token: Token) -> Update: ...

    def finish(self) -> Update:
        """What was held back."""


class LogprobQueue:
    """Tokens with log probabilities, held back as long as their text is: a stop string takes its tokens with it."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[Token, int]] = deque()  #: with the characters of text up to their end
        self._characters = 0
        self._given = 0

    def add(self, token: Token, text: str) -> None:
        """text: what it completed, nothing inside of a character."""
        self._characters += len(text)
        if token.logprob is not None:
            self._tokens.append((token, self._characters))

    def take(self, n_characters: int) -> list[Token]:
        """Those whose text is among the next n characters that are given out."""
        self._given += n_characters
        ready: list[Token] = []
        while n_characters and self._tokens and self._tokens[0][1] <= self._given:
            ready.append(self._tokens.popleft()[0])
        return ready

    def forget(self) -> None:
        """What is held back is no text."""
        self._tokens.clear()
        self._characters = self._given


class TextReading:
    """A completion: text as it comes, up to a stop string."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._stream = TokenStream(tokenizer)
        self._filter = StopFilter(stops)
        self._logprobs = LogprobQueue()
        self.stopped = False
        self.thinking_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._filter.hit

    def push(self, token: Token) -> Update:
        text = self._stream.push(token.id)
        self._logprobs.add(token, text)
        update = self._update(self._filter.push(text))
        self.stopped = self._filter.hit is not None
        return update

    def finish(self) -> Update:
        text = self._filter.push(self._stream.finish())
        return self._update(text + self._filter.finish())

    def _update(self, text: str) -> Update:
        return Update(text=text, logprobs=self._logprobs.take(len(text)))


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """What a chat reply is read with."""

    stops: Sequence[str] = ()  #: for the text; thinking and tool calls may have them
    tools: Sequence[Mapping[str, Any]] = ()
    with_tools: bool = True  #: False: markup of tool calls is left out
    single_call: bool = False  #: the reply ends with its first call
    thinking: bool = False  #: the prompt ends inside the thinking
    structured: ReplyConstraint | None = None  #: its part of the reply is text as it stands


class ChatReading:
    """A chat reply: thinking, text and tool calls apart, whatever the cuts between tokens."""

    def __init__(self, tokenizer: ChatTokenizer, form: ChatForm) -> None:
        named = {name: id for name in MARKUP if (id := tokenizer.token_id(name)) is not None}
        self._form = form
        self._kinds = {
            named.get(THINK): Kind.THINKING,
            named.get(UNTHINK): Kind.TEXT,
            named.get(NAMESPACE): Kind.TOOL,
        }
        self._markup: Collection[int] = frozenset(named.values())
        self._stream = TokenStream(tokenizer, visible=self._markup)
        self._splitter = ReplySplitter(thinking=form.thinking)
        self._filter = StopFilter(form.stops)
        self._parser = ToolCallParser(form.tools)
        self._logprobs = LogprobQueue()
        self._kind = Kind.THINKING if form.thinking else Kind.TEXT
        self.reply = Reply()  #: as it was given out
        self.calls: list[ToolCall] = []
        self.broken: list[BrokenCall] = []
        self.stopped = False
        self.thinking_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._filter.hit

    def push(self, token: Token) -> Update:
        text = self._stream.push(token.id)
        structured = self._form.structured is not None and self._form.structured.in_grammar
        pieces = [Piece(Kind.TEXT, text)] if structured else list(self._splitter.push(text))
        self._kind = self._kinds.get(token.id) or (pieces[-1].kind if pieces else self._kind)
        if self._kind is Kind.THINKING:
            self.thinking_tokens += 1
        if self._kind is not Kind.TEXT:
            self._logprobs.forget()
        elif token.id not in self._markup:
            self._logprobs.add(token, text)
        return self._update(pieces)

    def finish(self) -> Update:
        rest = self._stream.finish()
        update = self._update([*self._splitter.push(rest), *self._splitter.finish()])
        if self._form.with_tools:
            update.broken += self._parser.finish()
            self.broken += update.broken
        held = self._filter.finish()
        update.text += held
        self.reply.add(Piece(Kind.TEXT, held))
        update.logprobs += self._logprobs.take(len(held))
        return update

    def _update(self, pieces: Iterable[Piece]) -> Update:
        update = Update()
        for piece in pieces:
            if self._filter.hit is not None:
                break
            if piece.kind is Kind.TEXT:
                text = self._filter.push(piece.text)
                self._add(update, Piece(Kind.TEXT, text))
            elif piece.kind is Kind.TOOL:
                self._read_calls(update, piece)
            elif piece.kind is Kind.RECLASSIFY:
                held = self._filter.finish()
                self._add(update, Piece(Kind.TEXT, held))
                update.reclassified, update.text = self.reply.text, ""
                self.reply.add(piece)
            else:
                self._add(update, piece)
        update.logprobs = self._logprobs.take(len(update.text))
        self.stopped = self.stopped or self._filter.hit is not None
        return update

    def _add(self, update: Update, piece: Piece) -> None:
        self.reply.add(piece)
        if piece.kind is Kind.TEXT:
            update.text += piece.text
        else:
            update.thinking += piece.text

    def _read_calls(self, update: Update, piece: Piece) -> None:
        if not self._form.with_tools:
            return
        self.reply.add(piece)
        for call in self._parser.push(piece.text):
            if isinstance(call, ToolCall):
                update.calls.append(call)
                self.calls.append(call)
                if self._form.single_call:
                    self.stopped = True
                    break
            else:
                update.broken.append(call)
                self.broken.append(call)
