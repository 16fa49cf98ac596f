"""How near to the cut a lost block was: whether a flip is a near-tie or a real one.

The margin of a flip, a block that the reference reads and the candidate does not, is the reference's score of it less
that of the best block that the candidate read in its place (if it read none, of the best visible block that the
reference left out), in units of the standard deviation of the reference's scores of that query and head over the
visible blocks that are not local. Rounding that moves scores by a small part of their spread makes flips of small
margin only.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from m3_convert.selection import Doubles, Floats, Ints, Lists, Mask, Swaps

#: Bins of margins: each from one edge up to, not including, the next.
EDGES: Final = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, np.inf)
NEAR_TIE: Final = 0.1  #: margin below which a flip is called a near-tie
_NEAR_BINS: Final = EDGES.index(NEAR_TIE)


@dataclass(frozen=True)
class Flips:
    """Lost blocks of some queries, arrays [flips] in the order of queries, heads and blocks."""

    row: Ints  #: of the query
    head: Ints
    block: Ints
    margin: Doubles  #: 0 to infinity
    mass: Doubles  #: share of attention that the reference gives to it, mean of the query heads of the list


def find_flips(swaps: Swaps, scores: Floats, forced: Mask, lists: Lists, mass: Floats) -> Flips:
    """The flips of some queries.

    swaps: of candidate against reference. scores: the reference's, float32 [n, heads, n_blocks], -inf for blocks that
    are not visible. forced: the local blocks, bool [n, n_blocks]. lists: the reference's, int32 [n, heads, top_k].
    mass: float32 [n, n_head, top_k], see `mass_lost`.
    """
    rows, heads = np.nonzero(swaps.lost.any(axis=-1))
    which, block = np.nonzero(swaps.lost[rows, heads])
    own = scores[rows, heads].astype(np.float64)  # [lists, n_blocks]
    visible, local = np.isfinite(own), forced[rows]
    gained = swaps.gained[rows, heads]
    rivals = np.where(gained.any(axis=1, keepdims=True), gained, visible & ~swaps.ours[rows, heads])
    best = np.where(rivals, own, -np.inf).max(axis=1, initial=-np.inf)
    spread = _deviation(own, visible & ~local)[which]
    ahead = np.maximum(own[which, block] - best[which], 0)
    # No rounding leaves a local block out, nor reads another where all scores are the same.
    margin = np.where(ahead > 0, np.inf, 0.0)
    np.divide(ahead, spread, out=margin, where=spread > 0)
    margin[local[which, block]] = np.inf
    row, head = rows[which], heads[which]
    place = (lists[row, head] == block[:, None]).argmax(axis=1)
    by_list = mass.reshape(len(lists), lists.shape[1], -1, lists.shape[2])
    shares = by_list[row, head, :, place]
    return Flips(row, head, block, margin, shares.mean(axis=1, dtype=np.float64))


def _deviation(scores: Doubles, counted: Mask) -> Doubles:
    """Standard deviation over the counted columns of each row; 0 if there are none."""
    n = np.maximum(counted.sum(axis=1), 1)
    mean = np.where(counted, scores, 0).sum(axis=1) / n
    with np.errstate(invalid="ignore"):  # -inf, which is not counted
        squares = np.where(counted, (scores - mean[:, None]) ** 2, 0)
    deviation: Doubles = np.sqrt(squares.sum(axis=1) / n)
    return deviation


def bins(margin: Doubles) -> NDArray[np.int64]:
    """The bin of EDGES that each margin falls in."""
    return np.digitize(margin, EDGES[1:-1]).astype(np.int64)


@dataclass
class FlipTally:
    """Flips in one sparse layer by margin, arrays [heads, bins]."""

    heads: int
    counts: Ints = field(init=False)
    mass: Doubles = field(init=False)  #: sum of the flips' masses

    def __post_init__(self) -> None:
        shape = (self.heads, len(EDGES) - 1)
        self.counts, self.mass = np.zeros(shape, np.int64), np.zeros(shape)

    def add(self, flips: Flips) -> None:
        """Counts flips, in the order of their queries."""
        where = flips.head, bins(flips.margin)
        np.add.at(self.counts, where, 1)
        np.add.at(self.mass, where, flips.mass)


def near_tie_share(counts: Ints) -> float | None:
    """Share of flips with a margin below NEAR_TIE, None if there are no flips. counts: int [..., bins]."""
    total = int(counts.sum())
    return None if total == 0 else int(counts[..., :_NEAR_BINS].sum()) / total
