"""Progress of a check on stderr: a bar on a terminal, elsewhere one plain line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from m3_convert.progress import LINE_SECONDS, format_seconds


@contextmanager
def walk_progress(name: str, total: float, n_layer: int, stream: TextIO) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the work done since its last call, of `total` in any unit.

    name: stands before each line. n_layer: layers, each the same share of the work.
    """
    if not stream.isatty():
        yield _Lines(name, total, n_layer, stream).advance
        return
    columns = (TextColumn("layer {task.fields[layer]} of {task.fields[layers]}"), BarColumn(), TaskProgressColumn())
    # The estimate of the time left comes from hours, not from the half minute that is rich's default: layers are long.
    with Progress(
        *columns,
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(file=stream),
        speed_estimate_period=86400,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=total, layer=1, layers=n_layer)
        done = 0.0

        def advance(n: float) -> None:
            nonlocal done
            done += n
            bar.update(task, advance=n, layer=_layer(done, total, n_layer))

        yield advance


def _layer(done: float, total: float, n_layer: int) -> int:
    """The layer that is being worked on, counted from 1."""
    return min(n_layer, int(done / total * n_layer) + 1)


class _Lines:
    def __init__(self, name: str, total: float, n_layer: int, stream: TextIO) -> None:
        self.name, self.total, self.n_layer, self.stream = name, total, n_layer, stream
        self.done = 0.0
        self.start = self.last = time.monotonic()

    def advance(self, n: float) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        left = (self.total - self.done) * (now - self.start) / max(self.done, 1e-9)
        share = min(99, int(100 * self.done / self.total))
        layer = _layer(self.done, self.total, self.n_layer)
        text = f"{self.name}: layer {layer} of {self.n_layer}, {share}%, {format_seconds(max(left, 0))} left"
        print(text, file=self.stream, flush=True)
