"""A request at work, between the scheduler's thread and the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.requests import Request as HttpRequest

from m3_runtime.request import End, EndReason, Token
from m3_runtime.scheduler import Job
from m3_runtime.server.reading import Reading, Update
from m3_runtime.server.refusal import RefusalError, of_error

#: Seconds of silence after which a stream says that it is alive, which also shows that its reader is gone.
QUIET: Final = 15.0


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Answering:
    """Listens to a job and hands on what comes. Made on the event loop; `job` is set once it is queued."""

    def __init__(self, reading: Reading, on_end: Callable[[End], None]) -> None:
        """on_end: called on the scheduler's thread."""
        self.reading = reading
        self._on_end = on_end
        self.job: Job | None = None
        self.end: End | None = None  #: set when all updates have been given out
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Update | End | None] = asyncio.Queue()

    # ------------------------------------------------------------------------------- on the scheduler's thread

    def token(self, token: Token) -> bool:
        update = self.reading.push(token)
        if not update.is_empty:
            self._post(update)
        return self.reading.stopped

    def finished(self, end: End) -> None:
        self._on_end(end)
        if end.error is None:
            update = self.reading.finish()
            if not update.is_empty:
                self._post(update)
        self._post(end)

    def _post(self, item: Update | End) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    # --------------------------------------------------------------------------------------- on the event loop

    async def updates(self, request: HttpRequest) -> AsyncIterator[Update | None]:
        """What comes, until `end` is set; None after a while of silence.

        Raises ClientGoneError when the client has left, RefusalError if the job failed. The job is cancelled when the
        caller stops early, for whatever reason.
        """
        watch = asyncio.create_task(_left(request))
        watch.add_done_callback(lambda _: self._queue.put_nowait(None))
        try:
            while True:
                try:
                    item = await self._next()
                except TimeoutError:
                    yield None
                    continue
                if item is None:
                    raise ClientGoneError
                if isinstance(item, End):
                    self._check(item)
                    self.end = item
                    return
                yield item
        finally:
            self.cancel()
            watch.cancel()

    async def _next(self) -> Update | End | None:
        """Raises TimeoutError after a while of silence."""
        try:
            return self._queue.get_nowait()
        except asyncio.QueueEmpty:
            return await asyncio.wait_for(self._queue.get(), QUIET)

    def cancel(self) -> None:
        """Stops computing."""
        if self.job is not None and self.end is None:
            self.job.cancel()

    def _check(self, end: End) -> None:
        if end.error is not None:
            raise of_error(end.error)
        if end.reason is EndReason.CANCELLED:
            raise RefusalError(503, "the server is shutting down", code="shutting_down")
        if end.reason is EndReason.TIME and not end.generated_tokens:
            raise RefusalError(503, "the time limit of the request came before its first token", code="timeout")


async def _left(request: HttpRequest) -> None:
    """Ends when the client does."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
