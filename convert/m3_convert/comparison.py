"""The selection of one run beside the reference's: agreement, attention lost and margins, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m3_convert.attention_mass import MassTally, mass_lost
from m3_convert.flip_margin import Flips, FlipTally, find_flips
from m3_convert.selection import (
    Agreement,
    Comparison,
    Doubles,
    Floats,
    Ints,
    LayerTally,
    Lists,
    Mask,
    PositionBuckets,
    SelectionRule,
    compare_swaps,
    swapped_blocks,
)


@dataclass(frozen=True)
class ReferenceRows:
    """What the reference did at some queries that had a choice."""

    positions: Ints  #: [n], ascending
    lists: Lists  #: [n, heads, top_k]
    scores: Floats  #: [n, heads, n_blocks], -inf for blocks that are not visible
    mass: Floats  #: [n, n_head, top_k]
    forced: Mask  #: [n, n_blocks], the local blocks


@dataclass(frozen=True)
class RowDifference:
    """How a run differs from the reference at these queries."""

    comparison: Comparison
    mass_lost: Doubles  #: [n, n_head]
    flips: Flips


@dataclass
class LayerComparison:
    """One sparse layer of a run beside the reference's, counted up chunk by chunk."""

    agreement: LayerTally
    mass: MassTally
    flips: FlipTally

    @classmethod
    def empty(cls, layer: int, heads: tuple[int, int], buckets: PositionBuckets, rounding: float) -> "LayerComparison":
        """heads: number of index heads and of query heads. rounding: see `score_rounding`."""
        n_index, n_head = heads
        agreement = LayerTally(layer, n_index, buckets, rounding)
        return cls(agreement, MassTally(n_head, buckets), FlipTally(n_index))

    def add(self, rows: ReferenceRows, lists: Lists) -> RowDifference:
        """Counts the lists of the run at the queries of `rows`, int32 [n, heads, top_k]."""
        swaps = swapped_blocks(rows.lists, lists, rows.scores.shape[-1])
        comparison = compare_swaps(swaps, rows.scores, rows.forced, self.agreement.rounding)
        lost = mass_lost(rows.mass, rows.lists, swaps.lost)
        flips = find_flips(swaps, rows.scores, rows.forced, rows.lists, rows.mass)
        self.agreement.add(rows.positions, comparison)
        self.mass.add(rows.positions, lost)
        self.flips.add(flips)
        return RowDifference(comparison, lost, flips)


@dataclass(frozen=True)
class MassCell:
    """A query head of a layer, and the mass that it loses: mean of all queries, or of the one at a position."""

    layer: int
    query_head: int
    value: float
    position: int = -1


@dataclass(frozen=True)
class SelectionComparison:
    """All sparse layers of a run beside the reference's, in order; at least one, with at least one tested query."""

    rule: SelectionRule
    buckets: PositionBuckets
    layers: Sequence[LayerComparison]

    @property
    def agreement(self) -> Agreement:
        return Agreement(self.rule, self.buckets, [layer.agreement for layer in self.layers])

    @property
    def mass_lost(self) -> float:
        """Mean of all layers, query heads and queries. It hides a head that reads other blocks: see `worst_mass`."""
        return float(np.mean([layer.mass.mean.mean() for layer in self.layers]))

    @property
    def worst_mass(self) -> MassCell:
        """The layer and query head that lose most in the mean, the first of several."""
        means = [(layer.agreement.layer, layer.mass.mean) for layer in self.layers]
        cells = [MassCell(layer, int(mean.argmax()), float(mean.max())) for layer, mean in means]
        return max(cells, key=lambda cell: cell.value)

    @property
    def largest_mass(self) -> MassCell:
        """The single query that loses most."""
        cells = []
        for layer in self.layers:
            head = int(layer.mass.largest.argmax())
            largest, position = float(layer.mass.largest[head]), int(layer.mass.largest_at[head])
            cells.append(MassCell(layer.agreement.layer, head, largest, position))
        return max(cells, key=lambda cell: cell.value)

    @property
    def flip_counts(self) -> Ints:
        """Lost blocks by margin, [bins]."""
        total: Ints = np.sum([layer.flips.counts.sum(axis=0) for layer in self.layers], axis=0)
        return total

    @property
    def flip_mass(self) -> Doubles:
        """Attention in them, summed up, [bins]; over the number of lists it is the mean mass lost."""
        total: Doubles = np.sum([layer.flips.mass.sum(axis=0) for layer in self.layers], axis=0)
        return total
