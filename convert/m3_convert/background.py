"""Work in threads that do not keep the program from ending: a request on a dead connection takes its time to fail."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Final, TypeVar

_LOOK_SECONDS: Final = 0.1  #: between two looks at whether to stop

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class StoppedError(Exception):
    """What was being done is not wanted any more."""


def in_background(function: Callable[[Argument], Result], argument: Argument) -> Future[Result]:
    """Calls `function` in a thread of its own."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = function(argument)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_order(
    function: Callable[[Argument], Result],
    arguments: Iterable[Argument],
    at_once: int,
    stop: threading.Event | None = None,
) -> Iterator[Result]:
    """The results of `function`, called `at_once` times in parallel, in the order of the arguments.

    Raises what a call raised, when its turn comes, and StoppedError soon after `stop` is set; other calls may then
    still be running. No more than `at_once` results are held.
    """
    running: deque[Future[Result]] = deque()
    for argument in arguments:
        if len(running) == at_once:
            yield _result(running.popleft(), stop)
        running.append(in_background(function, argument))
    while running:
        yield _result(running.popleft(), stop)


def _result(future: Future[Result], stop: threading.Event | None) -> Result:
    while stop is not None and not wait([future], _LOOK_SECONDS).done:
        if stop.is_set():
            raise StoppedError
    return future.result()
