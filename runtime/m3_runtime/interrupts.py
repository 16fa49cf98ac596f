"""Exceptions of signal handlers, held back while locks and buffers are in use.

Python runs signal handlers between any two instructions of the main thread, also between taking a lock and the block
that would give it back. KeyboardInterrupt raised there leaves the lock taken, and whatever shares it waits for ever.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object]


class HeldSignals:
    """What came while `hold_signals` was active."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._error: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Whether a handler has raised, so that the block should come to its end."""
        return self._error is not None

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._error = self._error or error

    def _take(self) -> None:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._arrived)

    def _give_back(self) -> None:
        # Ctrl-C last: from then on it may raise at any point of what follows.
        for number in reversed(_NUMBERS):
            if number in self._handlers:
                signal.signal(number, self._handlers[number])


@contextmanager
def hold_signals() -> Iterator[HeldSignals]:
    """Handlers written in Python still run when their signal comes, but what they raise is raised after the block.

    On other threads than the main one this does nothing: no handler runs there.
    """
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    try:
        held._take()
        yield held
    finally:
        held._give_back()
        if held._error is not None:
            raise held._error
