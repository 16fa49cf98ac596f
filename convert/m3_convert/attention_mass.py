"""What a changed selection costs: the share of the reference's attention that lies in blocks the candidate leaves out.

A query head of the reference gives shares of its softmax, which add up to 1, to the blocks of its list. The mass lost
by a query head at a query is the sum of its shares of the blocks that the candidate's list lacks: 0 if the candidate
reads all of them, whatever it reads besides. Ties count like other differences: blocks of equal score can have very
different masses.
"""

from dataclasses import dataclass, field

import numpy as np

from m3_convert.selection import Doubles, Floats, Ints, Lists, Mask, PositionBuckets


def mass_lost(mass: Floats, lists: Lists, lost: Mask) -> Doubles:
    """Mass lost by each query head, 0 to 1, float64 [n, n_head].

    mass: float32 [n, n_head, top_k], shares of the blocks of `lists`. lists: the reference's, int32 [n, heads, top_k],
    padded with -1; each is that of n_head / heads neighboring query heads. lost: blocks that only the reference reads,
    bool [n, heads, n_blocks].
    """
    n, heads, top_k = lists.shape
    gone = np.take_along_axis(lost, np.maximum(lists, 0).astype(np.int64), axis=-1) & (lists >= 0)
    shares = mass.reshape(n, heads, -1, top_k) * gone[:, :, None, :]
    # Shares add up to 1 within float32 rounding only.
    total: Doubles = shares.sum(axis=-1, dtype=np.float64).reshape(n, -1)
    return np.minimum(total, 1.0)


@dataclass
class MassTally:
    """Mass lost in one sparse layer, counted up chunk by chunk. Arrays are [n_head], by bucket [buckets, n_head]."""

    n_head: int
    buckets: PositionBuckets
    bucket_tested: Ints = field(init=False)  #: [buckets]
    bucket_sum: Doubles = field(init=False)
    largest: Doubles = field(init=False)  #: of one query
    largest_at: Ints = field(init=False)  #: its position, -1 if nothing was lost

    def __post_init__(self) -> None:
        n = len(self.buckets)
        self.bucket_tested, self.bucket_sum = np.zeros(n, np.int64), np.zeros((n, self.n_head))
        self.largest, self.largest_at = np.zeros(self.n_head), np.full(self.n_head, -1, np.int64)

    def add(self, positions: Ints, lost: Doubles) -> None:
        """Counts queries in ascending order of position. positions: int [n]. lost: see `mass_lost`."""
        if not len(positions):
            return
        bucket = self.buckets.index(positions)
        np.add.at(self.bucket_tested, bucket, 1)
        np.add.at(self.bucket_sum, bucket, lost)
        row = lost.argmax(axis=0)
        largest = lost[row, np.arange(self.n_head)]
        larger = largest > self.largest
        self.largest[larger], self.largest_at[larger] = largest[larger], positions[row[larger]]

    @property
    def mean(self) -> Doubles:
        """Mean of each query head over the queries."""
        mean: Doubles = self.bucket_sum.sum(axis=0) / int(self.bucket_tested.sum())
        return mean

    def by_index_head(self, heads: int) -> Doubles:
        """Mean of the query heads that share a list, [heads]."""
        mean: Doubles = self.mean.reshape(heads, -1).mean(axis=1)
        return mean

    def bucket_mean(self, heads: int) -> Doubles:
        """The same by bucket, [buckets, heads]."""
        by_query_head = self.bucket_sum / self.bucket_tested[:, None]
        mean: Doubles = by_query_head.reshape(len(self.buckets), heads, -1).mean(axis=2)
        return mean
