"""The text that a check runs over, and its tokens."""

import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO, Final

from m3_convert.file_kind import file_kind
from m3_runtime.errors import InputError
from m3_runtime.quantities import format_bytes
from m3_runtime.text import ChatTokenizer

DEFAULT_CONTEXT: Final = 8192  #: tokens that a check reads
BUILT_IN: Final = "built-in text"
STANDARD_INPUT: Final = "standard input"
STREAM_BYTES: Final = 1 << 30  #: that are read from a pipe, which need not end
_STDIN: Final = Path("-")

# Characters of text for each wanted token. More than any text has, so that the text is nearly always cut well behind
# the last token that is used; where it is not, more is taken.
_CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    name: str
    content: str
    n_bytes: int  #: as UTF-8
    sha256: str  #: of the bytes, hexadecimal


def load_text(path: Path | None) -> Text:
    """A UTF-8 file, standard input for the path "-", or the text that ships with the package if path is None.

    Raises InputError for a file that cannot be read, or that is not UTF-8 (with the offset of the first bad byte), and
    for what could keep the command waiting without an end: a named pipe, a device, a terminal.
    """
    name = BUILT_IN if path is None else STANDARD_INPUT if path == _STDIN else str(path)
    try:
        raw = _read(path, name)
    except OSError as error:
        raise InputError(f"{name}: the text cannot be read: {error.strerror}") from error
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: expected UTF-8, found byte {raw[error.start]:#04x} at offset {error.start}: {error.reason}"
        ) from error
    return Text(name, content, len(raw), hashlib.sha256(raw).hexdigest())


def _read(path: Path | None, name: str) -> bytes:
    if path is None:
        return files("m3_convert").joinpath("text.txt").read_bytes()
    if path == _STDIN:
        if sys.stdin.isatty():
            raise InputError(f"{name}: expected a text from a file or a pipe, found a terminal")
        return _read_stream(sys.stdin.buffer, name)
    kind = file_kind(path)
    if kind == "a named pipe" and _is_descriptor(path):  # of the shell: /dev/stdin, or <(command)
        with path.open("rb") as stream:
            return _read_stream(stream, name)
    if kind in ("a named pipe", "a device") and not path.samefile(os.devnull):
        raise InputError(f"{name}: expected a text in a file (- is standard input), found {kind}")
    return path.read_bytes()


def _is_descriptor(path: Path) -> bool:
    """True for a name of what this process was given open, so that somebody holds the other end."""
    return str(path) == "/dev/stdin" or os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd")


def _read_stream(stream: BinaryIO, name: str) -> bytes:
    raw = stream.read(STREAM_BYTES + 1)
    if len(raw) > STREAM_BYTES:
        raise InputError(f"{name}: expected at most {format_bytes(STREAM_BYTES)} from a pipe, found more; give a file")
    return raw


def context_tokens(wanted: int | None, trained: int, default: int = DEFAULT_CONTEXT) -> int:
    """Tokens that --context asks for, or `default`, as far as the model was trained for so many (`trained`).

    Raises InputError if more are asked for.
    """
    if wanted is not None and wanted > trained:
        raise InputError(f"--context is {wanted}, the model was trained for {trained} tokens")
    return min(default, trained) if wanted is None else wanted


@dataclass(frozen=True)
class TextSample:
    """The first tokens of a text."""

    text: Text
    ids: list[int]
    whole: bool  #: True if these are all tokens of the text


def sample_text(text: Text, tokenizer: ChatTokenizer, n_tokens: int) -> TextSample:
    """The first `n_tokens` tokens of `text`, or all if it has fewer.

    Only as much of the text is tokenized as they need: a corpus of gigabytes may be given.
    """
    size = n_tokens * _CHARACTERS_PER_TOKEN
    while True:
        ids = tokenizer.encode(text.content[:size])
        if size >= len(text.content):
            return TextSample(text, ids[:n_tokens], len(ids) <= n_tokens)
        if len(ids) >= n_tokens:
            return TextSample(text, ids[:n_tokens], False)
        size *= 4
