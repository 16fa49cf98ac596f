"""Charts of the report as geometry: what `templates/charts.jinja` draws.

A place along the horizontal axis is in percent of the width of the plot, so that a chart fits any screen without its
text being scaled; heights are in CSS pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

MarkKind = Literal["lowest", "mean", "worst", "isolated"]
BarKind = Literal["first", "second"]

#: The height that the rows of a chart share at most: with a heading and its caption it fits on a printed page.
ROWS_HEIGHT: Final = 700
_ROW_HEIGHT: Final = 26
_LABEL_HEIGHT: Final = 12

_DECADES: Final = 4  #: decades of the logarithmic axes
_DECADE: Final = 21.0  #: percent of the width for each; what is left separates exactly none from the last


@dataclass(frozen=True)
class Tick:
    """A labeled line across the plot; at: percent, or pixels on a vertical axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A value in a row; title says it in words."""

    at: float
    kind: MarkKind
    title: str


@dataclass(frozen=True)
class RangeRow:
    """Values of one layer: label on the left, note on the right."""

    label: str
    note: str
    marks: Sequence[Mark]

    @property
    def ends(self) -> tuple[float, float]:
        """The leftmost and the rightmost mark."""
        places = [mark.at for mark in self.marks]
        return min(places), max(places)


@dataclass(frozen=True)
class RangeChart:
    """Rows of values on one axis; label says in words what is seen, threshold is where an option drew the line."""

    label: str
    x_label: str
    ticks: Sequence[Tick]
    rows: Sequence[RangeRow]
    threshold: Tick | None = None

    @property
    def row_height(self) -> float:
        return row_height(len(self.rows))

    @property
    def label_step(self) -> int:
        return label_step(self.row_height)


@dataclass(frozen=True)
class Bar:
    """From start to end in percent; text stands behind it."""

    kind: BarKind
    start: float
    end: float
    text: str
    title: str


@dataclass(frozen=True)
class BarRow:
    label: str
    note: str  #: small, under the label
    bars: Sequence[Bar]


@dataclass(frozen=True)
class BarChart:
    """Rows of bars from a common zero, in percent. The first `band_rows` rows lie in a shaded band named band_label."""

    label: str
    rows: Sequence[BarRow]
    zero: float = 0.0
    band_rows: int = 0
    band_label: str = ""


@dataclass(frozen=True)
class Step:
    """One range of positions, start to end in percent: heights of two lines in pixels from the top."""

    start: float
    end: float
    first: float
    second: float
    title: str


@dataclass(frozen=True)
class StepChart:
    """Two lines over positions, each flat within a range."""

    label: str
    height: float
    steps: Sequence[Step]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    border: Tick | None = None  #: a position of note


@dataclass(frozen=True)
class Cell:
    """shade: 0 for none to 7."""

    shade: int
    title: str


@dataclass(frozen=True)
class HeatRow:
    label: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class HeatMap:
    """Rows of cells of equal width. x_ticks: labels under the left edges of cells; edges: lines between groups."""

    label: str
    x_label: str
    rows: Sequence[HeatRow]
    x_ticks: Sequence[Tick]
    legend: Sequence[str]  #: what each shade stands for
    edges: Sequence[float] = ()

    @property
    def row_height(self) -> float:
        return row_height(len(self.rows))

    @property
    def label_step(self) -> int:
        return label_step(self.row_height)

    @property
    def cell_width(self) -> float:
        return 100 / len(self.rows[0].cells)


def row_height(n_rows: int) -> float:
    """Pixels for each of so many rows."""
    return min(_ROW_HEIGHT, round(ROWS_HEIGHT / n_rows, 1))


def label_step(height: float) -> int:
    """Every how many rows of this height have room for a label."""
    return math.ceil(_LABEL_HEIGHT / height)


def overlap_place(overlap: float) -> float:
    """Where an overlap lies on an axis of 0, 0.9, 0.99 ... that ends with exactly 1; in percent."""
    if overlap >= 1:
        return 100.0
    decades = -math.log10(1 - overlap)
    return _DECADE * min(max(decades, 0.0), _DECADES + 0.3)


def overlap_ticks() -> list[Tick]:
    """The axis of `overlap_place`."""
    values = ["0", *("0." + "9" * n for n in range(1, _DECADES + 1))]
    return [Tick(_DECADE * n, value) for n, value in enumerate(values)] + [Tick(100.0, "1")]


def share_place(share: float) -> float:
    """Where a share of 0 to 1 lies on an axis from exactly 0 over 0.01%, 0.1% ... to 100%; in percent."""
    if share <= 0:
        return 0.0
    return 100 + _DECADE * max(math.log10(min(share, 1.0)), -_DECADES - 0.3)


def share_ticks() -> list[Tick]:
    """The axis of `share_place`."""
    return [Tick(0.0, "0")] + [Tick(100 - _DECADE * n, f"{100 / 10**n:g}%") for n in range(_DECADES, -1, -1)]


def round_ticks(highest: float, n_wanted: int = 4) -> list[float]:
    """Round numbers from 0 on, in equal steps, of which the last is at least `highest`; it is above 0."""
    raw = highest / n_wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [n * step for n in range(math.ceil(highest / step - 1e-9) + 1)]
