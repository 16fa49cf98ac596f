"""Which type each tensor gets: the least harm in so many bytes, or the fewest bytes with no more than so much harm.

A Lagrangian knapsack. Of the types of a tensor only those on the lower convex hull of harm over bytes can be chosen for
a price of harm; going along all hulls in the order of harm saved per byte passes the best choice for every price. What
lies between two of these is filled greedily, so that a result is worse than the best one by less than one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from m3_runtime.quantize import TensorType

Doubles: TypeAlias = NDArray[np.float64]

_ROUNDS: Final = 60  #: of prices for several limits
_HASTE: Final = 0.5  #: how fast the price of a limit that is missed grows


@dataclass(frozen=True)
class Choice:
    """A type that a tensor may get. harm: at least 0, one for each limit or a single one."""

    type: TensorType
    n_bytes: int
    harm: tuple[float, ...]


Choices: TypeAlias = Mapping[str, Sequence[Choice]]  #: of each tensor, by name
Chosen: TypeAlias = dict[str, Choice]


def least_harm(choices: Choices, max_bytes: int) -> Chosen | None:
    """The choices with the least sum of harm whose bytes are at most `max_bytes`; None if the smallest are larger."""
    table = _Table(choices)
    weighed = table.weighed(np.ones(1))
    picked, steps = table.path(weighed)
    room = max_bytes - table.total_bytes(picked)
    if room < 0:
        return None
    stopped = set[int]()
    for step in steps:
        # A step that does not fit ends the way of its tensor: those behind it are measured from it.
        if step.row in stopped or step.n_bytes > room:
            stopped.add(step.row)
            continue
        picked[step.row], room = step.to, room - step.n_bytes
    table.fill(picked, room, weighed)
    return table.chosen(picked)


def fewest_bytes(choices: Choices, limits: Sequence[float]) -> Chosen | None:
    """The choices with the fewest bytes whose sums of harm are at most `limits`, each above 0; None if there are none.

    With several limits the price of each is raised as long as it is missed.
    """
    bounds = np.array(limits, np.float64)
    table = _Table(choices)
    best = [int(np.argmin((harm / bounds).max(axis=1))) for harm in table.harm]
    if (table.total_harm(best) > bounds).any():
        return None
    smallest = [int(np.argmin(sizes)) for sizes in table.sizes]
    prices = np.maximum(table.total_harm(smallest) / bounds, 1e-9)
    prices /= prices.sum()
    for _ in range(_ROUNDS):
        found, relaxed = table.priced(prices / bounds, bounds, best)
        if table.total_bytes(found) < table.total_bytes(best):
            best = found
        prices = prices * np.maximum(relaxed / bounds, 1e-3) ** _HASTE
        prices /= prices.sum()
    return table.chosen(best)


@dataclass(frozen=True)
class _Step:
    """From one choice of a tensor to the next one on its hull."""

    row: int
    to: int
    n_bytes: int  #: more than before
    gain: float  #: harm less than before


class _Table:
    """Choices as arrays. A pick is the number of a choice for each tensor."""

    def __init__(self, choices: Choices) -> None:
        self._names = list(choices)
        self._options = [sorted(options, key=lambda c: c.n_bytes) for options in choices.values()]
        self.sizes = [[choice.n_bytes for choice in options] for options in self._options]
        self.harm = [np.array([choice.harm for choice in options], np.float64) for options in self._options]

    def chosen(self, picked: Sequence[int]) -> Chosen:
        return {n: options[i] for n, options, i in zip(self._names, self._options, picked, strict=True)}

    def total_bytes(self, picked: Sequence[int]) -> int:
        return sum(sizes[i] for sizes, i in zip(self.sizes, picked, strict=True))

    def total_harm(self, picked: Sequence[int]) -> Doubles:
        total: Doubles = np.sum([harm[i] for harm, i in zip(self.harm, picked, strict=True)], axis=0)
        return total

    def weighed(self, weights: Doubles) -> list[list[float]]:
        """One harm for each choice."""
        return [(harm @ weights).tolist() for harm in self.harm]

    def path(self, weighed: Sequence[Sequence[float]]) -> tuple[list[int], list[_Step]]:
        """The smallest choice of each tensor, and the steps from it, in the order of what they gain per byte."""
        picked, steps = [], []
        for row, (sizes, harms) in enumerate(zip(self.sizes, weighed, strict=True)):
            hull = _hull(sizes, harms)
            picked.append(hull[0])
            steps += [_Step(row, b, sizes[b] - sizes[a], harms[a] - harms[b]) for a, b in pairwise(hull)]
        steps.sort(key=lambda step: -step.gain / step.n_bytes)
        return picked, steps

    def priced(self, weights: Doubles, bounds: Doubles, safe: Sequence[int]) -> tuple[list[int], Doubles]:
        """Along the hulls of the weighted harm until every limit is kept, then down again wherever none is missed; and
        the harm where the weighted sum, but not every limit, was kept. safe: a pick that keeps all limits."""
        picked, steps = self.path(self.weighed(weights))
        harm = self.total_harm(picked)
        relaxed: Doubles | None = None
        for step in steps:
            if relaxed is None and float(weights @ harm) <= 1:
                relaxed = harm
            if relaxed is not None and (harm <= bounds).all():
                break
            harm = harm + self.harm[step.row][step.to] - self.harm[step.row][picked[step.row]]
            picked[step.row] = step.to
        relaxed = harm if relaxed is None else relaxed
        if (harm > bounds).any():  # hulls of weighted harm leave out what is best for one limit alone
            picked = list(safe)
            harm = self.total_harm(picked)
        for row in sorted(range(len(picked)), key=lambda row: -self.sizes[row][picked[row]]):
            for to in range(picked[row]):  # ascending by size
                changed = harm + self.harm[row][to] - self.harm[row][picked[row]]
                if (changed <= bounds).all():
                    picked[row], harm = to, changed
                    break
        return picked, relaxed

    def fill(self, picked: list[int], room: int, weighed: Sequence[Sequence[float]]) -> None:
        """Uses what is left of the room, the largest gain first: types off the hulls fit where those on them do not."""
        while True:
            best = (0.0, -1, -1)
            for row, (sizes, harms) in enumerate(zip(self.sizes, weighed, strict=True)):
                now = picked[row]
                for to in range(len(sizes)):
                    if sizes[to] - sizes[now] <= room and harms[now] - harms[to] > best[0]:
                        best = harms[now] - harms[to], row, to
            _, row, to = best
            if row < 0:
                return
            room -= self.sizes[row][to] - self.sizes[row][picked[row]]
            picked[row] = to


def _hull(sizes: Sequence[int], harms: Sequence[float]) -> list[int]:
    """The lower convex hull of harm over bytes, from the fewest bytes on; harm falls along it."""
    hull: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (sizes[i], harms[i])):
        if hull and harms[i] >= harms[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2:]
            if (harms[a] - harms[b]) * (sizes[i] - sizes[b]) > (harms[b] - harms[i]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(i)
    return hull
