"""Ranges of layers as rules write them: "3-10", "first 1/8, last 1/8"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from m3_runtime.errors import InputError

# So few digits that int() takes them.
_NUMBERS = re.compile(r"([0-9]{1,9})(-)?([0-9]{1,9})?")
_SHARE = re.compile(r"(first|last) +([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True)
class Numbers:
    """Layers by number, both ends included; last None: to the end of the model."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"

    def select(self, layers: Sequence[int]) -> list[int]:
        return [n for n in layers if n >= self.first and (self.last is None or n <= self.last)]


@dataclass(frozen=True)
class Share:
    """The first or last part of the layers that a pattern matches, rounded up to whole layers."""

    end: str  #: "first" or "last"
    part: Fraction

    def __str__(self) -> str:
        return f"{self.end} {self.part.numerator}/{self.part.denominator}"

    def select(self, layers: Sequence[int]) -> list[int]:
        n = ceil(len(layers) * self.part)
        return list(layers[:n] if self.end == "first" else layers[len(layers) - n :])


@dataclass(frozen=True)
class LayerRange:
    """A union of parts."""

    parts: tuple[Numbers | Share, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.parts))

    def select(self, layers: Sequence[int]) -> frozenset[int]:
        """Those of `layers` (ascending numbers of the layers that a pattern matches) that are in the range.

        Raises InputError, naming the part, if one of the parts selects none: it would be lost in silence.
        """
        chosen = [part.select(layers) for part in self.parts]
        for part, found in zip(self.parts, chosen, strict=True):
            if not found:
                raise InputError(f"none in layers {part} (the layers that have it: {_spans(layers)})")
        return frozenset(n for found in chosen for n in found)


def parse_layers(text: str) -> LayerRange:
    """Parts separated by commas: "7", "3-10" (both ends included), "20-" (to the last), "first 1/8", "last 1/4".

    A share is one of the layers in which the rule's pattern matches a tensor, rounded up: of routed experts those with
    experts. Raises InputError for anything else.
    """
    return LayerRange(tuple(_parse_part(part.strip(), text) for part in text.split(",")))


def _parse_part(part: str, text: str) -> Numbers | Share:
    if match := _NUMBERS.fullmatch(part):
        first = int(match[1])
        last = int(match[3]) if match[3] else None if match[2] else first
        if last is None or first <= last:
            return Numbers(first, last)
    if match := _SHARE.fullmatch(part):
        above, below = int(match[2]), int(match[3])
        if 0 < above <= below:
            return Share(match[1], Fraction(above, below))
    raise InputError(f'layers {text!r}: expected parts such as "7", "3-10", "20-", "first 1/8" or "last 1/8"')


def _spans(layers: Sequence[int]) -> str:
    spans: list[Numbers] = []
    for n in layers:
        if spans and spans[-1].last == n - 1:
            spans[-1] = Numbers(spans[-1].first, n)
        else:
            spans.append(Numbers(n, n))
    return ", ".join(map(str, spans)) or "none"
