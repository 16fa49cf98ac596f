"""What goes wrong between this machine and the Hub: tried again if that may help, else said in one line."""

import re
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from m3_convert.background import StoppedError
from m3_convert.disk_room import DISK_FULL
from m3_runtime.command import one_line
from m3_runtime.errors import InputError, M3Error, MachineError

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  #: seconds before each further try
LONGEST_PAUSE: Final = 300.0  #: seconds, if the Hub asks for more

Result = TypeVar("Result")


class Tries:
    """Counts failures of a request, and waits after each.

    again: tries after the first, by default as many as there are PAUSES. stop: set from another thread if the request
    is not wanted any more.
    """

    def __init__(self, again: int | None = None, stop: threading.Event | None = None) -> None:
        self._pauses = PAUSES[:again]
        self._stop = stop
        self._failed = 0

    def failed(self, error: Exception, *, progress: bool = False) -> None:
        """Waits before the next try. progress: it came further than those before it, so that the count starts anew.

        Raises `error` if it is not transient or the pauses are used up; StoppedError if `stop` is set.
        """
        self._failed = 0 if progress else self._failed
        if self._failed == len(self._pauses) or not is_transient(error):
            raise error
        seconds = max(self._pauses[self._failed], _asked_pause(error))
        self._failed += 1
        if self._stop is None:
            time.sleep(seconds)
        elif self._stop.wait(seconds):
            raise StoppedError


def retried(attempt: Callable[[], Result], again: int | None = None) -> Result:
    """What `attempt` returns, called again while it fails by a transient error; see `Tries`. Raises its last error."""
    tries = Tries(again)
    while True:
        try:
            return attempt()
        except Exception as error:
            tries.failed(error)


def is_transient(error: BaseException | None) -> bool:
    """Whether the same request may succeed a little later: the network, or an overloaded server."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if isinstance(error, LocalEntryNotFoundError):
        return is_transient(error.__cause__)
    # The HTTP library behind huggingface_hub changes by version; all its errors have one base.
    http_error = HfHubHTTPError.__bases__[0]
    # A body that ends too early is an OSError without a number, and hf_xet gives RuntimeError for whatever ails it.
    return isinstance(error, http_error | RuntimeError) or (isinstance(error, OSError) and error.errno is None)


def error_text(error: BaseException) -> str:
    """What the Hub or the network gave, in a few words on one line."""
    cause = error.__cause__
    if _status(error) is None and cause is not None and (_status(cause) is not None or is_transient(cause)):
        error = cause
    response = getattr(error, "response", None)
    if response is not None:
        text = f"{response.status_code} {response.reason_phrase}"
        message = one_line(getattr(error, "server_message", None) or "")
        return f"{text}: {message:.200}" if message else text
    text = one_line(str(error))
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__


def hub_error(name: str, error: Exception) -> M3Error:
    """The error to raise in place of one of huggingface_hub, for the repository or file `name`: what to do, in one
    line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    log_in = "`hf auth login` or a token in HF_TOKEN"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return MachineError(f"{name}: the disk of the Hub's cache is full: {error}")
    if isinstance(error, OSError) and error.errno is not None:
        return InputError(f"{name}: the Hub's cache: {error}")
    if isinstance(error, GatedRepoError):
        return InputError(
            f"{name}: access has to be asked for on its page ({constants.ENDPOINT}/{name}), and needs {log_in} "
            f"(the Hub gave: {error_text(error)})"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InputError(
            f"{name}: no such folder, and no such repository on the Hub; a private one needs {log_in} "
            f"(the Hub gave: {error_text(error)})"
        )
    if _status(error) in (401, 403):
        return InputError(f"{name}: the Hub gives no access; it needs {log_in} (the Hub gave: {error_text(error)})")
    return InputError(f"{name}: no such folder, and the Hub gave: {error_text(error)}")


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of huggingface_hub stands for."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _asked_pause(error: BaseException) -> float:
    """Seconds that the server asks to wait."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    match = re.fullmatch(r"\s*(\d+)\s*", headers.get("retry-after", ""))
    if match is None and _status(error) == 429:
        match = re.search(r"\bt=(\d+)", headers.get("ratelimit", ""))
    return min(float(match[1]), LONGEST_PAUSE) if match else 0.0
