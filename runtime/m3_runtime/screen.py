"""How a command shows a reply: the answer on stdout, everything else on stderr."""

import os
import time
from collections.abc import Callable
from typing import TextIO

from m3_runtime.reply import Kind, Piece

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

# A model's text must not steer the terminal: escape sequences, carriage returns, bells.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class Screen:
    """Writes pieces of replies as they come.

    Text goes to stdout, unchanged where that is a file or a pipe. Thinking (dimmed on a terminal), tool calls and
    notes go to stderr. On a terminal control characters are shown as U+FFFD and the answer starts on its own line.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._dim = err.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._kind: Kind | None = None  #: of what was shown last
        self._line: TextIO | None = None  #: the stream whose line is not ended yet

    def show(self, piece: Piece) -> None:
        if piece.kind is Kind.RECLASSIFY:
            self.note("(the text above was thinking)")
            return
        text = piece.text
        if piece.kind is not self._kind:
            if self._line is not self._out or self._out.isatty():
                self._end_line()
            if piece.kind is Kind.TOOL:
                self.note("tool call, not executed:")
        if piece.kind is Kind.TEXT:
            if self._kind is not Kind.TEXT and self._out.isatty():
                text = text.lstrip("\n")
            self._write(self._out, text)
        else:
            self._write(self._err, text)
        if text:
            self._kind = piece.kind

    def note(self, text: str) -> None:
        """One line on stderr."""
        if self._line is not self._out or self._out.isatty():
            self._end_line()
        self._err.write(text + "\n")
        self._err.flush()

    def end(self) -> None:
        """Ends the reply: its last line is completed."""
        self._end_line()
        self._kind = None

    def _end_line(self) -> None:
        if self._line is not None:
            self._line.write("\n")
            self._line.flush()
            self._line = None

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
        return f"prefill: {share:.0%} of {self._n_tokens} tokens, {share * self._n_tokens / seconds:.1f} tok/s"


class LoadProgress(_Progress):
    """Of `Model.load`: bytes of the weights."""

    def _text(self, done: int, total: int, seconds: float) -> str:
        return f"loading: {done / total:.0%} of {total / 1e9:.2f} GB, {done / seconds / 1e9:.2f} GB/s"
