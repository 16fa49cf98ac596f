"""Sizes and times as text: how they are shown to people, and how a size is read from an option."""

import re
from typing import Final

from m3_runtime.errors import InputError

SIZE_UNITS: Final = {"": 1, "M": 10**6, "G": 10**9}
MAX_SIZE: Final = 2**63 - 1  #: bytes of a file, on any system

_SIZE: Final = re.compile(r"0*([0-9]+)([MG]?)", re.IGNORECASE)
_SHOWN: Final = 30  # characters of an option


def format_bytes(n: float) -> str:
    """A size for people, in powers of 1000: "999 bytes", "1.2 MB", "795.5 GB"."""
    if n < 1000:
        return f"{n:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        n /= 1000
        if n < 999.95:
            return f"{n:.1f} {unit}"
    return f"{n / 1000:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A duration for people: "4.2 s", "2:05 min", "1:02:05 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def parse_size(text: str, option: str) -> int:
    """Bytes that "500M", "40G" or "123456789" stand for, in powers of 1000. Raises InputError for anything else.

    option: that has the value, for messages.
    """
    match = _SIZE.fullmatch(text)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if match is None or match[1] == "0":
        raise InputError(f"{option} {shown}: expected a number of bytes above 0, or one followed by M or G")
    n_digits = len(match[1])
    size = int(match[1]) * SIZE_UNITS[match[2].upper()] if n_digits <= len(str(MAX_SIZE)) else MAX_SIZE + 1
    if size > MAX_SIZE:
        raise InputError(f"{option} {shown}: more than a file can have, expected at most {MAX_SIZE} bytes")
    return size
