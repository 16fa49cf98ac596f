"""Progress of a walk through layers on stderr: a bar on a terminal, elsewhere one plain line every few seconds."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from m3_convert.progress import LINE_SECONDS
from m3_runtime.quantities import format_seconds

Stages = Sequence[tuple[str, float]]  #: what is done one after the other, and the work in it, in any unit


def layer_stages(n_layer: int, total: float) -> Stages:
    """Layers that are each the same share of the work `total`."""
    return [(f"layer {i + 1} of {n_layer}", total / n_layer) for i in range(n_layer)]


@contextmanager
def walk_progress(name: str, stages: Stages, stream: TextIO, done: float = 0.0) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the work done since its last call.

    name: stands before each line. done: work of an earlier run, which does not count for the rate.
    """
    if not stream.isatty():
        yield _Lines(name, _Course(stages), stream, done).advance
        return
    course = _Course(stages)
    columns = (TextColumn("{task.fields[stage]}"), BarColumn(), TaskProgressColumn())
    # The estimate of the time left comes from hours, not from the half minute that is rich's default: layers are long.
    with Progress(
        *columns,
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(file=stream),
        speed_estimate_period=86400,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=course.total, completed=int(done), stage=course.stage(done))

        def advance(n: float) -> None:
            nonlocal done
            done += n
            bar.update(task, advance=n, stage=course.stage(done))

        yield advance


class _Course:
    def __init__(self, stages: Stages) -> None:
        self._names = [name for name, _ in stages]
        self._ends = list(accumulate(work for _, work in stages))
        self.total = self._ends[-1]

    def stage(self, done: float) -> str:
        """The stage that is being worked on."""
        # Sums of parts reach the end of a stage within rounding only.
        return self._names[min(bisect_right(self._ends, done * (1 + 1e-9)), len(self._names) - 1)]


class _Lines:
    def __init__(self, name: str, course: _Course, stream: TextIO, before: float) -> None:
        self.name, self.course, self.stream, self.before = name, course, stream, before
        self.done = before
        self.start = self.last = time.monotonic()

    def advance(self, n: float) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        total = self.course.total
        left = (total - self.done) * (now - self.start) / max(self.done - self.before, 1e-9)
        share = min(99, int(100 * self.done / total))
        text = f"{self.name}: {self.course.stage(self.done)}, {share}%, {format_seconds(max(left, 0))} left"
        print(text, file=self.stream, flush=True)
