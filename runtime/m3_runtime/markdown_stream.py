"""Markdown shown on a terminal while it is written."""

import time
from collections.abc import Callable, Iterator
from typing import TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.text import Text

from m3_runtime.interrupts import hold_signals

_SECONDS = 0.08  # between two pictures of the block that is being written
_SHARE = 0.1  # of the time, at most, that pictures take: a long block is drawn less often, and the model goes on


def new_parser() -> MarkdownIt:
    """CommonMark with tables and ~~strikethrough~~, of which nothing that was written is left out when it is shown.

    HTML, images and definitions of references stay text.
    """
    parser = MarkdownIt("commonmark", {"html": False})
    return parser.enable(["strikethrough", "table"]).disable(["image", "reference"])


class _LeftHeading(Heading):
    """A heading in bold at the left margin, where rich would center it and frame the first level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text: Text = self.text
        text.justify = "left"
        text.stylize("bold underline" if self.tag == "h1" else "bold")
        yield text


class _Blocks(Markdown):
    """Rendered Markdown with the terminal's own colors, line breaks where they were written, addresses in full."""

    elements = {**Markdown.elements, "heading_open": _LeftHeading}  # noqa: RUF012 (rich's declaration)

    def __init__(self, text: str, parser: MarkdownIt) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = text
        self.parsed = parser.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class _Lines:
    """Lines that are rendered already."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self._lines:
            yield from line
            yield Segment.line()


def _without_padding(line: list[Segment]) -> list[Segment]:
    line = list(line)
    while line and not line[-1].text.strip():
        line.pop()
    if line and line[-1].text.endswith(" "):
        line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style, line[-1].control)
    return line


class MarkdownStream:
    """Shows Markdown that comes in pieces.

    A block (paragraph, list, table, code) is printed for good when the next one begins. Until then its last lines stand
    at the end of the screen and are drawn over in place, at most twelve times a second and for a tenth of the time.
    Nothing above them is touched.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(file=out, force_terminal=True, highlight=False, emoji=False, markup=False)
        self._parser = new_parser()
        self._clock = clock
        self._live: Live | None = None
        self._pending = ""  #: text of the block that is being written
        self._due = float("-inf")  #: when the next picture of it may be drawn
        self._printed = False  #: whether a block stands above it

    def push(self, text: str) -> None:
        """More text, which must have no control characters but line breaks and tabs."""
        self._pending += text
        start = self._clock()
        if start < self._due:
            return
        with hold_signals():  # an interruption must not leave the cursor in the middle of a picture
            for n in self._block_lengths()[:-1]:
                self._print(n)
            if self._pending.strip():
                self._draw()
        end = self._clock()
        self._due = end + max(_SECONDS, (end - start) / _SHARE)

    def finish(self) -> None:
        """Prints what is there; the next text begins anew."""
        with hold_signals():
            for n in self._block_lengths():
                self._print(n)
        self._printed = False
        self._due = float("-inf")

    def _block_lengths(self) -> list[int]:
        """Characters of each block in what is pending, each up to where the next one begins."""
        tokens = self._parser.parse(self._pending)
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
        lines = self._pending.split("\n")
        ends = [*starts[1:], len(lines)]
        # The last line has no break behind it.
        lengths = [sum(len(line) + 1 for line in lines[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        lengths[-1] -= 1
        return lengths

    def _print(self, n: int) -> None:
        """Prints the first `n` characters of what is pending for good."""
        text, self._pending = self._pending[:n], self._pending[n:]
        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            if self._printed:
                self._console.print()
            self._console.print(_Lines(self._rendered(text)), end="")
            self._printed = True

    def _rendered(self, text: str) -> list[list[Segment]]:
        """The lines of a block without the empty ones around them and the spaces that rich fills lines with."""
        rendered = self._console.render_lines(_Blocks(text, self._parser), pad=False)
        lines = [_without_padding(line) for line in rendered]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            lines.pop(0)
        return lines

    def _draw(self) -> None:
        lines = self._rendered(self._pending)
        if not lines:
            return  # a "#" whose heading is still to come
        tail = _Lines(lines[-max(1, self._console.height - 2) :])  # no more than can be erased again
        if self._live is None:
            if self._printed:
                self._console.print()
                self._printed = False
            self._live = Live(
                tail,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(tail, refresh=True)
