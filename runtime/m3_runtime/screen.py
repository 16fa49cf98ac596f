"""How a command shows a reply: the answer on stdout, everything else on stderr."""

import json
import os
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TextIO

from m3_runtime.quantities import format_seconds
from m3_runtime.reply import Kind, Piece
from m3_runtime.tool_call import BrokenCall, ToolCall, ToolCallParser

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

# A model's text must not steer the terminal: escape sequences, carriage returns, bells.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def is_capable(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class ThinkingView(StrEnum):
    """How much of the thinking is shown."""

    SHOW = "show"
    FOLD = "fold"  #: one line that says how long it is


class Screen:
    """Writes pieces of replies as they come.

    Text goes to stdout, unchanged where that is a file or a pipe. Thinking (dimmed on a terminal), tool calls and
    notes go to stderr. On a terminal control characters are shown as U+FFFD and the answer starts on its own line.
    """

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.thinking = ThinkingView.SHOW
        self._out = out
        self._err = err
        self._clock = clock
        self._dim = is_capable(err) and not os.environ.get("NO_COLOR")
        self._kind: Kind | None = None  #: of what was shown last
        self._line: TextIO | None = None  #: the stream whose line is not ended yet
        self._calls = ToolCallParser()
        self._fold: _Fold | None = None

    def show(self, piece: Piece) -> None:
        if piece.kind is Kind.RECLASSIFY:
            self.note("(the text above was thinking)")
            return
        text = piece.text
        if piece.kind is not self._kind:
            if self._line is not self._out or self._out.isatty():
                self._end_line()
            if piece.kind is Kind.TEXT and self._kind is not Kind.TEXT and self._out.isatty():
                text = text.lstrip("\n")
        if piece.kind is Kind.TEXT:
            self._write(self._out, text)
        elif piece.kind is Kind.TOOL:
            self._note_calls(self._calls.push(text))
        elif self.thinking is ThinkingView.FOLD:
            self._fold = self._fold or _Fold(self._err, self._clock)
            self._fold.add(text)
        else:
            self._write(self._err, text)
        if text:
            self._kind = piece.kind

    def note(self, text: str) -> None:
        """Lines on stderr."""
        if self._line is not self._out or self._out.isatty():
            self._end_line()
        if self._err.isatty():
            text = text.translate(_CONTROLS)
        self._err.write(text + "\n")
        self._err.flush()

    def dimmed(self, text: str) -> None:
        """Text on stderr that looks like thinking, on lines of its own."""
        self._end_line()
        self._write(self._err, text)
        self._end_line()

    def end(self) -> None:
        """Ends the reply: its last line is completed."""
        self._note_calls(self._calls.finish())
        self._end_line()
        self._kind = None

    def _note_calls(self, calls: Iterable[ToolCall | BrokenCall]) -> None:
        for call in calls:
            self.note(describe_call(call))

    def _end_line(self) -> None:
        if self._fold is not None:
            fold, self._fold = self._fold, None
            fold.close()
        if self._line is not None:
            line, self._line = self._line, None
            line.write("\n")
            line.flush()

    def _write(self, stream: TextIO, text: str) -> None:
        if not text:
            return
        self._line = None if text.endswith("\n") else stream
        if stream.isatty():
            text = text.translate(_CONTROLS)
        if stream is self._err and self._dim:
            text = _DIM + text + _PLAIN
        stream.write(text)
        stream.flush()


def describe_call(call: ToolCall | BrokenCall) -> str:
    """A tool call in one line, without its markup's namespace tokens."""
    if isinstance(call, BrokenCall):
        return f"broken tool call, not executed ({call.why}): {' '.join(call.text.split())}"
    values = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"tool call, not executed: {call.name}({values})"


class MarkdownScreen(Screen):
    """A Screen that renders the text as Markdown. stdout must be a terminal that knows escape sequences."""

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        # Here: rich takes a moment to load, which one answer to a pipe need not wait for.
        from m3_runtime.markdown_stream import MarkdownStream

        super().__init__(out, err, clock)
        self._markdown = MarkdownStream(out, clock)

    def _end_line(self) -> None:
        self._markdown.finish()
        super()._end_line()

    def _write(self, stream: TextIO, text: str) -> None:
        if stream is self._out:
            self._markdown.push(text.translate(_CONTROLS))
        else:
            super()._write(stream, text)


class _Fold:
    """Thinking that is not shown: one line on stderr, which on a terminal grows while it goes on."""

    def __init__(self, err: TextIO, clock: Callable[[], float]) -> None:
        self._err = err
        self._clock = clock
        self._start = clock()
        self._drawn = float("-inf")
        self._characters = 0
        self._columns = 0  #: to draw over

    def add(self, text: str) -> None:
        self._characters += len(text)
        if self._err.isatty() and self._clock() - self._drawn >= 0.25:
            self._drawn = self._clock()
            self._draw(f"thinking: {self._text()}")

    def close(self) -> None:
        self._draw(f"(thought: {self._text()}; /thinking last shows it)")
        self._err.write("\n")
        self._err.flush()

    def _text(self) -> str:
        return f"{self._characters} characters, {format_seconds(self._clock() - self._start)}"

    def _draw(self, text: str) -> None:
        start = "\r" if self._columns else ""
        self._err.write(start + text.ljust(self._columns))
        self._err.flush()
        self._columns = len(text) if self._err.isatty() else 0


class _Progress:
    """Reports something long on stderr: a line every 1.5 seconds, on a terminal one line that is rewritten."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._clock = clock
        self._start = self._last = clock()
        self._shown = 0  #: columns to erase

    def __call__(self, done: int, total: int) -> None:
        """done, total: steps or bytes."""
        now = self._clock()
        if now - self._last < 1.5 or total <= 0:
            return
        self._last = now
        text = self._text(done, total, now - self._start)
        if self._err.isatty():
            self._err.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            self._err.write(text + "\n")
        self._err.flush()

    def clear(self) -> None:
        """Removes the line from a terminal."""
        if self._shown:
            self._err.write("\r" + " " * self._shown + "\r")
            self._err.flush()
            self._shown = 0

    def _text(self, done: int, total: int, seconds: float) -> str:
        raise NotImplementedError


class PrefillProgress(_Progress):
    """Of `Session.eval`: tokens of a prompt."""

    def __init__(self, err: TextIO, n_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(err, clock)
        self._n_tokens = n_tokens

    def _text(self, done: int, total: int, seconds: float) -> str:
        share = done / total
        text = f"prefill: {share:.0%} of {self._n_tokens} tokens, {share * self._n_tokens / seconds:.1f} tok/s"
        return f"{text}, {format_seconds(seconds / share - seconds)} left" if done else text


class LoadProgress(_Progress):
    """Of `Model.load`: bytes of the weights."""

    def _text(self, done: int, total: int, seconds: float) -> str:
        return f"loading: {done / total:.0%} of {total / 1e9:.2f} GB, {done / seconds / 1e9:.2f} GB/s"


class FileProgress(_Progress):
    """Of a session that is saved or loaded."""

    def __init__(self, err: TextIO, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(err, clock)
        self._what = what

    def _text(self, done: int, total: int, seconds: float) -> str:
        return f"{self._what}: {done / total:.0%}"
