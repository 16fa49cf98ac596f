"""The queries that lose most of their attention, with what each side read."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from m3_convert.comparison import ReferenceRows, RowDifference
from m3_convert.selection import Lists

WORST: Final = 10  #: queries that are kept


@dataclass(frozen=True)
class LostBlock:
    """A block that only the reference reads."""

    block: int
    score: float  #: the reference's
    margin: float  #: see flip_margin.py; infinity for a local block
    mass: float  #: mean of the query heads of the list


@dataclass(frozen=True)
class GainedBlock:
    """A block that only the candidate reads."""

    block: int
    score: float  #: the reference's


@dataclass(frozen=True)
class WorstQuery:
    """A query of an index head, and the query head that loses most there."""

    layer: int
    head: int
    query_head: int
    position: int
    mass_lost: float
    overlap: float
    reference_blocks: list[int]
    candidate_blocks: list[int]
    lost: list[LostBlock]
    gained: list[GainedBlock]

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Ascending from the worst."""
        return -self.mass_lost, self.layer, self.head, self.position

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "WorstQuery":
        """Of what `asdict` made."""
        lost, gained = [LostBlock(**b) for b in value["lost"]], [GainedBlock(**b) for b in value["gained"]]
        return cls(**{**value, "lost": lost, "gained": gained})


class WorstQueries:
    """Up to WORST queries by the mass that their worst query head loses, from the worst on.

    Neighbors lose the same blocks: of the queries of one layer, index head and block only the worst stands here.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._found: dict[tuple[int, int, int], WorstQuery] = {}

    def __iter__(self) -> Iterator[WorstQuery]:
        return iter(self._found.values())

    def add(self, layer: int, rows: ReferenceRows, lists: Lists, difference: RowDifference) -> None:
        """Queries of a layer in ascending order of position. lists: the candidate's."""
        n, heads = lists.shape[:2]
        losses = difference.mass_lost.reshape(n, heads, -1)
        loss = losses.max(axis=2)
        floor = min(q.mass_lost for q in self) if len(self._found) == WORST else 0.0
        row, head = np.nonzero((loss > 0) & (loss >= floor))
        first_head = head * losses.shape[2]
        taken: set[tuple[int, int, int]] = set()
        for i in np.lexsort((rows.positions[row], head, -loss[row, head])):
            key = (layer, int(head[i]), int(rows.positions[row[i]]) // self._block_size)
            if key in taken:
                continue
            taken.add(key)
            query_head = int(first_head[i] + losses[row[i], head[i]].argmax())
            found = _details(layer, (int(row[i]), int(head[i]), query_head), rows, lists, difference)
            if key not in self._found or found.rank < self._found[key].rank:
                self._found[key] = found
            if len(taken) == WORST:
                break
        best = sorted(self._found.items(), key=lambda item: item[1].rank)
        self._found = dict(best[:WORST])

    def to_json(self) -> list[dict[str, Any]]:
        """What `restore` takes."""
        return [asdict(query) for query in self]

    def restore(self, values: list[dict[str, Any]]) -> None:
        queries = [WorstQuery.from_json(value) for value in values]
        self._found = {(q.layer, q.head, q.position // self._block_size): q for q in queries}


def _details(
    layer: int, where: tuple[int, int, int], rows: ReferenceRows, lists: Lists, difference: RowDifference
) -> WorstQuery:
    row, head, query_head = where
    ours, theirs = ([int(b) for b in side[row, head] if b >= 0] for side in (rows.lists, lists))
    scores, flips = rows.scores[row, head], difference.flips
    mine = np.flatnonzero((flips.row == row) & (flips.head == head))
    return WorstQuery(
        layer=layer,
        head=head,
        query_head=query_head,
        position=int(rows.positions[row]),
        mass_lost=float(difference.mass_lost[row, query_head]),
        overlap=float(difference.comparison.overlap[row, head]),
        reference_blocks=ours,
        candidate_blocks=theirs,
        lost=[
            LostBlock(int(block), float(scores[block]), float(margin), float(mass))
            for block, margin, mass in zip(flips.block[mine], flips.margin[mine], flips.mass[mine], strict=True)
        ],
        gained=[GainedBlock(block, float(scores[block])) for block in theirs if block not in ours],
    )
