"""Byte ranges of a file on the Hub, over connections that may break."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from m3_convert.background import StoppedError
from m3_convert.hub import Repository, RepositoryFile
from m3_convert.hub_failure import Tries


class RangeError(ValueError):
    """The server did not answer with the range that was asked for: it cannot, or the file is another one."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, as it lies on the Hub."""

    repository: Repository
    file: RepositoryFile

    def read(
        self,
        start: int,
        n: int,
        *,
        stop: threading.Event | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> bytearray:
        """`n` bytes from byte `start` on. A connection that breaks is taken up where it broke, `Tries` times in a row
        without a new byte.

        advance: gets the number of bytes that have arrived since its last call. Raises RangeError, what the HTTP
        library and huggingface_hub raise (see `hub_failure`), and StoppedError if `stop` is set.
        """
        data = bytearray()
        tries = Tries(stop=stop)
        while len(data) < n:
            before = len(data)
            try:
                self._read_on(data, start, n, stop, advance)
            except StoppedError:
                raise
            except Exception as error:
                tries.failed(error, progress=len(data) > before)
        return data

    def _read_on(
        self, data: bytearray, start: int, n: int, stop: threading.Event | None, advance: Callable[[int], None]
    ) -> None:
        """One request for what `data` lacks."""
        with closing(self._chunks(start + len(data), start + n)) as chunks:
            for chunk in chunks:
                if stop is not None and stop.is_set():
                    raise StoppedError
                new = chunk[: n - len(data)]  # of a server without ranges, which sends all of the file
                data += new
                advance(len(new))
                if len(data) == n:
                    return
        raise OSError(f"the answer ended after {len(data)} of {n} bytes")

    def _chunks(self, begin: int, end: int) -> Generator[bytes, None, None]:
        from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repository.id, self.file.name, revision=self.repository.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            expected, found = f"bytes {begin}-{end - 1}/{self.file.size}", response.headers.get("content-range", "none")
            if (response.status_code, found) != (206, expected) and (response.status_code, begin) != (200, 0):
                raise RangeError(f"asked for '{expected}', the Hub gave {response.status_code} and range '{found}'")
            yield from response.iter_bytes()  # as they come: what is collected first is lost with the connection
