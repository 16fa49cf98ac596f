"""The text that a check runs over, and its tokens."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from m3_runtime.errors import InputError
from m3_runtime.text import ChatTokenizer

BUILT_IN = "built-in text"

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
    """A UTF-8 file, or the text that ships with the package if path is None.

    Raises InputError for a file that cannot be read, or that is not UTF-8 (with the offset of the first bad byte).
    """
    name = BUILT_IN if path is None else str(path)
    if path is not None and path.is_char_device() and not path.samefile("/dev/null") and path.name != "stdin":
        raise InputError(f"{name}: expected a text, found a device")
    try:
        raw = files("m3_convert").joinpath("text.txt").read_bytes() if path is None else path.read_bytes()
    except OSError as error:
        raise InputError(f"{name}: the text cannot be read: {error.strerror}") from error
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: expected UTF-8, found byte {raw[error.start]:#04x} at offset {error.start}: {error.reason}"
        ) from error
    return Text(name, content, len(raw), hashlib.sha256(raw).hexdigest())


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
