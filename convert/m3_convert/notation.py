"""How numbers and foreign text are written for people in a report."""

import math
import re
from typing import Final

from m3_runtime.quantities import format_bytes

NONE: Final = "\u2013"  #: stands for a value that does not exist
_MINUS: Final = "\u2212"

# What HTML forbids in a document: control characters but tab and line ends, halves of surrogate pairs (a file name that
# is not UTF-8 has them), and code points that are no characters. Besides, the marks that turn the writing direction
# around: a name could pretend to be another with them.
_UNFIT: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_SPACES: Final = str.maketrans({"\n": "⏎", "\r": "⏎", "\t": "⇥", " ": "␣"})


def share(value: float | None) -> str:
    """An overlap, 0 to 1: four decimals, rounded down, so that 1.0000 is exactly 1 and a missed threshold looks missed.

    The small addend keeps 0.57 from becoming 0.5699.
    """
    if value is None:
        return NONE
    return "1.0000" if value >= 1 else f"{min(math.floor(value * 10000 + 1e-9), 9999) / 10000:.4f}"


def percent(value: float | None) -> str:
    """A share of 0 to 1 in percent; 0% and 100% stand for exactly none and all."""
    if value is None:
        return NONE
    if value in (0, 1):
        return "100%" if value else "0%"
    if abs(value) < 0.0001:
        return "<0.01%" if value > 0 else f">{_MINUS}0.01%"
    if 0.9999 < value < 1:
        return ">99.99%"
    text = f"{100 * abs(value):.2f}%" if abs(value) < 0.0995 or value > 0.9995 else f"{100 * abs(value):.1f}%"
    return _MINUS + text if value < 0 else text


def points(value: float | None) -> str:
    """A difference of two shares, in percentage points with its sign."""
    if value is None:
        return NONE
    return f"{value * 100:+.2f} points".replace("-", _MINUS)


def decimal(value: float | None) -> str:
    """Three significant digits without an exponent, for a divergence, a score, or a difference of such."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "∞" if value > 0 else f"{_MINUS}∞" if value < 0 else "NaN"
    size = abs(value)
    if size == 0:
        return "0"
    sign = _MINUS if value < 0 else ""
    if size < 1e-6:
        return "<0.000001" if value > 0 else f">{sign}0.000001"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{sign}{size:,.{digits}f}"


def exact(value: float) -> str:
    """A number that somebody gave, with all its digits."""
    return repr(value).removesuffix(".0")


def beside(value: float, limit: float) -> str:
    """A value that missed a limit: four significant digits, or as many as show that it did."""
    for digits in range(4, 17):
        text = f"{value:.{digits}g}"
        if (float(text) < limit, float(text) > limit) == (value < limit, value > limit):
            return text
    return repr(value)


def perplexity(value: float | None) -> str:
    """Five significant digits or more."""
    if value is None:
        return NONE
    return f"{value:,.4f}" if value < 10 else f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"


def count(value: int | None) -> str:
    """A whole number with separators."""
    return NONE if value is None else f"{value:,}"


def more_bytes(n: int) -> str:
    """A difference of sizes, with its sign."""
    return f"{_MINUS if n < 0 else '+'}{format_bytes(abs(n))}"


def fit_for_html(text: str) -> str:
    """`text` with U+FFFD for what a page must not contain; markup in it is not touched."""
    return _UNFIT.sub("\ufffd", text)


def curly(text: str) -> str:
    """A sentence of this program as it is printed: with typographic apostrophes."""
    return re.sub(r"(?<=\w)'(?=\w)", "\u2019", text)


def visible_token(text: str) -> str:
    """A token that can be seen: one of white space alone is shown as signs for it, an empty one as the empty set."""
    if not text:
        return "∅"
    return text if text.strip() else text.translate(_SPACES)
