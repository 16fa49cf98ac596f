"""Progress of a conversion on stderr: a bar on a terminal, elsewhere one plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from m3_runtime.quantities import format_bytes, format_seconds

LINE_SECONDS = 3.0


class Downloads(Protocol):
    """Where downloads are shown; called from any thread, and never in the way of one."""

    def note(self, text: str) -> None:
        """Shows a line."""
        ...

    def shown(self, text: str, name: str, total: int, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Shows the line `text`, and how far the download of the file `name` is while the block lasts.

        Yields a function that takes the number of bytes that have arrived since its last call. total, done: bytes of
        the file, and how many of them an earlier run has got.
        """
        ...


@contextmanager
def progress(
    name: str, total: int, stream: TextIO | None = None, start: int = 0
) -> Iterator[tuple[Callable[[int], None], Downloads]]:
    """Yields a function that takes the number of bytes done since its last call, and where downloads for it are shown.
    `total` in bytes, `name` of the file.

    start: bytes that an earlier run has done; they count as done, but not for the rate.

    Elsewhere than on a terminal: the first line after LINE_SECONDS, then one each LINE_SECONDS, and a last one when the
    block ends without an exception.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(stream) as bar:
            task = bar.add_task(name, total=total, completed=start)
            yield lambda n: bar.advance(task, n), _DownloadBars(bar)
        return
    lines = _Lines(name, total, stream, start)
    yield lines.advance, DownloadLines(stream)
    lines.finish()


def _bar(stream: TextIO) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=stream))


class DownloadLines:
    """Downloads as lines; on a terminal, where a bar of something else may be, one for each."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        # What stands for stderr changes while a bar is shown; it puts lines above the bar.
        stream = self._stream or sys.stderr
        with suppress(OSError):
            stream.write(f"{text}\n")
            stream.flush()

    @contextmanager
    def shown(self, text: str, name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        self.note(text)
        stream = self._stream or sys.stderr
        lines = _Lines(name, total, stream, done)

        def advance(n: int) -> None:
            with suppress(OSError):
                lines.advance(n)

        yield advance if not stream.isatty() else lambda n: None
        with suppress(OSError):
            lines.finish()


class _DownloadBars:
    """Downloads as bars below that of the conversion."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def shown(self, text: str, name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        self.note(text)
        task = self._bar.add_task(name, total=total, completed=done)
        try:
            yield lambda n: self._bar.advance(task, n)
        finally:
            self._bar.remove_task(task)


class _Lines:
    def __init__(self, name: str, total: int, stream: TextIO, before: int) -> None:
        self.name, self.total, self.stream, self.before = name, total, stream, before
        self.done = before
        self.start = self.last = time.monotonic()

    def advance(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS:
            self.last = now
            left = (self.total - self.done) * (now - self.start) / max(self.done - self.before, 1)
            self._print(now, f", {format_seconds(left)} left")

    def finish(self) -> None:
        now = time.monotonic()
        self._print(now, f" in {format_seconds(now - self.start)}")

    def _print(self, now: float, end: str) -> None:
        rate = (self.done - self.before) / max(now - self.start, 1e-9)
        share = 100 * self.done // max(self.total, 1)
        text = f"{self.name}: {share}% of {format_bytes(self.total)}, {format_bytes(rate)}/s{end}"
        # In one piece: lines of downloads come from other threads.
        self.stream.write(f"{text}\n")
        self.stream.flush()
