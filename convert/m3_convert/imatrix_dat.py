"""Importance matrices in llama.cpp's older format, .dat: little-endian, no magic number.

int32 number of entries, then for each: int32 length and bytes of the name, int32 calls, int32 number of values,
float32 values (mean square times calls, all experts of a stacked weight in a row); then, in newer files, int32
number of chunks, int32 length and bytes of the name of the text.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m3_runtime.errors import InputError

_MAX_NAME = 4096  #: bytes; a longer name is a sign of another kind of file


@dataclass(frozen=True)
class DatContent:
    """What such a file holds. entries: calls and values, float32 [n], by name."""

    entries: dict[str, tuple[int, npt.NDArray[np.float32]]]
    chunk_count: int  #: 0 if the file does not say
    dataset: str  #: empty likewise


def is_gguf(path: Path) -> bool:
    """True if a file begins as a GGUF does. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def read_dat(path: Path) -> DatContent:
    """Reads a .dat file; every length is checked against what is left of the file. Raises InputError."""
    reader = _Reader(path, path.read_bytes())
    n_entries = reader.number("the number of entries", 1)
    entries: dict[str, tuple[int, npt.NDArray[np.float32]]] = {}
    for i in range(n_entries):
        name = reader.text(f"the name of entry {i}", 1)
        if name in entries:
            raise InputError(f"{path}: two entries are named {name!r}")
        calls = reader.number(f"the count of {name!r}")
        n = reader.number(f"the number of values of {name!r}", 1)
        entries[name] = calls, np.frombuffer(reader.take(4 * n, f"the values of {name!r}"), "<f4").astype(np.float32)
    if not reader.left:
        return DatContent(entries, 0, "")
    chunks = reader.number("the number of chunks", 0)
    dataset = reader.text("the name of the text", 0) if reader.left else ""
    if reader.left:
        raise InputError(f"{path}: {reader.left} bytes after its end")
    return DatContent(entries, chunks, dataset)


class _Reader:
    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content, self._at = path, memoryview(content), 0

    @property
    def left(self) -> int:
        return len(self._content) - self._at

    def take(self, n: int, what: str) -> memoryview:
        if n > self.left:
            raise self._wrong(f"{what} takes {n} bytes, {self.left} are left")
        self._at += n
        return self._content[self._at - n : self._at]

    def number(self, what: str, least: int | None = None) -> int:
        value = int.from_bytes(self.take(4, what), "little", signed=True)
        if least is not None and value < least:
            raise self._wrong(f"{what} is {value}, expected at least {least}")
        return value

    def text(self, what: str, least: int) -> str:
        n = self.number(f"the length of {what}", least)
        if n > _MAX_NAME:
            raise self._wrong(f"the length of {what} is {n}, expected at most {_MAX_NAME}")
        try:
            return bytes(self.take(n, what)).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"{what} is not UTF-8") from None

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self._path}: no importance matrix (neither GGUF nor .dat): {what}")
