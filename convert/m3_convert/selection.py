"""Agreement of two block selections: what of the blocks that a reference reads, a candidate reads too.

Everything here works on arrays alone. A list is the set of blocks that one query reads for one index head; the lists
of a layer are int32 [n, heads, top_k], padded with -1. Two lists are

    equal    the same set,
    a tie    different, but all blocks that were swapped have reference scores within float32 rounding of each other,
    changed  different in any other way.

The overlap of two lists is their Jaccard index, |both read| / |either reads|. Which of tied blocks is read is not
defined by the model, so a tie counts as agreement: its overlap is 1 and none of its blocks is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Lists = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

MAX_BUCKETS = 16

# A float32 dot product q . k is reproduced, in whatever order it is summed, within this share of |q| |k|.
SCORE_ROUNDING = 2.0**-18


def score_rounding(q_norm: Floats, k_norm: Floats) -> float:
    """The largest difference between two block scores of a layer that float32 rounding can make.

    q_norm, k_norm: float32 [index_dim], weights of the index norms as the model multiplies with them (1 + w). The
    norms leave vectors x_i = n_i w_i with sum n_i^2 <= index_dim, so |x| <= sqrt(index_dim) max|w|; the rotation that
    follows keeps lengths. Hence |q| |k| <= index_dim max|w_q| max|w_k| for every query and every key of the layer.
    """
    bound = float(np.abs(q_norm).max()) * float(np.abs(k_norm).max()) * len(q_norm)
    return SCORE_ROUNDING * bound


@dataclass(frozen=True)
class SelectionRule:
    """How many blocks a query reads: top_k in all, the last local_blocks of them always; block_size in tokens."""

    top_k: int
    block_size: int
    local_blocks: int

    @property
    def always_read(self) -> int:
        """Tokens up to which every visible block is read."""
        return self.top_k * self.block_size

    @property
    def chooses(self) -> bool:
        """False if all blocks that a query reads are local ones, so that scores never matter."""
        return self.local_blocks < self.top_k

    def had_choice(self, positions: Ints) -> Mask:
        """Which queries saw more blocks than they read. positions: int [n], 0-based; bool [n]."""
        return (positions // self.block_size + 1 > self.top_k) & self.chooses

    def forced(self, positions: Ints, n_blocks: int) -> Mask:
        """The local blocks of each query, bool [n, n_blocks]."""
        own = (positions // self.block_size)[:, None]
        blocks = np.arange(n_blocks)
        return (blocks <= own) & (blocks > own - self.local_blocks)


@dataclass(frozen=True)
class Swaps:
    """Blocks that one side alone reads: bool [n, heads, n_blocks]."""

    ours: Mask  #: blocks that the reference reads
    lost: Mask  #: blocks that only the reference reads
    gained: Mask  #: blocks that only the candidate reads


@dataclass(frozen=True)
class Comparison:
    """Lists of some queries compared, arrays [n, heads]. A list that is neither equal nor a tie is changed."""

    equal: Mask
    tie: Mask
    overlap: Doubles  #: Jaccard index, 1 for ties
    lost: Ints  #: blocks that only the reference reads, 0 for ties

    @property
    def changed(self) -> Mask:
        return ~(self.equal | self.tie)


def block_masks(lists: Lists, n_blocks: int) -> Mask:
    """Lists [n, heads, top_k] as bool [n, heads, n_blocks]; -1 stands for no block."""
    mask = np.zeros((*lists.shape[:-1], n_blocks + 1), np.bool_)
    # The padding goes to a column of its own, which is cut off.
    np.put_along_axis(mask, np.where(lists < 0, n_blocks, lists).astype(np.int64), True, axis=-1)
    return mask[..., :n_blocks]


def swapped_blocks(reference: Lists, candidate: Lists, n_blocks: int) -> Swaps:
    """What differs between lists of the same queries, int32 [n, heads, top_k]."""
    ours, theirs = block_masks(reference, n_blocks), block_masks(candidate, n_blocks)
    return Swaps(ours, ours & ~theirs, theirs & ~ours)


def compare_lists(reference: Lists, candidate: Lists, scores: Floats, forced: Mask, rounding: float) -> Comparison:
    """Compares the lists of the same queries.

    reference, candidate: int32 [n, heads, top_k]. scores, forced, rounding: as for `compare_swaps`.
    """
    return compare_swaps(swapped_blocks(reference, candidate, scores.shape[-1]), scores, forced, rounding)


def compare_swaps(swaps: Swaps, scores: Floats, forced: Mask, rounding: float) -> Comparison:
    """Judges what differs between the lists of the same queries.

    scores: the reference's block scores, float32 [n, heads, n_blocks], -inf for blocks that are not visible. forced:
    the local blocks, bool [n, n_blocks]. rounding: see `score_rounding`.

    A difference is a tie if as many blocks were lost as gained, none of them a local one, and no lost block has a
    score that is more than `rounding` above that of a gained one. Rounding cannot make any other swap.
    """
    lost, gained = swaps.lost, swaps.gained
    n_lost, n_gained = lost.sum(axis=-1), gained.sum(axis=-1)
    n_ours = swaps.ours.sum(axis=-1)
    equal = (n_lost == 0) & (n_gained == 0)
    tie = ~equal & (n_lost == n_gained)
    if tie.any():
        best_lost = np.where(lost, scores, -np.inf).max(axis=-1).astype(np.float64)
        worst_gained = np.where(gained, scores, np.inf).min(axis=-1).astype(np.float64)
        local = ((lost | gained) & forced[:, None, :]).any(axis=-1)
        with np.errstate(invalid="ignore"):  # inf - inf where nothing was swapped
            tie &= (best_lost - worst_gained <= rounding) & ~local
    same = equal | tie
    overlap = np.where(same, 1.0, (n_ours - n_lost) / np.maximum(n_ours + n_gained, 1))
    return Comparison(equal, tie, overlap, np.where(same, 0, n_lost).astype(np.int64))


@dataclass(frozen=True)
class PositionBuckets:
    """Positions [first, end) in up to MAX_BUCKETS parts of equal width, a whole number of blocks."""

    first: int
    end: int
    width: int

    @classmethod
    def over(cls, rule: SelectionRule, n_tokens: int) -> "PositionBuckets":
        """Buckets for the queries of `n_tokens` tokens that had a choice; at least one must have had one."""
        first = rule.always_read
        blocks = -(-(n_tokens - first) // rule.block_size)
        return cls(first, n_tokens, -(-blocks // MAX_BUCKETS) * rule.block_size)

    def __len__(self) -> int:
        return -(-(self.end - self.first) // self.width)

    def ranges(self) -> list[tuple[int, int]]:
        """First and last position of each bucket."""
        return [(start, min(start + self.width, self.end) - 1) for start in range(self.first, self.end, self.width)]

    def index(self, positions: Ints) -> Ints:
        """The bucket of each position."""
        return (positions - self.first) // self.width


@dataclass
class LayerTally:
    """Agreement in one sparse layer, counted up chunk by chunk. Arrays are [heads], those by bucket [buckets, heads].

    Counts are lists, one for each tested query. Positions are those of queries, -1 if there is none. Sums add up in the
    order of the queries, so that no bit depends on how these are cut into chunks.
    """

    layer: int
    n_heads: int
    buckets: PositionBuckets
    rounding: float  #: score difference up to which a swap is a tie
    equal: Ints = field(init=False)
    ties: Ints = field(init=False)
    changed: Ints = field(init=False)
    blocks_lost: Ints = field(init=False)
    overlap_min: Doubles = field(init=False)
    overlap_min_at: Ints = field(init=False)
    first_changed: Ints = field(init=False)
    bucket_tested: Ints = field(init=False)  #: [buckets]
    bucket_changed: Ints = field(init=False)
    bucket_overlap_sum: Doubles = field(init=False)
    bucket_overlap_min: Doubles = field(init=False)

    def __post_init__(self) -> None:
        def zeros() -> Ints:
            return np.zeros(self.n_heads, np.int64)

        shape = (len(self.buckets), self.n_heads)
        self.equal, self.ties, self.changed, self.blocks_lost = zeros(), zeros(), zeros(), zeros()
        self.overlap_min = np.ones(self.n_heads)
        self.overlap_min_at, self.first_changed = zeros() - 1, zeros() - 1
        self.bucket_tested = np.zeros(shape[0], np.int64)
        self.bucket_changed = np.zeros(shape, np.int64)
        self.bucket_overlap_sum, self.bucket_overlap_min = np.zeros(shape), np.ones(shape)

    def add(self, positions: Ints, comparison: Comparison) -> None:
        """Counts queries that had a choice, in ascending order of position. positions: int [n]."""
        if not len(positions):
            return
        changed = comparison.changed
        self.equal += comparison.equal.sum(axis=0)
        self.ties += comparison.tie.sum(axis=0)
        self.changed += changed.sum(axis=0)
        self.blocks_lost += comparison.lost.sum(axis=0)
        bucket = self.buckets.index(positions)
        np.add.at(self.bucket_tested, bucket, 1)
        np.add.at(self.bucket_changed, bucket, changed)
        np.add.at(self.bucket_overlap_sum, bucket, comparison.overlap)
        np.minimum.at(self.bucket_overlap_min, bucket, comparison.overlap)
        for head in range(self.n_heads):
            overlap = comparison.overlap[:, head]
            lowest = int(overlap.argmin())
            if overlap[lowest] < self.overlap_min[head]:
                self.overlap_min[head], self.overlap_min_at[head] = overlap[lowest], positions[lowest]
            if self.first_changed[head] < 0 and changed[:, head].any():
                self.first_changed[head] = positions[int(changed[:, head].argmax())]

    @property
    def tested(self) -> int:
        """Queries that had a choice, the same for every head."""
        return int(self.bucket_tested.sum())

    @property
    def overlap_sum(self) -> Doubles:
        total: Doubles = self.bucket_overlap_sum.sum(axis=0)
        return total

    @property
    def overlap_mean(self) -> Doubles:
        """Mean overlap of each head."""
        return self.overlap_sum / self.tested

    @property
    def worst_head(self) -> int:
        """The head with the lowest mean overlap, the first of several."""
        return int(self.overlap_sum.argmin())

    @property
    def first_change(self) -> int:
        """Position of the first changed list of any head, -1 if there is none."""
        return min((int(p) for p in self.first_changed if p >= 0), default=-1)


@dataclass(frozen=True)
class Cell:
    """One index head of one layer, with its mean overlap."""

    layer: int
    head: int
    overlap: float


@dataclass(frozen=True)
class Agreement:
    """Agreement in all sparse layers, in order. There is at least one, and it has at least one tested query."""

    rule: SelectionRule
    buckets: PositionBuckets
    layers: Sequence[LayerTally]

    @property
    def queries(self) -> int:
        """Queries that had a choice; each has a list for every layer and head."""
        return self.layers[0].tested

    @property
    def lists(self) -> int:
        """Lists that were compared."""
        return sum(layer.tested * layer.n_heads for layer in self.layers)

    @property
    def equal(self) -> int:
        return sum(int(layer.equal.sum()) for layer in self.layers)

    @property
    def ties(self) -> int:
        return sum(int(layer.ties.sum()) for layer in self.layers)

    @property
    def changed(self) -> int:
        return sum(int(layer.changed.sum()) for layer in self.layers)

    @property
    def blocks_lost(self) -> int:
        return sum(int(layer.blocks_lost.sum()) for layer in self.layers)

    @property
    def overlap_mean(self) -> float:
        """Mean overlap of all lists. It hides a head that reads other blocks: judge by `worst`."""
        return float(sum(layer.overlap_sum.sum() for layer in self.layers)) / self.lists

    @property
    def worst(self) -> Cell:
        """The layer and head with the lowest mean overlap, the first of several."""
        cells = [Cell(t.layer, t.worst_head, float(t.overlap_mean[t.worst_head])) for t in self.layers]
        return min(cells, key=lambda cell: cell.overlap)

    @property
    def lowest(self) -> tuple[Cell, int]:
        """The single list with the lowest overlap, and its position; -1 if all are 1."""
        tally = min(self.layers, key=lambda t: float(t.overlap_min.min()))
        head = int(tally.overlap_min.argmin())
        return Cell(tally.layer, head, float(tally.overlap_min[head])), int(tally.overlap_min_at[head])
